"""Finds training pairs of one dataset that show what another dataset holds out for validation.

Datasets that were prepared with other options of the same surveys, meshes or HDF5 patches hold out
other parts of these. Trained on together, or joined, each would train on validation data of the
others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.held_out import rows_near
from pointup.datasets.samples import Samples

SURVEY_FILES = {"prepare pairs": ("source", "target"), "prepare thin": ("inputs",)}
"""Keys of pointup.json that name the files of a survey, by the command that wrote the dataset."""
SHAPES = "shapes.json"
"""File of a dataset of shapes: where each shape is from, by the beginning of its pairs' names."""


def rows_held_out_elsewhere(train: Samples, validation: Samples) -> dict[str, np.ndarray]:
    """Ascending rows of `train` that show what `validation`, of another dataset, holds out.

    The keys say how: "touching" validation pairs, or "sharing a shape with" them.
    """
    return {
        "touching": rows_on_held_out_ground(train, validation),
        "sharing a shape with": rows_of_held_out_shapes(train, validation),
    }


def rows_on_held_out_ground(train: Samples, validation: Samples) -> np.ndarray:
    """Rows (n,) of `train` within the strip around pairs of `validation`, ascending.

    Both are of different datasets; none if these were not made from a common survey file.
    """
    (strip, files), (other_strip, others) = (survey_of(each.folder) for each in (train, validation))
    if not files & others:
        return np.empty(0, np.int64)
    return rows_near(train, validation, max(strip, other_strip))


def rows_of_held_out_shapes(train: Samples, validation: Samples) -> np.ndarray:
    """Rows (n,) of `train` whose shape a pair of `validation` shows, too, ascending.

    Both are of different datasets; none if these have no shape in common.
    """
    shapes, others = (shapes_of(each.folder) for each in (train, validation))
    common = set(shapes.values()) & set(others.values())
    held_out = {_shape_of(name, others) for name in validation.names} & common if common else set()
    if not held_out:
        return np.empty(0, np.int64)
    is_held_out = [_shape_of(name, shapes) in held_out for name in train.names]
    return np.flatnonzero(is_held_out)


def survey_of(folder: Path) -> tuple[float, set[Path]]:
    """The strip of a dataset around its validation tiles, and the survey files that it was made
    from, also as `prepare join` stored them; none for other datasets."""
    path = folder / "pointup.json"
    info: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    made_by = str(info.get("made_by", ""))
    if "survey_files" in info:
        return float(info["survey_strip"]), set(map(Path, info["survey_files"]))
    keys = [keys for command, keys in SURVEY_FILES.items() if made_by.endswith(command)]
    if not keys or info.get("separate"):
        return 0.0, set()
    named = [Path(name) for key in keys[0] for name in info.get(key, [])]
    files = [file for path in named for file in (path.rglob("*") if path.is_dir() else [path])]
    return float(info.get("strip", 0.0)), {file.resolve() for file in files}


def shapes_of(folder: Path) -> dict[str, str]:
    """Where the shapes of a dataset are from; {} if this was not stored.

    Pairs of the shape NAME are named NAME/...; shapes are the same where their values are: the path
    of a mesh without its extension, or the path of an HDF5 file and the number of the shape in it.
    """
    path = folder / SHAPES
    shapes: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return shapes


def write_shapes(folder: Path, shapes: Mapping[str, str]) -> None:
    """Store for `shapes_of` where the shapes of a dataset are from."""
    (folder / SHAPES).write_text(json.dumps(shapes, indent=1) + "\n", encoding="utf-8")


def _shape_of(pair: str, shapes: Mapping[str, str]) -> str | None:
    """Where the shape of a pair is from, by the name of the pair; None if unknown."""
    name = pair
    while name not in shapes and "/" in name:
        name = name.rpartition("/")[0]
    return shapes.get(name)
