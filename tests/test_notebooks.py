"""The notebooks of the documentation: their links, their outputs, and that they run."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 1_200_000
SHORTER = {
    "--steps 60 --eval-every 20": "--steps 2 --eval-every 1 --num-pictures 0",
    "--steps 80 --eval-every 40": "--steps 2 --eval-every 1 --num-pictures 0",
    "--tile 30 ": "--tile 20 ",
    "--num-pairs 40": "--num-pairs 8",
    "subdivisions=5": "subdivisions=3",
}
of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@of_each
def test_a_notebook_has_outputs_that_are_small_and_of_no_machine(path):
    assert path.stat().st_size < LARGEST
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert code and all(cell["execution_count"] for cell in code), "run docs/run_notebooks.py"
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert '"image/jpeg"' in outputs and '"error"' not in outputs
    assert "/tmp/" not in outputs and str(ROOT) not in outputs


@of_each
def test_links_of_a_notebook_lead_to_files(path):
    text = "".join("".join(c["source"]) for c in cells(path) if c["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    for link in links:
        assert (path.parent / link).is_file(), link


@of_each
@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    pytest.importorskip("nbclient", reason="no nbclient: pip install -e '.[notebooks]'")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install -e '.[notebooks]'")
    script = runpy.run_path(str(ROOT / "docs" / "run_notebooks.py"))
    before = path.read_bytes()
    done = script["run_notebook"](path, tmp_path, SHORTER)
    assert path.read_bytes() == before
    printed = "".join(o.get("text", "") for cell in done.cells for o in cell.get("outputs", ()))
    # `!` does not raise where a command fails.
    assert "pointup: error" not in printed and "Traceback" not in printed
    expected = {"surveys": "trained here", "shapes": "model shapes"}[path.stem]
    assert expected in printed and "points in" in printed
