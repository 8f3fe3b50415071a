"""Validation blocks of large surveys, chosen from the headers of their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointup.datasets.regions import index_survey, is_held_out, split_regions
from pointup.io.extents import FileExtent

WIDTH = 40.0


def extent(low: tuple[float, float], high: tuple[float, float]) -> FileExtent:
    corners = np.array(low, float), np.array(high, float)
    return FileExtent(Path("a.las"), *corners, 10_000_000, (), (), np.zeros(2))


def block_grid(num_x: int, num_y: int) -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(num_x), np.arange(num_y)), axis=-1).reshape(-1, 2)


def held_out_blocks(extents: list[FileExtent], fraction: float, seed: int, strip: float) -> set:
    size, regions = index_survey([extents], WIDTH)
    split = split_regions([extents], size, regions, WIDTH, fraction, seed)
    found = [split.held_out_around(region, strip) for region in regions]
    return set(map(tuple, np.concatenate(found).tolist()))


@pytest.mark.parametrize("seed", range(8))
def test_of_few_blocks_the_wanted_number_is_held_out_whatever_the_seed(seed):
    for (num_x, num_y), fraction, expected in (
        ((2, 1), 0.1, 1),
        ((3, 4), 0.1, 1),
        ((5, 6), 0.2, 6),
        ((2, 1), 0.9, 1),
    ):
        # A margin of 1 cm, so that no other block is touched.
        extents = [extent((0.01, 0.01), (num_x * WIDTH - 0.01, num_y * WIDTH - 0.01))]
        found = held_out_blocks(extents, fraction, seed, strip=0)
        assert len(found) == expected
        assert found <= set(map(tuple, block_grid(num_x, num_y).tolist()))


def test_a_single_block_is_for_training():
    assert not held_out_blocks([extent((1, 1), (39, 39))], 0.5, 0, strip=0)


def test_of_many_blocks_each_is_held_out_by_its_own_hash():
    small = [extent((0.01, 0.01), (20 * WIDTH - 0.01, 20 * WIDTH - 0.01))]
    large = [extent((0.01, 0.01), (40 * WIDTH - 0.01, 40 * WIDTH - 0.01))]
    found, more = (held_out_blocks(extents, 0.1, 0, strip=0) for extents in (small, large))
    assert found == {xy for xy in more if max(xy) < 20}
    assert 20 < len(found) < 60
    grid = block_grid(20, 20)
    assert found == set(map(tuple, grid[is_held_out(grid, 0.1, 0)].tolist()))


def test_a_strip_is_only_around_blocks_that_lie_in_the_extents_of_the_files():
    # A row of blocks; the strip reaches to 3 blocks above and below of it.
    extents = [extent((0.01, 0.01), (300 * WIDTH - 0.01, WIDTH - 0.01))]
    found = held_out_blocks(extents, 0.5, 0, strip=100.0)
    assert len(found) > 100 and {y for _, y in found} == {0}
