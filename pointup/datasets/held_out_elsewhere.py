"""Finds training pairs of one dataset that show what another dataset holds out for validation.

Datasets that were prepared with other options of the same surveys, meshes or HDF5 patches hold out
other parts of these. Trained on together, or joined, each would train on validation data of the
others.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.held_out import rows_near
from pointup.datasets.samples import Samples

SURVEYS = "surveys"
"""Key of pointup.json for the surveys of a dataset, see `surveys_of`."""
_FILES_BY_COMMAND = {"prepare pairs": ("source", "target"), "prepare thin": ("inputs",)}
"""Keys of pointup.json that name the files of a survey in datasets of earlier versions, by the
command that wrote the dataset."""
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
    surveys, others = (surveys_of(each.folder) for each in (train, validation))
    near = [np.empty(0, np.int64)]
    for name, survey in surveys.items():
        for other_name, other in others.items():
            if survey.files & other.files:
                rows = _rows_of(train, name, surveys)
                held_out = validation.select(_rows_of(validation, other_name, others))
                strip = max(survey.strip, other.strip)
                near.append(rows[rows_near(train.select(rows), held_out, strip)])
    return np.unique(np.concatenate(near))


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


@dataclass(frozen=True)
class SurveyFiles:
    """Files with common coordinates, and the width of the strip left out around their validation
    tiles. Paths are absolute."""

    strip: float
    files: frozenset[str]


def surveys_of(folder: Path) -> dict[str, SurveyFiles]:
    """The surveys that a dataset was made from, by the beginning of their pairs' names.

    The name is "" for a survey that all pairs are of. Other datasets than those of surveys have
    none.
    """
    path = folder / "pointup.json"
    info: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if SURVEYS in info:
        return {
            name: SurveyFiles(float(stored["strip"]), frozenset(stored["files"]))
            for name, stored in info[SURVEYS].items()
        }
    # Datasets of earlier versions.
    if "survey_files" in info:
        return {"": SurveyFiles(float(info["survey_strip"]), frozenset(info["survey_files"]))}
    made_by = str(info.get("made_by", ""))
    keys = [keys for command, keys in _FILES_BY_COMMAND.items() if made_by.endswith(command)]
    if not keys or info.get("separate"):
        return {}
    named = [Path(name) for key in keys[0] for name in info.get(key, [])]
    files = [file for path in named for file in (path.rglob("*") if path.is_dir() else [path])]
    strip = float(info.get("strip", 0.0))
    return {"": SurveyFiles(strip, frozenset(str(file.resolve()) for file in files))}


def stored_surveys(surveys: Mapping[str, SurveyFiles]) -> dict[str, Any]:
    """The entry of pointup.json that `surveys_of` reads."""
    return {
        SURVEYS: {
            name: {"strip": survey.strip, "files": sorted(survey.files)}
            for name, survey in surveys.items()
        }
    }


def shapes_of(folder: Path) -> dict[str, str]:
    """Where the shapes of a dataset are from; {} if this was not stored.

    Pairs of the shape NAME are named NAME/...; shapes are the same where their values are: the path
    of a mesh without its extension, the name of a shape in HDF5 files, or else the path of such a
    file and the number of the shape in it.
    """
    path = folder / SHAPES
    shapes: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return shapes


def write_shapes(folder: Path, shapes: Mapping[str, str]) -> None:
    """Store for `shapes_of` where the shapes of a dataset are from."""
    (folder / SHAPES).write_text(json.dumps(shapes, indent=1) + "\n", encoding="utf-8")


def _shape_of(pair: str, shapes: Mapping[str, str]) -> str | None:
    """Where the shape of a pair is from, by the name of the pair; None if unknown."""
    return shapes.get(_beginning(pair, shapes))


def _rows_of(samples: Samples, survey: str, surveys: Mapping[str, SurveyFiles]) -> np.ndarray:
    """Rows (n,) of the pairs of a survey, ascending."""
    if list(surveys) == [""]:
        return np.arange(len(samples))
    # Names of tiles end in their two indices.
    tiles = (name.rsplit("_", 2)[0] for name in samples.names)
    return np.flatnonzero([_beginning(tile, surveys) == survey for tile in tiles])


def _beginning(name: str, keys: Container[str]) -> str:
    """The longest beginning of a name, up to a "/", that is a key; "" without one."""
    while name and name not in keys:
        name = name.rpartition("/")[0]
    return name
