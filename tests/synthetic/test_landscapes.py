"""Landscapes and the simulated scanner: occlusion, density, returns and noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.synthetic.landscapes import FORESTS, KINDS, Scene, random_scene, scan
from pointup.synthetic.scanner import Scanner
from pointup.synthetic.scanner import scan as scan_triangles
from pointup.synthetic.site import box
from pointup.synthetic.tessellation import sphere, surface_of

NOTHING = np.empty((0, 3, 3))
EXACT = Scanner(
    density=30.0,
    headings=np.array([0.4]),
    tilts=np.array([0.3]),
    aspect=1.5,
    slant=0.1,
    jitter=0.05,
    footprint=0.3,
    separation=0.8,
    max_returns=5,
    sensitivity=0.1,
    sensitivity_spread=0.0,
    range_noise=0.0,
    aim_noise=0.0,
    strip_noise=0.0,
)


def floor(width: float, height: float = 0.0) -> np.ndarray:
    return box([-width, -width, height - 1], [width, width, height])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_without_noise_returns_lie_on_the_surface_and_face_the_scanner(rng) -> None:
    solid = np.concatenate([floor(9), sphere(0.2) * 2 + [0, 1, 2]])
    returns = scan_triangles(solid, NOTHING, 8.0, EXACT, rng)
    points, normals = returns.points, returns.normals
    assert surface_of(solid).distance(points).max() < 1e-9
    assert np.abs(points[:, :2]).max() <= 4
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1)
    assert normals[:, 2].min() > -1
    ball = points[:, 2] > 1e-6
    outwards = (points[ball] - [0, 1, 2]) / 2
    assert np.einsum("ij,ij->i", outwards, normals[ball]).min() > 0.9


def test_a_roof_occludes_the_ground_below_it(rng) -> None:
    roof = box([-3, -3, 5], [3, 3, 5.2])
    solid = np.concatenate([floor(20), roof])
    straight = replace(EXACT, tilts=np.zeros(1), density=100.0)
    points = scan_triangles(solid, NOTHING, 10.0, straight, rng).points
    below = (np.abs(points[:, :2]) < 2.95).all(axis=1) & (points[:, 2] < 5)
    assert not below.any()
    # Slanted beams towards y > 0 reach under the roof from y < 0 and leave a shadow behind it.
    slanted = replace(EXACT, headings=np.zeros(1), tilts=np.array([0.5]), density=100.0)
    points = scan_triangles(solid, NOTHING, 12.0, slanted, rng).points
    x, y, z = points.T
    beside = (np.abs(x) < 2.9) & (z < 1e-6)
    first, last = -3 + 5.2 * np.tan(0.5), 3 + 5 * np.tan(0.5)
    assert not (beside & (y > first + 0.05) & (y < last - 0.05)).any()
    lit = beside & (y > -3) & (y < -3 + 5 * np.tan(0.5))
    assert lit.sum() > 0.8 * 100 * np.cos(0.5) * 5.8 * 5 * np.tan(0.5)


def test_the_density_is_pulses_per_square_metre(rng) -> None:
    for density in (5.0, 40.0):
        flat = replace(EXACT, density=density, tilts=np.zeros(2), headings=np.array([0.4, 2.0]))
        points = scan_triangles(floor(20), NOTHING, 16.0, flat, rng).points
        assert len(points) / 16**2 == pytest.approx(density, rel=0.05)


def test_the_spacing_of_scan_lines_follows_the_aspect(rng) -> None:
    lines = replace(
        EXACT, headings=np.zeros(1), tilts=np.zeros(1), aspect=4.0, slant=0.0, jitter=0.0
    )
    points = scan_triangles(floor(20), NOTHING, 10.0, replace(lines, footprint=0.0), rng).points
    # Each return is within half a pixel of its line. 30 per m2 with aspect 4 is 0.365 m by 0.091 m.
    spacing = (4 / 30) ** 0.5
    phase = np.exp(2j * np.pi * points[:, 0] / spacing)
    assert abs(phase.mean()) > 0.6


def test_a_pulse_has_returns_from_leaves_and_from_the_ground(rng) -> None:
    facets = rng.uniform([-5, -5, 4], [5, 5, 6], (3000, 1, 3)) + rng.normal(size=(3000, 3, 3)) * 0.1
    wide = replace(EXACT, tilts=np.zeros(1), footprint=0.5)
    returns = scan_triangles(floor(20), facets, 8.0, wide, rng)
    points, normals = returns.points, returns.normals
    in_leaves = points[:, 2] > 3
    assert len(points) > 1.2 * EXACT.density * 8**2
    assert 0.2 < in_leaves.mean() < 0.9
    # Leaves have no plane; the ground is level.
    assert not normals[in_leaves].any()
    np.testing.assert_allclose(normals[~in_leaves], [[0, 0, 1]] * (~in_leaves).sum(), atol=1e-12)
    # Two returns of the same pulse are further apart than the separation.
    assert not ((points[:, 2] > 1e-6) & (points[:, 2] < 3)).any()
    leaf_surface = surface_of(facets)
    assert leaf_surface.distance(points[in_leaves]).max() < 1e-9


def test_returns_of_a_pulse_closer_than_the_separation_are_merged(rng) -> None:
    def num_second_returns(separation: float) -> int:
        scanner = replace(wide, separation=separation)
        returns = scan_triangles(floor(20), layers, 8.0, scanner, np.random.default_rng(0))
        lower = np.abs(returns.points[:, 2] - 4) < 0.1
        return int(np.count_nonzero(lower & (returns.number == 2)))

    corners = rng.uniform([-6, -6], [6, 6], (6000, 1, 2)) + rng.normal(size=(6000, 3, 2)) * 0.1
    heights = np.repeat([[4.0], [4.5]], 3000, axis=0)[:, None].repeat(3, axis=1)
    layers = np.concatenate([corners, heights], axis=2)
    wide = replace(EXACT, tilts=np.zeros(1), footprint=0.5)
    assert num_second_returns(0.8) == 0
    assert num_second_returns(0.4) > 50


def test_the_noise_has_the_stated_standard_deviation(rng) -> None:
    noisy = replace(EXACT, tilts=np.zeros(1), range_noise=0.02)
    points = scan_triangles(floor(20), NOTHING, 10.0, noisy, rng).points
    assert points[:, 2].std() == pytest.approx(0.02, rel=0.1)
    assert abs(points[:, 2].mean()) < 0.002


@pytest.mark.parametrize("kind", KINDS)
def test_a_landscape_can_be_scanned_by_aeroplane_and_drone(kind: str) -> None:
    rng = np.random.default_rng(3)
    scene = random_scene(rng, 4.0, kind)
    source = scan(scene, 10.0, rng).points
    returns = scan(scene, 40.0, rng, from_drone=True)
    target, normals = returns.points, returns.normals
    surface = scene.surface()
    # At most 3 cm of noise along and 4 cm across the beam, and 2 cm in the height of a strip.
    assert np.quantile(surface.distance(source), 0.99) < 0.12
    assert np.quantile(surface.distance(target), 0.99) < 0.02
    assert len(target) > 1.5 * len(source)
    length = np.linalg.norm(normals, axis=1)
    assert (np.isclose(length, 1) | (length == 0)).all()
    if kind in FORESTS:
        assert (source[:, 2] - scene.ground(source[:, :2])).max() > 3
    # The two scans have no common points.
    assert cKDTree(source).query(target)[0].min() > 0


def test_forests_have_leaves_and_gardens_have_houses() -> None:
    forest = random_scene(np.random.default_rng(0), 6.0, "forest-leaf-on")
    assert len(forest.rough) > 1000
    assert np.ptp(forest.rough[..., 2]) > 4
    garden = random_scene(np.random.default_rng(0), 12.0, "garden")
    a, b, c = np.moveaxis(garden.solid, 1, 0)
    assert np.linalg.norm(np.cross(b - a, c - a), axis=1).max() / 2 > 4


def test_a_scan_depends_only_on_the_generator() -> None:
    def scanned(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return scan(random_scene(rng, 2.0), 8.0, rng).points

    np.testing.assert_array_equal(scanned(4), scanned(4))
    assert not np.array_equal(scanned(4), scanned(5))


def test_the_surface_of_a_scene_has_the_triangles_that_reach_into_its_square() -> None:
    inside, outside = sphere(1.0), sphere(1.0) + np.array([9, 0, 0])
    scene = Scene(inside, outside, 4.0, lambda places: places[..., 0])
    assert scene.surface().area == pytest.approx(surface_of(inside).area)
