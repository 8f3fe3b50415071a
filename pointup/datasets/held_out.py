"""Measures what a pair dataset holds out, and finds training pairs that show it."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.pair import is_within
from pointup.datasets.samples import Samples
from pointup.disk import read_json
from pointup.errors import DataError

ROUNDING = 1e-4
"""Relative tolerance of a gap that should equal the strip, because points are stored as float32."""


@dataclass(frozen=True)
class HeldOut:
    """The size of the validation split, and its distance to the training split.

    Attributes:
        num_pairs: number of validation pairs.
        share_of_pairs, share_of_area: fraction of both splits. Areas are those of the pairs'
            bounding rectangles in x and y, or of their cores; None for shapes, which have none.
        gap: smallest horizontal distance between a training and a validation point, in the unit of
            the files; None if the pairs have no common coordinates.
    """

    num_pairs: int
    share_of_pairs: float
    share_of_area: float | None
    gap: float | None

    def describe(self, strip: float | None, separate: bool = False) -> list[str]:
        """Lines to print; `strip` is the width of the strip left out around the held-out tiles.

        With `separate` the gap is between points of the same file only.
        """
        pairs = f"{self.num_pairs:,} pair{'s' * (self.num_pairs != 1)}"
        area = "" if self.share_of_area is None else f", {self.share_of_area:.1%} of the area"
        lines = [f"held out to validate on: {pairs} ({self.share_of_pairs:.1%}){area}"]
        if self.gap is None:
            return lines
        of_file = " of the same file" if separate else ""
        left_out = f"; a strip of {strip:g} was left out" if strip else ""
        lines.append(f"  at least {self.gap:.6g} from every training point{of_file}{left_out}")
        if not strip or self.gap < strip * (1 - ROUNDING):
            lines.append("  touches training ground, so that scores are too good; prepare it again")
        return lines


def measure_held_out(train: Samples, validation: Samples, info: dict[str, Any]) -> HeldOut:
    """Measure both splits of a dataset; `info` is the content of the dataset's pointup.json.

    Only points of pairs that lie near the other split are read. Pairs of surveys have common
    coordinates. Pairs made with `--separate` have common coordinates with the pairs of the same
    file only.
    """
    area, trained = (
        float(np.nansum((high - low).prod(axis=1)))
        for low, high in map(_corners, (validation, train))
    )
    return HeldOut(
        num_pairs=len(validation),
        share_of_pairs=len(validation) / max(len(validation) + len(train), 1),
        share_of_area=area / max(area + trained, 1e-300)
        if any(map(validation.is_vertical, range(len(validation))))
        else None,
        gap=_smallest_gap(train, validation, bool(info.get("separate")))
        if str(info.get("made_by", "")).endswith(
            ("prepare pairs", "prepare thin", "prepare passes")
        )
        else None,
    )


def rows_near(train: Samples, validation: Samples, distance: float) -> np.ndarray:
    """Rows (n,) of `train` with a point nearer than `distance` to a point of `validation`.

    The rows ascend. Distances are horizontal. Both are in the same coordinates. A distance of 0
    gives the rows whose rectangle overlaps or touches one of `validation`.
    """
    from scipy.spatial import cKDTree

    near = np.zeros(len(train), dtype=bool)
    for row, between in enumerate(_distances(train, validation)):
        if not distance:
            near |= between == 0
        candidates = np.flatnonzero((between < distance) & ~near)
        tree = cKDTree(_points(validation, row)) if len(candidates) else None
        for other in candidates.tolist():
            assert tree is not None
            distances = tree.query(_points(train, other), k=[1], distance_upper_bound=distance)[0]
            near[other] = np.min(distances, initial=np.inf) < distance * (1 - ROUNDING)
    return np.flatnonzero(near)


def _smallest_gap(train: Samples, validation: Samples, are_separate: bool) -> float | None:
    from scipy.spatial import cKDTree

    # The names of tiles end in their two indices.
    train_files, held_out_files = (
        np.array([name.rsplit("_", 2)[0] if are_separate else "" for name in samples.names])
        for samples in (train, validation)
    )
    smallest = np.inf
    for row, between in enumerate(_distances(train, validation)):
        # The comparison is also False for a distance of NaN.
        candidates = np.flatnonzero((between < smallest) & (train_files == held_out_files[row]))
        if not len(candidates):
            continue
        tree = cKDTree(_points(validation, row))
        for other in candidates[np.argsort(between[candidates], kind="stable")].tolist():
            if between[other] >= smallest:
                break
            distances = tree.query(_points(train, other), k=[1], distance_upper_bound=smallest)[0]
            smallest = float(np.min(distances, initial=smallest))
    return smallest if np.isfinite(smallest) else None


def _points(samples: Samples, row: int) -> np.ndarray:
    """x and y (N, 2) float64 of all points of a pair, in the coordinates of its file."""
    clouds = samples.points(row)
    core = samples.core(row, clouds)
    points = np.concatenate([clouds["source"], clouds["target"]])[:, :2].astype(np.float64)
    points = points if core is None else points[is_within(points, core)]
    return points + samples.value("origin", row)[:2]


def _corners(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """The corners of the bounding rectangles of pairs, (n, 2) to (n, 2); NaN without points."""
    origin, low, high = (samples.array(name)[:, :2] for name in ("origin", "low", "high"))
    return origin + low, origin + high


def _distances(train: Samples, validation: Samples) -> Iterator[np.ndarray]:
    """The distances (n,) of all training pairs to each validation pair, as rectangles."""
    lows, highs = _corners(train)
    for low, high in zip(*_corners(validation), strict=True):
        beside = np.maximum(lows - high, low - highs).clip(min=0)
        yield np.hypot(beside[:, 0], beside[:, 1])


# Datasets that were prepared with other options of the same surveys, meshes or HDF5 patches hold
# out other parts of these. Trained on together, or joined, each would train on validation data of
# the others.

SURVEYS = "surveys"
"""Key of pointup.json for the surveys of a dataset, see `surveys_of`."""
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


def none_left_of(folder: Path) -> DataError:
    """The error for a dataset all of whose training samples others hold out."""
    return DataError(
        f"{folder}: no training pairs are left: all touch validation pairs of the other datasets "
        "or share a shape with them; leave it out, or prepare all with the same held-out data"
    )


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
    info = read_json(folder / "pointup.json")
    return {
        name: SurveyFiles(float(stored["strip"]), frozenset(stored["files"]))
        for name, stored in info.get(SURVEYS, {}).items()
    }


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
    return read_json(folder / SHAPES)


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
