from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sheets import StoreMaker, in_chunks, sheet

from pointup.io.cloud import PointCloud
from pointup.upsampling.single_pass.upsampling_pass import cut_into_tiles
from pointup.upsampling.store import point_store
from pointup.upsampling.store.bisection import BisectionOrder, split_boxes
from pointup.upsampling.store.point_store import build_survey_store

UTM = np.array([500_000.0, 4_100_000.0, 0.0])


def test_boxes_are_the_largest_that_fit() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((500, 3)) * (7.0, 3.0, 0.5)
    keys = BisectionOrder(np.array([7.0, 3.0, 0.5])).keys(points)
    order = np.argsort(keys)

    def halves(index: np.ndarray, low: np.ndarray, side: np.ndarray) -> list[set[int]]:
        if len(index) <= 20:
            return [set(index.tolist())] if len(index) else []
        axis = int(np.argmax(side))
        half = side.copy()
        half[axis] /= 2
        upper = points[index, axis] >= low[axis] + half[axis]
        up = low.copy()
        up[axis] += half[axis]
        return halves(index[~upper], low, half) + halves(index[upper], up, half)

    expected = halves(np.arange(500), np.zeros(3), np.array([8.0, 4.0, 1.0]))
    starts = split_boxes(keys[order], lambda starts, stops: stops - starts <= 20)
    assert [set(part.tolist()) for part in np.split(order, starts[1:])] == expected


def test_a_store_has_every_point_once_with_its_attributes(make_store: StoreMaker) -> None:
    points = sheet(1300) + UTM
    store = make_store(points)
    rows = store.read(0, len(store))
    index = rows["index"]
    assert sorted(index.tolist()) == list(range(1300))
    assert np.array_equal(rows["attributes"]["number"], index)
    assert np.allclose(rows["position"] + store.frame.origin, points[index], atol=1e-4)
    sizes = np.diff(store.block_ptr)
    assert sizes.sum() == 1300 and sizes.max() <= 200
    for block in range(store.num_blocks):
        inside = store.read_block(block)["position"]
        assert np.array_equal(inside.min(0), store.low[block])
        assert np.array_equal(inside.max(0), store.high[block])


def test_a_store_does_not_depend_on_chunks_and_parts(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = sheet(1300)
    points[200:500] = points[7]
    whole = make_store(points, chunk_size=1300)
    monkeypatch.setattr("pointup.upsampling.store.point_store.CHUNK_SIZE", 230)
    cut = make_store(points, chunk_size=100)
    assert np.array_equal(whole.read(0, 1300), cut.read(0, 1300))
    assert np.array_equal(whole.block_ptr, cut.block_ptr)


def test_one_point_far_away_does_not_make_a_part_of_most_of_the_cloud(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = np.concatenate([sheet(1300) + UTM, np.zeros((1, 3))])
    whole = make_store(points, chunk_size=2000)
    sizes, real = [], point_store._sort_parts

    def sort_parts(*given: Any) -> Any:
        sizes.extend(np.diff(given[3]))
        return real(*given)

    monkeypatch.setattr(point_store, "_HISTOGRAM_BITS", 6)
    monkeypatch.setattr(point_store, "CHUNK_SIZE", 230)
    monkeypatch.setattr(point_store, "_sort_parts", sort_parts)
    cut = make_store(points, chunk_size=300)
    assert sum(sizes) == 1301 and max(sizes) <= 230
    assert np.array_equal(whole.read(0, 1301), cut.read(0, 1301))
    assert np.array_equal(whole.block_ptr, cut.block_ptr)


def test_a_place_of_a_survey_has_one_row(tmp_path: Path) -> None:
    points = sheet(500)
    again = np.concatenate([points, points[:120], points[:30]])
    for name, given, num_coincident in (("once", points, 0), ("again", again, 150)):
        (tmp_path / name).mkdir()
        chunks = in_chunks(PointCloud(given), 100)
        store = build_survey_store([chunks], tmp_path / name, block_size=64)
        assert store.num_coincident == num_coincident
        assert sorted(store.read(0, len(store))["index"]) == list(range(500))


def test_the_same_cloud_elsewhere_gives_the_same_store(make_store: StoreMaker) -> None:
    points = np.round(sheet(1000), 2)
    here, there = make_store(points), make_store(points + UTM)
    assert np.array_equal(here.read(0, 1000), there.read(0, 1000))


def test_tiles_hold_all_batches_and_are_within_their_limit_but_no_smaller(
    make_store: StoreMaker,
) -> None:
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


def test_points_that_only_the_grid_joins_are_places_of_their_own_in_a_buffer_as_well(
    tmp_path: Path,
) -> None:
    points = np.round(sheet(500), 2)
    # Pairs of points much closer to each other than the steps of the grid.
    points[:40] = points[40:80] + 1e-9
    rng = np.random.default_rng(1)
    files = [points, points[rng.permutation(300)]]
    chunks = [in_chunks(PointCloud(given), 100) for given in files]
    store = build_survey_store(chunks, tmp_path, block_size=64)
    rows = store.read(0, len(store))
    assert len(np.unique(rows["position"], axis=0)) == 460
    assert len(store) == 500 and store.num_coincident == 300
    first, second = (store.places_in_file(np.arange(500), file) for file in (0, 1))
    assert sorted(first) == list(range(500))
    assert sorted(second) == [-1] * 200 + list(range(300))
    is_in_both = second >= 0
    assert np.array_equal(files[0][first[is_in_both]], files[1][second[is_in_both]])
