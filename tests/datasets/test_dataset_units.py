"""The unit of length of pair datasets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from las_files import write_las

from pointup.datasets.dataset_units import dataset_unit, known_unit
from pointup.io.length_unit import UNKNOWN


def las(path: Path, system: int) -> Path:
    return write_las(path, np.empty((0, 3)), system=system)


def test_a_dataset_has_the_unit_of_its_input_files(tmp_path: Path) -> None:
    def unit(info: dict[str, object]) -> str:
        (tmp_path / "pointup.json").write_text(json.dumps(info))
        return dataset_unit(tmp_path).name

    folder = tmp_path / "surveys" / "tiles"
    folder.mkdir(parents=True)
    feet = las(folder / "ft.las", 2994)
    assert unit({"inputs": [str(feet)]}) == unit({"inputs": [str(folder)]}) == "ft"
    assert unit({"source": [str(feet)], "target": [str(tmp_path / "gone.las")]}) == "ft"
    assert unit({"recipe": 1}) == "m"
    # Folders are searched at any depth. Files that can't be read were left out of the dataset.
    assert unit({"inputs": [str(tmp_path / "surveys")]}) == "ft"
    (folder / "damaged.las").write_bytes(b"no header")
    assert unit({"inputs": [str(folder)]}) == "ft"
    assert unit({"inputs": [str(tmp_path / "gone.las")]}) == unit({}) == "unit"
    assert dataset_unit(tmp_path / "elsewhere") == UNKNOWN


def test_a_joined_dataset_has_the_unit_of_its_datasets_if_they_agree(tmp_path: Path) -> None:
    datasets = {}
    for name, system in (("feet", 2994), ("also_feet", 2994), ("metres", 32618)):
        datasets[name] = tmp_path / name
        datasets[name].mkdir()
        survey = las(tmp_path / f"{name}.las", system)
        (datasets[name] / "pointup.json").write_text(json.dumps({"inputs": [str(survey)]}))

    def unit(*names: str) -> str:
        inputs = [str(datasets[name]) for name in names]
        joined = {"made_by": "pointup 0.1.0 prepare join", "inputs": inputs}
        (tmp_path / "pointup.json").write_text(json.dumps(joined))
        return dataset_unit(tmp_path).name

    assert unit("feet", "also_feet") == "ft"
    assert unit("feet", "metres") == "unit"


def test_several_datasets_have_a_unit_if_it_is_known_and_the_same(tmp_path: Path) -> None:
    for name, info in (
        ("scenes", '{"recipe": 1}'),
        ("more", '{"recipe": 1}'),
        ("unknown", "{}"),
        ("damaged", "{"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pointup.json").write_text(info)

    def unit(*names: str) -> str:
        return known_unit(tmp_path / name for name in names)

    assert unit("scenes", "more") == "m"
    assert unit("unknown") == unit("scenes", "unknown") == unit("scenes", "damaged") == ""
    assert unit("gone") == ""
