from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from pointup import upsample
from pointup.data.clouds import PointCloud
from pointup.errors import ConfigError, DataError, FileError, ModelError
from pointup.geometry.midpoints import midpoint_upsample
from pointup.model import Upsampler
from pointup.upsampling.candidates import make_candidates
from pointup.upsampling.colors import color_boxes, touching
from pointup.upsampling.halving import Halving, split_boxes
from pointup.upsampling.job import Upsampling
from pointup.upsampling.passes import run_passes
from pointup.upsampling.region import Region
from pointup.upsampling.relaxation import relax
from pointup.upsampling.running import Alone
from pointup.upsampling.selection import first_radius, select_evenly
from pointup.upsampling.store import Store, build_store
from pointup.upsampling.wishes import MAX_LOCAL_RATIO, Wishes, pass_ratios

UTM = np.array([500_000.0, 4_100_000.0, 0.0])
CPU = torch.device("cpu")
SMALL = {"feature_dim": 8, "k": 6, "num_layers": 1, "heads": 2, "child_heads": 2}


def small_model(noise: float = 0.0) -> Upsampler:
    """A model quick enough for tests; with noise it moves the children, as a trained one does."""
    torch.manual_seed(0)
    model = Upsampler(**SMALL).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights += noise * torch.randn_like(weights)
    return model


def sheet(num_points: int, side: float = 32.0, seed: int = 0) -> np.ndarray:
    """Random points of a wavy sheet."""
    rng = np.random.default_rng(seed)
    xy = side * rng.random((num_points, 2))
    return np.column_stack([xy, np.sin(xy[:, 0] / 3) + np.cos(xy[:, 1] / 4)])


def grid(side: int) -> np.ndarray:
    axis = np.arange(side, dtype=np.float64)
    return np.stack(np.meshgrid(axis, axis, [0.0]), axis=-1).reshape(-1, 3)


def in_chunks(cloud: PointCloud, size: int) -> Iterator[PointCloud]:
    for start in range(0, len(cloud), size):
        yield cloud.select(slice(start, start + size))


StoreMaker = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> StoreMaker:
    count = iter(range(100))

    def make(positions: np.ndarray, block_size: int = 200, chunk_size: int = 500) -> Store:
        directory = tmp_path / str(next(count))
        directory.mkdir()
        cloud = PointCloud(positions, {"number": np.arange(len(positions))})
        return build_store(in_chunks(cloud, chunk_size), directory, block_size)

    return make


def upsample_in_blocks(
    store: Store, model: Upsampler, wishes: Wishes, tile: float | None = None, budget: int = 400
) -> np.ndarray:
    parts = run_passes(store, model, wishes, Alone(), CPU, token_budget=budget, tile=tile)
    return np.concatenate([np.empty((0, 3)), *(cloud.positions for cloud in parts)])


# Boxes


def test_boxes_are_the_largest_halves_that_fit() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((500, 3)) * (7.0, 3.0, 0.5)
    keys = Halving(np.array([7.0, 3.0, 0.5])).keys(points)
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
    assert np.allclose(rows["position"] + store.anchor, points[index], atol=1e-4)
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
    monkeypatch.setattr("pointup.upsampling.store.CHUNK_SIZE", 230)
    cut = make_store(points, chunk_size=100)
    assert np.array_equal(whole.read(0, 1300), cut.read(0, 1300))
    assert np.array_equal(whole.block_ptr, cut.block_ptr)


def test_the_same_cloud_elsewhere_gives_the_same_store(make_store: StoreMaker) -> None:
    points = np.round(sheet(1000), 2)
    here, there = make_store(points), make_store(points + UTM)
    assert np.array_equal(here.read(0, 1000), there.read(0, 1000))


# Neighbours

CLOUDS = {
    "random": sheet(900),
    "grid": grid(30),
    "outliers": np.concatenate([sheet(600), [[900, 0, 0], [0, 5, 400], [900, 1, 0]]]),
    "duplicates": np.concatenate([sheet(300), np.full((400, 3), 5.0), sheet(300).round()]),
    "line": np.arange(700.0)[:, None] * (1, 0, 0),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_neighbors_in_a_region_are_those_in_the_whole_cloud(
    name: str, make_store: StoreMaker
) -> None:
    store = make_store(CLOUDS[name], block_size=100)
    position = store.read(0, len(store))["position"]
    for dims, k in ((3, 1), (3, 9), (2, 9)):
        gap = position[:, None, :dims] - position[None, :, :dims]
        distance = np.sqrt(np.square(gap).sum(2))
        # By distance, then by place in the store: a region must break ties like this.
        expected = np.lexsort((np.broadcast_to(np.arange(len(position)), gap.shape[:2]), distance))
        for block in range(0, store.num_blocks, 3):
            rows = slice(store.block_ptr[block], store.block_ptr[block + 1])
            region = Region(store, block, block + 1, dims)
            found = region.neighbors(position[rows], k)
            index = expected[rows, :k]
            assert np.allclose(found[0], np.take_along_axis(distance[rows], index, axis=1))
            assert np.array_equal(region.rows["position"][found[1]], position[index])
            original = store.read(0, len(store))["index"]
            assert np.array_equal(region.rows["index"][found[1]], original[index])


def test_each_point_is_its_own_first_neighbor(make_store: StoreMaker) -> None:
    store = make_store(CLOUDS["duplicates"], block_size=100)
    for block in range(store.num_blocks):
        region = Region(store, block, block + 1)
        places = region.places(block)
        distance, found = region.neighbors_of(places, 5)
        assert np.array_equal(found[:, 0], places)
        assert all(len(set(row)) == 5 for row in found.tolist())
        assert np.allclose(distance, region.neighbors(region.rows["position"][places], 5)[0])


def test_few_points_leave_places_for_neighbors_empty(make_store: StoreMaker) -> None:
    region = Region(make_store(sheet(4), block_size=1), 0, 1)
    distance, found = region.neighbors(np.zeros((2, 3)), 6)
    assert (found[:, 4:] == -1).all() and np.isinf(distance[:, 4:]).all()
    assert (found[:, :4] >= 0).all()


# Candidates


@pytest.mark.parametrize("ratio", [2.0, 5.0])
def test_candidates_of_blocks_are_those_of_the_whole_cloud(
    ratio: float, make_store: StoreMaker
) -> None:
    model, store = small_model(noise=0.1), make_store(sheet(1000))
    rows = store.read(0, len(store))
    pos = torch.from_numpy(rows["position"].astype(np.float32))
    with torch.no_grad():
        whole = model(pos, torch.tensor([0, 1000]), ratio).candidates.numpy()
    slots = round(2 * ratio)
    for block in range(store.num_blocks):
        region = Region(store, block, block + 1)
        core = region.places(block)
        num_slots = np.full(len(core), slots)
        found = make_candidates(model, region, core, num_slots, CPU, 300, Alone().together())
        parent = region.rows["position"][core[found.parent]]
        first = int(store.block_ptr[block]) * slots
        expected = whole[first : first + len(parent)]
        assert np.allclose(parent + found.offset, expected, atol=2e-5)
        away = np.abs(expected - np.repeat(rows["position"], slots, 0)[first:][: len(parent)])
        assert away.max() > 0.5
        nearest = cKDTree(rows["position"]).query(expected)[0]
        assert (found.distance >= nearest - 1e-5).all()
        assert np.isclose(found.distance, nearest, atol=1e-5).mean() > 0.9


def test_points_may_have_different_numbers_of_children(make_store: StoreMaker) -> None:
    model, store = small_model(noise=0.1), make_store(sheet(300), block_size=400)
    region = Region(store, 0, 1)
    core = region.places(0)
    num_slots = np.tile([3, 0, 5], 100)

    def candidates(slots: np.ndarray) -> list[np.ndarray]:
        found = make_candidates(model, region, core, slots, CPU, 100, Alone().together())
        return np.split(found.offset, np.cumsum(slots)[:-1])

    mixed, most = candidates(num_slots), candidates(np.full(300, 5))
    for slots, some, all_five in zip(num_slots, mixed, most, strict=True):
        assert np.allclose(some, all_five[:slots], atol=1e-6)


def test_a_model_that_makes_nan_is_an_error() -> None:
    model = small_model()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        upsample(sheet(50), model=model)


# Thinning


def candidates_on_a_plane(seed: int = 0, num_points: int = 1200) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    points = np.column_stack([rng.random((num_points, 2)), np.zeros(num_points)])
    cell = (points[:, 0] >= 0.5) * 2 + (points[:, 1] >= 0.5)
    return points, np.full(num_points, 0.03), cell, rng.permutation(num_points)


def test_every_cell_gets_its_quota_evenly() -> None:
    points, scale, cell, priority = candidates_on_a_plane()
    quota = np.array([100, 101, 102, 103])
    distance = np.full(len(points), np.inf)
    radius = first_radius(points, scale)
    picked = select_evenly(points, scale, distance, cell, quota, priority, radius)
    assert np.array_equal(np.bincount(cell[picked]), quota)
    assert len(set(picked.tolist())) == quota.sum()
    nearest = cKDTree(points[picked]).query(points[picked], k=2)[0][:, 1]
    rng = np.random.default_rng(1)
    at_random = points[rng.choice(len(points), len(picked), replace=False)]
    assert nearest.min() > 0.02
    assert np.median(nearest) > 1.5 * np.median(cKDTree(at_random).query(at_random, k=2)[0][:, 1])


def test_what_is_kept_already_is_kept_away_from() -> None:
    points, scale, cell, priority = candidates_on_a_plane()
    kept = np.array([[0.3, 0.3, 0.0], [0.7, 0.6, 0.0]])
    distance = cKDTree(kept).query(points)[0] / scale
    distance[:50] = -1.0
    quota = np.full(4, 60)
    picked = select_evenly(points, scale, distance, cell, quota, priority, 2.0)
    assert picked.min() >= 50
    assert cKDTree(kept).query(points[picked])[0].min() > 0.03


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_thinning_depends_on_points_and_not_on_their_order(seed: int) -> None:
    points, scale, cell, priority = candidates_on_a_plane(seed, 200)
    distance, quota = np.full(200, np.inf), np.array([20, 0, 30, 70])
    picked = select_evenly(points, scale, distance, cell, quota, priority, 3.0)
    order = np.random.default_rng(seed).permutation(200)
    again = select_evenly(points[order], scale, distance, cell[order], quota, priority[order], 3.0)
    assert np.array_equal(np.sort(order[again]), picked)


def test_a_mass_of_duplicates_is_thinned_quickly_and_to_the_quota() -> None:
    points = np.concatenate([np.zeros((20_000, 3)), np.random.default_rng(0).random((50, 3))])
    num_points = len(points)
    picked = select_evenly(
        points,
        np.full(num_points, 0.1),
        np.full(num_points, np.inf),
        np.zeros(num_points, dtype=np.int64),
        np.array([1000]),
        np.arange(num_points),
        first_radius(points[::300], np.full(67, 0.1)),
    )
    assert len(picked) == 1000
    assert (picked >= 20_000).sum() == 50


def test_boxes_that_touch_have_different_colors() -> None:
    rng = np.random.default_rng(0)
    low = rng.random((60, 3))
    high = low + 0.2 * rng.random((60, 3))
    colors = color_boxes(low, high)
    for box in range(60):
        neighbors = touching(low, high, box)
        assert box not in neighbors
        assert (colors[neighbors] != colors[box]).all()


# Passes


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1, [1]), (8, [8]), (9, [4, 2.25]), (16, [4, 4]), (64, [4, 4, 4])]
)
def test_large_ratios_take_passes_of_four(ratio: float, expected: list[float]) -> None:
    assert pass_ratios(ratio) == expected
    assert Wishes(ratio=ratio).pass_ratios(1000) == expected


@settings(max_examples=6)
@given(st.integers(2, 40), st.floats(8.01, 40.0), st.booleans())
def test_passes_give_exactly_so_many_points(size: int, ratio: float, originals: bool) -> None:
    made = upsample(sheet(size), ratio, model=small_model(0.1), originals=originals)
    assert len(made) == round(ratio * size)


@pytest.mark.parametrize("seed", range(3))
def test_two_passes_are_one_after_the_other(seed: int) -> None:
    # A store rounds to a finer grid, so that both ways the second pass begins with the same points.
    points, model = np.rint(1024 * sheet(300, seed=seed)) / 1024, small_model(0.1)
    made = upsample(points, 12.0, model=model)
    once = upsample(points, 4.0, model=model)
    twice = upsample(once, 3.0, model=model)
    assert np.array_equal(made[:1200], once)
    # The first pass stands block after block, which is another order where coordinates tie.
    assert cKDTree(made[1200:]).query(twice[1200:])[0].max() < 1e-9


def test_tiles_threads_and_place_do_not_change_passes(make_store: StoreMaker) -> None:
    model, points = small_model(0.1), np.round(sheet(400), 2)
    for wishes in (Wishes(ratio=8.5), Wishes(density=4.0, originals=False)):
        made = upsample_in_blocks(make_store(points), model, wishes)
        tiled = upsample_in_blocks(make_store(points, chunk_size=60), model, wishes, 4.0)
        assert np.array_equal(tiled, made)
        there = upsample_in_blocks(make_store(points + UTM), model, wishes)
        assert np.abs(there - UTM - made).max() < 1e-8


@pytest.mark.parametrize("originals", [True, False])
def test_all_passes_tell_of_measured_points(originals: bool) -> None:
    points = sheet(200) + UTM
    number = np.arange(200)
    made = upsample(
        PointCloud(points, {"number": number}),
        16.0,
        model=small_model(0.05),
        originals=originals,
        max_distance=1.5,
    )
    new = made.select(made.attributes["synthetic"] == 1)
    assert len(new) > 2000
    distance, nearest = cKDTree(points).query(new.positions, k=2)
    assert np.allclose(new.attributes["distance_to_measured"], distance[:, 0], atol=1e-3)
    assert distance[:, 0].max() <= 1.5 + 1e-3
    is_clear = distance[:, 0] < distance[:, 1] - 1e-2
    assert np.array_equal(new.attributes["number"][is_clear], nearest[is_clear, 0])
    parent = new.attributes["parent_index"]
    assert np.isin(parent, number).all()
    assert np.median(np.linalg.norm(points[parent] - new.positions, axis=1)) < 3


def test_density_takes_a_second_pass_where_a_place_is_very_sparse() -> None:
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((3000, 3)) * (20, 20, 1), rng.random((600, 3)) * (20, 20, 1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    made = upsample(points, density=18.0, model=small_model())
    for low, high in ((2, 18), (23, 38)):
        inside = (made[:, 0] > low) & (made[:, 0] < high) & (np.abs(made[:, 1] - 10) < 8)
        assert 16.5 < inside.sum() / ((high - low) * 16) < 19.5


def test_two_passes_stay_closer_to_a_surface_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)

    def off_the_sphere() -> float:
        made = upsample(points, 16.0, model=small_model(), only_new=True)
        return float(np.abs(np.linalg.norm(made, axis=1) - 1).mean())

    in_passes = off_the_sphere()
    monkeypatch.setattr("pointup.upsampling.wishes.MAX_PASS_RATIO", 16.0)
    assert in_passes < 0.6 * off_the_sphere()


# The whole


@settings(max_examples=15)
@given(st.integers(2, 60), st.floats(1.0, 6.0), st.booleans())
def test_a_ratio_gives_exactly_so_many_points(size: int, ratio: float, originals: bool) -> None:
    made = upsample(sheet(size), ratio, model=small_model(), originals=originals)
    assert len(made) == round(ratio * size)
    assert np.isfinite(made).all()


def test_points_come_first_and_unchanged() -> None:
    points = sheet(500) + UTM
    made = upsample(points, 2.5, model=small_model(0.1))
    assert np.array_equal(made[:500], points)
    new = upsample(points, 2.5, model=small_model(0.1), only_new=True)
    assert np.array_equal(made[500:], new)
    assert cKDTree(points).query(new)[0].max() < 5


def test_ratio_one_adds_nothing() -> None:
    points = sheet(100)
    assert np.array_equal(upsample(points, 1.0, model=small_model()), points)
    assert upsample(points, 1.0, model=small_model(), only_new=True).shape == (0, 3)


def test_tiles_threads_and_parts_do_not_change_a_bit(make_store: StoreMaker) -> None:
    model, wishes = small_model(0.1), Wishes(ratio=3.3)
    points = np.round(sheet(2000), 1)
    made = upsample_in_blocks(make_store(points), model, wishes)
    num_threads = torch.get_num_threads()
    for tile, threads in ((4.0, 1), (16.0, 2), (100.0, 1), (None, 2)):
        torch.set_num_threads(threads)
        try:
            again = upsample_in_blocks(make_store(points, chunk_size=2000), model, wishes, tile)
        finally:
            assert torch.get_num_threads() == threads
            torch.set_num_threads(num_threads)
        assert np.array_equal(again, made)


def test_a_shifted_cloud_gives_the_shifted_result() -> None:
    points = np.round(sheet(1000), 2)
    made = upsample(points, model=small_model(0.1))
    there = upsample(points + UTM, model=small_model(0.1))
    assert np.abs(there - UTM - made).max() < 1e-8


def test_no_seam_can_be_told(make_store: StoreMaker) -> None:
    # Sides of blocks are 8, so that lines at odd multiples of 4 are inside.
    points = sheet(6000, side=32.0)
    points[0] = 0.0
    store = make_store(points, block_size=500)
    model = small_model(0.05)
    new = upsample_in_blocks(store, model, Wishes(ratio=4.0), budget=500)
    inside = ((points > 1) & (points < 31))[:, :2].all(axis=1)

    def near_lines(cloud: np.ndarray, offset: float) -> np.ndarray:
        away = np.abs((cloud[:, :2] + offset + 4) % 8 - 4).min(axis=1)
        return (away < 0.15) & ((cloud > 1) & (cloud < 31))[:, :2].all(axis=1)

    ratio = near_lines(new, 0).sum() / near_lines(points, 0).sum()
    assert inside.sum() > 5000
    assert ratio == pytest.approx(near_lines(new, 4).sum() / near_lines(points, 4).sum(), rel=0.1)
    gap = cKDTree(np.concatenate([points, new])).query(new, k=2)[0][:, 1]
    at_borders, between = gap[near_lines(new, 0)], gap[near_lines(new, 4)]
    for share in (2, 10, 50):
        border, inner = np.percentile(at_borders, share), np.percentile(between, share)
        assert border == pytest.approx(inner, rel=0.15)


@pytest.mark.parametrize("originals", [True, False])
def test_blocks_are_evened_out_like_the_whole_cloud(
    make_store: StoreMaker, originals: bool
) -> None:
    store = make_store(sheet(2000, side=16.0), block_size=300)
    wishes = Wishes(originals=originals)
    upsampling = Upsampling(store, small_model(0.05), wishes, CPU, 300, ratio=4.0)
    for tile in upsampling.tiles(300):
        upsampling.make_candidates(tile)
    for blocks in upsampling.colors():
        for block in blocks:
            upsampling.thin(block)
    picked = [
        upsampling._files.load(block, "picked")["position"] for block in range(len(upsampling))
    ]
    for block in range(len(upsampling)):
        upsampling.even_out(block)
    made = np.concatenate([cloud.positions for cloud in upsampling.new_points()]) - store.anchor
    fixed = np.concatenate(
        [store.read_block(block)["position"] for block in range(len(upsampling))]
    )
    whole = relax(np.concatenate(picked), fixed if originals else fixed[:0])
    off = np.linalg.norm(made - whole, axis=1)
    assert len(picked) > 4 and np.mean(off < 1e-9) > 0.9 and off.max() < 0.02


def test_thinning_is_as_good_as_farthest_points() -> None:
    rng = np.random.default_rng(0)

    def sphere(num_points: int) -> np.ndarray:
        points = rng.normal(size=(num_points, 3))
        return points / np.linalg.norm(points, axis=1, keepdims=True)

    def chamfer(cloud: np.ndarray, truth: np.ndarray) -> float:
        return float(
            np.square(cKDTree(truth).query(cloud)[0]).mean()
            + np.square(cKDTree(cloud).query(truth)[0]).mean()
        )

    points, truth = sphere(1000), sphere(20_000)
    pos = torch.from_numpy(points.astype(np.float32))
    farthest = midpoint_upsample(pos, torch.tensor([0, 1000]), 4.0)[0].numpy()
    made = upsample(points, 4.0, model=small_model(), originals=False)
    kept = upsample(points, 4.0, model=small_model())
    assert chamfer(made, truth) < 1.01 * chamfer(farthest, truth)
    assert chamfer(kept, truth) < 1.01 * chamfer(farthest, truth)


def test_density_fills_sparse_ground_and_leaves_the_rest_alone() -> None:
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((6000, 3)) * (20, 20, 1), rng.random((600, 3)) * (20, 20, 1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    made = upsample(points, density=6.0, model=small_model())[len(points) :]

    def count(cloud: np.ndarray, low: float, high: float, margin: float = 0.0) -> int:
        inside = (cloud[:, 0] >= low) & (cloud[:, 0] < high)
        return int((inside & (np.abs(cloud[:, 1] - 10) < 10 - margin)).sum())

    assert count(made, 0, 18) < 60
    for low, high, margin, least in ((23, 37, 3, 5.5), (22, 40, 0, 5.5), (38.5, 40, 0, 4.5)):
        area = (high - low) * (20 - 2 * margin)
        everything = count(made, low, high, margin) + count(points, low, high, margin)
        assert least < everything / area < 6.6


def test_density_is_limited_where_there_is_hardly_a_point() -> None:
    points = sheet(40, side=1000.0)
    assert len(upsample(points, density=100.0, model=small_model())) <= 40 * MAX_LOCAL_RATIO


def test_no_point_is_made_beyond_the_largest_distance() -> None:
    points = np.concatenate([sheet(300, side=10.0), sheet(300, side=10.0) + np.array([30.0, 0, 0])])
    points = np.concatenate([points, [[15.0, 5.0, 20.0]]])
    for model in (small_model(), small_model(0.1)):
        far = upsample(points, 6.0, model=model, only_new=True)
        near = upsample(points, 6.0, model=model, only_new=True, max_distance=0.5)
        assert cKDTree(points).query(far)[0].max() > 0.5
        assert cKDTree(points).query(near)[0].max() <= 0.5
        assert 0 < len(near) <= len(far)


def test_the_seed_decides_between_equally_good_points() -> None:
    points, model = grid(20), small_model()
    made = [upsample(points, 2.0, model=model, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])
    assert len(made[2]) == 800


def test_attributes_follow_the_nearest_point_and_intensity_is_between() -> None:
    points = sheet(400)
    cloud = PointCloud(
        points,
        {
            "intensity": np.arange(400, dtype=np.uint16) * 100,
            "classification": np.arange(400, dtype=np.uint16),
            "colors": np.random.default_rng(0).random((400, 3)),
        },
    )
    made = upsample(cloud, 3.0, model=small_model(0.1))
    assert len(made) == 1200 and made.attributes["colors"].shape == (1200, 3)
    for name, values in cloud.attributes.items():
        assert np.array_equal(made.attributes[name][:400], values)
    assert made.attributes["synthetic"].tolist() == [0] * 400 + [1] * 800
    assert np.array_equal(made.attributes["parent_index"][:400], np.arange(400))
    distance, nearest = cKDTree(points).query(made.positions[400:], k=3)
    assert np.allclose(made.attributes["distance_to_measured"][400:], distance[:, 0], atol=1e-4)
    is_clear = distance[:, 0] < distance[:, 1] - 1e-3
    new_class = made.attributes["classification"][400:]
    assert np.array_equal(new_class[is_clear], nearest[is_clear, 0])
    intensity = made.attributes["intensity"][400:].astype(np.float64)
    among = cloud.attributes["intensity"][nearest]
    assert (intensity >= among.min(1)).all() and (intensity <= among.max(1)).all()
    assert (intensity[is_clear] != among[is_clear, 0]).any()
    parent = made.attributes["parent_index"][400:]
    assert np.linalg.norm(points[parent] - made.positions[400:], axis=1).max() < 6


# Clouds that are hardly clouds


@pytest.mark.parametrize(
    "points",
    [
        sheet(2),
        sheet(5),
        np.arange(40.0)[:, None] * (1.0, 2.0, 3.0),
        np.concatenate([sheet(60), sheet(60), sheet(60)]),
        np.concatenate([np.zeros((500, 3)), sheet(20)]),
        np.concatenate([sheet(100), [[1e6, 1e6, 1e6]]]),
    ],
    ids=["two", "fewer than k", "line", "duplicates", "mostly one place", "outlier"],
)
def test_clouds_that_are_hardly_clouds_are_upsampled(points: np.ndarray) -> None:
    for model in (small_model(), small_model(0.1)):
        made = upsample(points, 4.0, model=model)
        assert len(made) == 4 * len(points)
        assert np.isfinite(made).all()
        assert np.array_equal(made[: len(points)], points)


def test_points_on_a_line_stay_on_it() -> None:
    line = np.arange(40.0)[:, None] * (1.0, 2.0, 3.0)
    made = upsample(line, 4.0, model=small_model(0.1))
    assert np.abs(made - made[:, :1] * (1.0, 2.0, 3.0)).max() < 1e-3


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (np.empty((0, 3)), FileError, "no points"),
        (np.zeros((1, 3)), DataError, "1 point"),
        (np.full((9, 3), 7.0), DataError, "all 9 points are in one place"),
        (np.array([[0, 0, 0], [1, np.nan, 0]]), FileError, "1 of 2 have NaN"),
        (np.zeros((4, 2)), FileError, r"expected \(N, 3\)"),
    ],
)
def test_what_is_no_cloud_is_an_error(
    points: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        upsample(points, model=small_model())


@pytest.mark.parametrize(
    "wishes",
    [{"ratio": 0.5}, {"ratio": float("nan")}, {"density": 0.0}, {"max_distance": -1.0}],
)
def test_wishes_that_cannot_be_met_are_errors(wishes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        Wishes(**wishes)


def test_a_model_in_training_is_left_as_it_was() -> None:
    model = small_model().train()
    upsample(sheet(20), model=model)
    assert model.training


def test_gaps_by_chance_get_more_points_and_dense_places_stay_denser() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((4000, 2)), np.zeros(4000)])
    # Four times as dense on the left.
    points = points[(points[:, 0] < 0.5) | (rng.random(4000) < 0.25)]
    made = upsample(points, 4.0, model=small_model())
    num_left, left = np.count_nonzero(points[:, 0] < 0.5), np.count_nonzero(made[:, 0] < 0.5)
    assert len(made) == 4 * len(points)
    assert 3.6 * num_left < left < 3.95 * num_left

    def unevenness(cloud: np.ndarray) -> float:
        counts = np.histogram2d(cloud[:, 0], cloud[:, 1], bins=[[0.05, 0.25, 0.45], 10])[0]
        return float(counts.std() / counts.mean())

    assert unevenness(made) < 0.95 * unevenness(points)
