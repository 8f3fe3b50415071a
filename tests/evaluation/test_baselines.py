"""The no-network baselines, by brute force and by their definitions."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.evaluation.baselines import (
    BASELINES,
    FITTED,
    baseline_clouds,
    fitted_clouds,
    jitter,
    plane,
    random_midpoints,
)


def cloud(seed: int, num_points: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_points, 3))


def nearest_others(points: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and indices (N, k) of the nearest other points, by brute force."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    index = np.argsort(distance, axis=1)[:, :k]
    return np.take_along_axis(distance, index, axis=1), index


@given(st.integers(0, 2**32 - 1), st.integers(2, 30))
@settings(max_examples=25)
def test_random_midpoints_lie_half_way_to_one_of_the_eight_nearest(seed, size):
    points = cloud(seed, size)
    _, index = nearest_others(points, min(8, size - 1))
    allowed = ((points[:, None] + points[index]) / 2).reshape(-1, 3)
    made = random_midpoints(points, 60, np.random.default_rng(seed))
    gap = np.linalg.norm(made[:, None] - allowed[None], axis=2).min(axis=1)
    assert gap.max() < 1e-12


def test_random_midpoints_take_every_point_and_each_of_the_eight_alike():
    points = cloud(0, 30)
    _, index = nearest_others(points, 8)
    made = random_midpoints(points, 48_000, np.random.default_rng(1))
    allowed = (points[:, None] + points[index]) / 2
    flat, count = np.unique(made.round(9), axis=0, return_counts=True)
    times = dict(zip(map(tuple, flat), count, strict=True))
    # A midpoint of two that are near each other both ways is drawn from both ends.
    expected = dict.fromkeys(times, 0.0)
    for midpoint in map(tuple, allowed.reshape(-1, 3).round(9)):
        expected[midpoint] += 48_000 / (30 * 8)
    for midpoint, number in times.items():
        assert number == pytest.approx(expected[midpoint], abs=6 * expected[midpoint] ** 0.5)


def test_jitter_moves_by_half_the_distance_to_the_nearest():
    # Pairs of points 1, 2 and 4 apart, the pairs far from each other.
    gaps = np.array([1.0, 2.0, 4.0])
    points = np.concatenate(
        [[[1000.0 * i, 0, 0], [1000.0 * i + g, 0, 0]] for i, g in enumerate(gaps)]
    )
    made = jitter(points, 60_000, np.random.default_rng(0))
    at = np.linalg.norm(made[:, None] - points[None], axis=2).argmin(axis=1) // 2
    for pair, gap in enumerate(gaps):
        # Across the pair's own direction, so that either end gives the same spread.
        spread = made[at == pair][:, 1:].std(axis=0)
        np.testing.assert_allclose(spread, 0.5 * gap, rtol=0.03)


def test_plane_moves_along_the_fitted_plane_and_half_way_onto_it():
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((60, 2)) * 10, rng.normal(0, 0.2, 60)])
    distance, index = nearest_others(points, 10)
    # One point at a time, so that it is known which one was moved.
    for row in (0, 7, 31):
        made = np.array(
            [
                plane(points, 1, _Fixed(row, np.random.default_rng(draw)))[0]  # type: ignore[arg-type]
                for draw in range(1500)
            ]
        )
        near = points[index[row]]
        centre = near.mean(axis=0)
        axes = np.linalg.svd(near - centre)[2]
        before, after = (points[row] - centre) @ axes.T, (made - centre) @ axes.T
        np.testing.assert_allclose(after[:, 2], before[2] / 2, atol=1e-9)
        spread = (after[:, :2] - before[:2]).std(axis=0)
        np.testing.assert_allclose(spread, 0.6 * distance[row, :4].mean(), rtol=0.07)


class _Fixed:
    """A generator whose integers are all one number."""

    def __init__(self, row: int, generator: np.random.Generator) -> None:
        self.row, self.generator = row, generator

    def integers(self, high: int, size: int) -> np.ndarray:
        return np.full(size, self.row)

    def standard_normal(self, shape: tuple[int, int]) -> np.ndarray:
        return self.generator.standard_normal(shape)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(1, 9))
@settings(max_examples=25)
def test_every_baseline_keeps_the_source_and_has_the_requested_number_of_points(seed, size, ratio):
    points = cloud(seed, size)
    clouds = baseline_clouds(points, round(ratio * size), seed=1, name="a")
    assert list(clouds) == list(BASELINES)
    for made in clouds.values():
        assert made.shape == (round(ratio * size), 3) and np.isfinite(made).all()
        np.testing.assert_array_equal(made[:size], points)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_baselines_move_and_scale_with_the_cloud(seed):
    points = cloud(seed)
    moved = baseline_clouds(8.0 * points + np.array([5e5, 4e6, 100]), 120)
    for name, made in baseline_clouds(points, 120).items():
        expected = 8.0 * made + np.array([5e5, 4e6, 100])
        np.testing.assert_allclose(moved[name], expected, atol=1e-5)


@pytest.mark.parametrize("noise", [0.02, 0.4, 1.4])
def test_fitted_noise_has_the_lowest_error_of_a_ladder(noise):
    rng = np.random.default_rng(1)
    source = np.column_stack([rng.random((60, 2)) * 10, np.zeros(60)])
    target = source.repeat(4, axis=0) + rng.normal(0, noise, (240, 3))

    def error(made: np.ndarray) -> float:
        distance = np.linalg.norm(made[:, None] - target[None], axis=2)
        return distance.min(axis=0).mean() + distance.min(axis=1).mean()

    fixed = baseline_clouds(source, 200, seed=2, name="a")
    origin = source.mean(axis=0)
    for row, (cloud, share) in fitted_clouds(source, 200, error, seed=2, name="a").items():
        draw, usual = FITTED[row]
        key = row.removesuffix("_fitted")
        assert cloud.shape == (200, 3) and error(cloud) <= error(fixed[key])
        of_ladder = []
        for step in range(-12, 13):
            generator = np.random.default_rng([2, crc32(b"a"), crc32(key.encode())])
            new = draw(source - origin, 140, generator, usual * 1.25**step)
            of_ladder.append(error(np.concatenate([source, new + origin])))
        assert of_ladder[12] == pytest.approx(error(fixed[key]), rel=1e-12)
        assert error(cloud) == pytest.approx(min(of_ladder), rel=0.02)
        assert share / usual == pytest.approx(1.25 ** (np.argmin(of_ladder) - 12), rel=0.6)


def test_random_numbers_depend_on_the_seed_and_the_name_only():
    points = cloud(0)
    first, again = (baseline_clouds(points, 80, seed=3, name="a") for _ in range(2))
    for name in BASELINES:
        np.testing.assert_array_equal(first[name], again[name])
        for other in (
            baseline_clouds(points, 80, seed=4, name="a"),
            baseline_clouds(points, 80, seed=3, name="b"),
        ):
            assert (first[name][40:] != other[name][40:]).any()


def test_points_in_one_place_give_points_there():
    for made in baseline_clouds(np.ones((5, 3)), 20).values():
        np.testing.assert_allclose(made, 1, atol=1e-12)
