"""Finds the samples of a pair dataset that can't be trained on, for training and `inspect`."""

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

MIN_EXTENT = 1e-6
MAX_EXTENT = 1e5


@dataclass(frozen=True)
class BadSample:
    """A sample that must be left out: its row in the dataset, its name, and the reason."""

    index: int
    name: str
    reason: str


def find_bad_samples(
    dataset: Dataset, min_points: int, folder: str | Path | None = None
) -> list[BadSample]:
    """Find the samples that can't be used, in the order of the dataset, each with one reason.

    A source or target is bad if

    - it is empty, has fewer than `min_points` points, or one of its points is missing;
    - its number of points differs from `num_source` or `num_target`;
    - a coordinate is not finite, or all its points coincide;
    - its extent (the longest side of its bounding box) is outside 1e-6 to 1e5 units.

    Normals must be finite and match the target in number; `resample` must be finite. If `folder`,
    the directory of the dataset, is given, the surface file of each sample must exist in
    `folder/surfaces` and be undamaged.
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
                found += _wrong_counts(np.diff(ptr), num_target)
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
"""Rows of bad samples with the reasons."""


def _unpack_each(column: pa.Array) -> tuple[np.ndarray, np.ndarray, Reasons]:
    """`unpack_points` that replaces invalid rows by empty clouds and returns their reasons."""
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


def _wrong_counts(num_normals: np.ndarray, num_target: np.ndarray) -> Reasons:
    wrong = np.flatnonzero((num_normals > 0) & (num_normals != num_target)).tolist()
    return [(i, f"{num_normals[i]} normals for {num_target[i]} points") for i in wrong]


def _bad_surface(folder: Path, file: str) -> str:
    """The reason why the surface file of a sample can't be used; "" if it can."""
    try:
        path = surface_path(folder, file)
    except DataError:
        return f"surface {file!r} lies outside the dataset's {folder / 'surfaces'}"
    if not path.is_file():
        return f"surface {path} is missing"
    # The directory of a zip archive is at its end, so this detects a truncated file.
    return "" if is_zipfile(path) else f"surface {path} is damaged"


def _bad_clouds(
    values: np.ndarray, ptr: np.ndarray, counted: np.ndarray, column: str, min_points: int
) -> Reasons:
    sizes = np.diff(ptr)
    filled = np.flatnonzero(sizes)
    # Minimum and maximum propagate NaN and infinity, so one pass finds every bad coordinate.
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
        elif size > 1 and not MIN_EXTENT <= extent[i] <= MAX_EXTENT:
            reason = (
                f"{column} is {extent[i]:.3g} units wide, outside {MIN_EXTENT:g} to {MAX_EXTENT:g}"
            )
        else:
            continue
        found.append((i, reason))
    return found
