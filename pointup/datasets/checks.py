"""Finds the samples of a pair dataset that can't be trained on, for training and `inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa
from datasets import Dataset

from pointup.datasets.columns import unpack_points
from pointup.datasets.pair import POINT_COLUMNS, surface_path

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
    bad: list[BadSample] = []
    start = 0
    for table in dataset.with_format("arrow").iter(batch_size=256):
        reasons = check_samples(table, min_points).reasons
        if folder is not None and "surface" in table.column_names:
            for i, file in enumerate(table["surface"].to_pylist()):
                reasons[i] = reasons[i] or (bad_surface(Path(folder), file) if file else "")
        bad += [
            BadSample(start + i, table["name"][i].as_py(), reason)
            for i, reason in enumerate(reasons)
            if reason
        ]
        start += len(table)
    return bad


@dataclass(frozen=True)
class CheckedSamples:
    """What a check of n samples found.

    Attributes:
        reasons: why each sample can't be used; "" if it can.
        low, high: (n, 3) float64, bounding boxes of source and target together; NaN if a cloud is
            empty or has a point that isn't finite.
        source_extent: (n,) float64, the longest side of the bounding box of the source.
    """

    reasons: list[str]
    low: np.ndarray
    high: np.ndarray
    source_extent: np.ndarray


def check_samples(table: pa.Table, min_points: int) -> CheckedSamples:
    """Check the point columns of samples; `find_bad_samples` says what is bad.

    Without the columns `num_source` and `num_target`, the numbers of points aren't compared.
    """
    number = len(table)
    reasons = [""] * number
    boxes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    num_target = np.zeros(number, np.int64)
    for column in POINT_COLUMNS:
        if column not in table.column_names:
            continue
        values, ptr, unreadable = _unpack_each(table[column].combine_chunks())
        sizes = np.diff(ptr)
        found = list(unreadable)
        if column in ("source", "target"):
            has_numbers = f"num_{column}" in table.column_names
            stated = table[f"num_{column}"].to_numpy() if has_numbers else sizes
            boxes[column] = _bounds(values, ptr)
            found += _bad_clouds(values, ptr, boxes[column], stated, column, min_points)
        else:
            found += _not_finite(values, ptr, column)
        if column == "target":
            num_target = sizes
        if column == "target_normals":
            found += _wrong_counts(sizes, num_target)
        for i, reason in found:
            reasons[i] = reasons[i] or reason
    low = np.minimum(boxes["source"][0], boxes["target"][0])
    high = np.maximum(boxes["source"][1], boxes["target"][1])
    is_finite = np.isfinite(low + high)
    with np.errstate(invalid="ignore"):
        source_extent = (boxes["source"][1] - boxes["source"][0]).max(axis=1)
    return CheckedSamples(
        reasons, np.where(is_finite, low, np.nan), np.where(is_finite, high, np.nan), source_extent
    )


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


def bad_surface(folder: Path, file: str) -> str:
    """The reason why the surface file of a sample can't be used; "" if it can."""
    path = surface_path(folder, file)
    if not path.is_file():
        return f"surface {path} is missing"
    # The directory of a zip archive is at its end, so this detects a truncated file.
    return "" if is_zipfile(path) else f"surface {path} is damaged"


def _bounds(values: np.ndarray, ptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounding boxes (n, 3) to (n, 3) float64 of clouds; NaN and infinity propagate."""
    filled = np.flatnonzero(np.diff(ptr))
    low, high = (np.full((len(ptr) - 1, 3), np.nan) for _ in range(2))
    if len(filled):
        low[filled] = np.minimum.reduceat(values, ptr[filled], axis=0)
        high[filled] = np.maximum.reduceat(values, ptr[filled], axis=0)
    return low, high


def _bad_clouds(
    values: np.ndarray,
    ptr: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    stated: np.ndarray,
    column: str,
    min_points: int,
) -> Reasons:
    sizes = np.diff(ptr)
    with np.errstate(invalid="ignore"):
        extent = (bounds[1] - bounds[0]).max(axis=1)
    found = []
    for i, size in enumerate(sizes.tolist()):
        if size == 0:
            reason = f"{column} is empty"
        elif size != stated[i]:
            reason = f"num_{column} is {stated[i]}, but {column} has {size} points"
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
