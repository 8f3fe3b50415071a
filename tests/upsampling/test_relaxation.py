from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial import ConvexHull, cKDTree
from torch import Tensor

from pointup import upsample
from pointup.upsampling.single_pass import relaxation
from pointup.upsampling.single_pass.relaxation import (
    NUM_NEIGHBORS,
    onto_facets,
    onto_surface,
    relax,
    relax_on_device,
    towards_measured,
    within_borders,
)

NOTHING = np.empty((0, 3))


def plane(num_points: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.random((num_points, 2)), np.zeros(num_points)])


def ball(num_points: int, seed: int = 0) -> np.ndarray:
    """Random points of the unit sphere."""
    points = np.random.default_rng(seed).normal(size=(num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def nearest(points: np.ndarray) -> np.ndarray:
    return np.asarray(cKDTree(points).query(points, k=2)[0])[:, 1]


def rotation(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]


def test_gaps_between_points_become_even():
    points = plane(2000)
    before, after = nearest(points), nearest(relax(points, NOTHING))
    assert after.std() / after.mean() < 0.5 * before.std() / before.mean()
    assert after.mean() > 1.4 * before.mean()


def test_points_of_a_plane_stay_on_it_however_it_lies():
    turn = rotation(3)
    relaxed = relax(plane(500) @ turn.T + 7.0, NOTHING)
    height = ((relaxed - 7.0) @ turn)[:, 2]
    assert np.abs(height).max() < 1e-9


def test_noise_across_the_surface_becomes_less():
    points = plane(2000)
    points[:, 2] = 0.002 * np.random.default_rng(1).normal(size=len(points))
    assert relax(points, NOTHING)[:, 2].std() < 0.85 * points[:, 2].std()


def test_a_wider_radius_spreads_points_farther_into_holes():
    points = plane(1500)
    spacing = nearest(points).mean()
    middles = (0.2 + 0.6 * np.random.default_rng(0).random((8, 3))) * (1, 1, 0)
    points = points[cKDTree(middles).query(points)[0] > 2 * spacing]

    def mean_gap(radius: float) -> float:
        relaxed = relax(points, NOTHING, num_steps=8, radius=radius)
        return float(cKDTree(relaxed).query(middles)[0].mean())

    assert mean_gap(1.25) < 0.95 * mean_gap(1.0)


@pytest.mark.parametrize("keeps_sheets", [True, False])
def test_errors_average_out_over_more_neighbors_where_sheets_are_kept(keeps_sheets, monkeypatch):
    points = plane(1500) + np.random.default_rng(0).normal(0, 1e-3, (1500, 3)) * (0, 0, 1)

    def error() -> float:
        return float(relax(points, NOTHING, keeps_sheets=keeps_sheets)[:, 2].std())

    found = error()
    monkeypatch.setattr(relaxation, "NUM_ON_SHEET", relaxation.NUM_NEIGHBORS)
    assert (found < 0.95 * error()) if keeps_sheets else (found == error())


@pytest.mark.parametrize("gap", [0.7, 0.9, 1.2])
def test_points_of_two_close_sheets_stay_on_them(gap):
    """The gap is in spacings of the points of a sheet."""
    points = np.concatenate([relax(plane(1500, seed), NOTHING) for seed in (0, 1)])
    width = gap * nearest(points[:1500]).mean()
    points[1500:, 2] += width
    inside = ((points[:, :2] > 0.1) & (points[:, :2] < 0.9)).all(axis=1)
    between = [
        np.mean(np.abs(relaxed[inside, 2] / width - 0.5) < 0.25)
        for relaxed in (relax(points, NOTHING, keeps_sheets=keeps) for keeps in (True, False))
    ]
    assert between[0] < 0.01 and between[1] > 0.04


def roof(num_points: int) -> np.ndarray:
    """Two planes that meet at a right angle along y = 0."""
    points = 2 * plane(num_points) - (1, 1, 0)
    points[:, 2] = -np.abs(points[:, 0])
    return points


def test_points_of_an_edge_stay_on_it_where_the_fitted_surface_leaves_it():
    points = roof(3000)

    def off(relaxed: np.ndarray) -> np.ndarray:
        height: np.ndarray = np.abs(relaxed[:, 2] + np.abs(relaxed[:, 0]))
        return height

    free, held = relax(points, NOTHING), relax(points, NOTHING, most_residual=0.1)
    is_edge = np.abs(points[:, 0]) < nearest(points).mean()
    assert off(held)[is_edge].mean() < 0.5 * off(free)[is_edge].mean()
    # On the faces the surface fits, and points move as without the limit.
    is_face = (np.abs(points[:, 0]) > 0.2) & (np.abs(points[:, :2]).max(axis=1) < 0.8)
    assert is_face.sum() > 1000
    np.testing.assert_array_equal(held[is_face], free[is_face])


def test_a_larger_residual_lets_points_move_farther():
    points = roof(1000) + 0.01 * np.random.default_rng(0).normal(size=(1000, 3))
    moved = [
        np.linalg.norm(relax(points, NOTHING, most_residual=most) - points, axis=1)
        for most in (1e-6, 0.05, 0.2, 1e6)
    ]
    assert moved[0].max() == 0
    for less, more in itertools.pairwise(moved):
        assert (less <= more + 1e-12).all() and less.sum() < more.sum()
    free = np.linalg.norm(relax(points, NOTHING) - points, axis=1)
    np.testing.assert_array_equal(moved[-1], free)


def test_points_of_a_volume_are_spread_in_all_directions():
    measured = np.random.default_rng(0).random((400, 3))
    # New points lie close to measured ones.
    new = np.repeat(measured, 3, axis=0)
    new += 0.01 * np.random.default_rng(1).normal(size=new.shape)
    around = np.concatenate([new, measured])
    around = around[cKDTree(around).query(new, k=13)[1]]
    normals = np.linalg.svd(around - around.mean(axis=1, keepdims=True))[2][:, 2]
    gaps, across = {}, {}
    for radius in (0.0, 1.0, 1.5):
        relaxed = relax(new, measured, num_steps=8, volume_radius=radius)
        gaps[radius] = float(np.median(cKDTree(measured).query(relaxed)[0]))
        assert nearest(np.concatenate([relaxed, measured])).min() > 0
        moved = relaxed - new
        along_normal = np.square((moved * normals).sum(axis=1)).sum()
        across[radius] = along_normal / np.square(moved).sum()
    assert gaps[1.0] > 1.1 * gaps[0.0] and gaps[1.5] > 1.05 * gaps[1.0]
    # Of moves alike in all directions it is a third; a part of them is still along surfaces.
    assert across[0.0] < 0.16 and across[1.0] > 0.17 and across[1.5] > 0.25


def test_points_of_a_sphere_stay_near_it():
    relaxed = relax(ball(3000), NOTHING)
    # A chord as long as the spacing, 0.065, has its middle 5e-4 off the sphere.
    off = np.abs(np.linalg.norm(relaxed, axis=1) - 1)
    assert off.mean() < 5e-5 and off.max() < 2e-3


@pytest.mark.parametrize("points", [plane(600), ball(1000)], ids=["plane", "sphere"])
def test_points_of_a_surface_are_relaxed_as_without_volumes(points):
    with_volumes = relax(points, NOTHING, volume_radius=1.5)
    np.testing.assert_array_equal(with_volumes, relax(points, NOTHING))


def test_points_of_a_volume_go_less_far_than_the_spacing():
    points = np.random.default_rng(0).random((2000, 3))
    moved = np.linalg.norm(relax(points, NOTHING, 50, volume_radius=4.0) - points, axis=1)
    distance = cKDTree(points).query(points, k=7)[0][:, 1:].mean(axis=1)
    # The spacing is the mean of that of twelve neighbours.
    assert moved.max() < 1.5 * distance.max() and 0.3 < moved.mean() / distance.mean() < 1.0


def test_fixed_points_repel_others():
    fixed = plane(200, seed=1)
    free = fixed + np.array([1e-4, 0.0, 0.0])
    relaxed = relax(free, fixed)
    gap = cKDTree(fixed).query(relaxed)[0]
    assert np.median(gap) > 0.015


def test_no_point_goes_far():
    points = plane(2000)
    furthest = np.asarray(cKDTree(points).query(points, k=13)[0])[:, -1]
    moved = np.linalg.norm(relax(points, NOTHING) - points, axis=1)
    assert (moved < furthest).all() and moved.mean() < 0.3 * furthest.mean()


def test_the_border_of_a_sheet_is_not_driven_outwards():
    points = plane(2000)
    spacing = 2000**-0.5
    relaxed = relax(points, NOTHING)[:, :2]
    beyond = np.maximum(relaxed - 1.0, -relaxed).max(axis=1).clip(min=0.0)
    assert beyond.max() < 0.75 * spacing
    # Points within a spacing of the border, of which every other one would go beyond it.
    assert np.mean(beyond > 0.1 * spacing) < 0.02


def test_points_of_a_wire_stay_on_it():
    rng = np.random.default_rng(0)
    wire = np.column_stack([np.sort(rng.random(300)), 1e-6 * rng.normal(size=(300, 2))])
    relaxed = relax(wire, NOTHING)
    assert np.abs(relaxed[:, 1:]).max() < 1e-5
    assert np.diff(np.sort(relaxed[:, 0])).std() < 0.8 * np.diff(wire[:, 0]).std()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    most=st.sampled_from([0.0, 1e-3, 0.1, 0.3]),
    is_volume=st.booleans(),
)
def test_moving_turning_and_scaling_the_cloud_moves_turns_and_scales_the_result(
    seed, scale, most, is_volume
):
    rng = np.random.default_rng(seed)
    points = ball(150, seed) * (rng.random((150, 1)) if is_volume else 1.0)
    turn, shift = rotation(seed), np.array([5.0, -3.0, 2.0])
    options = {"most_residual": most, "volume_radius": 1.2 * is_volume}
    relaxed = relax(points[:100], points[100:], **options)
    parts = (scale * (part @ turn.T + shift) for part in (points[:100], points[100:]))
    moved = relax(*parts, **options)
    np.testing.assert_allclose(moved / scale, relaxed @ turn.T + shift, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    points=arrays(
        np.float64, st.tuples(st.integers(0, 20), st.just(3)), elements=st.integers(0, 2)
    ),
    num_fixed=st.integers(0, 20),
    volume_radius=st.sampled_from([0.0, 1.2]),
)
def test_coincident_and_few_points_stay_finite(points, num_fixed, volume_radius):
    relaxed = relax(points[num_fixed:], points[:num_fixed], volume_radius=volume_radius)
    assert relaxed.shape == points[num_fixed:].shape and np.isfinite(relaxed).all()


@pytest.mark.parametrize("points", [*map(plane, (0, 1, 3)), np.ones((30, 3))])
def test_less_than_four_points_and_points_in_one_place_stay(points):
    np.testing.assert_array_equal(relax(points, NOTHING), points)


def test_distant_points_have_no_influence():
    points = plane(3000)
    left = points[:, 0] < 0.3
    alone = relax(points[left & (points[:, 0] >= 0)], points[:0])
    together = relax(points[left], points[~left])
    deep = points[left, 0] < 0.1
    np.testing.assert_allclose(alone[deep], together[deep], atol=1e-12)


def test_points_are_moved_onto_the_surface_of_others():
    rng = np.random.default_rng(0)

    def bowl(num_points: int) -> np.ndarray:
        xy = rng.random((num_points, 2)) * 4 - 2
        return np.column_stack([xy, 0.1 * (xy**2).sum(axis=1)])

    around, exact, on_it = bowl(4000), bowl(300), bowl(200) * (0.5, 0.5, 0.25)
    lifted = on_it + rng.normal(0, 0.01, (200, 3))
    noisy = around + rng.normal(0, 0.01, around.shape)
    turn = rotation(0)

    def height(points: np.ndarray) -> np.ndarray:
        off: np.ndarray = points[:, 2] - 0.1 * np.square(points[:, :2]).sum(axis=1)
        return off

    assert np.abs(height(onto_surface(lifted, around, exact))).max() < 2e-4
    brought = onto_surface(lifted, noisy, exact)
    assert height(brought).std() < 0.5 * height(noisy).std()
    turned = onto_surface(5 * lifted @ turn.T, 5 * noisy @ turn.T, 5 * exact @ turn.T)
    np.testing.assert_allclose(turned, 5 * brought @ turn.T, atol=1e-8)
    # Exact points among noisy ones count more.
    assert height(brought).std() < 0.95 * height(onto_surface(lifted, noisy, NOTHING)).std()


def test_too_few_points_around_leave_points_where_they_are():
    points = np.random.default_rng(0).random((5, 3))
    np.testing.assert_array_equal(onto_surface(points, points[:3], NOTHING), points)
    np.testing.assert_array_equal(onto_surface(points[:0], points, NOTHING), points[:0])
    same = np.ones((9, 3))
    np.testing.assert_array_equal(onto_surface(same[:2], same, NOTHING), same[:2])


def within(points: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return within_borders(points, cKDTree(measured))


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
def test_a_point_moves_to_the_hull_of_its_nearest_points_and_one_inside_stays(seed, num_measured):
    measured = plane(num_measured, seed) @ rotation(seed).T + 5.0
    axes = rotation(seed)[:, :2]
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
    assert moved @ rotation(seed)[:, 2] == pytest.approx(points @ rotation(seed)[:, 2], abs=1e-9)


def test_nothing_moves_on_curved_parts_and_without_three_measured_points():
    measured, points = ball(300), 1.01 * ball(1000)
    assert np.array_equal(within(points, measured), points)
    assert np.array_equal(within(points, measured[:2]), points)
    assert within(points[:0], measured).shape == (0, 3)


# Each pass rounds positions to the grid of its store.
@pytest.mark.parametrize(("ratio", "rounding"), [(4.0, 1e-6), (16.0, 2e-6)])
def test_new_points_of_a_flat_square_lie_on_it(ratio, rounding):
    axis = np.linspace(0.0, 1.0, 24)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    uneven = np.random.default_rng(0).normal(0.0, 0.008, grid.shape)
    points = np.column_stack([(grid + uneven).clip(0, 1), np.zeros(len(grid))])
    new = upsample(points, ratio, model="shapes", only_new=True)
    beyond = np.maximum(-new, new - 1)[:, :2].max()
    assert beyond < rounding
    assert np.abs(new[:, 2]).max() < 1e-3


def facet(along: np.ndarray, across: np.ndarray, seed: int) -> np.ndarray:
    """Points (256, 3) of a facet that begins at the origin, about 0.1 apart."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(16), np.arange(16)), axis=-1).reshape(-1, 2)
    return (0.1 * (grid + rng.uniform(0.2, 0.8, grid.shape))) @ np.stack([along, across])


def on_facets(points: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return onto_facets(points, cKDTree(measured))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.6, 2.2) | st.floats(4.1, 5.1))
@example(seed=5777, angle=1.75)  # Planes around one of the points are all of one facet.
def test_points_near_the_edge_of_two_facets_move_onto_them_and_not_beyond(seed, angle):
    turn, along = rotation(seed), np.array([1.0, 0.0, 0.0])
    other = np.array([0.0, np.cos(angle), np.sin(angle)])
    facets = [facet(along, np.array([0.0, 1.0, 0.0]), seed), facet(along, other, seed + 1)]
    measured = np.concatenate(facets)
    rng = np.random.default_rng(seed)
    middle = measured[(measured[:, 0] > 0.4) & (measured[:, 0] < 1.2)]
    near = middle[np.linalg.norm(middle[:, 1:], axis=1) < 0.1]
    points = near + rng.uniform(-0.03, 0.03, near.shape)
    tree, side = cKDTree(measured), np.arange(len(measured)) < len(facets[0])
    of_one = (side[tree.query(measured, k=9)[1]] == side[:, None]).all(axis=1)
    around = tree.query(points, k=100)[1]
    sees_both = [(of_one[around] & (side[around] == of)).any(axis=1) for of in (True, False)]
    points = points[np.logical_and(*sees_both)]
    assert len(points) >= 6
    moved = on_facets(points @ turn.T, measured @ turn.T) @ turn
    # Across the edge: the distance to each of the two rays.
    off = []
    for ray in (np.array([1.0, 0.0]), other[1:]):
        reach = (moved[:, 1:] @ ray).clip(min=0.0)
        off.append(np.linalg.norm(moved[:, 1:] - reach[:, None] * ray, axis=1))
    assert np.minimum(*off).max() < 1e-6
    assert np.linalg.norm(moved - points, axis=1).max() < 0.1


def test_points_near_the_corner_of_a_cube_stay_within_it():
    axes = np.eye(3)
    measured = np.concatenate([facet(axes[i], axes[i - 1], i) for i in range(3)])
    points = measured[np.sort(measured, axis=1)[:, 1] < 0.1]
    points = points[points.max(axis=1) < 1.0]
    points = points + np.random.default_rng(0).uniform(-0.05, 0.02, points.shape)
    moved = on_facets(points, measured)
    assert points.min() < -0.02
    assert moved.min() > -1e-9 and moved.min(axis=1).max() < 1e-9


def test_points_of_curved_and_of_noisy_surfaces_are_on_no_facets():
    sphere = ball(2000)
    noisy = np.concatenate([facet(*np.eye(3)[:2], 0), facet(*np.eye(3)[1:], 1)])
    noisy += np.random.default_rng(0).normal(0, 0.01, noisy.shape)
    for measured in (sphere, noisy):
        points = measured[:300] + 0.01
        assert np.array_equal(on_facets(points, measured), points)


@pytest.mark.parametrize("options", [(5, True, 0.0, 0.0, 1.25), (3, False, 0.3, 1.5, 1.0)])
def test_blocks_relaxed_together_are_as_those_relaxed_alone(options):
    """Batched operations on packed blocks, here on the CPU, against NumPy and a k-d tree."""
    rng = np.random.default_rng(0)
    blocks, far = [], np.array([0, 0, 1000])
    for seed, (num_free, num_fixed) in enumerate([(700, 250), (14, 4), (300, 0)]):
        free = plane(num_free, seed) + far + rng.normal(size=(num_free, 3)) * 0.01
        free[:5] = free[0]
        blocks.append((free, plane(num_fixed, seed + 9) + far, 2 * num_free // 3))
    # All neighbours of a point in one place.
    blocks.append((np.ones((20, 3)), NOTHING, 20))
    together = relax_on_device(blocks, torch.device("cpu"), *options)
    for relaxed, (free, fixed, num_wanted) in zip(together, blocks, strict=True):
        alone = relax(free, fixed, *options, num_wanted)  # type: ignore[arg-type]
        np.testing.assert_allclose(relaxed, alone, rtol=0, atol=1e-9)


def test_a_device_solves_no_more_systems_at_a_time_than_its_solver_takes():
    sizes = []

    def solve(matrices: Tensor, values: Tensor) -> Tensor:
        sizes.append(len(matrices))
        return torch.zeros_like(values)

    points = np.random.default_rng(0).random((66_000, 3))
    with mock.patch.object(torch.linalg, "solve", solve):
        relax_on_device([(points, NOTHING, 66_000)], torch.device("cpu"), 0, False, 0.0, 0.0, 1.0)
    assert sum(sizes) == 66_000 and max(sizes) < 2**16


def ridge(num_points: int, seed: int = 0) -> np.ndarray:
    """Random points of two planes at right angles that meet in a ridge, the x axis."""
    rng = np.random.default_rng(seed)
    across, side = rng.random(num_points), rng.integers(2, size=num_points)
    points = np.column_stack([rng.random(num_points), across, -across])
    points[side == 0, 1] *= -1
    return points * np.sqrt([1.0, 0.5, 0.5])


def follow(
    points: np.ndarray, others: np.ndarray, measured: np.ndarray, noise: float
) -> np.ndarray:
    return towards_measured(points, others, cKDTree(measured), noise)


def off_ridge(points: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(points[:, 2] + np.abs(points[:, 1])) / np.sqrt(2))


def test_points_of_a_rounded_ridge_move_back_to_it_however_it_lies():
    measured, new = ridge(1000), ridge(4000, 1)
    rounded = new.copy()
    rounded[:, 2] = -np.hypot(new[:, 1], 0.06)
    moved = follow(rounded, NOTHING, measured, 0.0)
    near = (np.abs(new[:, 1]) < 0.05) & (np.abs(new[:, 0] - 0.5) < 0.4)
    assert off_ridge(moved[near]).mean() < 0.5 * off_ridge(rounded[near]).mean()
    turn = rotation(1)
    turned = [3.0 * points @ turn.T + 5.0 for points in (rounded, measured)]
    again = follow(turned[0], NOTHING, turned[1], 0.0)
    np.testing.assert_allclose((again - 5.0) @ turn / 3.0, moved, rtol=0, atol=1e-9)


def test_points_of_a_block_follow_measured_points_as_in_the_whole_cloud():
    """With the points that are up to three spacings away from the block."""
    measured, new = ridge(1000), ridge(4000, 1)
    new[:, 2] = -np.hypot(new[:, 1], 0.06)
    moved = follow(new, NOTHING, measured, 0.005)
    margin = 3.0 * np.median(cKDTree(measured).query(measured, k=7)[0][:, 1:].mean(axis=1))
    inside, near = (np.abs(new[:, 0] - 0.5) < 0.2 + width for width in (0.0, margin))
    around = measured[np.abs(measured[:, 0] - 0.5) < 0.2 + margin]
    alone = follow(new[inside], new[near & ~inside], around, 0.005)
    np.testing.assert_allclose(alone, moved[inside], rtol=0, atol=1e-12)


def test_points_of_a_plane_do_not_follow_the_noise_of_measured_points():
    rng = np.random.default_rng(0)
    measured, new = relax(plane(1000), NOTHING), relax(plane(4000, 1), NOTHING)
    spacing = np.median(cKDTree(measured).query(measured, k=7)[0][:, 1:].mean(axis=1))
    measured += 0.3 * spacing * rng.standard_normal(measured.shape)
    following, stay = (follow(new, NOTHING, measured, share * spacing) for share in (0.0, 0.3))
    inside = np.abs(new[:, :2] - 0.5).max(axis=1) < 0.4
    following, stay = (np.abs(points[inside, 2]) for points in (following, stay))
    assert np.mean(stay) < 0.25 * np.mean(following)


def test_a_tip_that_is_too_short_reaches_to_its_measured_point_but_for_the_noise():
    """A cone of which the new points stop short of the apex, at which a point is measured."""
    rng = np.random.default_rng(0)

    def cone(num_points: int, shortest: float) -> np.ndarray:
        height = np.sqrt(rng.uniform(shortest**2, 1.0, num_points))
        angle = rng.uniform(0, 2 * np.pi, num_points)
        return np.column_stack(
            [0.2 * height * np.cos(angle), 0.2 * height * np.sin(angle), -height]
        )

    measured = np.concatenate([np.zeros((1, 3)), cone(1000, 0.15)])
    new = cone(4000, 0.15)
    tips = [follow(new, NOTHING, measured, noise)[:, 2].max() for noise in (0.0, 0.02, 0.04, 0.2)]
    assert tips[0] == pytest.approx(0.0, abs=0.02)
    assert tips[0] > tips[1] > tips[2] > tips[3] == pytest.approx(new[:, 2].max(), abs=1e-3)
    # Points of another block that are nearer to the apex move instead.
    others = np.array([[0.0, 0.0, -0.05]])
    assert follow(new, others, measured, 0.0)[:, 2].max() < -0.1


@pytest.mark.parametrize("number", [12, 20])
@pytest.mark.parametrize("size", [1.0, 770.0])
def test_points_closer_than_the_step_of_the_grid_are_denoised(size, number):
    """They are at a distance of 0 from one another."""
    random = np.random.default_rng(0)
    clumps = np.repeat(1.5e-5 * np.eye(3), number, axis=0)
    clumps += 1e-22 * random.random(clumps.shape)
    around = size * random.normal(size=(40, 3))
    around /= np.linalg.norm(around, axis=1, keepdims=True) / size
    with np.errstate(all="raise", under="ignore"):
        dense = upsample(np.append(around, clumps, axis=0), 4, denoise=True)
    assert np.isfinite(dense).all() and np.abs(dense).max() < 1.5 * size


def test_denoising_keeps_the_tip_of_a_cone():
    rng = np.random.default_rng(0)
    height, angle = np.sqrt(rng.random(1500)), rng.uniform(0, 2 * np.pi, 1500)
    sides = 0.3 * height * np.array([np.cos(angle), np.sin(angle)])
    cone = np.concatenate([np.column_stack([*sides, -height]), np.zeros((1, 3))])
    assert upsample(cone, 4, denoise=True)[:, 2].max() == pytest.approx(0.0, abs=0.002)
