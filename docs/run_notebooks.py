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
    for cell in notebook.cells:
        # Times of cells and the versions of this machine differ in each run.
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = _without_machine(output["text"], folder)
    notebook.metadata.pop("language_info", None)
    return notebook


def _without_machine(text: str, folder: Path) -> str:
    """The text with relative paths, and only the last state of lines that were overwritten."""
    text = text.replace(f"{folder}/", "").replace(f"{Path(__file__).parents[1]}/", "")
    return re.sub(r"[^\n]*\r(?!\n)", "", text.replace("\r\n", "\n"))


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
