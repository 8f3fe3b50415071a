"""Square tiles of survey files: points by tile, pairs of two surveys, and splits by place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pointup.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair

# Tile numbers are exact below this in float64, and their products fit int64.
LARGEST_TILE_NUMBER = 2**52


@dataclass(frozen=True)
class Tiles:
    """Points grouped by the square tile they lie in.

    Attributes:
        size: length of a tile's side.
        origin: (2,) float64, the lower corner of tile (0, 0).
        xy: (T, 2) int64, numbers of the tiles that hold points, ascending in x, then y. A tile
            holds its lower edges and not its upper ones.
        order: (N,) int64, indices of the points, tile after tile, ascending in each.
        ptr: (T + 1,) int64, tile t has the points order[ptr[t]:ptr[t + 1]].
    """

    size: float
    origin: np.ndarray
    xy: np.ndarray
    order: np.ndarray
    ptr: np.ndarray

    def __len__(self) -> int:
        return len(self.xy)

    def points(self, tile: int) -> np.ndarray:
        """Indices of the points of the tile in row `tile` of `xy`, ascending."""
        return self.order[self.ptr[tile] : self.ptr[tile + 1]]

    def lower_corner(self, tile: int) -> np.ndarray:
        """(2,) float64, where that tile begins; it ends `size` further."""
        return self.origin + self.xy[tile] * self.size


def split_tiles(positions_xy: np.ndarray, tile: float, origin: np.ndarray | None = None) -> Tiles:
    """Group points (N, 2) by square tiles with sides of length `tile`.

    Without an origin, tiles begin at multiples of their size, so that those of several files match.
    Raises ConfigError for a size that isn't positive, DataError for coordinates that are not finite
    or too far away to number their tiles.
    """
    if not (np.isfinite(tile) and tile > 0):
        raise ConfigError(f"tile size {tile}: must be a positive length")
    corner = np.zeros(2) if origin is None else np.asarray(origin, dtype=np.float64)
    numbers = np.floor((np.asarray(positions_xy, dtype=np.float64) - corner) / tile)
    # Negated, so that NaN fails as well.
    if not (np.abs(numbers) < LARGEST_TILE_NUMBER).all():
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
    return Tiles(float(tile), corner, xy, order, np.append(starts, len(key)))


def survey_pairs(
    source_positions: np.ndarray,
    target_positions: np.ndarray,
    tile: float,
    min_points: int,
    stem: str = "tile",
) -> Iterator[Pair]:
    """Pairs of two surveys of the same ground, a tile each, named STEM_X_Y by the tile's number.

    Both positions are (N, 3) in the same coordinates. Tiles in which either has less than
    `min_points` points are left out. A pair's origin is the mean of its source.
    """
    # Here, because pairs need torch and tiles don't.
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
    """Which tiles to validate on: (T,) bool, True for about `fraction` of them.

    Blocks of `block` x `block` neighbouring tiles stay on one side, so that few validation tiles
    touch training ground. What a tile gets depends on the set of tiles and the seed, not on their
    order. From two different tiles on, neither side is empty: the blocks shrink if there is but
    one. Raises ConfigError for a fraction not between 0 and 1, or a block below 1.
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
    wanted, taken = fraction * len(tile_xy), 0
    shuffled = np.random.default_rng(seed).permutation(len(blocks))
    # One block is always trained on. A block is taken when that brings the number closer.
    for candidate in shuffled[1:]:
        if abs(taken + sizes[candidate] - wanted) < abs(taken - wanted) or not taken:
            held_out[candidate] = True
            taken += sizes[candidate]
    return held_out[block_of.reshape(-1)]


def split_few(tile_xy: np.ndarray, weights: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which of a few tiles to validate on: (T,) bool, True for about `fraction` of the weights.

    `tile_xy` (T, 2) are different tiles, `weights` (T,) positive, as their numbers of points. The
    tiles lie together, since each place apart would cost a strip around it. From two tiles on,
    neither side is empty: the heaviest is trained on, and the lightest is held out where all are
    too heavy. Depends on the set of tiles and the seed, not on their order.
    """
    held_out = np.zeros(len(tile_xy), dtype=bool)
    if len(tile_xy) < 2:
        return held_out
    order = np.lexsort(tile_xy.T)
    tile_xy, weights = tile_xy[order], np.asarray(weights, dtype=np.float64)[order]
    shuffled = np.random.default_rng(seed).permutation(len(order))
    shuffled = shuffled[shuffled != np.argmax(weights)]
    wanted = fraction * weights.sum()
    light = shuffled[weights[shuffled] < 2 * wanted]
    first = light[0] if len(light) else shuffled[np.argmin(weights[shuffled])]
    gaps = np.square(tile_xy[shuffled] - tile_xy[first]).sum(axis=1)
    taken = 0.0
    for candidate in shuffled[np.argsort(gaps, kind="stable")]:
        brings_closer = abs(taken + weights[candidate] - wanted) < abs(taken - wanted)
        if candidate == first or brings_closer:
            held_out[order[candidate]] = True
            taken += weights[candidate]
    return held_out


def away_from(
    positions_xy: np.ndarray, tile: float, tile_xy: np.ndarray, distance: float
) -> np.ndarray:
    """Which points (N, 2) lie `distance` or more from all of these tiles (T, 2): (N,) bool.

    Tiles are squares with sides of `tile` that begin at multiples of it; the points in them are at
    distance 0.
    """
    kept = np.ones(len(positions_xy), dtype=bool)
    for corner in np.asarray(tile_xy).reshape(-1, 2) * tile:
        beside = np.maximum(corner - positions_xy, positions_xy - (corner + tile)).clip(min=0)
        kept &= np.hypot(beside[:, 0], beside[:, 1]) >= distance
    return kept
