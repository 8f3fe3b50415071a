"""Copies the points of all files of a survey to one unsorted file, the first step of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pointup.errors import DataError
from pointup.io.cloud import PointCloud
from pointup.upsampling.store.duplicates import FILE_BITS, exact_positions


class Spooled(NamedTuple):
    """Lowest coordinates, extent, dtype of a row, number of points read and taken of each file."""

    low: np.ndarray
    extent: np.ndarray
    dtype: np.dtype
    num_read: np.ndarray
    num_taken: np.ndarray


def spool_points(
    files: Iterable[Iterable[PointCloud]],
    path: Path,
    takes_part: Callable[[PointCloud], np.ndarray] | None,
) -> Spooled:
    """Write the points of a survey's files to a file, in input order; see `build_survey_store`."""
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    dtype = np.dtype([])
    num_read: list[int] = []
    num_taken: list[int] = []
    with path.open("wb") as stream:
        for number, chunks in enumerate(files):
            num_read.append(0)
            num_taken.append(0)
            for chunk in chunks:
                index = np.arange(num_read[-1], num_read[-1] + len(chunk))
                num_read[-1] += len(chunk)
                if takes_part is not None:
                    taking = takes_part(chunk)
                    if not taking.all():
                        chunk, index = chunk.select(taking), index[taking]
                if not len(chunk):
                    continue
                if not any(num_taken):
                    dtype = _row_dtype(chunk)
                low = np.minimum(low, chunk.positions.min(axis=0))
                high = np.maximum(high, chunk.positions.max(axis=0))
                table = np.zeros(len(chunk), dtype)
                table["position"] = chunk.positions
                table["exact"] = exact_positions(table["position"])
                table["index"] = index + (number << FILE_BITS)
                for name in dtype["attributes"].names or ():
                    table["attributes"][name] = chunk.attributes[name]
                stream.write(table.data)
                num_taken[-1] += len(table)
    num_points, what = sum(num_taken), "point"
    if num_points < sum(num_read):
        what = f"of {sum(num_read):,} points without noise, withheld points and other classes"
    if num_points < 2:
        raise DataError(f"has {num_points} {what}; at least 2 are needed, leave it out")
    if not (high > low).any():
        raise DataError(f"all {num_points} points are in one place; leave it out")
    return Spooled(low, high - low, dtype, np.array(num_read), np.array(num_taken))


def _row_dtype(cloud: PointCloud) -> np.dtype:
    attributes = np.dtype(
        [(name, values.dtype, values.shape[1:]) for name, values in cloud.attributes.items()]
    )
    return np.dtype(
        [
            ("position", "<f8", 3),
            ("index", "<i8"),
            ("key", "<i8"),
            ("exact", "<u8"),
            ("attributes", attributes),
        ]
    )
