"""Surveys of any size, sorted into blocks of tiles, and their split into training and validation.

Survey files overlap, their borders cut through tiles, and together they may be larger than memory.
So each file is read once, in chunks, and its points are appended to one scratch file per block of
tiles. Pairs are then made block by block (`pointup.datasets.block_pairs`). The scratch files take
24 bytes per point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pointup.disk import scratch_errors
from pointup.errors import DataError
from pointup.io.cloud import PointCloud, is_noise, is_synthetic
from pointup.io.files import iter_points

# Odd numbers without a pattern, from the digits of pi.
MIXING = np.array([0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1], dtype=np.uint64)


Columns = Callable[[PointCloud], Iterable[np.ndarray]]
"""Columns (N,) of the points of a cloud, as float64."""


@dataclass(frozen=True)
class SortedFile:
    """The points of a survey file, sorted by block into files of `folder`.

    `tile_xy` (T, 2) int64 are the tiles that hold points and `num_points` (T,) int64 their numbers
    of points; a tile occurs once for each chunk that has points in it. `low` and `high` (3,)
    float64 are the bounding box. `num_noise` points were left out as noise.
    """

    folder: Path
    tile_xy: np.ndarray
    num_points: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_noise: int = 0


@dataclass(frozen=True)
class Place:
    """Ground in one coordinate system, with one side (a survey to thin) or two (sparse and dense).

    The names of its pairs begin with `stem`.
    """

    stem: str
    sides: tuple[list[SortedFile], ...]

    def tiles_with(self, fewest_points: int) -> np.ndarray:
        """The tiles (T, 2) int64 in which each side has at least `fewest_points`, ascending."""
        of_sides = []
        for files in self.sides:
            xy, counts = _count_tiles(files)
            of_sides.append(xy[counts >= fewest_points])
        xy, counts = np.unique(np.concatenate(of_sides), axis=0, return_counts=True)
        return xy[counts == len(self.sides)]

    def num_points(self, tile_xy: np.ndarray) -> np.ndarray:
        """Numbers of points (T,) int64 of all sides together in each of these tiles (T, 2)."""
        files = [file for side in self.sides for file in side]
        xy, counts = (array.tolist() for array in _count_tiles(files))
        number_of = {(x, y): number for (x, y), number in zip(xy, counts, strict=True)}
        return np.array([number_of.get((x, y), 0) for x, y in tile_xy.tolist()], dtype=np.int64)

    @property
    def folders(self) -> list[list[Path]]:
        """The folders of the points of each side, for `read_block`."""
        return [[file.folder for file in side] for side in self.sides]

    def extent(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper corner (3,) of the points of a side."""
        files = self.sides[side]
        return np.min([f.low for f in files], axis=0), np.max([f.high for f in files], axis=0)

    def describe(self, side: int) -> str:
        """The extent of a side as text: "x 12.5 to 80, y 3 to 9.25"."""
        low, high = self.extent(side)
        return f"x {low[0]:.10g} to {high[0]:.10g}, y {low[1]:.10g} to {high[1]:.10g}"


def sort_file(
    path: Path,
    folder: Path,
    tile: float,
    block: int,
    regions: tuple[int, frozenset[tuple[int, int]]] | None = None,
    include_noise: bool = False,
    columns: Columns | None = None,
) -> SortedFile:
    """Sort the points of a file into blocks of `block` x `block` tiles, in the new folder `folder`.

    With `regions`, their side length in blocks and the indices of some, only the points in these
    are kept; the numbers of points are those of all. Noise, withheld and synthetic points are left
    out unless `include_noise`. `columns` gives columns (N,) to store beside the coordinates. Raises
    the errors of `iter_points` and of `columns`, and DataError for a file of noise alone; the
    folder is then incomplete.
    """
    folder.mkdir(parents=True)
    tile_xy, num_points = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    num_noise = 0
    for cloud in iter_points(path, attributes=columns is not None or not include_noise):
        points = cloud.positions
        if columns is not None:
            points = np.column_stack([points, *columns(cloud)])
        if not include_noise:
            noise = is_noise(cloud) | is_synthetic(cloud)
            num_noise += int(noise.sum())
            points = points[~noise]
        if not len(points):
            continue
        tiles = split_tiles(points[:, :2], tile)
        tile_xy.append(tiles.xy)
        num_points.append(np.diff(tiles.ptr))
        low = np.minimum(low, points[:, :3].min(axis=0))
        high = np.maximum(high, points[:, :3].max(axis=0))
        blocks, block_of = np.unique(tiles.xy // block, axis=0, return_inverse=True)
        for number, (x, y) in enumerate(blocks.tolist()):
            if regions is not None and (x // regions[0], y // regions[0]) not in regions[1]:
                continue
            index = [
                tiles.points(int(row)) for row in np.flatnonzero(block_of.reshape(-1) == number)
            ]
            path_of_block = _block_file(folder, (x, y))
            # Not `tofile`, which does not say that a disk is full.
            with scratch_errors(path_of_block), path_of_block.open("ab") as file:
                file.write(points[np.concatenate(index)].tobytes())
    if num_noise and len(tile_xy) == 1:
        raise DataError(f"{path}: all {num_noise:,} points are noise, withheld or synthetic")
    counts = np.concatenate(num_points)
    return SortedFile(folder, np.concatenate(tile_xy), counts, low, high, num_noise)


@dataclass(frozen=True)
class HeldOutTiles:
    """The validation tiles of a place, and the strip around them that is left out of training.

    Attributes:
        tile: side length of a tile.
        xy: (T, 2) int64, indices of the tiles.
        strip: width of the strip.
    """

    tile: float
    xy: np.ndarray
    strip: float

    def near_block(self, block_xy: tuple[int, int], block: int) -> HeldOutTiles:
        """The tiles whose strip may reach into a block of `block` x `block` tiles."""
        first = np.array(block_xy) * block
        reach = math.ceil(self.strip / self.tile)
        near = ((self.xy >= first - reach) & (self.xy < first + block + reach)).all(axis=1)
        return replace(self, xy=self.xy[near])

    def without_strip(self, positions: np.ndarray) -> np.ndarray:
        """The points (N, 3 or more) that lie neither in the tiles nor in the strip around them."""
        return positions[away_from(positions[:, :2], self.tile, self.xy, self.strip)]


def hold_out(
    tile_xy: Sequence[np.ndarray],
    fraction: float,
    seed: int,
    block: int,
    weights: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Masks (T,) bool of the validation tiles, for the tiles (T, 2) of each place.

    `split_blocks` splits the tiles. Blocks are halved while there are too few of them to hold out
    about `fraction`. If that ends at single tiles or there are too few tiles, `split_few` splits
    the tiles instead, by `weights` (T,) for each place, if these are given.
    """
    if not fraction or not tile_xy:
        return [np.zeros(len(xy), bool) for xy in tile_xy]
    # The places are shifted side by side, at distances of whole blocks.
    shifted, right = [], 0
    for xy in tile_xy:
        local = xy - xy.min(axis=0, initial=np.iinfo(np.int64).max) // block * block
        shifted.append(local + np.array([right, 0]))
        right += (local[:, 0].max(initial=0) // block + 2) * block
    everything = np.concatenate(shifted)
    largest_block = block
    while block > 1 and len(np.unique(everything // block, axis=0)) < 1 / fraction:
        block //= 2
    are_few = block == 1 and (largest_block > 1 or len(everything) < 1 / fraction)
    if are_few and weights is not None:
        held_out = split_few(everything, np.concatenate(weights), fraction, seed)
    else:
        held_out = split_blocks(everything, fraction, seed, block)
    return np.split(held_out, np.cumsum([len(xy) for xy in tile_xy])[:-1])


def read_block(
    folders: Sequence[Path], block_xy: tuple[int, int], num_columns: int = 3
) -> np.ndarray:
    """The points (N, num_columns) float64 of a block, in the order of the files."""
    paths = [_block_file(folder, block_xy) for folder in folders]
    of_files = [np.fromfile(path).reshape(-1, num_columns) for path in paths if path.exists()]
    return np.concatenate([np.empty((0, num_columns)), *of_files])


def first_occurrences(points: np.ndarray) -> np.ndarray:
    """Mask (N,) bool of the points (N, 3) float64 that are not at the position of an earlier one.

    Positions that differ in the last bits of float64 only are the same: files with LAS offsets of
    their own give the same coordinate different last bits. So positions are rounded to a power of
    ten, as the scales of files are: 1e-7 for coordinates of a few million.
    """
    largest = float(np.abs(points).max(initial=1e-300))
    step = 10.0 ** np.ceil(np.log10(64 * np.spacing(largest)))
    keys = np.round(points / step).astype(np.int64)
    # Sorted by a single mixed number, which takes a third of the time of sorting by three.
    mixed = (keys.view(np.uint64) * MIXING).sum(axis=1)
    order = np.argsort(mixed, kind="stable")
    keys = keys[order]
    is_first = np.ones(len(points), dtype=bool)
    is_first[order[1:]] = (keys[1:] != keys[:-1]).any(axis=1)
    return is_first


def _count_tiles(files: Sequence[SortedFile]) -> tuple[np.ndarray, np.ndarray]:
    tile_xy = np.concatenate([np.empty((0, 2), np.int64), *(file.tile_xy for file in files)])
    xy, row = np.unique(tile_xy, axis=0, return_inverse=True)
    counts = np.zeros(len(xy), np.int64)
    np.add.at(counts, row.reshape(-1), np.concatenate([[0], *(f.num_points for f in files)])[1:])
    return xy, counts


def _block_file(folder: Path, block_xy: tuple[int, int]) -> Path:
    return folder / f"{block_xy[0]}_{block_xy[1]}.xyz"


# Tile indices below this are exact in float64.
MAX_TILE_INDEX = 2**52


@dataclass(frozen=True)
class Tiles:
    """Points grouped by square tiles.

    Attributes:
        xy: (T, 2) int64, indices of the tiles that hold points, ascending in x, then y. Tile (0, 0)
            has its lower corner at the origin. A tile includes its lower edges and excludes its
            upper edges.
        order: (N,) int64, indices of the points, grouped by tile and ascending in each tile.
        ptr: (T + 1,) int64; tile t has the points order[ptr[t]:ptr[t + 1]].
    """

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
    DataError for coordinates that are not finite or too large for tile indices.
    """
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
    return Tiles(xy, order, np.append(starts, len(key)))


def split_blocks(tile_xy: np.ndarray, fraction: float, seed: int, block: int) -> np.ndarray:
    """Mask (T,) bool of the validation tiles: about `fraction` of the tiles (T, 2).

    Blocks of `block` x `block` tiles are not split, so that few validation tiles touch training
    tiles. The result depends on the set of tiles and the seed, not on their order. With two or more
    blocks neither side is empty.
    """
    blocks, block_of, sizes = np.unique(
        tile_xy // block, axis=0, return_inverse=True, return_counts=True
    )
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
