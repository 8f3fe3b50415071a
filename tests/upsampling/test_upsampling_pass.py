"""A pass: its tiles, the blocks that run at the same time, and the points around a block."""

from __future__ import annotations

import numpy as np
import pytest
from sheets import CPU, sheet, small_model, upsample_in_blocks

from pointup.model.config import RANGES
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass import upsampling_pass
from pointup.upsampling.single_pass.relaxation import relax
from pointup.upsampling.single_pass.upsampling_pass import (
    MOST_AROUND,
    Surroundings,
    UpsamplingPass,
    color_boxes,
    cut_into_tiles,
    touching,
)

RNG = np.random.default_rng(0)
LOW, HIGH = np.full(3, 0.2), np.full(3, 0.9)


def test_tiles_hold_all_batches_and_are_within_their_limit_but_no_smaller(make_store):
    store = make_store(sheet(1300) * (1.0, 0.4, 1.0), block_size=50)
    batches = np.arange(0, store.num_blocks, 2)
    extent = (store.high.max(0) - store.low.min(0))[:2]
    for num_points, side in ((1300, None), (1299, None), (300, None), (0, extent.max()), (0, 10.0)):
        tiles = cut_into_tiles(store, batches, num_points, side)
        assert np.array_equal(np.concatenate([tile.batches for tile in tiles]), batches)
        assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
        assert tiles[-1].stop == store.num_blocks
        assert any(len(tile.batches) > 1 for tile in tiles)
        for tile in tiles:
            low, high = (edge[tile.start : tile.stop, :2] for edge in (store.low, store.high))
            count = store.block_ptr[tile.stop] - store.block_ptr[tile.start]
            is_small = (high.max(0) - low.min(0) <= side).all() if side else count <= num_points
            assert is_small or len(tile.batches) == 1
        assert (len(tiles) == 1) == (num_points == 1300 or side == extent.max())


def test_boxes_that_touch_have_different_colors():
    rng = np.random.default_rng(0)
    low = rng.random((60, 3))
    high = low + 0.2 * rng.random((60, 3))
    colors = color_boxes(low, high)
    for box in range(60):
        neighbors = touching(low, high, box)
        assert box not in neighbors
        assert (colors[neighbors] != colors[box]).all()


@pytest.mark.parametrize("originals", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_are_relaxed_like_the_whole_cloud(make_store, originals, monkeypatch):
    monkeypatch.setitem(RANGES, "reach", (0.01, 100.0))
    store = make_store(sheet(2000, side=16.0), block_size=300)
    options = UpsampleOptions(originals=originals)
    upsampling = UpsamplingPass(store, small_model(0.05, reach=100.0), options, CPU, 300, ratio=4.0)
    for tile in upsampling.tiles(300):
        upsampling.make_candidates(tile)
    for groups in upsampling.colors():
        for blocks in groups:
            upsampling.thin(blocks)
    picked = [
        upsampling._files.load(block, "picked")["position"] for block in range(len(upsampling))
    ]
    for block in range(len(upsampling)):
        upsampling.relax_block(block)
    clouds = [upsampling.output.cloud(block) for block in range(len(upsampling))]
    made = np.concatenate([cloud.positions for cloud in clouds]) - store.frame.origin
    fixed = np.concatenate(
        [store.read_block(block)["position"] for block in range(len(upsampling))]
    )
    fixed = fixed if originals else fixed[:0]
    whole = relax(np.concatenate(picked), fixed, *upsampling._relaxation)
    off = np.linalg.norm(made - whole, axis=1)
    assert len(picked) > 4 and np.mean(off < 1e-9) > 0.9 and off.max() < 0.02


def added(parts: list[np.ndarray], points: np.ndarray) -> np.ndarray:
    around = Surroundings(points, LOW, HIGH)
    for part in parts:
        around.add(part)
    return around.nearest()


def in_box(points: np.ndarray) -> np.ndarray:
    return points[((points >= LOW) & (points <= HIGH)).all(axis=1)]


def test_all_points_of_the_box_are_around_in_their_order():
    parts = [RNG.random((size, 3)) for size in (300, 1, 0, 500)]
    assert np.array_equal(added(parts, RNG.random((20, 3))), in_box(np.concatenate(parts)))


@pytest.mark.parametrize("num_parts", [1, 7, 60])
def test_of_many_points_the_nearest_are_around(num_parts, monkeypatch):
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 10)
    points, cloud = RNG.random((5, 3)), RNG.random((2000, 3))
    inside = in_box(cloud)
    gap = np.linalg.norm(inside[:, None] - points, axis=2).min(axis=1)
    expected = inside[np.sort(np.argsort(gap)[: MOST_AROUND * 10])]
    assert np.array_equal(added(np.array_split(cloud, num_parts), points), expected)


def test_without_points_the_number_around_is_limited_too(monkeypatch):
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 10)
    assert len(added([RNG.random((3000, 3))], np.empty((0, 3)))) == MOST_AROUND * 10


def test_wrong_measurements_above_a_survey_do_not_have_all_of_it_around_them(
    make_store, monkeypatch
):
    """Their boxes contain all of it, below and above them."""
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 50)
    numbers: list[int] = []

    def relax(free: np.ndarray, fixed: np.ndarray, *options: int) -> np.ndarray:
        numbers.append(len(fixed))
        return free[: options[-1]]

    monkeypatch.setattr(upsampling_pass, "relax", relax)
    xy = 100 * RNG.random((3000, 2))
    survey = np.column_stack([xy, np.sin(xy[:, 0] / 10)])
    wrong = np.column_stack([100 * RNG.random((20, 2)), np.repeat([80.0, -80.0], 10)])
    store = make_store(np.concatenate([survey, wrong]), block_size=300)
    upsample_in_blocks(store, small_model(), UpsampleOptions(ratio=2.0, above_ground=True))
    assert max(numbers) < 1500
