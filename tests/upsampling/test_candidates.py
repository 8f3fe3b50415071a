from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from forest_options import FOREST
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import CPU, sheet, small_model

from pointup import Upsampler, upsample
from pointup.errors import ModelError
from pointup.io.cloud import PointCloud
from pointup.upsampling.executor import SingleProcess
from pointup.upsampling.single_pass.candidates import (
    Candidates,
    gather_neighborhood,
    make_candidates,
    near_groups,
)
from pointup.upsampling.store.point_store import build_store
from pointup.upsampling.store.region import Region


def candidates_of(
    model: Upsampler, region: Region, core: np.ndarray, num_slots: np.ndarray, at_once: int = 300
) -> Candidates:
    lock = SingleProcess().barrier()
    return make_candidates(model, region, core, num_slots, num_slots / 2, CPU, at_once, lock)


@pytest.mark.parametrize("options", [{}, FOREST])
@pytest.mark.parametrize("ratio", [2.0, 5.0])
def test_candidates_of_blocks_are_those_of_the_whole_cloud(ratio, options, make_store):
    model, store = small_model(noise=0.1, **options), make_store(sheet(700))
    rows = store.read(0, len(store))
    pos = torch.from_numpy(rows["position"].astype(np.float32))
    with torch.no_grad():
        output = model(pos, torch.tensor([0, 700]), ratio)
    whole = output.candidates.numpy()
    slots = round(2 * ratio)
    for block in range(store.num_blocks):
        region = Region(store, block, block + 1)
        core = region.places(block)
        num_slots = np.full(len(core), slots)
        found = candidates_of(model, region, core, num_slots)
        parent = region.rows["position"][core[found.parent]]
        first = int(store.block_ptr[block]) * slots
        expected = whole[first : first + len(parent)]
        # Children out of reach are copies of their parents.
        is_made = found.distance > 0
        assert is_made.mean() > 0.95
        assert np.allclose((parent + found.offset)[is_made], expected[is_made], atol=2e-5)
        assert not found.offset[~is_made].any()
        assert len(found.error) == len(parent)
        assert (found.error.std() > 0.01) == bool(options)
        away = np.abs(expected - np.repeat(rows["position"], slots, 0)[first:][: len(parent)])
        assert away.max() > 0.5
        nearest = cKDTree(rows["position"]).query(expected)[0]
        assert (found.distance >= nearest - 1e-5)[is_made].all()
        assert np.isclose(found.distance, nearest, atol=1e-5).mean() > 0.9


def test_quotas_follow_from_the_predicted_errors_of_the_candidates(make_store):
    """A point whose candidates have twice the error gets a quarter of the points."""
    model = small_model(noise=0.1, **FOREST, error_exponent=1.0, density_exponent=1.0)
    store = make_store(sheet(300), block_size=300)
    region = Region(store, 0, 1)
    core = region.places(0)
    num_slots = np.where(np.arange(len(core)) % 3 == 0, 4, 9)
    found = candidates_of(model, region, core, num_slots)
    density = np.where(found.distance > 0, found.error.astype(np.float64) ** -2, 0.0)
    expected = np.log(np.bincount(found.parent, density) / num_slots)
    assert found.quota.std() > 0.1
    assert np.allclose(found.quota, expected, atol=1e-4)


def test_points_may_have_different_numbers_of_children(make_store):
    # In float32, products of matrices of other sizes differ by more on some processors.
    model, store = small_model(noise=0.1).double(), make_store(sheet(300), block_size=400)
    region = Region(store, 0, 1)
    core = region.places(0)
    num_slots = np.tile([3, 0, 5], 100)

    def candidates(slots: np.ndarray) -> list[np.ndarray]:
        found = candidates_of(model, region, core, slots, 100)
        return np.split(found.offset, np.cumsum(slots)[:-1])

    mixed, most = candidates(num_slots), candidates(np.full(300, 5))
    for slots, some, all_five in zip(num_slots, mixed, most, strict=True):
        assert np.allclose(some, all_five[:slots], atol=1e-6)


@pytest.mark.parametrize("name", ["embed.0.weight", "pull.bias", "quota_powers"])
def test_a_model_with_nan_in_its_output_is_an_error(name):
    model = small_model()
    with torch.no_grad():
        model.get_parameter(name).fill_(torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        upsample(sheet(50), model=model)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    away=st.sampled_from([0.0, 10.0, 1e4, 1e7]),
    seed=st.integers(0, 2**16),
)
def test_groups_are_near_or_few_and_hold_each_point_once(sizes, away, seed):
    rng = np.random.default_rng(seed)
    clusters = [rng.standard_normal((size, 3)) + away * rng.random(3) for size in sizes]
    with TemporaryDirectory() as directory:
        cloud = PointCloud(np.concatenate([*clusters, np.ones((1, 3))]))
        store = build_store([cloud], Path(directory), block_size=128)
        region = Region(store, 0, store.num_blocks)
        core = np.arange(len(store))
        groups = near_groups(region, core)
        assert np.array_equal(np.concatenate([core[group] for group in groups]), core)
        side = 1000 * 2**14 * store.resolution
        for group in groups:
            points = region.rows["position"][core[group]]
            assert near_groups(region, core[group]) == [slice(0, len(points))]
            assert len(points) <= 64 or np.ptp(points, axis=0).max() < 1.03 * side
        if np.ptp(region.rows["position"], axis=0).max() < side:
            assert len(groups) == 1


@pytest.mark.parametrize("options", [{}, FOREST])
def test_the_points_around_a_batch_are_in_the_same_order_whatever_its_tile(options, make_store):
    """The order of rows in a product of matrices changes its last digits."""
    store = make_store(sheet(2000), block_size=50)
    config, ranks, block = small_model(**options).config, np.arange(1, 7), store.num_blocks // 2
    found = []
    for first, last in ((block, block + 1), (0, block + 1), (block - 3, store.num_blocks)):
        region = Region(store, first, last)
        found.append(gather_neighborhood(region, region.places(block), ranks, config))
    for name in ("pos", "index", "squared", "slot_index", "columns"):
        whole, *others = (getattr(of_tile, name) for of_tile in found)
        assert all(np.array_equal(whole, values) for values in others)
