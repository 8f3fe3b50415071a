"""Pairs from meshes: all samplings lie on the surface and are independent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.datasets.meshes import Sampling, mesh_file_pairs, surface_file, surface_pairs
from pointup.datasets.pair import Pair
from pointup.errors import ConfigError
from pointup.geometry.surfaces import Surface

TETRAHEDRON = Surface.from_triangles(
    np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]),
).normalized()


def sample(
    num_samples: int = 1, resample: bool = False, seed: int = 0, **options: object
) -> list[Pair]:
    values: dict[str, Any] = {"num_source": 60, "ratio": 3.0, "pattern": "random"} | options
    return surface_pairs(TETRAHEDRON, "t", Sampling(**values), num_samples, resample, seed)


@pytest.mark.parametrize("pattern", ["poisson", "random", "scanline"])
def test_all_samplings_lie_on_the_surface_and_have_no_common_point(pattern):
    (pair,) = sample(pattern=pattern, resample=True)
    assert pair.name == f"t/0-{pattern}"
    assert len(pair.source) == 60
    assert pair.resample is not None and pair.target_normals is not None
    assert len(pair.target) == len(pair.resample) == 180
    for points in (pair.source, pair.target, pair.resample):
        assert TETRAHEDRON.distance(points).max() < 1e-6
    assert np.min(cKDTree(pair.target).query(pair.source)[0]) > 0
    assert np.min(cKDTree(pair.target).query(pair.resample)[0]) > 0
    np.testing.assert_allclose(np.linalg.norm(pair.target_normals, axis=1), 1, atol=1e-6)


def test_the_mixed_pattern_takes_the_patterns_in_turn():
    kinds = [pair.name.split("-")[1] for pair in sample(6, pattern="mixed")]
    assert kinds[:3] == kinds[3:]
    assert set(kinds) == {"poisson", "random", "scanline"}


def test_a_sampling_depends_only_on_seed_name_and_number():
    once, again, other = sample(2), sample(1), sample(1, seed=1)
    np.testing.assert_array_equal(once[0].target, again[0].target)
    assert not np.array_equal(once[0].target, once[1].target)
    assert not np.array_equal(once[0].target, other[0].target)


def test_noise_moves_the_source_alone():
    clean, noisy = (sample(30, noise=noise) for noise in ((0.0, 0.0), (0.01, 0.03)))
    levels = [(b.source - a.source).std() for a, b in zip(clean, noisy, strict=True)]
    assert 0.008 < min(levels) < 0.013 and 0.026 < max(levels) < 0.034
    for a, b in zip(clean, noisy, strict=True):
        assert np.array_equal(a.target, b.target)


def test_a_patch_is_the_same_ball_of_all_clouds():
    (whole,) = sample(resample=True)
    patches = sample(resample=True, num_patches=5, patch_size=12)
    assert len({pair.name for pair in patches}) == 5
    assert len({pair.source.tobytes() for pair in patches}) > 1

    def is_ball_around(centre: np.ndarray, patch: Pair) -> bool:
        radius = np.linalg.norm(patch.source - centre, axis=1).max()
        for side in ("source", "target", "resample"):
            points = getattr(whole, side)
            inside = points[np.linalg.norm(points - centre, axis=1) <= radius]
            if not np.array_equal(inside, getattr(patch, side)):
                return False
        return True

    for patch in patches:
        assert len(patch.source) == 12
        assert any(is_ball_around(centre, patch) for centre in patch.source)
        assert patch.target_normals is not None
        assert len(patch.target_normals) == len(patch.target)


def test_a_mesh_file_is_normalised_and_its_pairs_name_the_surface(tmp_path):
    path = tmp_path / "big.off"
    path.write_text("OFF\n4 2 0\n0 0 0\n50 0 0\n50 50 0\n0 50 0\n3 0 1 2\n3 0 2 3\n")
    sampling = Sampling(num_source=50, ratio=2, pattern="poisson")
    pairs, surface = mesh_file_pairs(path, "a/big", sampling, 1, True, 0)
    assert np.linalg.norm(surface.vertices, axis=1).max() == pytest.approx(1)
    assert surface.distance(pairs[0].source).max() < 1e-6
    assert pairs[0].surface == "a%2Fbig.npz"


def test_surfaces_of_different_meshes_have_different_files():
    names = ["a/b", "a_b", "a%2Fb", "a/b_c", "a_b/c"]
    files = [surface_file(name) for name in names]
    assert len(set(files)) == len(names)
    assert not any("/" in file for file in files)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 0.5},
        {"num_source": 0},
        {"num_patches": 1, "patch_size": 61},
        {"num_patches": 1, "patch_size": 1},
        {"noise": (-0.1, 0.0)},
        {"noise": (0.2, 0.1)},
        {"noise": (0.0, float("nan"))},
    ],
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(ConfigError):
        sample(**wrong)
