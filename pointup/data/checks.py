"""Finds the samples of a pair dataset that can't be trained on, without looping over points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from pointup.data.columns import unpack_points

SMALLEST_EXTENT = 1e-6
LARGEST_EXTENT = 1e5


@dataclass(frozen=True)
class BadSample:
    """One sample that should be left out; `index` is its row in the dataset, `reason` says why."""

    index: int
    name: str
    reason: str


def find_bad_samples(dataset: Dataset, min_points: int) -> list[BadSample]:
    """The samples whose source or target can't be used, in the order of the dataset.

    A cloud is bad when it is empty, has fewer than `min_points` points, holds a coordinate that is
    not finite, has all its points in one place, or an extent (longest side of its bounding box)
    beyond 1e-6 to 1e5 units; a sample is bad, too, when `num_source` or `num_target` is not what
    the columns hold, or when normals don't match the target in number. Each gets one reason.
    """
    bad: dict[int, BadSample] = {}
    start = 0
    for table in dataset.with_format("arrow").iter(batch_size=256):
        names = table["name"].to_pylist()
        reasons = [""] * len(names)
        for column in ("source", "target"):
            values, ptr = unpack_points(table[column].combine_chunks())
            counted = table[f"num_{column}"].to_numpy()
            for i, reason in _bad_clouds(values, ptr, counted, column, min_points):
                reasons[i] = reasons[i] or reason
        if "target_normals" in table.column_names:
            _, normals_ptr = unpack_points(table["target_normals"].combine_chunks())
            num_normals = np.diff(normals_ptr)
            for i in np.flatnonzero((num_normals > 0) & (num_normals != np.diff(ptr))).tolist():
                reasons[i] = reasons[i] or f"{num_normals[i]} normals for {np.diff(ptr)[i]} points"
        for i, reason in enumerate(reasons):
            if reason:
                bad[start + i] = BadSample(start + i, names[i], reason)
        start += len(names)
    return list(bad.values())


def _bad_clouds(
    values: np.ndarray, ptr: np.ndarray, counted: np.ndarray, column: str, min_points: int
) -> list[tuple[int, str]]:
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
