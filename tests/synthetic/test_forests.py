"""Simulated forests: what reaches the ground, by foliage, season, and place in the scene."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from pointup.synthetic.landscapes import (
    Scene,
    Stand,
    plant_stand,
    random_scene,
    random_stand,
    scene_of,
    stand_site,
)
from pointup.synthetic.scanner import Scanner, scan
from pointup.synthetic.site import Site, log, snag

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
STRAIGHT = Scanner(
    density=20.0,
    headings=np.array([0.4]),
    tilts=np.zeros(1),
    aspect=1.0,
    slant=0.0,
    jitter=0.1,
    footprint=0.3,
    separation=1.0,
    max_returns=5,
    sensitivity=0.3,
    sensitivity_spread=0.4,
    range_noise=0.0,
    aim_noise=0.0,
    strip_noise=0.0,
)


def scene_of_stand(seed: int, width: float, stand: Stand) -> Scene:
    return scene_of(stand_site(np.random.default_rng(seed), width, stand), width)


def heights(scene: Scene, scanner: Scanner, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 3) of a scan, and their heights (N,) above the ground."""
    rng = np.random.default_rng(seed)
    points = scan(scene.solid, scene.rough, scene.width, scanner, rng).points
    return points, points[:, 2] - scene.ground(points[:, :2])


@cache
def stand_heights(stand: Stand, seed: int) -> np.ndarray:
    """Heights (N,) above the ground of the points of a scan of a small scene."""
    return heights(scene_of_stand(seed, 5.0, stand), STRAIGHT)[1]


def ground_share(stand: Stand, seeds: int = 2) -> float:
    """The share of returns from at most 0.3 m above the ground, mean of several scenes."""
    return float(np.mean([np.mean(stand_heights(stand, seed) < 0.3) for seed in range(seeds)]))


def test_the_share_of_returns_from_the_ground_falls_with_foliage_and_cover() -> None:
    winter, thin, summer = (ground_share(replace(STAND, foliage=f)) for f in (0.12, 0.4, 1.0))
    assert winter > thin + 0.05 > summer + 0.1
    assert ground_share(replace(STAND, cover=0.3, understory=0.05)) > summer + 0.1


def test_conifers_keep_their_needles_in_winter() -> None:
    evergreen = replace(STAND, conifers=1.0, shrubs=0.0)
    assert ground_share(replace(evergreen, foliage=0.1), 1) == ground_share(evergreen, 1)


def test_an_understory_fills_the_space_below_the_crowns() -> None:
    def low_share(understory: float) -> float:
        shares = []
        for seed in range(2):
            stand = replace(STAND, understory=understory, cover=0.8, evenness=0.9, shrubs=0.0)
            above = stand_heights(stand, seed)
            shares.append(np.mean((above > 1) & (above < 6)))
        return float(np.mean(shares))

    assert low_share(1.2) > 2 * low_share(0.05)


def test_the_height_of_a_stand_is_that_of_its_tallest_trees() -> None:
    above = np.concatenate([stand_heights(STAND, seed) for seed in range(2)])
    assert 0.6 * STAND.height < above.max() < 1.1 * STAND.height


def test_oblique_beams_do_not_pass_below_the_crowns_at_the_edge(monkeypatch) -> None:
    oblique = replace(STRAIGHT, headings=np.zeros(1), tilts=np.array([0.5]), density=10.0)
    site = stand_site(np.random.default_rng(1), 8.0, replace(STAND, cover=2.2, height=30.0))

    def share() -> float:
        return float(np.mean(heights(scene_of(site, 8.0), oblique)[1] < 0.5))

    with_surroundings = share()
    monkeypatch.setattr("pointup.synthetic.landscapes.STEEPEST", -1.0)
    assert share() > 2 * with_surroundings


def test_slopes_are_steep() -> None:
    scene = random_scene(np.random.default_rng(1), 1.0, "slope")
    low, high = scene.ground(np.array([[[-20.0, 0], [0, -20]], [[20, 0], [0, 20]]]))
    assert np.linalg.norm((high - low) / 40) > np.tan(np.radians(17))


def test_copies_around_a_site_stand_on_the_ground_within_reach() -> None:
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


def test_dead_wood_lies_on_and_stands_on_the_ground() -> None:
    rng = np.random.default_rng(0)
    assert log(rng)[..., 2].max() < 1.0
    assert 3.0 < snag(rng, 5.0)[..., 2].max() < 8.0
    site = Site(rng, lambda places: places[..., 0] * 0 + 7, extent=40.0)
    plant_stand(site, replace(STAND, cover=0.0, understory=0.0, shrubs=0.0, dead_wood=0.02))
    assert len(site.solid) > 10
    assert not site.rough
    assert all(part[..., 2].min() < 7.2 for part in site.solid)


def test_a_stand_depends_only_on_the_generator() -> None:
    one, two, other = (
        random_stand(np.random.default_rng(seed), 0.5, leaf_on=True) for seed in (0, 0, 1)
    )
    assert one == two != other
