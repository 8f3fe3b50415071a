"""Which blocks of a large survey are for validation, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pointup.datasets.regions import Region, SurveyIndex
from pointup.io.extents import FileExtent

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

    def held_out_around(self, region: Region, strip: float) -> np.ndarray:
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
    index: SurveyIndex,
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
    split = RegionSplit(block_width, index.size, extents, math.inf, fraction, seed)
    if not fraction or len(index.regions) * index.size**2 > MOST_COUNTED:
        return split
    blocks = np.concatenate(
        [np.empty((0, 2), np.int64), *(_blocks_of(region, index.size) for region in index.regions)]
    )
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
    return RegionSplit(block_width, index.size, extents, number, threshold, seed)


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


def _blocks_of(region: Region, size: int, reach: int = 0) -> np.ndarray:
    """The blocks (B, 2) int64 in a region of `size` x `size` blocks, and `reach` blocks around."""
    x, y = (
        np.arange(first * size - reach, (first + 1) * size + reach, dtype=np.int64)
        for first in region.xy
    )
    return np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)


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
