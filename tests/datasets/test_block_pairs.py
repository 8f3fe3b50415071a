"""Thinning: the exact number of points, in the requested pattern."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.datasets.block_pairs import PATTERNS, on_common_ground, thin, whole_pair
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points


def make_ground(count: int) -> np.ndarray:
    """A hillside with walls, in map coordinates."""
    rng = np.random.default_rng(0)
    positions = rng.random((count, 3)) * [50, 50, 8] + [4e5, 5.1e6, 100]
    ground = positions[:, 0] % 10 > 0.5
    positions[ground, 2] = 100 + 0.3 * (positions[ground, 0] - 4e5)
    return positions


def make_sphere(count: int) -> np.ndarray:
    directions = np.random.default_rng(0).normal(size=(count, 3))
    return directions / np.linalg.norm(directions, axis=1, keepdims=True)


CLOUDS = {
    "ground": make_ground(3000),
    "sphere": make_sphere(3000),
    "copies": np.ones((50, 3)),
    "line": np.linspace(0, 1, 101)[:, None] * [1, 0, 0],
    "pole": np.linspace(0, 9, 100)[:, None] * [0, 0, 1],
    "outlier": np.concatenate([make_sphere(99), [[1e9, -1e9, 1e9]]]),
    "point": np.zeros((1, 3)),
    "nothing": np.zeros((0, 3)),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", CLOUDS)
def test_thinning_keeps_the_exact_number_of_distinct_points(name, pattern):
    cloud = CLOUDS[name]
    for ratio in (1, 1.5, 4, 7.3, 100):
        index = thin(cloud, ratio, pattern, np.random.default_rng(1))
        assert len(index) == round(len(cloud) / ratio)
        assert (np.diff(index) > 0).all()
        assert ((index >= 0) & (index < len(cloud))).all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_thinning_depends_only_on_the_generator(pattern):
    cloud = CLOUDS["sphere"]
    first, again, other = (thin(cloud, 4, pattern, np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def spacing(points: np.ndarray) -> np.ndarray:
    return cKDTree(points).query(points, 2)[0][:, 1]


def test_poisson_points_are_evenly_spaced_and_random_points_are_not():
    cloud = make_sphere(8000)
    even, random = (
        spacing(cloud[thin(cloud, 8, pattern, np.random.default_rng(0))])
        for pattern in ("poisson", "random")
    )
    assert even.min() > 0.6 * np.median(even)
    assert random.min() < 0.2 * np.median(random)


def anisotropy(points: np.ndarray) -> float:
    """Spread of the steps to the nearest neighbours: ratio of largest to smallest direction."""
    xy = points[:, :2] - points[:, :2].mean(axis=0)
    near = cKDTree(xy).query(xy, 3)[1][:, 1:]
    steps = (xy[near] - xy[:, None]).reshape(-1, 2)
    across, along = np.linalg.eigvalsh(steps.T @ steps)
    return float(np.sqrt(along / across))


@pytest.mark.parametrize("seed", range(4))
def test_scan_lines_are_further_apart_than_the_points_along_them(seed):
    rng = np.random.default_rng(seed)
    ground = rng.random((40_000, 3)) * [60, 60, 0] + [4e5, 5.1e6, 3]
    ground[:, 2] += 0.2 * (ground[:, 0] - 4e5)
    lines = ground[thin(ground, 8, "scanline", rng)]
    random = ground[thin(ground, 8, "random", rng)]
    assert anisotropy(random) < 1.15
    assert anisotropy(lines) > 1.6
    # The lines cover the ground: every original point has a kept point near it.
    gaps = cKDTree(lines).query(ground)[0]
    assert gaps.max() < 3 * np.sqrt(8 * 60 * 60 / len(ground))


def test_scan_lines_reach_walls_and_all_sides_of_shapes():
    sphere = make_sphere(20_000)
    kept = sphere[thin(sphere, 8, "scanline", np.random.default_rng(0))]
    gaps = cKDTree(kept).query(sphere)[0]
    assert gaps.max() < 4 * np.sqrt(4 * np.pi / len(kept))


def test_scan_lines_keep_points_on_the_ground_and_above_it():
    rng = np.random.default_rng(0)
    floors = rng.random((40_000, 3)) * [60, 60, 0] + [0, 0, 5] * rng.integers(0, 2, (40_000, 1))
    kept = floors[thin(floors, 8, "scanline", rng)]
    for height in (0, 5):
        floor, lines = floors[floors[:, 2] == height], kept[kept[:, 2] == height]
        assert cKDTree(lines).query(floor)[0].max() < 1.3 * np.sqrt(60 * 60 / len(lines))
        assert anisotropy(lines) > 1.6


CORNER = np.array([500_000.0, 4_000_000.0, 100.0])


def survey(density: float, seed: int, width: float = 40.0) -> np.ndarray:
    number = round(density * width**2)
    return CORNER + np.random.default_rng(seed).random((number, 3)) * [width, width, 5]


def distance_from_middle(points: np.ndarray) -> np.ndarray:
    return np.hypot(*(points - CORNER)[:, :2].T - 20.0)


@pytest.mark.parametrize("density", [0.3, 1, 30])
def test_points_beyond_a_round_survey_are_left_out_up_to_the_width_of_a_cell(density):
    sparse, plot = survey(density, 0), survey(100, 1)
    plot = plot[distance_from_middle(plot) < 13]
    kept_sparse, kept_plot = on_common_ground([sparse, plot], 10.0)
    # A cell is 1 m wide, so that its corners are at most 1.42 m apart.
    assert distance_from_middle(sparse[kept_sparse]).max() < 13 + 1.42
    inside = distance_from_middle(sparse) < 13 - 1.42
    assert inside.sum() > 100 * density and kept_sparse[inside].all()
    assert kept_plot.all()


def test_small_holes_of_a_survey_are_kept_and_large_ones_left_out():
    sparse, dense = survey(4, 0), survey(100, 1)
    for width, is_kept in ((2.0, True), (10.0, False)):
        around = distance_from_middle(dense) > width / 2
        kept, _ = on_common_ground([sparse, dense[around]], 10.0)
        middle = distance_from_middle(sparse) < width / 2 - 1
        assert (kept[middle] == is_kept).all()


def test_a_block_cut_out_of_a_large_survey_loses_no_points_along_its_border():
    for density in (0.3, 1, 8):
        sparse, dense = survey(density, 0), survey(50, 1)
        kept_sparse, kept_dense = on_common_ground([sparse, dense], 10.0)
        assert kept_sparse.all()
        assert kept_dense.mean() > 0.99


def test_clouds_without_points_have_no_ground_in_common():
    kept = on_common_ground([survey(1, 0), np.empty((0, 3))], 10.0)
    assert [len(mask) for mask in kept] == [1600, 0] and not kept[0].any()


def test_new_points_of_an_upsampled_target_are_left_out_with_a_note(tmp_path, caplog):
    points = np.random.default_rng(0).random((20, 3))
    write_points(tmp_path / "sparse.ply", points[:8])
    synthetic = (np.arange(20) >= 8).astype(np.uint8)
    write_points(tmp_path / "dense.ply", PointCloud(points, {"synthetic": synthetic}))
    pair, _ = whole_pair("one", tmp_path / "sparse.ply", tmp_path / "dense.ply")
    assert len(pair.target) == 8
    (record,) = caplog.records
    assert "dense.ply: 12 of 20 points are left out" in record.getMessage()
