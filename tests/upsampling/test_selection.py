"""New points are distributed by the quotas of the model, and selected evenly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import small_model

from pointup import upsample
from pointup.upsampling.single_pass import selection
from pointup.upsampling.single_pass.quotas import by_quota, quota_shares, scale_to_total
from pointup.upsampling.single_pass.selection import first_radius, select_evenly
from pointup.upsampling.store.bisection import BlockFiles


@given(
    st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 9)), min_size=1, max_size=30),
    st.floats(0.0, 1.0),
)
@example([(0.1, 9), (0.3, 9)], 0.3)
def test_cells_get_their_total_by_weight_and_never_more_than_they_have(cells, part):
    weights, num_candidates = (np.array(values, float) for values in zip(*cells, strict=True))
    total = part * num_candidates.sum()
    wanted = scale_to_total(total, weights, num_candidates)
    assert wanted.sum() == pytest.approx(total, abs=1e-9)
    assert (wanted <= max(part, 0.8) * num_candidates + 1e-9).all()
    # Cells that are not full have counts in proportion to their weights.
    is_full = wanted >= max(part, 0.8) * num_candidates - 1e-9
    scale = wanted[~is_full] / weights[~is_full]
    assert np.allclose(scale, scale.mean() if len(scale) else 0.0)
    if len(scale):
        assert (weights[is_full] * scale.mean() >= wanted[is_full] - 1e-6).all()


def test_cells_without_weight_get_what_full_cells_have_no_room_for():
    weights, room = np.array([0.0] * 90 + [50.0] * 10), np.full(100, 96.0)
    wanted = scale_to_total(1500.0, weights, room)
    assert wanted.sum() == pytest.approx(1500)
    np.testing.assert_allclose(wanted[90:], 0.8 * 96)
    np.testing.assert_allclose(wanted[:90], (1500 - 768) / 90)
    assert scale_to_total(30.0, np.zeros(2), np.array([20.0, 40.0])).tolist() == [10.0, 20.0]


def test_cells_without_weight_get_nothing():
    weights = np.array([0.0, 1.0, 1.0])
    assert scale_to_total(4.0, weights, np.full(3, 9.0)).tolist() == [0.0, 2.0, 2.0]
    assert scale_to_total(0.0, np.zeros(2), np.zeros(2)).tolist() == [0.0, 0.0]


def test_shares_follow_the_quotas_up_to_a_bound():
    quota = np.log(np.array([1.0, 2.0, 1000.0, 1e-9], np.float32))
    expected = pytest.approx([1.0, 2.0, 4.0, 0.25], rel=1e-5)
    assert quota_shares(quota, 0.0) == expected == quota_shares(quota + 30, 30.0)


@given(st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_quotas_shrink_by_the_share_of_noise_in_their_variance(tmp_path_factory, share, seed):
    rng = np.random.default_rng(seed)
    quota = rng.normal(1.0, 0.2, (2, 50))
    noise = float(share * quota.var())

    def counts(quota: np.ndarray, equal: bool, noise: float) -> np.ndarray:
        files = BlockFiles(Path(tmp_path_factory.mktemp("blocks")))
        for block in range(2):
            files.save(
                block, "candidates", quota=quota[block], ratio=np.full(50, 4.0),
                cell=np.arange(50) // 5, num_slots=np.full(50, 12), distance=np.ones(600),
            )  # fmt: skip
        return np.concatenate(by_quota(files, 2, 100, 300, True, equal, noise))

    shrunk = quota.mean() + (1 - share) * (quota - quota.mean())
    assert np.array_equal(counts(quota, False, noise), counts(shrunk, False, 0.0))
    assert np.array_equal(counts(quota, False, 10.0), counts(quota, True, 0.0))


def sparser_on_the_right(share: float) -> np.ndarray:
    """Points of a unit square, the right half of which has a `share` of the density of the left."""
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((3000, 2)), np.zeros(3000)])
    return points[(points[:, 0] < 0.5) | (rng.random(3000) < share)]


def test_new_points_are_distributed_by_the_quotas_of_the_model():
    points = sparser_on_the_right(0.5)
    model, shares = small_model(), []
    for power, trust, ratio in (
        (0.0, 0.7, 4), (1.0, 0.7, 4), (1.0, 0.3, 4), (1.0, 0.0, 4), (1.0, 0.7, 9),
    ):  # fmt: skip
        torch.nn.init.constant_(model.quota_powers, 0.0)
        with torch.no_grad():
            model.quota_powers[1] = power
        model.config = replace(model.config, density_exponent=trust)
        made = upsample(points, ratio, model=model, originals=False)
        assert len(made) == ratio * len(points)
        shares.append(float(np.mean(made[:, 0] < 0.5)))
    as_measured = pytest.approx(np.mean(points[:, 0] < 0.5), abs=0.01)
    assert shares[0] == as_measured and shares[3] == as_measured
    # Gaps on the right are larger by the root of two.
    assert shares[1] == pytest.approx(2 / (2 + 2 ** (0.7 * 0.5)), abs=0.01)
    assert shares[2] == pytest.approx(2 / (2 + 2 ** (0.3 * 0.5)), abs=0.01)
    # The second pass keeps the distribution of the first one.
    assert shares[4] == pytest.approx(shares[1], abs=0.01)


def test_quotas_of_predicted_errors_are_multiplied_by_the_predicted_quotas():
    points = sparser_on_the_right(0.5)
    # Before training, all predicted errors are equal.
    model = small_model(predict_error=True)
    with torch.no_grad():
        model.quota_powers.copy_(torch.tensor([0.0, 1.0]))
    shares = {}
    for exponent in (0.0, 0.4, 0.8):
        model.config = replace(model.config, density_exponent=0.25, quota_exponent=exponent)
        made = upsample(points, 4, model=model, originals=False)
        shares[exponent] = float(np.mean(made[:, 0] < 0.5))
    assert shares[0.0] == pytest.approx(np.mean(points[:, 0] < 0.5), abs=0.01)
    # Gaps on the right are larger by the root of two.
    for exponent in (0.4, 0.8):
        expected = 2 / (2 + 2 ** (exponent * 0.5))
        assert shares[exponent] == pytest.approx(expected, abs=0.015)


def test_gaps_by_chance_get_more_points_and_dense_places_stay_denser():
    points = sparser_on_the_right(0.25)
    made = upsample(points, 4.0, model=small_model())
    num_left, left = np.count_nonzero(points[:, 0] < 0.5), np.count_nonzero(made[:, 0] < 0.5)
    assert len(made) == 4 * len(points)
    assert 3.6 * num_left < left < 3.95 * num_left

    def spread(cloud: np.ndarray) -> float:
        counts = np.histogram2d(cloud[:, 0], cloud[:, 1], bins=[[0.05, 0.25, 0.45], 10])[0]
        return float(counts.std() / counts.mean())

    assert spread(made) < 0.95 * spread(points)


def candidates_on_a_plane(seed: int = 0, num_points: int = 1200) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    points = np.column_stack([rng.random((num_points, 2)), np.zeros(num_points)])
    cell = (points[:, 0] >= 0.5) * 2 + (points[:, 1] >= 0.5)
    return points, np.full(num_points, 0.03), cell, rng.permutation(num_points)


def test_every_cell_gets_its_quota_evenly():
    points, scale, cell, priority = candidates_on_a_plane()
    quota = np.array([100, 101, 102, 103])
    distance = np.full(len(points), np.inf)
    radius = first_radius(points, scale)
    (picked,) = select_evenly([(points, scale, distance, cell, quota, priority, radius)])
    assert np.array_equal(np.bincount(cell[picked]), quota)
    assert len(set(picked.tolist())) == quota.sum()
    nearest = cKDTree(points[picked]).query(points[picked], k=2)[0][:, 1]
    rng = np.random.default_rng(1)
    at_random = points[rng.choice(len(points), len(picked), replace=False)]
    assert nearest.min() > 0.02
    assert np.median(nearest) > 1.5 * np.median(cKDTree(at_random).query(at_random, k=2)[0][:, 1])


def test_points_near_picked_ones_are_not_picked():
    points, scale, cell, priority = candidates_on_a_plane()
    kept = np.array([[0.3, 0.3, 0.0], [0.7, 0.6, 0.0]])
    distance = cKDTree(kept).query(points)[0] / scale
    distance[:50] = -1.0
    quota = np.full(4, 60)
    (picked,) = select_evenly([(points, scale, distance, cell, quota, priority, 2.0)])
    assert picked.min() >= 50
    assert cKDTree(kept).query(points[picked])[0].min() > 0.03


def test_copies_of_picked_points_fill_a_cell_after_all_other_places():
    rng = np.random.default_rng(2)
    points = np.zeros((40, 3))
    points[:30] = rng.uniform(0.0, 1.0, (30, 3))
    # Copies of a measured point, points next to it, and others next to each other.
    points[30:] = points[0]
    points[1:10] = points[0] + rng.uniform(-1e-3, 1e-3, (9, 3))
    points[10:20] = points[20:30] + rng.uniform(-1e-3, 1e-3, (10, 3))
    distance = np.linalg.norm(points - points[0], axis=1)
    cell, priority = np.zeros(40, np.int64), rng.permutation(40)
    for quota in (25, 29, 33):
        block = points, np.ones(40), distance, cell, np.array([quota]), priority, 0.5
        picked = select_evenly([block])[0]
        assert len(picked) == quota
        assert (distance[picked] > 0).sum() == min(quota, 29)


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_thinning_depends_on_points_and_not_on_their_order(seed):
    points, scale, cell, priority = candidates_on_a_plane(seed, 200)
    distance, quota = np.full(200, np.inf), np.array([20, 0, 30, 70])
    (picked,) = select_evenly([(points, scale, distance, cell, quota, priority, 3.0)])
    order = np.random.default_rng(seed).permutation(200)
    moved = points[order], scale, distance, cell[order], quota, priority[order], 3.0
    (again,) = select_evenly([moved])
    assert np.array_equal(np.sort(order[again]), picked)


def test_a_mass_of_duplicates_is_thinned_quickly_and_to_the_quota():
    points = np.concatenate([np.zeros((20_000, 3)), np.random.default_rng(0).random((50, 3))])
    num_points = len(points)
    block = (
        points,
        np.full(num_points, 0.1),
        np.full(num_points, np.inf),
        np.zeros(num_points, dtype=np.int64),
        np.array([1000]),
        np.arange(num_points),
        first_radius(points[::300], np.full(67, 0.1)),
    )
    (picked,) = select_evenly([block])
    assert len(picked) == 1000
    assert (picked >= 20_000).sum() == 50


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_without_copies_every_place_is_picked_once_and_none_where_a_point_is(seed):
    points, scale, cell, priority = candidates_on_a_plane(seed, 300)
    rng = np.random.default_rng(seed)
    points[:200] = points[rng.integers(200, 300, 200)]
    cell = (points[:, 0] >= 0.5) * 2 + (points[:, 1] >= 0.5)
    # Candidates in the same place may have different scales.
    scale = scale * rng.choice([0.5, 1.0, 2.0], 300)
    taken = points[-10:]
    distance = cKDTree(taken).query(points)[0] / scale
    quota = np.array([5, 100, 100, 100])
    arguments = points, scale, distance, cell, quota, priority, first_radius(points, scale)
    (picked,) = select_evenly([arguments], copies=False)
    places = {tuple(place) for place in points.tolist()} - {tuple(p) for p in taken.tolist()}
    found = [tuple(place) for place in points[picked].tolist()]
    assert len(set(found)) == len(found) and set(found) <= places
    x, y = np.array(sorted(places)).T[:2]
    num_places = np.bincount((x >= 0.5) * 2 + (y >= 0.5), minlength=4)
    num_picked = np.bincount(cell[picked], minlength=4)
    assert num_picked[0] == 5
    # Places closer together than a hundredth of the radius count as one.
    assert (num_places - num_picked)[1:].sum() <= 3 and (num_places >= num_picked).all()
    assert len(select_evenly([arguments])[0]) > len(picked)


def block_of_all_scales(seed: int, num_points: int) -> tuple[Any, ...]:
    """A thick sheet with copies, points that are taken, and scales that differ a hundredfold."""
    rng = np.random.default_rng(seed)
    points = rng.random((num_points, 3)) * [8, 8, 0.3] - [4, 4, 0]
    points[: num_points // 9] = points[rng.integers(num_points // 2, num_points, num_points // 9)]
    scale = np.exp(0.5 * points[:, 0] + 0.4 * rng.normal(size=num_points))
    distance = np.where(rng.random(num_points) < 0.2, 4 * rng.random(num_points) - 1, np.inf)
    cell, quota = rng.integers(0, 7, num_points), rng.integers(0, num_points // 9 + 1, 7)
    priority = rng.permutation(num_points) - num_points // 2
    return points, scale, distance, cell, quota, priority, 0.8 + rng.random()


@pytest.mark.parametrize("copies", [True, False])
def test_blocks_thinned_together_in_cells_are_as_those_thinned_alone_by_trees(copies, monkeypatch):
    blocks = [block_of_all_scales(*each) for each in [(0, 600), (1, 1), (2, 90), (3, 0), (4, 300)]]
    alone = [select_evenly([block], copies)[0] for block in blocks]
    monkeypatch.setattr(selection, "_pairs_in_trees", selection._pairs_in_cells)
    monkeypatch.setattr(selection, "_ROWS_IN_CELLS", 100)
    for picked, expected in zip(select_evenly(blocks, copies), alone, strict=True):
        np.testing.assert_array_equal(picked, expected)
    assert len(alone[0]) > 100


@pytest.mark.parametrize("search", [selection._pairs_in_trees, selection._pairs_in_cells])
def test_all_pairs_closer_than_the_radius_are_found_and_no_other(search, monkeypatch):
    monkeypatch.setattr(selection, "_pairs_in_trees", search)
    points, scale, *_, radius = block_of_all_scales(5, 400)
    block, index = np.arange(400) % 2, np.flatnonzero(np.arange(400) % 5)
    one, other = index[np.array(np.triu_indices(len(index), 1))]
    gap = np.linalg.norm(points[one] - points[other], axis=1) / np.minimum(scale[one], scale[other])
    close = (gap < radius) & (block[one] == block[other])
    arrays = points, scale, index, np.full(400, radius), block
    first, second, found = selection._close_pairs(*map(torch.from_numpy, arrays))
    pairs = torch.stack([torch.minimum(first, second), torch.maximum(first, second)], dim=1)
    order = np.lexsort(pairs.numpy().T[::-1])
    np.testing.assert_array_equal(pairs[order], np.column_stack([one, other])[close])
    np.testing.assert_allclose(found[order], gap[close])
