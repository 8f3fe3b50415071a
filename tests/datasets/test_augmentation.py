"""Augmentation applies one similarity transform to all clouds of a pair, and up stays up."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.spatial.distance import pdist

from pointup.datasets.pair_dataset import (
    SCALES,
    augment_pair,
    crop_pair,
    estimate_spacing,
    random_rotation,
)


def sheet(num_points: int, rng: np.random.Generator) -> np.ndarray:
    """Points of the plane z = x / 2 + 3, far from the origin."""
    xy = rng.random((num_points, 2)) + 50
    return np.column_stack([xy, xy[:, 0] / 2 + 3]).astype(np.float32)


@pytest.mark.parametrize("vertical", [True, False])
def test_all_clouds_of_a_pair_get_the_same_similarity_transform(vertical):
    rng = np.random.default_rng(0)
    normal = np.array([-0.5, 0, 1]) / np.sqrt(1.25)
    clouds = {
        "source": sheet(40, rng),
        "target": sheet(60, rng),
        "resample": sheet(50, rng),
        "target_normals": np.tile(normal, (60, 1)).astype(np.float32),
    }
    for seed in range(6):
        moved = augment_pair(clouds, vertical, np.random.default_rng(seed))
        assert all(points.dtype == np.float32 for points in moved.values())
        ratio = pdist(moved["target"]) / pdist(clouds["target"])
        assert ratio.std() < 1e-3 * ratio.mean()
        assert SCALES[0] <= ratio.mean() <= SCALES[1]
        # All clouds still lie in one plane, the jittered source approximately. The normals are
        # those of the plane.
        n = moved["target_normals"]
        assert np.abs(np.linalg.norm(n, axis=1) - 1).max() < 1e-5
        origin = moved["target"][0]
        assert np.abs((moved["target"] - origin) @ n[0]).max() < 1e-4
        assert np.abs((moved["resample"] - origin) @ n[0]).max() < 1e-4
        assert 1e-6 < np.abs((moved["source"] - origin) @ n[0]).max() < 1e-2
        if vertical:
            assert np.abs(n[:, 2] - normal[2]).max() < 1e-5
        # The mean of the source is the fixed point.
        shift = moved["source"].mean(axis=0) - clouds["source"].mean(axis=0)
        assert np.abs(shift).max() < 5e-3
    assert np.abs(clouds["source"] - sheet(40, np.random.default_rng(0))).max() == 0


@pytest.mark.parametrize("vertical", [True, False])
def test_rotations_are_orthogonal_uniform_and_reflected_half_of_the_time(vertical):
    rng = np.random.default_rng(1)
    rotations = np.stack([random_rotation(rng, vertical) for _ in range(2000)])
    identity = rotations @ rotations.transpose(0, 2, 1)
    assert np.abs(identity - np.eye(3)).max() < 1e-12
    assert abs((np.linalg.det(rotations) > 0).mean() - 0.5) < 0.05
    assert np.abs(rotations[:, 0].mean(axis=0)).max() < 0.06
    if vertical:
        assert np.array_equal(rotations[:, 2], np.tile([0, 0, 1], (2000, 1)))
    else:
        assert np.abs(rotations[:, 2].mean(axis=0)).max() < 0.06


def test_the_spacing_equals_a_brute_force_within_the_sampling_error():
    points = np.random.default_rng(2).random((500, 3), dtype=np.float32)
    nearest = cKDTree(points).query(points, 2)[0][:, 1]
    estimates = [estimate_spacing(points, np.random.default_rng(seed)) for seed in range(20)]
    assert np.median(estimates) == pytest.approx(np.median(nearest), rel=0.15)
    assert estimate_spacing(points[:1], np.random.default_rng(0)) == 0


def test_noise_is_drawn_evenly_up_to_its_largest_level():
    # Evenly spaced points of a sphere, on a spiral, so that the estimate of the spacing is exact.
    z = np.linspace(-0.99, 0.99, 600)
    turn = np.pi * (1 + 5**0.5) * np.arange(600)
    radius = np.sqrt(1 - z**2)
    sphere = np.column_stack([radius * np.cos(turn), radius * np.sin(turn), z]).astype(np.float32)
    spacing = np.median(cKDTree(sphere).query(sphere, 2)[0][:, 1])
    levels = []
    for seed in range(200):
        # The target is the source without noise, moved likewise.
        clouds = {"source": sphere, "target": sphere}
        moved = augment_pair(clouds, False, np.random.default_rng(seed), noise=0.5)
        scale = pdist(moved["target"][:50]).mean() / pdist(sphere[:50]).mean()
        levels.append((moved["source"] - moved["target"]).std() / scale / spacing)
    quartiles = np.quantile(levels, [0, 0.25, 0.5, 0.75, 1])
    assert quartiles == pytest.approx([0.01, 0.13, 0.255, 0.38, 0.5], abs=0.1)


def test_pairs_of_very_few_points_can_be_augmented():
    empty = np.empty((0, 3), np.float32)
    for source in (empty, empty + 0, np.ones((1, 3), np.float32), np.ones((5, 3), np.float32)):
        moved = augment_pair({"source": source, "target": empty}, True, np.random.default_rng(0))
        assert moved["source"].shape == source.shape
        assert np.isfinite(moved["source"]).all()


def test_a_crop_of_duplicate_points_has_exactly_the_budget():
    same = np.ones((50, 3), np.float32)
    cropped = crop_pair({"source": same, "target": same}, 30, np.random.default_rng(0))
    assert len(cropped["source"]) + len(cropped["target"]) == 30


def test_a_crop_has_points_of_both_clouds_where_they_overlap_in_part():
    rng = np.random.default_rng(0)
    source = rng.random((2000, 3)).astype(np.float32) * np.float32([10, 10, 0])
    target = source[source[:, 0] < 3]
    empty = 0
    for seed in range(100):
        cropped = crop_pair({"source": source, "target": target}, 200, np.random.default_rng(seed))
        assert len(cropped["source"]) + len(cropped["target"]) == 200
        empty += not len(cropped["target"])
    # Two thirds of the centres are without a target: of 8 draws, one in 17.
    assert empty < 15
