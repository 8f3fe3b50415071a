"""The spatial index of a large survey: which files each of its regions needs, from their headers.

A region is a square of whole blocks of tiles, with about `POINTS_PER_REGION` points. Regions are
numbered along a Morton curve, so that consecutive ones lie together and share files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.errors import DataError
from pointup.geometry.morton import morton_codes
from pointup.io.extents import FileExtent

POINTS_PER_REGION = 5_000_000
LARGE_BYTES = 200_000_000
"""Surveys of files that take more bytes together are cut into regions."""
MAX_REGIONS_OF_FILE = 1_000_000
MAX_CELL = 2**21


@dataclass(frozen=True)
class Region:
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


@dataclass(frozen=True)
class SurveyIndex:
    """The regions of a survey with one or two sides.

    Attributes:
        size: side length of a region in blocks.
        regions: the regions that files of every side may have points in.
    """

    size: int
    regions: tuple[Region, ...]


def is_large(paths: Sequence[Path]) -> bool:
    """Whether the files are more than a dataset is made from at once."""
    return sum(path.stat().st_size for path in paths) > LARGE_BYTES


def index_survey(sides: Sequence[Sequence[FileExtent | None]], block_width: float) -> SurveyIndex:
    """The regions of a survey from the extents of its files; None for a file that can't be used.

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
        return SurveyIndex(size, ())
    cells = np.array(sorted(common), dtype=np.int64)
    low = cells.min(axis=0)
    if (cells.max(axis=0) - low >= MAX_CELL).any():
        raise DataError(f"files too far apart for tiles in blocks of {block_width:g}")
    order = np.argsort(morton_codes(cells - low), kind="stable")
    regions = tuple(
        Region(number, (x, y), tuple(tuple(of_side[x, y]) for of_side in files), points[x, y])
        for number, (x, y) in enumerate(map(tuple, cells[order].tolist()))
    )
    return SurveyIndex(size, regions)


def shard_of(regions: Sequence[Region], shard: tuple[int, int]) -> Sequence[Region]:
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
    return [
        (x, y)
        for x in range(int(first[0]), int(last[0]) + 1)
        for y in range(int(first[1]), int(last[1]) + 1)
    ]
