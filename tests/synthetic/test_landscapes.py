"""Landscapes, forests and the simulated scanner: occlusion, density, returns, noise, foliage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.synthetic.landscapes import (
    FORESTS,
    KINDS,
    MARGIN,
    ScannedScene,
    Stand,
    ground,
    plant_stand,
    random_scene,
    scan,
    scene_of,
)
from pointup.synthetic.scanner import Scanner
from pointup.synthetic.scanner import scan as scan_triangles
from pointup.synthetic.site import Site, box, log, snag
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


def test_without_noise_returns_lie_on_the_surface_and_face_the_scanner(rng):
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


def test_a_roof_occludes_the_ground_below_it(rng):
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


def test_the_density_is_pulses_per_square_metre(rng):
    for density in (5.0, 40.0):
        flat = replace(EXACT, density=density, tilts=np.zeros(2), headings=np.array([0.4, 2.0]))
        points = scan_triangles(floor(20), NOTHING, 16.0, flat, rng).points
        assert len(points) / 16**2 == pytest.approx(density, rel=0.05)


def test_the_spacing_of_scan_lines_follows_the_aspect(rng):
    lines = replace(
        EXACT, headings=np.zeros(1), tilts=np.zeros(1), aspect=4.0, slant=0.0, jitter=0.0
    )
    points = scan_triangles(floor(20), NOTHING, 10.0, replace(lines, footprint=0.0), rng).points
    # Each return is within half a pixel of its line. 30 per m2 with aspect 4 is 0.365 m by 0.091 m.
    spacing = (4 / 30) ** 0.5
    phase = np.exp(2j * np.pi * points[:, 0] / spacing)
    assert abs(phase.mean()) > 0.6


def test_a_pulse_has_returns_from_leaves_and_from_the_ground(rng):
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


def test_returns_of_a_pulse_closer_than_the_separation_are_merged(rng):
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


def test_the_noise_has_the_stated_standard_deviation(rng):
    noisy = replace(EXACT, tilts=np.zeros(1), range_noise=0.02)
    points = scan_triangles(floor(20), NOTHING, 10.0, noisy, rng).points
    assert points[:, 2].std() == pytest.approx(0.02, rel=0.1)
    assert abs(points[:, 2].mean()) < 0.002


@pytest.mark.parametrize(
    "kind",
    # Of the forests one.
    [
        pytest.param(kind, marks=pytest.mark.slow if number in range(1, 5) else ())
        for number, kind in enumerate(KINDS)
    ],
)
def test_a_landscape_can_be_scanned_by_aeroplane_and_drone(kind):
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


def test_forests_have_leaves_and_gardens_have_houses():
    forest = random_scene(np.random.default_rng(0), 6.0, "forest-leaf-on")
    assert len(forest.rough) > 1000
    assert np.ptp(forest.rough[..., 2]) > 4
    garden = random_scene(np.random.default_rng(0), 12.0, "garden")
    a, b, c = np.moveaxis(garden.solid, 1, 0)
    assert np.linalg.norm(np.cross(b - a, c - a), axis=1).max() / 2 > 4


def test_the_surface_of_a_scene_has_the_triangles_that_reach_into_its_square():
    inside, outside = sphere(1.0), sphere(1.0) + np.array([9, 0, 0])
    scene = ScannedScene(inside, outside, 4.0, lambda places: places[..., 0])
    assert scene.surface().area == pytest.approx(surface_of(inside).area)


STAND = Stand(
    height=18.0,
    evenness=0.6,
    cover=1.5,
    understory=0.5,
    conifers=0.0,
    foliage=1.0,
    shrubs=0.02,
    dead_wood=0.01,
)
STRAIGHT = replace(
    EXACT, density=20.0, tilts=np.zeros(1), aspect=1.0, slant=0.0, jitter=0.1, separation=1.0,
    sensitivity=0.3, sensitivity_spread=0.4,
)  # fmt: skip


def stand_site(seed: int, width: float, stand: Stand) -> Site:
    rng = np.random.default_rng(seed)
    site = Site(rng, ground(rng), width + 2 * MARGIN)
    plant_stand(site, stand)
    return site


def scene_of_stand(seed: int, width: float, stand: Stand) -> ScannedScene:
    return scene_of(stand_site(seed, width, stand), width)


def heights(scene: ScannedScene, scanner: Scanner, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 3) of a scan, and their heights (N,) above the ground."""
    rng = np.random.default_rng(seed)
    points = scan_triangles(scene.solid, scene.rough, scene.width, scanner, rng).points
    return points, points[:, 2] - scene.ground(points[:, :2])


@cache
def stand_heights(stand: Stand, seed: int) -> np.ndarray:
    """Heights (N,) above the ground of the points of a scan of a small scene."""
    return heights(scene_of_stand(seed, 5.0, stand), STRAIGHT)[1]


def ground_share(stand: Stand, seeds: int = 2) -> float:
    """The share of returns from at most 0.3 m above the ground, mean of several scenes."""
    return float(np.mean([np.mean(stand_heights(stand, seed) < 0.3) for seed in range(seeds)]))


@pytest.mark.slow
def test_the_share_of_returns_from_the_ground_falls_with_foliage_and_cover():
    winter, thin, summer = (ground_share(replace(STAND, foliage=f)) for f in (0.12, 0.4, 1.0))
    assert winter > thin + 0.05 > summer + 0.1
    assert ground_share(replace(STAND, cover=0.3, understory=0.05)) > summer + 0.1


def test_conifers_keep_their_needles_in_winter():
    evergreen = replace(STAND, conifers=1.0, shrubs=0.0)
    assert ground_share(replace(evergreen, foliage=0.1), 1) == ground_share(evergreen, 1)


def test_an_understory_fills_the_space_below_the_crowns():
    def low_share(understory: float) -> float:
        shares = []
        for seed in range(2):
            stand = replace(STAND, understory=understory, cover=0.8, evenness=0.9, shrubs=0.0)
            above = stand_heights(stand, seed)
            shares.append(np.mean((above > 1) & (above < 6)))
        return float(np.mean(shares))

    assert low_share(1.2) > 2 * low_share(0.05)


def test_the_height_of_a_stand_is_that_of_its_tallest_trees():
    above = np.concatenate([stand_heights(STAND, seed) for seed in range(2)])
    assert 0.6 * STAND.height < above.max() < 1.1 * STAND.height


def test_oblique_beams_do_not_pass_below_the_crowns_at_the_edge(monkeypatch):
    oblique = replace(STRAIGHT, headings=np.zeros(1), tilts=np.array([0.5]), density=10.0)
    site = stand_site(1, 8.0, replace(STAND, cover=2.2, height=30.0))

    def share() -> float:
        return float(np.mean(heights(scene_of(site, 8.0), oblique)[1] < 0.5))

    with_surroundings = share()
    monkeypatch.setattr("pointup.synthetic.landscapes.STEEPEST", -1.0)
    assert share() > 2 * with_surroundings


def test_slopes_are_steep():
    scene = random_scene(np.random.default_rng(1), 1.0, "slope")
    low, high = scene.ground(np.array([[[-20.0, 0], [0, -20]], [[20, 0], [0, 20]]]))
    assert np.linalg.norm((high - low) / 40) > np.tan(np.radians(17))


def test_copies_around_a_site_stand_on_the_ground_within_reach():
    def height(places: np.ndarray) -> np.ndarray:
        return 0.5 * places[..., 0]

    site = Site(np.random.default_rng(0), height, extent=10.0)
    box = np.array([[[1.0, 2, 3], [1.1, 2, 3], [1, 2.1, 3]]])
    triangles = site.with_surroundings([box], reach=4.0)
    middles = triangles.mean(axis=1)
    found = {tuple(np.round(m[:2] - box.mean(axis=(0, 1))[:2]).astype(int)) for m in middles}
    # At x = 1 and y = 2, the copies at x = 11 and y = 12 are too far away.
    assert found == {(0, 0), (-10, 0), (0, -10), (-10, -10)}
    lift = middles[:, 2] - box[..., 2].mean()
    np.testing.assert_allclose(lift, 0.5 * (middles[:, 0] - box[..., 0].mean()), atol=1e-9)


def test_dead_wood_lies_on_and_stands_on_the_ground():
    rng = np.random.default_rng(0)
    assert log(rng)[..., 2].max() < 1.0
    assert 3.0 < snag(rng, 5.0)[..., 2].max() < 8.0
    site = Site(rng, lambda places: places[..., 0] * 0 + 7, extent=40.0)
    plant_stand(site, replace(STAND, cover=0.0, understory=0.0, shrubs=0.0, dead_wood=0.02))
    assert len(site.solid) > 10
    assert not site.rough
    assert all(part[..., 2].min() < 7.2 for part in site.solid)
    lying = [part.mean(axis=(0, 1)) for part in site.solid if part[..., 2].max() < 8]
    assert (np.ptp(lying, axis=0)[:2] > 20).all()
