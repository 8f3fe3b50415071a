from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from pointup.upsampling.single_pass.selection import first_radius, select_evenly
from pointup.upsampling.single_pass.upsampling_pass import color_boxes, touching


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


def test_points_near_picked_ones_are_not_picked() -> None:
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


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_without_copies_every_place_is_picked_once_and_none_where_a_point_is(seed: int) -> None:
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
    picked = select_evenly(*arguments, copies=False)
    places = {tuple(place) for place in points.tolist()} - {tuple(p) for p in taken.tolist()}
    found = [tuple(place) for place in points[picked].tolist()]
    assert len(set(found)) == len(found) and set(found) <= places
    x, y = np.array(sorted(places)).T[:2]
    num_places = np.bincount((x >= 0.5) * 2 + (y >= 0.5), minlength=4)
    num_picked = np.bincount(cell[picked], minlength=4)
    assert num_picked[0] == 5
    # Places closer together than a hundredth of the radius count as one.
    assert (num_places - num_picked)[1:].sum() <= 3 and (num_places >= num_picked).all()
    assert len(select_evenly(*arguments)) > len(picked)


def test_boxes_that_touch_have_different_colors() -> None:
    rng = np.random.default_rng(0)
    low = rng.random((60, 3))
    high = low + 0.2 * rng.random((60, 3))
    colors = color_boxes(low, high)
    for box in range(60):
        neighbors = touching(low, high, box)
        assert box not in neighbors
        assert (colors[neighbors] != colors[box]).all()
