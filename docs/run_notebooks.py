"""Runs the notebooks of the documentation and stores their outputs in them:

    pip install -e ".[notebooks]"
    python docs/run_notebooks.py [NAME ...]

Each runs from top to bottom in an empty folder. Progress bars are left out of the outputs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent / "notebooks"
LONGEST_CELL = 1800
"""Seconds; a busy machine with two cores trains for minutes."""


def run_notebook(
    path: Path, folder: Path, shorter: Mapping[str, str] | None = None
) -> nbformat.NotebookNode:
    """Run a notebook in `folder` and return it with its outputs; an error of a cell is raised.

    shorter: words of cells and their replacements, such as a smaller number of steps.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for word, replacement in (shorter or {}).items():
            cell.source = cell.source.replace(word, replacement)
    # `!pointup` in a cell is that of this environment, and its output has no progress bars.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
    }
    client = NotebookClient(
        notebook, timeout=LONGEST_CELL, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    tidy(notebook, folder)
    return notebook


def tidy(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Leave out of the outputs what differs in each run: progress bars, times, local paths."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs = cell.get("outputs", [])
        printed = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
        others = [o for o in outputs if o.output_type != "stream"]
        if text := _as_left_on_screen(printed).replace(f"{folder}/", "").strip("\n"):
            text = text.replace(f"{Path(__file__).parents[1]}/", "")
            others.insert(0, nbformat.v4.new_output("stream", name="stdout", text=f"{text}\n"))
        if "outputs" in cell:
            cell.outputs = others
    notebook.metadata.pop("language_info", None)


def _as_left_on_screen(text: str) -> str:
    """Text of a terminal without control sequences, overwritten lines and progress bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r\n", "\n"))
    lines = (line.rstrip().rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if not re.search(r"\d%\s?\||\[00:00", line))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", default=names, help=f"of {', '.join(names)}")
    for name in parser.parse_args(args).names:
        path = NOTEBOOKS / f"{name}.ipynb"
        with TemporaryDirectory() as folder:
            nbformat.write(run_notebook(path, Path(folder).resolve()), path)
        print(f"{path}: {path.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main()
