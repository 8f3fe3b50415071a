"""The ground that both surveys of a pair cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pointup.datasets.tiles import split_tiles
from pointup.geometry.coverage import without_holes

CELLS_PER_TILE = 10
SPACINGS_PER_CELL = 2.0


def on_common_ground(clouds: Sequence[np.ndarray], tile: float) -> list[np.ndarray]:
    """Masks (N,) bool of the points of each cloud (N, 3) that lie on ground that all clouds cover.

    A cloud covers the cells with points, and holes between them up to three cells wide. Its cells
    are a tenth of a tile wide, or two of its point spacings if these are wider. The clouds are cut
    out of larger surveys along tiles of side length `tile`: what is beyond their border counts as
    its mirror image.
    """
    if not all(map(len, clouds)):
        return [np.zeros(len(points), dtype=bool) for points in clouds]
    everything = np.concatenate([points[:, :2] for points in clouds])
    first, last = (np.floor(f(axis=0) / tile) for f in (everything.min, everything.max))
    low, width = first * tile, (last - first + 1) * tile
    on_all = np.ones(len(everything), dtype=bool)
    ends = np.cumsum([len(points) for points in clouds])
    for points, end in zip(clouds, ends, strict=True):
        cell = max(tile / CELLS_PER_TILE, SPACINGS_PER_CELL * _spacing(points, tile))
        shape = np.maximum(np.floor(width / cell + 1e-6), 1).astype(np.int64)
        x, y = np.clip((everything - low) / width * shape, 0, shape - 1).astype(np.int64).T
        own = slice(end - len(points), end)
        occupied = np.zeros(shape, dtype=bool)
        occupied[x[own], y[own]] = True
        on_all &= without_holes(occupied, "symmetric")[x, y]
    return np.split(on_all, ends[:-1])


def _spacing(points: np.ndarray, tile: float) -> float:
    """About the horizontal point spacing of a cloud (N, 3) where it has points.

    Where it covers a part of the tiles only, points per tile say too little, and points per
    occupied cell say more: for points in random places, a mean of m in cells that hold any means
    about 2 (m - 1) in all cells while there are few, and m when there are many.
    """
    cells = split_tiles(points[:, :2], tile / CELLS_PER_TILE)
    per_occupied_cell = len(points) / len(cells)
    per_cell = min(2 * (per_occupied_cell - 1), per_occupied_cell)
    per_tile = np.diff(split_tiles(points[:, :2], tile).ptr)
    # The number of points in the tile of the median point.
    typical = float(np.median(np.repeat(per_tile, per_tile)))
    return tile / np.sqrt(max(per_cell * CELLS_PER_TILE**2, typical))
