"""Makes the pairs of a block of tiles, of a region of a large survey, and of two whole clouds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from pointup.datasets.flight_passes import FlightPass, covered_area, find_passes, time_and_id
from pointup.datasets.pair import Pair, is_within
from pointup.datasets.pair_writer import write_part
from pointup.datasets.regions import SurveyRegion, is_held_out
from pointup.datasets.survey_tiles import (
    HeldOutTiles,
    Place,
    SortedFile,
    first_occurrences,
    read_block,
    sort_file,
    split_tiles,
)
from pointup.disk import scratch_errors, written_whole
from pointup.errors import FileError, PointupError
from pointup.geometry.grids import hashed, without_holes
from pointup.io.cloud import is_noise, is_synthetic, warn_once
from pointup.io.extents import FileExtent
from pointup.io.files import read_points


@dataclass(frozen=True)
class BlockPairs:
    """The pairs of a block of tiles, and how many points of their tiles are in none of them.

    Attributes:
        pairs: one for each tile with enough points, or several for pairs of flight passes.
        num_repeated: points at the position of another point of the same survey.
        num_outside: points on ground that the other survey does not cover.
        passes: the flight passes over the block, and the area of its ground, by its name.
    """

    pairs: list[Pair]
    num_repeated: int = 0
    num_outside: int = 0
    passes: tuple[str, list[FlightPass], float] | None = None


@dataclass(frozen=True)
class TileBlock:
    """The tiles of a block of which pairs are made.

    Attributes:
        folders: those of the sorted files of each side.
        stem: the names of tiles are STEM_X_Y.
        xy: index of the block.
        names: the tiles of the block of which pairs are made.
        held_out: validation tiles; their points, and those in the strip around them, are left out.
            None for validation pairs.
        tile: side length of a tile.
        margin: width of the ground around a tile that its pair shows beside the tile, its core.
        neighbors: blocks that this ground may be in.
    """

    folders: Sequence[Sequence[Path]]
    stem: str
    xy: tuple[int, int]
    names: frozenset[str]
    held_out: HeldOutTiles | None
    tile: float
    margin: float = 0.0
    neighbors: Sequence[tuple[int, int]] = ()

    def read(self, side: int, num_columns: int = 3) -> np.ndarray:
        """The points (N, num_columns) of a side: those of the block, then those near its tiles."""
        points = [read_block(self.folders[side], self.xy, num_columns)]
        for xy in self.neighbors:
            around = read_block(self.folders[side], xy, num_columns)
            near = [is_within(around, self.box(name), self.margin) for name in self.names]
            points.append(around[np.any(near, axis=0)])
        return np.concatenate(points)

    def box(self, name: str) -> np.ndarray:
        """Lower and upper corner (2, 2) of a tile."""
        x, y = map(int, name.rsplit("_", 2)[1:])
        return np.array([[x, y], [x + 1, y + 1]]) * self.tile

    def usable(self, points: np.ndarray) -> np.ndarray:
        """The points (N, 3 or more) that are not held out."""
        return points if self.held_out is None else self.held_out.without_strip(points)

    def tiles_of(self, points: np.ndarray, margin: float = 0.0) -> dict[str, np.ndarray]:
        """The points (N, 3 or more) of each tile of which pairs are made, and those within `margin`
        around, by the name of the tile, ascending in x, then y."""
        tiles = split_tiles(points[:, :2], self.tile)
        names = (f"{self.stem}_{x}_{y}" for x, y in tiles.xy.tolist())
        rows = [(name, row) for row, name in enumerate(names) if name in self.names]
        if margin:
            return {name: points[is_within(points, self.box(name), margin)] for name, _ in rows}
        return {name: points[tiles.points(row)] for name, row in rows}

    def count(self, points: np.ndarray) -> int:
        """The number of points in these tiles."""
        return sum(map(len, self.tiles_of(points).values()))

    def pairs(
        self, name: str, source: np.ndarray, target: np.ndarray, min_points: int
    ) -> Iterator[Pair]:
        """The pair of a tile; none with fewer than `min_points` of its points on a side."""
        core = self.box(name) if self.margin else None
        num_inside = (
            len(points) if core is None else int(is_within(points, core).sum())
            for points in (source, target)
        )
        if min(num_inside) >= max(min_points, 1):
            yield Pair.centred(name, source[:, :3], target[:, :3], core=core)


def two_survey_pairs(block: TileBlock, *, min_points: int) -> BlockPairs:
    """Make pairs of two surveys: one for each tile of a block.

    Removed first are points at the position of another one, points on ground that only one survey
    covers, and held-out points. A tile is left out if fewer than `min_points` remain on a side.
    """
    sides = [block.read(side) for side in range(len(block.folders))]
    clouds = [points[first_occurrences(points)] for points in sides]
    common = on_common_ground(clouds, block.tile)
    kept = [points[mask] for points, mask in zip(clouds, common, strict=True)]
    num_read, num_once, num_common = (sum(map(block.count, each)) for each in (sides, clouds, kept))
    sources, targets = (block.tiles_of(block.usable(points), block.margin) for points in kept)
    pairs = [
        pair
        for name in sources
        if name in targets
        for pair in block.pairs(name, sources[name], targets[name], min_points)
    ]
    return BlockPairs(pairs, num_read - num_once, num_once - num_common)


# A cloud of fewer points has no surface.
_FEWEST = 4


def whole_pair(name: str, source: Path, target: Path) -> tuple[Pair, int]:
    """The pair of two whole clouds without noise and repeated points, and the number of the latter.

    Raises the errors of `read_points`, and FileError for a cloud of fewer than 4 points.
    """
    clouds, num_repeated = [], 0
    for path in (source, target):
        cloud = read_points(path)
        left_out = is_noise(cloud) | is_synthetic(cloud)
        if left_out.any():
            warn_once(
                f"{path}: {left_out.sum():,} of {len(cloud):,} points are left out: noise, "
                "withheld or synthetic, such as new points of an upsampling"
            )
        points = cloud.positions[~left_out]
        clouds.append(points[first_occurrences(points)])
        num_repeated += len(points) - len(clouds[-1])
        if len(clouds[-1]) < _FEWEST:
            raise FileError(f"{path}: has {len(clouds[-1])} points; at least {_FEWEST} are needed")
    return Pair.centred(name, *clouds, vertical=False), num_repeated


def thinned_pairs(
    block: TileBlock, *, ratio: float, pattern: str, disjoint: bool, seed: int, min_points: int
) -> BlockPairs:
    """Make pairs by thinning: one for each tile of a block.

    The source is a subset by `pattern` (see `thin`; "mixed" draws a pattern for each
    tile). The target is `ratio` times as large as the source: the other
    points if `disjoint`, otherwise all points. The subset depends only on the tile's points, its
    name and the seed. Removed first are points at the position of another one, and held-out points.
    A tile is left out if too few points remain for `min_points` on each side.
    """
    read = block.read(0)
    points = read[first_occurrences(read)]
    fewest = fewest_dense_points(min_points, ratio, disjoint)
    pairs: list[Pair] = []
    for name, dense in block.tiles_of(block.usable(points), block.margin).items():
        if len(dense) < fewest:
            continue
        rng = np.random.default_rng([seed, crc32(name.encode())])
        kind = str(rng.choice(PATTERNS)) if pattern == "mixed" else pattern
        kept = thin(dense, thinning_ratio(ratio, disjoint), kind, rng)
        target = np.delete(dense, kept, axis=0) if disjoint else dense
        pairs += block.pairs(name, dense[kept], target, min_points)
    return BlockPairs(pairs, block.count(read) - block.count(points))


def thinning_ratio(ratio: float, disjoint: bool) -> float:
    """The thinning ratio for a target of `ratio` times the source: the other points, or all."""
    return ratio + 1 if disjoint else ratio


def fewest_dense_points(min_points: int, ratio: float, disjoint: bool) -> int:
    """The smallest number of points of a tile that gives both sides at least `min_points`."""
    return math.ceil(max(min_points, 1) * thinning_ratio(ratio, disjoint))


LEAST_COVERED = 0.5
"""A pass covers a tile if this share of the points of the other passes is on ground it covers."""
LEAST_RATIO = 2.0
"""The source of a pair of passes has at most one point for so many of its target."""
MOST_RETURNS = 15
"""A LAS record counts no more returns of a pulse: more points of one time are not of one pulse."""


def pass_pairs(
    block: TileBlock,
    *,
    source_density: tuple[float, float] | None,
    target_density: float | None,
    pairs_per_tile: int,
    seed: int,
    min_points: int,
) -> BlockPairs:
    """Make pairs of flight passes for each tile of a block, named after the tile and the source.

    The source of a pair is a pass that covers the tile, drawn at random, and the target all other
    passes, on ground that both cover. Both are thinned to at most a density, in points for each
    square unit, and the source to at most half of the target's points. The density of the source is
    drawn between the two of `source_density`, uniformly in its logarithm. Thinning drops whole
    pulses. The files are sorted with the columns of `time_and_id`.

    Left out are points at the position of another one, and held-out points. A tile has fewer than
    `pairs_per_tile` pairs where fewer passes cover it, and where a side has fewer than
    `min_points`.
    """
    read = block.read(0, num_columns=5)
    positions, time, ids = read[:, :3], read[:, 3], read[:, 4].astype(np.int64)
    found = find_passes(time, ids, positions)
    points = np.column_stack([positions, found.label, _pulses(time, ids)])[found.label >= 0]

    def pairs_of(name: str, here: np.ndarray) -> Iterator[Pair]:
        rng = np.random.default_rng([seed, crc32(name.encode())])
        for number in rng.permutation(np.unique(here[:, 3])):
            source, target = here[here[:, 3] == number], here[here[:, 3] != number]
            on_source, on_target = on_common_ground([source[:, :3], target[:, :3]], block.tile)
            if not len(target) or on_target.mean() < LEAST_COVERED:
                continue
            source, target = source[on_source], target[on_target]
            area = covered_area(target[:, :2], block.tile)
            if target_density is not None:
                target = target[_whole_pulses(target[:, 4], target_density * area, rng)]
            most = len(target) / LEAST_RATIO
            if source_density is not None:
                most = min(most, np.exp(rng.uniform(*np.log(source_density))) * area)
            source = source[_whole_pulses(source[:, 4], most, rng)]
            for pair in block.pairs(name, source, target, min_points):
                # After the tile's indices, because what is before them names the survey.
                yield replace(pair, name=f"{name}-pass{int(number) + 1}")

    pairs: list[Pair] = []
    for name, here in block.tiles_of(block.usable(points), block.margin).items():
        pairs += islice(pairs_of(name, here), pairs_per_tile)
    name = f"{block.stem}_{block.xy[0]}_{block.xy[1]}"
    if block.margin:
        # What is told of a survey counts the ground of each block once.
        own = read_block(block.folders[0], block.xy, num_columns=5)
        found = find_passes(own[:, 3], own[:, 4].astype(np.int64), own[:, :3])
    return BlockPairs(pairs, passes=(name, found.passes, found.area))


def _pulses(time: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The number of the pulse (N,) int64 of each point: returns of one have one time and id.

    Where times are rounded, so that no pulse has so many returns, each point counts as a pulse.
    """
    order = np.lexsort((ids, time))
    is_first = (np.diff(time[order], prepend=np.nan) != 0) | (np.diff(ids[order], prepend=-1) != 0)
    pulse = np.empty(len(time), dtype=np.int64)
    pulse[order] = np.cumsum(is_first)
    alone = np.bincount(pulse, minlength=1)[pulse] > MOST_RETURNS
    pulse[alone] = len(time) + 1 + np.arange(int(alone.sum()))
    return pulse


def _whole_pulses(pulse: np.ndarray, most: float, rng: np.random.Generator) -> np.ndarray:
    """Mask (N,) of at most `most` points: all points of pulses (N,) that are drawn at random."""
    if len(pulse) <= most:
        return np.ones(len(pulse), dtype=bool)
    _, of_point, sizes = np.unique(pulse, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    kept = np.zeros(len(sizes), dtype=bool)
    kept[order[np.cumsum(sizes[order]) <= most]] = True
    return kept[of_point.reshape(-1)]


MakePairs = Callable[..., BlockPairs]
"""`two_survey_pairs`, `thinned_pairs` or `pass_pairs` with its options; makes the pairs of a
block of tiles."""
BlockCalls = Sequence[partial[BlockPairs]]
Results = Callable[[BlockCalls, int, str], Iterable[BlockPairs]]
"""Yields the results of calls in their order, from the calls, their number and a title."""


@dataclass(frozen=True)
class PlaceTiles:
    """The tiles of a place of which pairs are made.

    Attributes:
        place: ground in one coordinate system.
        xy: (T, 2) int64, its tiles with enough points on each side.
        num_filled: number of its tiles with any points on each side.
        is_held_out: (T,) bool, which tiles are for validation.
        around: validation tiles whose strip may reach into the others.
        region_size: side length in blocks of the regions that are made apart; 0 for a whole survey.
    """

    place: Place
    xy: np.ndarray
    num_filled: int
    is_held_out: np.ndarray
    around: HeldOutTiles
    region_size: int = 0


CONTEXT = 0.5
"""Width of the ground around the tile of a validation pair, as a share of the strip. Its corners
are no farther from the tile than the strip, so that no training point is on it."""


def _in_this_process(calls: BlockCalls, number: int, title: str) -> Iterator[BlockPairs]:
    return (call() for call in calls)


def make_part(
    folder: Path,
    number: int | None,
    ground: Sequence[PlaceTiles],
    block: int,
    make: MakePairs,
    facts: dict[str, Any],
    results: Results = _in_this_process,
) -> None:
    """Write the pairs of the ground as a part of a dataset, see `write_part`.

    The pairs are made by calls for each block of `block` x `block` tiles. `facts` get the numbers
    of tiles and points.
    """
    facts |= {
        "num_tiles": sum(len(tiles.xy) for tiles in ground),
        "num_filled": sum(tiles.num_filled for tiles in ground),
        "points_in_tiles": sum(int(each.place.num_points(each.xy).sum()) for each in ground),
        "points_in_pairs": 0,
        "num_repeated": 0,
        "num_outside": 0,
        "noise": {
            file.folder.name: file.num_noise
            for tiles in ground
            for file in chain.from_iterable(tiles.place.sides)
        },
    }

    def pairs(is_validation: bool, title: str) -> Iterator[Pair]:
        calls = [call for each in ground for call in _calls(each, is_validation, block, make)]
        for found in results(calls, len(calls), title):
            facts["num_repeated"] += found.num_repeated
            facts["num_outside"] += found.num_outside
            if found.passes is not None:
                # Once for a block with training and validation tiles.
                name, passes, area = found.passes
                facts.setdefault("passes", {})[name] = [area, *map(asdict, passes)]
            for pair in found.pairs:
                facts["points_in_pairs"] += pair.num_points
                yield pair

    splits = {
        "train": pairs(False, "training blocks"),
        "validation": pairs(True, "validation blocks"),
    }
    write_part(folder, number, splits, facts)


def _calls(
    tiles: PlaceTiles, is_validation: bool, block: int, make: MakePairs
) -> Iterator[partial[BlockPairs]]:
    """A call for each block with tiles of a split, ascending."""
    stem, folders, tile = tiles.place.stem, tiles.place.folders, tiles.around.tile
    names: dict[tuple[int, int], list[str]] = {}
    for x, y in tiles.xy[tiles.is_held_out == is_validation].tolist():
        names.setdefault((x // block, y // block), []).append(f"{stem}_{x}_{y}")
    for block_xy in sorted(names):
        of_block = frozenset(names[block_xy])
        if not is_validation:
            near = tiles.around.near_block(block_xy, block)
            yield partial(make, TileBlock(folders, stem, block_xy, of_block, near, tile))
            continue
        margin = min(CONTEXT * tiles.around.strip, block * tile)
        neighbors = _around(block_xy, tiles.region_size) if margin else ()
        context = margin, neighbors
        yield partial(make, TileBlock(folders, stem, block_xy, of_block, None, tile, *context))


def _around(block_xy: tuple[int, int], region_size: int) -> list[tuple[int, int]]:
    """The blocks around a block. Those of other regions are not at hand in every call."""
    steps = product((-1, 0, 1), repeat=2)
    blocks = [(block_xy[0] + x, block_xy[1] + y) for x, y in steps if (x, y) != (0, 0)]
    if not region_size:
        return blocks
    region = [index // region_size for index in block_xy]
    return [xy for xy in blocks if [index // region_size for index in xy] == region]


# What worker processes do for a survey of several regions: sort files into blocks, make the part of
# a region.
#
# A file is sorted once, into a folder that appears when it is complete, or into a text file with
# the reason why it can't be used. A region waits for the folders of its files, which are sorted by
# calls that began before it.

SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class RegionTiling:
    """How regions are cut into blocks and tiles, and which of these are for validation.

    Attributes:
        tile: side length of a tile.
        block: side length of a block in tiles.
        size: side length of a region in blocks.
        strip: width of the strip around validation tiles.
        threshold, seed: for `is_held_out`, which says which blocks are for validation.
        fewest_points: a tile with fewer points on a side is left out.
        include_noise: whether noise and withheld points are kept.
        with_passes: whether points are stored with the columns of `time_and_id`.
    """

    tile: float
    block: int
    size: int
    strip: float
    threshold: float
    seed: int
    fewest_points: int
    include_noise: bool = False
    with_passes: bool = False


def sort_into(
    folder: Path, path: Path, extent: FileExtent, tiling: RegionTiling, wanted: frozenset[Any]
) -> None:
    """Sort the points of a file that lie in the regions `wanted` into blocks, in `folder`.

    If the file can't be used, `folder` becomes a text file with the reason.
    """
    if folder.exists():
        return
    regions = tiling.size, wanted
    columns = time_and_id if tiling.with_passes else None
    try:
        with written_whole(folder) as staging:
            found = sort_file(
                path, staging, tiling.tile, tiling.block, regions, tiling.include_noise, columns
            )
            low, high = found.low, found.high
            if np.isfinite(low).all() and not extent.holds(np.array([low, high])):
                raise FileError(
                    f"{path}: points lie outside of the extent in its header, x from "
                    f"{extent.low[0]:.10g} to {extent.high[0]:.10g}, y from {extent.low[1]:.10g} "
                    f"to {extent.high[1]:.10g}; repair the header"
                )
            with scratch_errors(folder):
                np.savez(
                    staging / "tiles.npz",
                    xy=found.tile_xy,
                    num=found.num_points,
                    low=low,
                    high=high,
                    noise=np.array(found.num_noise),
                )
    except PointupError as error:
        with scratch_errors(folder), written_whole(folder) as part:
            part.write_text(str(error), encoding="utf-8")


def make_region(
    folder: Path,
    region: SurveyRegion,
    sorted_files: tuple[tuple[Path, ...], ...],
    tiling: RegionTiling,
    stem: str,
    make: MakePairs,
    held_out: np.ndarray,
) -> None:
    """Write the pairs of a region as a part of the dataset, in `folder`.

    `held_out` (B, 2) int64 are the validation blocks whose strip may reach into the region.
    `sorted_files` are the results of `sort_into` for each side; waits until they are there.
    """
    left_out: list[str] = []
    place = Place(stem, tuple(list(_usable(side, left_out)) for side in sorted_files))
    xy, filled = (
        _inside(place.tiles_with(fewest), region, tiling) for fewest in (tiling.fewest_points, 1)
    )
    held = is_held_out(xy // tiling.block, tiling.threshold, tiling.seed)
    steps = np.indices((tiling.block, tiling.block)).reshape(2, -1).T
    held_out_tiles = (tiling.block * held_out[:, None] + steps).reshape(-1, 2)
    around = HeldOutTiles(tiling.tile, held_out_tiles, tiling.strip)
    tiles = PlaceTiles(place, xy, len(filled), held, around, tiling.size)
    facts = {"region": list(region.xy), "left_out": left_out}
    make_part(folder, region.number, [tiles], tiling.block, make, facts)


def _usable(folders: tuple[Path, ...], left_out: list[str]) -> Iterator[SortedFile]:
    for folder in folders:
        while not folder.exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if folder.is_file():
            left_out.append(folder.read_text())
            continue
        with np.load(folder / "tiles.npz") as found:
            xy, num, low, high = (found[name] for name in ("xy", "num", "low", "high"))
            yield SortedFile(folder, xy, num, low, high, int(found["noise"]))


def _inside(tile_xy: np.ndarray, region: SurveyRegion, tiling: RegionTiling) -> np.ndarray:
    regions = tile_xy // (tiling.block * tiling.size)
    return tile_xy[(regions == np.array(region.xy)).all(axis=1)]


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


PATTERNS = ("random", "poisson", "scanline")

# Spacing of the scan lines, in units of the point spacing along a line.
LINE_SPACING = (2.0, 4.0)
# Standard deviation of a return's distance from its sampling grid point, in the same units.
JITTER = 0.2
GOLDEN_RATIO = (1 + np.sqrt(5)) / 2


def thin(positions: np.ndarray, ratio: float, pattern: str, rng: np.random.Generator) -> np.ndarray:
    """Thin a cloud (N, 3): returns ascending indices of round(N / ratio) points, for a ratio >= 1.

    Patterns: "random" draws points uniformly; "poisson" draws evenly spaced points; "scanline"
    keeps points on parallel lines in the xy plane with a random heading, as a scanner records
    ground, walls and shapes. The lines are two to four times as far apart as the points along them.
    """
    num_kept = round(len(positions) / ratio)
    if pattern == "random":
        return np.sort(rng.choice(len(positions), num_kept, replace=False))
    if pattern == "poisson":
        # Imported here, because it needs torch and the other patterns don't.
        from pointup.geometry.thinning import poisson_disk_subset

        return poisson_disk_subset(positions, num_kept, rng)
    return _scan_lines(positions, num_kept, rng)


def _scan_lines(positions: np.ndarray, num_kept: int, rng: np.random.Generator) -> np.ndarray:
    if num_kept == 0:
        return np.empty(0, dtype=np.int64)
    heading, anisotropy = rng.uniform(0, np.pi), rng.uniform(*LINE_SPACING)
    centred = positions - positions.mean(axis=0)
    across = centred[:, 0] * np.cos(heading) + centred[:, 1] * np.sin(heading)
    along = centred[:, 1] * np.cos(heading) - centred[:, 0] * np.sin(heading)
    jitter = rng.normal(0, JITTER, (2, len(positions)))
    phase = rng.random(2)
    # The scan pattern is drawn. Its spacing is searched so that there are enough returns.
    area = float(np.prod(np.maximum(np.ptp(centred[:, :2], axis=0), 1e-9)))
    spacing = np.sqrt(area / (num_kept * anisotropy))
    best = np.arange(len(positions))
    for _ in range(12):
        line, off_line = _nearest_cell(across / (spacing * anisotropy) + phase[0])
        # Each line has another phase.
        place, off_place = _nearest_cell(along / spacing + phase[1] + line * GOLDEN_RATIO)
        # Hashed, because the linear index of an outlier's cell would overflow. If two cells
        # collide, one return is lost.
        beam = hashed([line.astype(np.int64), place.astype(np.int64)])
        stray = (off_line * anisotropy + jitter[0]) ** 2 + (off_place + jitter[1]) ** 2
        returns = _returns(beam, centred[:, 2] / spacing, stray)
        if num_kept <= len(returns) < len(best):
            best = returns
        if num_kept <= len(returns) <= 1.02 * num_kept:
            break
        spacing *= np.sqrt(len(returns) / (1.01 * num_kept))
    return np.sort(rng.choice(best, num_kept, replace=False))


def _nearest_cell(coordinate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cell = np.rint(coordinate)
    return cell, coordinate - cell


def _returns(beam: np.ndarray, height: np.ndarray, stray: np.ndarray) -> np.ndarray:
    """Indices of the returns: for each beam and unit of height the point of the least `stray`."""
    _, beam_of = np.unique(beam, return_inverse=True)
    lowest = np.full(beam_of.max() + 1, np.inf)
    np.minimum.at(lowest, beam_of, height)
    cell = hashed([beam_of, np.floor(height - lowest[beam_of]).astype(np.int64)])
    order = np.lexsort((stray, cell))
    return order[np.flatnonzero(np.diff(cell[order], prepend=~cell[order[:1]]))]
