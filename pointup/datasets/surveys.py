"""Surveys of any size cut into pairs: points are sorted by place on disk first, then tile by tile.

Survey files overlap, cut through tiles and may be larger than memory together. So each file is read
once, in pieces, and its points are appended to one file a block of tiles; pairs are made a block
at a time. Scratch space is 24 bytes a point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from pointup.datasets.pair import Pair
from pointup.datasets.thinning_patterns import PATTERNS, thin
from pointup.datasets.tiles import away_from, split_blocks, split_few, split_tiles, survey_pairs
from pointup.io.files import iter_points


@dataclass(frozen=True)
class SortedFile:
    """The points of a survey file, sorted by block below `folder`.

    `tile_xy` (T, 2) int64 are the tiles that hold points, `num_points` (T,) int64 how many; `low`
    and `high` (3,) float64 the bounding box.
    """

    folder: Path
    tile_xy: np.ndarray
    num_points: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Place:
    """Ground with one system of coordinates: a survey, or a sparse and a dense one on two sides.

    `stem` begins the names of its pairs.
    """

    stem: str
    sides: tuple[list[SortedFile], ...]

    def tiles_with(self, fewest_points: int) -> np.ndarray:
        """(T, 2) int64, the tiles in which every side has so many points, ascending."""
        common: np.ndarray | None = None
        for files in self.sides:
            xy, counts = _count_tiles(files)
            xy = xy[counts >= fewest_points]
            if common is not None:
                both, counts = np.unique(np.concatenate([common, xy]), axis=0, return_counts=True)
                xy = both[counts == 2]
            common = xy
        assert common is not None
        return common

    def num_points(self, tile_xy: np.ndarray) -> np.ndarray:
        """(T,) int64, points of all sides together in each of these tiles (T, 2)."""
        files = [file for side in self.sides for file in side]
        xy, counts = (array.tolist() for array in _count_tiles(files))
        number_of = {(x, y): number for (x, y), number in zip(xy, counts, strict=True)}
        return np.array([number_of.get((x, y), 0) for x, y in tile_xy.tolist()], dtype=np.int64)

    def folders(self, side: int) -> list[Path]:
        """Where the points of a side are, for `two_survey_pairs` and `thinned_pairs`."""
        return [file.folder for file in self.sides[side]]

    def describe(self, side: int) -> str:
        """The extent of a side, as in "x 12.5 to 80, y 3 to 9.25"."""
        low = np.min([file.low for file in self.sides[side]], axis=0)
        high = np.max([file.high for file in self.sides[side]], axis=0)
        return f"x {low[0]:.10g} to {high[0]:.10g}, y {low[1]:.10g} to {high[1]:.10g}"


def sort_file(path: Path, folder: Path, tile: float, block: int) -> SortedFile:
    """Sort a file's points into blocks of `block` x `block` tiles, in an empty folder of its own.

    Raises what reading the file does; the folder is then of no use.
    """
    folder.mkdir(parents=True)
    tile_xy, num_points = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    for cloud in iter_points(path, attributes=False):
        tiles = split_tiles(cloud.positions[:, :2], tile)
        tile_xy.append(tiles.xy)
        num_points.append(np.diff(tiles.ptr))
        low = np.minimum(low, cloud.positions.min(axis=0))
        high = np.maximum(high, cloud.positions.max(axis=0))
        blocks, block_of = np.unique(tiles.xy // block, axis=0, return_inverse=True)
        for number, (x, y) in enumerate(blocks):
            index = [
                tiles.points(int(row)) for row in np.flatnonzero(block_of.reshape(-1) == number)
            ]
            with _block_file(folder, (x, y)).open("ab") as file:
                cloud.positions[np.concatenate(index)].tofile(file)
    return SortedFile(folder, np.concatenate(tile_xy), np.concatenate(num_points), low, high)


@dataclass(frozen=True)
class HeldOutTiles:
    """Tiles of a place to validate on, and the strip around them that nothing is trained on in.

    Attributes:
        tile: length of a tile's side.
        xy: (T, 2) int64, numbers of the tiles.
        strip: width of the strip.
    """

    tile: float
    xy: np.ndarray
    strip: float

    def near_block(self, block_xy: tuple[int, int], block: int) -> HeldOutTiles:
        """Those whose strip may reach into a block of `block` x `block` tiles."""
        first = np.array(block_xy) * block
        reach = math.ceil(self.strip / self.tile)
        near = ((self.xy >= first - reach) & (self.xy < first + block + reach)).all(axis=1)
        return replace(self, xy=self.xy[near])

    def without_strip(self, positions: np.ndarray) -> np.ndarray:
        """The points of (N, 3) that lie neither in the tiles nor in the strip around them."""
        return positions[away_from(positions[:, :2], self.tile, self.xy, self.strip)]


def hold_out(
    tile_xy: Sequence[np.ndarray],
    fraction: float,
    seed: int,
    block: int,
    weights: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """For each place's tiles (T, 2) which to validate on, (T,) bool; see `split_blocks`.

    Where there are too few blocks to hold out about the fraction, they shrink. Once they are single
    tiles, a survey with `weights`, (T,) for each place, is split by `split_few`.
    """
    if not fraction or not tile_xy:
        return [np.zeros(len(xy), bool) for xy in tile_xy]
    # Places are laid out beside each other, whole blocks apart.
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


def read_block(folders: Sequence[Path], block_xy: tuple[int, int]) -> np.ndarray:
    """(N, 3) float64 points of a block, those of the first file first."""
    paths = [_block_file(folder, block_xy) for folder in folders]
    points = [np.fromfile(path).reshape(-1, 3) for path in paths if path.exists()]
    return np.concatenate([np.empty((0, 3)), *points])


def two_survey_pairs(
    source: Sequence[Path],
    target: Sequence[Path],
    block_xy: tuple[int, int],
    names: frozenset[str],
    *,
    tile: float,
    min_points: int,
    stem: str,
    held_out: HeldOutTiles | None = None,
) -> list[Pair]:
    """The pairs of a block's tiles that are among `names` (STEM_X_Y).

    Without the points in `held_out` and its strip; a tile is left out where fewer than `min_points`
    remain on a side.
    """
    clouds = [read_block(side, block_xy) for side in (source, target)]
    if held_out is not None:
        clouds = [held_out.without_strip(points) for points in clouds]
    return [
        pair
        for pair in survey_pairs(clouds[0], clouds[1], tile, min_points, stem)
        if pair.name in names
    ]


def thinned_pairs(
    folders: Sequence[Path],
    block_xy: tuple[int, int],
    names: frozenset[str],
    *,
    tile: float,
    stem: str,
    ratio: float,
    pattern: str,
    disjoint: bool,
    seed: int,
    min_points: int = 1,
    held_out: HeldOutTiles | None = None,
) -> list[Pair]:
    """The pairs of a block's tiles that are among `names`, each from one dense cloud.

    The source is a subset by `pattern` (`pointup.datasets.thinning_patterns.thin`; "mixed": the
    pattern changes from tile to tile). The target is `ratio` times as large: the other points if
    `disjoint`, all points if not. A tile's thinning depends on its points, its name and the seed
    alone. Without the points in `held_out` and its strip; a tile is left out where too few remain
    for `min_points` on either side.
    """
    points = read_block(folders, block_xy)
    if held_out is not None:
        points = held_out.without_strip(points)
    fewest = fewest_dense_points(min_points, ratio, disjoint)
    tiles = split_tiles(points[:, :2], tile)
    pairs = []
    for row, (x, y) in enumerate(tiles.xy.tolist()):
        name = f"{stem}_{x}_{y}"
        if name not in names:
            continue
        dense = points[tiles.points(row)]
        if len(dense) < fewest:
            continue
        rng = np.random.default_rng([seed, crc32(name.encode())])
        kind = str(rng.choice(PATTERNS)) if pattern == "mixed" else pattern
        kept = thin(dense, thinning_ratio(ratio, disjoint), kind, rng)
        source = dense[kept]
        target = np.delete(dense, kept, axis=0) if disjoint else dense
        origin = source.mean(axis=0)
        pairs.append(
            Pair(
                name=name,
                source=(source - origin).astype(np.float32),
                target=(target - origin).astype(np.float32),
                origin=origin,
            )
        )
    return pairs


def thinning_ratio(ratio: float, disjoint: bool) -> float:
    """How much to thin so that the target, the rest or all, is `ratio` times the source."""
    return ratio + 1 if disjoint else ratio


def fewest_dense_points(min_points: int, ratio: float, disjoint: bool) -> int:
    """The points a tile needs so that source and target get `min_points` each."""
    return math.ceil(max(min_points, 1) * thinning_ratio(ratio, disjoint))


def _count_tiles(files: Sequence[SortedFile]) -> tuple[np.ndarray, np.ndarray]:
    tile_xy = np.concatenate([np.empty((0, 2), np.int64), *(file.tile_xy for file in files)])
    xy, row = np.unique(tile_xy, axis=0, return_inverse=True)
    counts = np.zeros(len(xy), np.int64)
    np.add.at(counts, row.reshape(-1), np.concatenate([[0], *(f.num_points for f in files)])[1:])
    return xy, counts


def _block_file(folder: Path, block_xy: tuple[int, int]) -> Path:
    return folder / f"{block_xy[0]}_{block_xy[1]}.xyz"
