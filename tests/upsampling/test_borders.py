from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull, cKDTree

from pointup import upsample
from pointup.upsampling.single_pass.relaxation import NUM_NEIGHBORS, within_borders


def sheet(num_points: int, seed: int) -> np.ndarray:
    """Random points of a unit square, turned and moved."""
    rng = np.random.default_rng(seed)
    points = np.column_stack([rng.random((num_points, 2)), np.zeros(num_points)])
    return points @ turn(seed).T + 5.0


def turn(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]


def ball(num_points: int) -> np.ndarray:
    points = np.random.default_rng(0).normal(size=(num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def within(points: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """`within_borders` of children of their nearest measured points."""
    return within_borders(points, cKDTree(measured).query(points)[1], measured, measured)


def nearest_of_hull(corners: np.ndarray, point: np.ndarray) -> np.ndarray:
    """The point of the convex hull of points (K, 2) that is nearest to a point (2,)."""
    hull = ConvexHull(corners)
    if (hull.equations[:, :2] @ point + hull.equations[:, 2] <= 0).all():
        return point
    start, stop = corners[hull.simplices].transpose(1, 0, 2)
    along = stop - start
    share = (((point - start) * along).sum(1) / (along * along).sum(1)).clip(0, 1)
    there = start + share[:, None] * along
    return there[np.linalg.norm(there - point, axis=1).argmin()]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 60))
def test_a_point_moves_to_the_hull_of_its_nearest_points_and_one_inside_stays(
    seed: int, num_measured: int
) -> None:
    measured, axes = sheet(num_measured, seed), turn(seed)[:, :2]
    rng = np.random.default_rng(seed + 1)
    points = 5.0 + rng.uniform(-0.3, 1.3, (40, 2)) @ axes.T
    moved = within(points, measured)
    num_near = min(NUM_NEIGHBORS, num_measured)
    near = measured[cKDTree(measured).query(points, k=num_near)[1]]
    expected = [
        nearest_of_hull(corners @ axes, point @ axes)
        for corners, point in zip(near, points, strict=True)
    ]
    assert moved @ axes == pytest.approx(np.array(expected), abs=1e-9)
    assert moved @ turn(seed)[:, 2] == pytest.approx(points @ turn(seed)[:, 2], abs=1e-9)


def test_nothing_moves_on_curved_parts_and_without_three_measured_points() -> None:
    measured, points = ball(300), 1.01 * ball(1000)
    assert np.array_equal(within(points, measured), points)
    assert np.array_equal(within(points, measured[:2]), points)
    assert within(points[:0], measured).shape == (0, 3)


def test_new_points_of_a_flat_square_lie_on_it() -> None:
    axis = np.linspace(0.0, 1.0, 24)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    uneven = np.random.default_rng(0).normal(0.0, 0.008, grid.shape)
    points = np.column_stack([(grid + uneven).clip(0, 1), np.zeros(len(grid))])
    new = upsample(points, 4.0, model="shapes", only_new=True)
    beyond = np.maximum(-new, new - 1)[:, :2].max()
    assert beyond < 1e-6
    assert np.abs(new[:, 2]).max() < 1e-3
