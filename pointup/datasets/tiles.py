"""Square tiles of survey points: grouping, pairs of two surveys, and validation splits by place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pointup.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair

# Tile indices below this are exact in float64.
MAX_TILE_INDEX = 2**52


@dataclass(frozen=True)
class Tiles:
    """Points grouped by square tiles.

    Attributes:
        size: side length of a tile. Tile (0, 0) has its lower corner at the origin.
        xy: (T, 2) int64, indices of the tiles that hold points, ascending in x, then y. A tile
            includes its lower edges and excludes its upper edges.
        order: (N,) int64, indices of the points, grouped by tile and ascending in each tile.
        ptr: (T + 1,) int64; tile t has the points order[ptr[t]:ptr[t + 1]].
    """

    size: float
    xy: np.ndarray
    order: np.ndarray
    ptr: np.ndarray

    def __len__(self) -> int:
        return len(self.xy)

    def points(self, tile: int) -> np.ndarray:
        """Ascending indices of the points of the tile in row `tile` of `xy`."""
        return self.order[self.ptr[tile] : self.ptr[tile + 1]]


def split_tiles(positions_xy: np.ndarray, tile: float) -> Tiles:
    """Group points (N, 2) by square tiles of side length `tile`.

    Tiles begin at multiples of their size, so that the tiles of several files match. Raises
    ConfigError for a size that is not positive, DataError for coordinates that are not finite or
    too large for tile indices.
    """
    if not (np.isfinite(tile) and tile > 0):
        raise ConfigError(f"tile size {tile}: must be a positive length")
    numbers = np.floor(np.asarray(positions_xy, dtype=np.float64) / tile)
    # The condition is negated, so that NaN also fails.
    if not (np.abs(numbers) < MAX_TILE_INDEX).all():
        raise DataError(f"points too far away for tiles of {tile}, or not finite: check them")
    numbers = numbers.astype(np.int64)
    corners = numbers if len(numbers) else np.zeros((1, 2), np.int64)
    lowest = corners.min(axis=0)
    width, height = (int(n) for n in corners.max(axis=0) - lowest + 1)
    if width * height >= 2**63:
        raise DataError(f"points too far apart for tiles of {tile}: check them for outliers")
    key = (numbers[:, 0] - lowest[0]) * height + (numbers[:, 1] - lowest[1])
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    xy = np.column_stack([key[starts] // height, key[starts] % height]) + lowest
    return Tiles(float(tile), xy, order, np.append(starts, len(key)))


def survey_pairs(
    source_positions: np.ndarray,
    target_positions: np.ndarray,
    tile: float,
    min_points: int,
    stem: str = "tile",
) -> Iterator[Pair]:
    """Yield a pair for each tile of two surveys of the same ground, named STEM_X_Y by its index.

    Both surveys are (N, 3) in the same coordinates. A tile is left out if either survey has fewer
    than `min_points` points in it. The origin of a pair is the mean of its source.
    """
    # Imported here, because pairs need `datasets` and tiles don't.
    from pointup.datasets.pair import Pair

    sources = split_tiles(source_positions[:, :2], tile)
    targets = split_tiles(target_positions[:, :2], tile)
    row_of = {(x, y): row for row, (x, y) in enumerate(targets.xy.tolist())}
    for row, (x, y) in enumerate(sources.xy.tolist()):
        if (x, y) not in row_of:
            continue
        source = source_positions[sources.points(row)]
        target = target_positions[targets.points(row_of[x, y])]
        if min(len(source), len(target)) < max(min_points, 1):
            continue
        origin = source.mean(axis=0)
        yield Pair(
            name=f"{stem}_{x}_{y}",
            source=(source - origin).astype(np.float32),
            target=(target - origin).astype(np.float32),
            origin=origin,
        )


def split_blocks(tile_xy: np.ndarray, fraction: float, seed: int, block: int) -> np.ndarray:
    """Mask (T,) bool of the validation tiles: about `fraction` of the tiles (T, 2).

    Blocks of `block` x `block` tiles are not split, so that few validation tiles touch training
    tiles. The result depends on the set of tiles and the seed, not on their order. With two or more
    different tiles neither side is empty: if all tiles are in one block, the blocks are halved.
    Raises ConfigError for a fraction that is not between 0 and 1, or a block below 1.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"validation fraction {fraction}: must be between 0 and 1")
    if block < 1:
        raise ConfigError(f"block of {block} tiles: must be at least 1")
    tile_xy = np.asarray(tile_xy, dtype=np.int64).reshape(-1, 2)
    while True:
        blocks, block_of, sizes = np.unique(
            tile_xy // block, axis=0, return_inverse=True, return_counts=True
        )
        if len(blocks) > 1 or block == 1:
            break
        block //= 2
    held_out = np.zeros(len(blocks), dtype=bool)
    goal, taken = fraction * len(tile_xy), 0
    shuffled = np.random.default_rng(seed).permutation(len(blocks))
    # The first shuffled block is always for training. Another block is held out if that brings
    # `taken` closer to `goal`.
    for candidate in shuffled[1:]:
        if abs(taken + sizes[candidate] - goal) < abs(taken - goal) or not taken:
            held_out[candidate] = True
            taken += sizes[candidate]
    return held_out[block_of.reshape(-1)]


def split_few(tile_xy: np.ndarray, weights: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Mask (T,) bool of the validation tiles among a few tiles: about `fraction` of the weights.

    `tile_xy` (T, 2) are distinct tiles, `weights` (T,) positive, for example numbers of points. The
    validation tiles are close together, because each separate place needs a strip around it. With
    two or more tiles neither side is empty: the heaviest tile is for training, and if all others
    are too heavy, the lightest of them is held out. The result depends on the set of tiles and the
    seed, not on their order.
    """
    held_out = np.zeros(len(tile_xy), dtype=bool)
    if len(tile_xy) < 2:
        return held_out
    order = np.lexsort(tile_xy.T)
    tile_xy, weights = tile_xy[order], np.asarray(weights, dtype=np.float64)[order]
    shuffled = np.random.default_rng(seed).permutation(len(order))
    shuffled = shuffled[shuffled != np.argmax(weights)]
    goal = fraction * weights.sum()
    light = shuffled[weights[shuffled] < 2 * goal]
    first = light[0] if len(light) else shuffled[np.argmin(weights[shuffled])]
    squared_distances = np.square(tile_xy[shuffled] - tile_xy[first]).sum(axis=1)
    taken = 0.0
    for candidate in shuffled[np.argsort(squared_distances, kind="stable")]:
        brings_closer = abs(taken + weights[candidate] - goal) < abs(taken - goal)
        if candidate == first or brings_closer:
            held_out[order[candidate]] = True
            taken += weights[candidate]
    return held_out


def away_from(
    positions_xy: np.ndarray, tile: float, tile_xy: np.ndarray, distance: float
) -> np.ndarray:
    """Mask (N,) bool of the points (N, 2) that lie `distance` or more from all tiles (T, 2).

    Tiles are squares of side length `tile` that begin at multiples of it. Points in a tile have
    distance 0.
    """
    kept = np.ones(len(positions_xy), dtype=bool)
    for corner in np.asarray(tile_xy).reshape(-1, 2) * tile:
        beside = np.maximum(corner - positions_xy, positions_xy - (corner + tile)).clip(min=0)
        kept &= np.hypot(beside[:, 0], beside[:, 1]) >= distance
    return kept
