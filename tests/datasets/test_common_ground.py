"""The ground that two surveys cover, for clouds whose border is known."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.datasets.block_pairs import on_common_ground

CORNER = np.array([500_000.0, 4_000_000.0, 100.0])


def cloud(density: float, seed: int, width: float = 40.0) -> np.ndarray:
    number = round(density * width**2)
    return CORNER + np.random.default_rng(seed).random((number, 3)) * [width, width, 5]


def distance_from_middle(points: np.ndarray) -> np.ndarray:
    return np.hypot(*(points - CORNER)[:, :2].T - 20.0)


@pytest.mark.parametrize("density", [0.3, 1, 30])
def test_points_beyond_a_round_survey_are_left_out_up_to_the_width_of_a_cell(
    density: float,
) -> None:
    sparse, plot = cloud(density, 0), cloud(100, 1)
    plot = plot[distance_from_middle(plot) < 13]
    kept_sparse, kept_plot = on_common_ground([sparse, plot], 10.0)
    # A cell is 1 m wide, so that its corners are at most 1.42 m apart.
    assert distance_from_middle(sparse[kept_sparse]).max() < 13 + 1.42
    inside = distance_from_middle(sparse) < 13 - 1.42
    assert inside.sum() > 100 * density and kept_sparse[inside].all()
    assert kept_plot.all()


def test_small_holes_of_a_survey_are_kept_and_large_ones_left_out() -> None:
    sparse, dense = cloud(4, 0), cloud(100, 1)
    for width, is_kept in ((2.0, True), (10.0, False)):
        around = distance_from_middle(dense) > width / 2
        kept, _ = on_common_ground([sparse, dense[around]], 10.0)
        middle = distance_from_middle(sparse) < width / 2 - 1
        assert (kept[middle] == is_kept).all()


def test_a_block_cut_out_of_a_large_survey_loses_no_points_along_its_border() -> None:
    for density in (0.3, 1, 8):
        sparse, dense = cloud(density, 0), cloud(50, 1)
        kept_sparse, kept_dense = on_common_ground([sparse, dense], 10.0)
        assert kept_sparse.all()
        assert kept_dense.mean() > 0.99


def test_clouds_without_points_have_no_ground_in_common() -> None:
    kept = on_common_ground([cloud(1, 0), np.empty((0, 3))], 10.0)
    assert [len(mask) for mask in kept] == [1600, 0] and not kept[0].any()
