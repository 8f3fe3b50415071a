"""Finds the samples of a pair dataset that can't be trained on, without looping over points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa
from datasets import Dataset

from pointup.datasets.columns import POINT_COLUMNS, unpack_points
from pointup.datasets.pair import surface_path
from pointup.errors import DataError

SMALLEST_EXTENT = 1e-6
LARGEST_EXTENT = 1e5


@dataclass(frozen=True)
class BadSample:
    """One sample that should be left out; `index` is its row in the dataset, `reason` says why."""

    index: int
    name: str
    reason: str


def find_bad_samples(
    dataset: Dataset, min_points: int, folder: str | Path | None = None
) -> list[BadSample]:
    """The samples that can't be used, in the order of the dataset, each with one reason.

    A source or target is bad when it is empty, has fewer than `min_points` points, holds a
    coordinate that is not finite, has all its points in one place, or an extent (longest side of
    its bounding box) beyond 1e-6 to 1e5 units; when an entry is missing, or `num_source` or
    `num_target` is not what the columns hold. Normals must be as many as the target's points, and
    they and `resample` finite. With the `folder` of the dataset, the surface file that a sample
    names must be in its `surfaces`.
    """
    bad: dict[int, BadSample] = {}
    start = 0
    for table in dataset.with_format("arrow").iter(batch_size=256):
        names = table["name"].to_pylist()
        reasons = [""] * len(names)
        num_target = np.zeros(len(names), np.int64)
        for column in POINT_COLUMNS:
            if column not in table.column_names:
                continue
            values, ptr, unreadable = _unpack_each(table[column].combine_chunks())
            found = list(unreadable)
            if column in ("source", "target"):
                counted = table[f"num_{column}"].to_numpy()
                found += _bad_clouds(values, ptr, counted, column, min_points)
            else:
                found += _not_finite(values, ptr, column)
            if column == "target":
                num_target = np.diff(ptr)
            if column == "target_normals":
                found += _miscounted(np.diff(ptr), num_target)
            for i, reason in found:
                reasons[i] = reasons[i] or reason
        if folder is not None and "surface" in table.column_names:
            for i, file in enumerate(table["surface"].to_pylist()):
                reasons[i] = reasons[i] or (_bad_surface(Path(folder), file) if file else "")
        for i, reason in enumerate(reasons):
            if reason:
                bad[start + i] = BadSample(start + i, names[i], reason)
        start += len(names)
    return list(bad.values())


Reasons = list[tuple[int, str]]
"""Row and reason of bad samples."""


def _unpack_each(column: pa.Array) -> tuple[np.ndarray, np.ndarray, Reasons]:
    """`unpack_points`, with what can't be unpacked taken as empty, and the reason for each."""
    try:
        return *unpack_points(column), []
    except ValueError:
        clouds, reasons = [], []
        for row in range(len(column)):
            try:
                clouds.append(unpack_points(column[row : row + 1])[0])
            except ValueError as error:
                clouds.append(np.empty((0, 3)))
                reasons.append((row, str(error)))
        ptr = np.concatenate([[0], np.cumsum([len(cloud) for cloud in clouds])])
        return np.concatenate(clouds), ptr, reasons


def _not_finite(values: np.ndarray, ptr: np.ndarray, column: str) -> Reasons:
    rows = np.searchsorted(ptr, np.flatnonzero(~np.isfinite(values).all(axis=1)), side="right") - 1
    numbers = zip(*np.unique(rows, return_counts=True), strict=True)
    return [
        (int(row), f"{column} has {number} points that are not finite") for row, number in numbers
    ]


def _miscounted(num_normals: np.ndarray, num_target: np.ndarray) -> Reasons:
    wrong = np.flatnonzero((num_normals > 0) & (num_normals != num_target)).tolist()
    return [(i, f"{num_normals[i]} normals for {num_target[i]} points") for i in wrong]


def _bad_surface(folder: Path, file: str) -> str:
    """What is wrong with the surface that a sample names; empty where nothing is."""
    try:
        path = surface_path(folder, file)
    except DataError:
        return f"surface {file!r} lies outside the dataset's {folder / 'surfaces'}"
    if not path.is_file():
        return f"surface {path} is missing"
    # The directory of an archive stands at its end: this sees what was cut off.
    return "" if is_zipfile(path) else f"surface {path} is damaged"


def _bad_clouds(
    values: np.ndarray, ptr: np.ndarray, counted: np.ndarray, column: str, min_points: int
) -> Reasons:
    sizes = np.diff(ptr)
    filled = np.flatnonzero(sizes)
    # Minimum and maximum see a NaN as well as an infinity, so one pass finds every bad coordinate.
    low = np.zeros((len(sizes), 3))
    high = np.zeros((len(sizes), 3))
    if len(filled):
        low[filled] = np.minimum.reduceat(values, ptr[filled], axis=0)
        high[filled] = np.maximum.reduceat(values, ptr[filled], axis=0)
    with np.errstate(invalid="ignore"):
        extent = (high - low).max(axis=1)
    found = []
    for i, size in enumerate(sizes.tolist()):
        if size == 0:
            reason = f"{column} is empty"
        elif size != counted[i]:
            reason = f"num_{column} is {counted[i]}, but {column} has {size} points"
        elif not np.isfinite(extent[i]):
            number = int((~np.isfinite(values[ptr[i] : ptr[i + 1]])).any(axis=1).sum())
            reason = f"{column} has {number} points that are not finite"
        elif size < min_points:
            reason = f"{column} has {size} points, fewer than {min_points}"
        elif extent[i] == 0 and size > 1:
            reason = f"{column} has all its {size} points in one place"
        elif size > 1 and not SMALLEST_EXTENT <= extent[i] <= LARGEST_EXTENT:
            reason = (
                f"{column} is {extent[i]:.3g} units wide, beyond "
                f"{SMALLEST_EXTENT:g} to {LARGEST_EXTENT:g}"
            )
        else:
            continue
        found.append((i, reason))
    return found
