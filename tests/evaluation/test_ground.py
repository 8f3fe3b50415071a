"""The ground below surveys, against landscapes whose ground is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.evaluation.common_extent import (
    CLASSIFIED,
    LOWEST,
    Extent,
    TriangulatedGround,
    find_ground,
    whole_extent,
)
from pointup.io.length_unit import unit_of


def spread(rng: np.random.Generator, number: int, side: float) -> np.ndarray:
    return np.column_stack([rng.uniform(0, side, (number, 2)), np.zeros(number)])


@given(st.integers(0, 2**32 - 1), st.floats(-1, 1), st.floats(-1, 1))
@settings(max_examples=20)
def test_ground_between_points_of_a_plane_is_that_plane(seed, east, north):
    rng = np.random.default_rng(seed)
    vertices = spread(rng, 60, 10)
    vertices[:, 2] = 7 + east * vertices[:, 0] + north * vertices[:, 1]
    move = np.array([5e5, 4e6, 0])
    query = vertices[:3].mean(axis=0) + np.array([0, 0, 2.5])
    ground = TriangulatedGround(vertices + move, "")
    assert ground.above(query[None] + move) == pytest.approx([2.5], abs=1e-5)


def test_beyond_its_rim_the_ground_is_that_of_the_nearest_point():
    ground = TriangulatedGround(np.array([[0.0, 0, 1], [4, 0, 1], [0, 4, 3]]), "")
    assert ground.height(np.array([[-9.0, -9, 50], [-1, 30, 0]])) == pytest.approx([1, 3])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_points_and_points_on_a_line_have_a_ground(number):
    vertices = np.column_stack([np.arange(number), np.zeros(number), np.arange(number)]).astype(
        float
    )
    assert TriangulatedGround(vertices, "").height(np.array([[-3.0, 2, 9]])) == pytest.approx([0])


def landscape(rng: np.random.Generator, slope: float) -> tuple[np.ndarray, np.ndarray]:
    """40 m of sloping ground below trees and a house, and which points are ground."""
    ground = spread(rng, 6000, 40)
    house = np.linalg.norm(ground[:, :2] - [12, 14], np.inf, axis=1) < 5
    crowns = spread(rng, 6000, 40)
    crowns = crowns[np.sin(crowns[:, 0] / 3) * np.sin(crowns[:, 1] / 4) > 0.2]
    crowns[:, 2] = rng.uniform(3, 15, len(crowns))
    points = np.concatenate([ground[~house], ground[house] + [0, 0, 6], crowns])
    points[:, 2] += slope * points[:, 0] + rng.normal(0, 0.03, len(points))
    is_ground = np.arange(len(points)) < np.count_nonzero(~house)
    return points, is_ground


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.6])
def test_trees_and_houses_are_not_ground(slope):
    rng = np.random.default_rng(0)
    points, is_ground = landscape(rng, slope)
    ground = find_ground(points, whole_extent(points, 1.0))
    assert ground.origin == LOWEST
    error = ground.height(points) - slope * points[:, 0]
    # Lowest returns lie below the mean one, and a cell further down the slope.
    assert np.quantile(np.abs(error[is_ground]), 0.99) < 0.3 + 0.3 * slope
    assert np.quantile(error, 0.999) < 0.5
    assert (ground.above(points[is_ground]) > -0.3).mean() > 0.999


def test_plants_on_a_slope_are_not_below_ground_that_is_seen_at_its_top_only():
    rng = np.random.default_rng(0)
    points = spread(rng, 720, 6)
    seen = (points[:, :2] > 3).all(axis=1)
    points[:, 2] = points[:, 0] + np.where(seen, 0.0, 2.0)
    ground = find_ground(points, whole_extent(points, 1.0))
    assert (ground.above(points) > -0.3).mean() > 0.99


def test_a_wood_on_one_side_does_not_tilt_the_ground():
    rng = np.random.default_rng(0)
    ground_points, crowns = spread(rng, 900, 20), spread(rng, 4000, 20)
    crowns = crowns[crowns[:, 0] > 10]
    crowns[:, 2] = rng.uniform(8, 20, len(crowns))
    # In the wood one pulse in ten reaches the ground.
    ground_points = ground_points[(ground_points[:, 0] < 10) | (rng.random(900) < 0.1)]
    points = np.concatenate([ground_points, crowns])
    points[:, 2] -= 0.25 * points[:, 0]
    ground = find_ground(points, whole_extent(points, 1.0))
    error = ground.height(points) + 0.25 * points[:, 0]
    assert np.abs(error).max() < 0.8
    assert len(ground.vertices) > 150


def test_classified_ground_and_water_are_the_ground_if_there_are_any():
    rng = np.random.default_rng(1)
    points, is_ground = landscape(rng, 0.2)
    classes = np.where(is_ground, np.where(points[:, 0] < 20, 2, 9), 5).astype(np.uint8)
    # Under the ground, and not called that.
    points = np.concatenate([points, [[20.0, 20, -4]]])
    classes = np.append(classes, 1).astype(np.uint8)
    ground = find_ground(points, whole_extent(points, 1.0), classes)
    assert ground.origin == CLASSIFIED
    error = ground.height(points) - 0.2 * points[:, 0]
    assert np.quantile(np.abs(error[:-1][is_ground]), 0.99) < 0.2
    assert ground.above(points[-1:])[0] == pytest.approx(-8, abs=0.3)
    few = np.where(np.arange(len(points)) < 3, 2, 1).astype(np.uint8)
    assert find_ground(points, whole_extent(points, 1.0), few).origin == LOWEST


@pytest.mark.parametrize("number", [2, 9])
def test_a_corner_of_ground_or_a_pond_alone_does_not_replace_the_ground(number):
    rng = np.random.default_rng(4)
    points, is_ground = landscape(rng, 0.3)
    # All of 4 m2 of 1,600, where the ground is lowest.
    inside = is_ground & (points[:, :2] < 2).all(axis=1)
    if number == 9:
        inside = is_ground & (points[:, 0] < 10)
    assert inside.sum() >= 10
    classes = np.where(inside, number, 1).astype(np.uint8)
    extent = whole_extent(points, 1.0)
    ground = find_ground(points, extent, classes)
    assert ground.origin == LOWEST
    # With the classes alone, the ground would be level beyond them, up to 9 m too low.
    assert np.quantile(np.abs(ground.above(points[is_ground])), 0.99) < 0.6


@pytest.mark.parametrize("classified", [True, False])
def test_a_large_survey_has_its_ground_from_fewer_points(classified, monkeypatch):
    monkeypatch.setattr("pointup.evaluation.common_extent.MOST_VERTICES", 100)
    points, is_ground = landscape(np.random.default_rng(3), 0.3)
    classes = np.where(is_ground, 2, 5).astype(np.uint8) if classified else None
    ground = find_ground(points, whole_extent(points, 1.0), classes)
    assert len(ground.vertices) <= 121
    # Near the rim the nearest ground point may be a large cell away.
    within = is_ground & (np.abs(points[:, :2] - 20) < 15).all(axis=1)
    error = (ground.height(points) - 0.3 * points[:, 0])[within]
    assert np.quantile(np.abs(error), 0.9) < 0.2


def test_the_ground_is_the_same_in_feet():
    rng = np.random.default_rng(2)
    points, _ = landscape(rng, 0.1)
    extent = whole_extent(points, 1.0)
    in_feet = Extent(1 / 0.3048, extent.origin / 0.3048, extent.covered)
    metres = find_ground(points, extent).above(points)
    feet = find_ground(points / 0.3048, in_feet, unit=unit_of(0.3048)).above(points / 0.3048)
    np.testing.assert_allclose(feet * 0.3048, metres, atol=1e-6)
