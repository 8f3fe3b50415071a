"""Points around a block for its relaxation: those of a box, or the nearest if there are many."""

from __future__ import annotations

import numpy as np
import pytest
from sheets import small_model

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.upsampling.single_pass import upsampling_pass
from pointup.upsampling.single_pass.upsampling_pass import MOST_AROUND, Surroundings

RNG = np.random.default_rng(0)
LOW, HIGH = np.full(3, 0.2), np.full(3, 0.9)


def added(parts: list[np.ndarray], points: np.ndarray) -> np.ndarray:
    around = Surroundings(points, LOW, HIGH)
    for part in parts:
        around.add(part)
    return around.nearest()


def in_box(points: np.ndarray) -> np.ndarray:
    return points[((points >= LOW) & (points <= HIGH)).all(axis=1)]


def test_all_points_of_the_box_are_around_in_their_order() -> None:
    parts = [RNG.random((size, 3)) for size in (300, 1, 0, 500)]
    assert np.array_equal(added(parts, RNG.random((20, 3))), in_box(np.concatenate(parts)))


@pytest.mark.parametrize("num_parts", [1, 7, 60])
def test_of_many_points_the_nearest_are_around(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 10)
    points, cloud = RNG.random((5, 3)), RNG.random((2000, 3))
    inside = in_box(cloud)
    gap = np.linalg.norm(inside[:, None] - points, axis=2).min(axis=1)
    expected = inside[np.sort(np.argsort(gap)[: MOST_AROUND * 10])]
    assert np.array_equal(added(np.array_split(cloud, num_parts), points), expected)


def test_without_points_the_number_around_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 10)
    assert len(added([RNG.random((3000, 3))], np.empty((0, 3)))) == MOST_AROUND * 10


def test_wrong_measurements_above_a_survey_do_not_have_all_of_it_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their boxes contain all of it, below and above them."""
    monkeypatch.setattr(upsampling_pass, "BLOCK_SIZE", 500)
    numbers: list[int] = []

    def relax(free: np.ndarray, fixed: np.ndarray, *options: object) -> np.ndarray:
        numbers.append(len(fixed))
        return free

    monkeypatch.setattr(upsampling_pass, "relax", relax)
    xy = 100 * RNG.random((20_000, 2))
    survey = np.column_stack([xy, np.sin(xy[:, 0] / 10)])
    wrong = np.column_stack([100 * RNG.random((20, 2)), np.repeat([80.0, -80.0], 10)])
    cloud = PointCloud(np.concatenate([survey, wrong]))
    upsample(cloud, 2.0, model=small_model(), above_ground=True)
    assert max(numbers) < 15_000
