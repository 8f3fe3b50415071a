"""The spatial index of a large survey: which files each of its regions needs, from their headers.

A region is a square of whole blocks of tiles, with about `POINTS_PER_REGION` points. Regions are
numbered along a Morton curve, so that consecutive ones lie together and share files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from pointup.errors import DataError
from pointup.geometry.grids import morton_codes
from pointup.io.extents import FileExtent

POINTS_PER_REGION = 5_000_000
LARGE_BYTES = 200_000_000
"""Surveys of files that take more bytes together are cut into regions."""
MAX_REGIONS_OF_FILE = 1_000_000
MAX_CELL = 2**21


@dataclass(frozen=True)
class SurveyRegion:
    """A square of blocks: blocks x from xy[0] * size to (xy[0] + 1) * size, exclusive.

    Attributes:
        number: position in the order of all regions.
        xy: index of the region.
        files: indices of the files that may have points in it, for each side.
        num_points: their points in it, if each file's points are spread uniformly.
    """

    number: int
    xy: tuple[int, int]
    files: tuple[tuple[int, ...], ...]
    num_points: float


def is_large(paths: Sequence[Path]) -> bool:
    """Whether the files are more than a dataset is made from at once."""
    return sum(path.stat().st_size for path in paths) > LARGE_BYTES


def index_survey(
    sides: Sequence[Sequence[FileExtent | None]], block_width: float
) -> tuple[int, tuple[SurveyRegion, ...]]:
    """The side length of a region in blocks, and the regions that files of every side may have
    points in, from the extents of the files; None for a file that can't be used.

    `block_width` is the side length of a block of tiles. Raises DataError for an extent that is too
    large for the width.
    """
    known = [extent for side in sides for extent in side if extent is not None]
    area = sum(float((extent.high - extent.low).clip(1e-9).prod()) for extent in known)
    density = sum(extent.num_points for extent in known) / max(area, 1e-9)
    side_length = math.sqrt(POINTS_PER_REGION / max(density, 1e-9))
    size = int(max(1, side_length // block_width))
    width = size * block_width
    files: list[dict[tuple[int, int], list[int]]] = [{} for _ in sides]
    points: defaultdict[tuple[int, int], float] = defaultdict(float)
    for side, extents in enumerate(sides):
        for number, extent in enumerate(extents):
            if extent is None:
                continue
            for xy in _regions_of(extent, width):
                files[side].setdefault(xy, []).append(number)
                points[xy] += extent.num_points * _share_inside(extent, xy, width)
    common = set(files[0]).intersection(*files[1:])
    if not common:
        return size, ()
    cells = np.array(sorted(common), dtype=np.int64)
    low = cells.min(axis=0)
    if (cells.max(axis=0) - low >= MAX_CELL).any():
        raise DataError(f"files too far apart for tiles in blocks of {block_width:g}")
    order = np.argsort(morton_codes(cells - low), kind="stable")
    regions = tuple(
        SurveyRegion(number, (x, y), tuple(tuple(of_side[x, y]) for of_side in files), points[x, y])
        for number, (x, y) in enumerate(map(tuple, cells[order].tolist()))
    )
    return size, regions


def shard_of(regions: Sequence[SurveyRegion], shard: tuple[int, int]) -> Sequence[SurveyRegion]:
    """The regions of shard k of n, k from 1 to n: consecutive ones, with about as many points."""
    number, total = shard
    points = np.cumsum([region.num_points for region in regions])
    # A region is in the shard in which its middle is.
    middles = points - np.array([region.num_points for region in regions]) / 2
    of_region = np.minimum(middles / points[-1] * total, total - 1).astype(int)
    return [region for region, k in zip(regions, of_region, strict=True) if k == number - 1]


def _share_inside(extent: FileExtent, xy: tuple[int, int], width: float) -> float:
    """Share of the area of a file in a region; at least a little, for files without an area."""
    low = np.maximum(extent.low, np.array(xy) * width)
    high = np.minimum(extent.high, (np.array(xy) + 1) * width)
    sides = (extent.high - extent.low).clip(1e-9)
    return float(((high - low).clip(0) / sides).clip(1e-6, 1).prod())


def _regions_of(extent: FileExtent, width: float) -> list[tuple[int, int]]:
    # Coordinates are rounded to the scale when they are read.
    margin = np.maximum(extent.scale, 1e-9 * np.abs(extent.high).max(initial=1.0))
    first = np.floor((extent.low - margin) / width).astype(np.int64)
    last = np.floor((extent.high + margin) / width).astype(np.int64)
    if (last - first + 1).astype(float).prod() > MAX_REGIONS_OF_FILE:
        raise DataError(
            f"{extent.path}: its header gives x from {extent.low[0]:g} to {extent.high[0]:g}, "
            f"y from {extent.low[1]:g} to {extent.high[1]:g}, with few points; repair it"
        )
    x, y = (range(low, high + 1) for low, high in zip(first.tolist(), last.tolist(), strict=True))
    return list(product(x, y))


# With so many validation blocks expected, the share of chance is close to the wanted one.
MANY_HELD_OUT = 20
# More blocks are not counted: many of them are for validation anyway.
MOST_COUNTED = 100_000


@dataclass(frozen=True)
class RegionSplit:
    """The validation blocks of a survey, among blocks that lie in the extents of its files.

    Attributes:
        block_width: side length of a block.
        size: side length of a region in blocks.
        extents: (F, 2, 2) float64 for each side, the lower and upper corners of its files.
        num_blocks: number of blocks whose middle lies in extents of files of every side; infinite
            if there are too many to count.
        threshold, seed: for `is_held_out`.
    """

    block_width: float
    size: int
    extents: tuple[np.ndarray, ...]
    num_blocks: float
    threshold: float
    seed: int

    def held_out_around(self, region: SurveyRegion, strip: float) -> np.ndarray:
        """The validation blocks (B, 2) in a region and within reach of a strip around it.

        Blocks outside of the extents of the files are not among them.
        """
        blocks = _blocks_of(region, self.size, math.ceil(strip / self.block_width))
        blocks = blocks[is_held_out(blocks, self.threshold, self.seed)]
        low = blocks * self.block_width
        inside = np.ones(len(blocks), dtype=bool)
        for of_side in self.extents:
            inside &= _are_in(low, low + self.block_width, of_side)
        return blocks[inside]


def split_regions(
    sides: Sequence[Sequence[FileExtent | None]],
    size: int,
    regions: Sequence[SurveyRegion],
    block_width: float,
    fraction: float,
    seed: int,
) -> RegionSplit:
    """Choose about `fraction` of the blocks of an indexed survey for validation.

    Of many blocks, each is chosen by its own hash. Of few, those with the smallest hashes are, so
    that at least one block is, and one is for training.
    """
    extents = tuple(
        np.array([[e.low, e.high] for e in side if e is not None]).reshape(-1, 2, 2)
        for side in sides
    )
    split = RegionSplit(block_width, size, extents, math.inf, fraction, seed)
    if not fraction or len(regions) * size**2 > MOST_COUNTED:
        return split
    of_regions = [_blocks_of(region, size) for region in regions]
    blocks = np.concatenate([np.empty((0, 2), np.int64), *of_regions])
    low, high = blocks * block_width, (blocks + 1) * block_width
    in_middle, touching = (
        np.all([_are_in(*corners, of_side) for of_side in extents], axis=0)
        for corners in (((low + high) / 2,) * 2, (low, high))
    )
    # Blocks at the border of an extent may hold few points.
    counted = blocks[in_middle if in_middle.sum() > 1 else touching]
    number = len(counted)
    threshold = fraction
    if number < 2:
        threshold = 0.0
    elif number * fraction < MANY_HELD_OUT:
        held_out = min(max(round(number * fraction), 1), number - 1)
        threshold = float(np.sort(_hashes(counted, seed))[held_out])
    return replace(split, num_blocks=number, threshold=threshold)


def is_held_out(block_xy: np.ndarray, threshold: float, seed: int) -> np.ndarray:
    """Mask (B,) of the blocks (B, 2) int64 that are for validation: `threshold` of many.

    Depends on the index of a block, the threshold and the seed alone, so that no process needs the
    whole survey.
    """
    return _hashes(block_xy, seed) < threshold


def _hashes(block_xy: np.ndarray, seed: int) -> np.ndarray:
    """A number (B,) float64 from 0 to 1 for each block (B, 2) int64."""
    x, y = block_xy.astype(np.int64).view(np.uint64).T
    mixed = _mixed(x ^ _mixed(y ^ _mixed(np.full(len(x), seed % 2**64, np.uint64))))
    return (mixed >> np.uint64(11)) * 2.0**-53


def _blocks_of(region: SurveyRegion, size: int, reach: int = 0) -> np.ndarray:
    """The blocks (B, 2) int64 in a region of `size` x `size` blocks, and `reach` blocks around."""
    width = size + 2 * reach
    first = size * np.array(region.xy) - reach
    return first + np.indices((width, width)).reshape(2, -1).T


def _are_in(low: np.ndarray, high: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Mask (B,) of the rectangles `low` (B, 2) to `high` that touch one of the extents."""
    found = np.zeros(len(low), dtype=bool)
    for first, last in extents:
        found |= ((high >= first) & (low <= last)).all(axis=1)
    return found


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014): each bit of the result depends on all bits of the value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
