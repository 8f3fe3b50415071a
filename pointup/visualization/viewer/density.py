"""Point density on the ground, for colours: counts in cells, smoothed and interpolated."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter1d
from scipy.sparse import csr_array

POINTS_PER_CELL = 4
_REACH = 4
"""Cells that the Gaussian reaches; it has a standard deviation of one cell."""


def ground_density(places: np.ndarray) -> np.ndarray:
    """Points per area around each point (N,), for places (N, 2) on the ground.

    Points are counted in cells that hold four on average over the occupied area. The counts are
    smoothed with a Gaussian of one cell and interpolated at the points. Memory grows with the
    occupied cells, not with the extent: points far from all others change the result nowhere else.
    Near the border of the survey the density is too low, because cells beyond it are empty.
    """
    places = places - places.min(axis=0)
    cell = _cell_size(places)
    cells = np.floor(places / cell).astype(np.int64)
    # From the middle of the cell, -0.5 to 0.5.
    offsets = places / cell - cells - 0.5
    row, column = (_without_gaps(numbers) for numbers in cells.T)
    shape = (int(row.max()) + 1, int(column.max()) + 1)
    counts = csr_array((np.ones(len(places)), (row, column)), shape=shape)
    smooth = _gaussian(shape[0]) @ counts @ _gaussian(shape[1]).T
    smooth.sort_indices()
    # A grid without large gaps is read faster as an array.
    values = smooth.toarray() if shape[0] * shape[1] <= len(places) else smooth
    density = np.zeros(len(places))
    # Bilinear, with the next cell on the side of the point; the grid ends with its outer cells.
    share = np.abs(offsets)
    next_row, next_column = (
        np.clip(numbers + np.where(offset < 0, -1, 1), 0, size - 1)
        for numbers, offset, size in zip((row, column), offsets.T, shape, strict=True)
    )
    for rows, row_share in ((row, 1 - share[:, 0]), (next_row, share[:, 0])):
        for columns, column_share in ((column, 1 - share[:, 1]), (next_column, share[:, 1])):
            density += row_share * column_share * values[rows, columns]
    return density / cell**2


def _cell_size(places: np.ndarray) -> float:
    """Side of a cell that holds `POINTS_PER_CELL` points, on average over the occupied area.

    The occupied area is that of the blocks that hold a point. Blocks begin as large as if points
    filled their bounding box, and shrink as long as much of it is empty.
    """
    extent = places.max(axis=0)
    smallest = max(float(extent.max()) / 1e9, 1e-9)
    cell = max(float(np.sqrt(POINTS_PER_CELL * extent.prod() / len(places))), smallest)
    # Points of a block: scan lines that are some cells apart, and small gaps, belong to the area.
    # Few points make smaller blocks, of which one point far away is not half.
    in_block = float(np.clip(len(places) / 16, POINTS_PER_CELL, 16 * POINTS_PER_CELL))
    cells_along = np.sqrt(in_block / POINTS_PER_CELL)
    while True:
        block = np.floor(places / (cells_along * cell)).astype(np.int64)
        number = block[:, 0] * (int(block[:, 1].max()) + 1) + block[:, 1]
        share = len(np.unique(number)) * in_block / len(places)
        smaller = max(cell * float(np.sqrt(share)), smallest)
        # Blocks at the border are filled in part, so that a full box is left as it is.
        if smaller > 0.9 * cell:
            return cell
        cell = smaller


def _without_gaps(numbers: np.ndarray) -> np.ndarray:
    """Cell numbers (N,) along an axis, with empty stretches as short as the Gaussian allows."""
    used = np.unique(numbers)
    steps = np.minimum(np.diff(used, prepend=used[0]), 2 * _REACH + 2)
    return np.cumsum(steps)[np.searchsorted(used, numbers)]


def _gaussian(size: int) -> csr_array:
    """The matrix (size, size) that smooths along an axis; the border reflects."""
    impulse = np.zeros(2 * _REACH + 1)
    impulse[_REACH] = 1
    weights = gaussian_filter1d(impulse, 1.0, truncate=_REACH, mode="constant")
    rows = np.repeat(np.arange(size), len(weights))
    columns = (rows + np.tile(np.arange(-_REACH, _REACH + 1), size)) % (2 * size)
    columns = np.minimum(columns, 2 * size - 1 - columns)
    return csr_array((np.tile(weights, size), (rows, columns)), shape=(size, size))
