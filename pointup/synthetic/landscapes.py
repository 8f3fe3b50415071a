"""Procedural landscapes and simulated lidar surveys of them, for training without real surveys.

A landscape has ground with slopes, roads and ditches; houses, walls, cars, poles and wires; trees,
shrubs and grass. `scan` simulates a survey from an aeroplane or a drone. Metres, z up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pointup.geometry.surfaces import Surface
from pointup.synthetic.fields import Field, log_uniform, waves
from pointup.synthetic.scanner import Returns, airborne, bounds, drone
from pointup.synthetic.scanner import scan as scan_triangles
from pointup.synthetic.site import Site, broadleaf, car, conifer, fence, house, log, shrub, snag
from pointup.synthetic.tessellation import grid, surface_of

# Width of the margin around the scanned square. Objects in the margin can occlude the square.
MARGIN = 4.0
# What stands around a scene is repeated up to this times the height of the tallest object, the
# tangent of a steep beam's angle from the vertical.
STEEPEST = 0.5
# Kinds of forest, with the range of the share of conifers.
FORESTS = {
    "forest-leaf-on": (0.0, 0.1),
    "forest-leaf-off": (0.0, 0.1),
    "conifer": (0.9, 1.0),
    "mixed": (0.2, 0.8),
    "slope": (0.0, 1.0),
}
KINDS = (*FORESTS, "shrubs", "garden", "street", "field")
SHARES = (0.15, 0.1, 0.1, 0.1, 0.1, 0.05, 0.15, 0.15, 0.1)


@dataclass(frozen=True)
class ScannedScene:
    """A landscape centred on the origin.

    Attributes:
        solid: (S, 3, 3) float64 triangles that stop every beam.
        rough: (R, 3, 3) float64 facets of leaves, grass and wires, between which beams can pass.
        width: side length of the square to scan.
        ground: maps places (..., 2) to the height of the ground (...).
    """

    solid: np.ndarray
    rough: np.ndarray
    width: float
    ground: Field

    def surface(self) -> Surface:
        """The surface of all triangles that reach into the square."""
        return surface_of(_within(np.concatenate([self.solid, self.rough]), self.width))


def scan(
    scene: ScannedScene,
    density: float,
    rng: np.random.Generator,
    from_drone: bool = False,
    count_returns: bool = False,
) -> Returns:
    """Simulate a survey of a scene with `density` pulses per square metre.

    An aeroplane flies one to three lines with wide beams, several returns per pulse and 1 to 3 cm
    of range noise. A drone flies two or three crossing lines with narrow beams and 2 to 6 mm of
    range noise. With `count_returns` the density is that of the returns instead of the pulses:
    pulses among trees have several returns.
    """
    scanner = (drone if from_drone else airborne)(rng, density)
    return scan_triangles(scene.solid, scene.rough, scene.width, scanner, rng, count_returns)


def random_scene(rng: np.random.Generator, width: float, kind: str = "") -> ScannedScene:
    """A random landscape: a square of `width` to scan, and what stands around it.

    `kind` is one of `KINDS`; it is drawn if empty.
    """
    return scene_of(random_site(rng, width, kind), width)


def random_site(rng: np.random.Generator, width: float, kind: str = "") -> Site:
    """The objects of a random landscape on a square of `width` and a margin around it."""
    kind = kind or str(rng.choice(KINDS, p=SHARES))
    height = ground(rng, steep=kind == "slope")
    site = Site(rng, height, width + 2 * MARGIN)
    if kind in FORESTS:
        low, high = FORESTS[kind]
        stand = random_stand(rng, rng.uniform(low, high), leaf_on=kind != "forest-leaf-off")
        if kind == "slope" and rng.random() < 0.3:
            stand = replace(stand, foliage=rng.uniform(0.1, 0.22))
        plant_stand(site, stand)
    else:
        _furnish(site, kind)
    if rng.random() < 0.5:
        site.sow(int(site.extent**2 * log_uniform(rng, 0.5, 15)))
    return site


def _furnish(site: Site, kind: str) -> None:
    """Place houses, cars, a power line, trees and shrubs on a site that is no forest."""
    rng, area = site.rng, site.extent**2
    if kind in ("garden", "street"):
        for _ in range(rng.integers(1, 3)):
            site.put(house(rng), clearance=6.0)
        for _ in range(rng.integers(0, 3)):
            site.put(fence(rng), clearance=0.0)
    if kind in ("street", "field"):
        for _ in range(rng.integers(0, 4) if kind == "street" else 0):
            site.put(car(rng), clearance=2.5)
        if rng.random() < 0.6:
            site.put_line()
    conifers, foliage = rng.choice([0, 0.3, 1]), rng.choice([1, 1, 1, 0.15])
    tall = log_uniform(rng, 4, 16)
    for _ in range(rng.poisson(area * log_uniform(rng, 0.0005, 0.01))):
        height = tall * rng.uniform(0.6, 1.15)
        make = conifer if rng.random() < conifers else broadleaf
        leafy = 1.0 if make is conifer else foliage
        site.grow(partial(make, rng, height, leafy), clearance=0.08 * height)
    most = 0.3 if kind == "shrubs" else 0.03
    for _ in range(rng.poisson(area * log_uniform(rng, most / 20, most))):
        site.grow(partial(shrub, rng, log_uniform(rng, 0.4, 4), foliage), clearance=0.2)


def scene_of(site: Site, width: float) -> ScannedScene:
    """The scene of a furnished site, with copies of it around."""
    objects = [*site.solid, *site.rough]
    top = max((float(np.ptp(part[..., 2])) for part in objects), default=0.0)
    reach = min(site.extent, STEEPEST * top)
    solid = [terrain(site.height, site.extent), site.with_surroundings(site.solid, reach)]
    rough = site.with_surroundings(site.rough, reach, every=4)
    return ScannedScene(np.concatenate(solid), rough, width, site.height)


def _within(triangles: np.ndarray, width: float) -> np.ndarray:
    """The triangles that reach into a square of `width` centred on the origin."""
    low, high = bounds(triangles)
    inside = (low < width / 2) & (high > -width / 2)
    return triangles[inside[:, 0] & inside[:, 1]]


@dataclass(frozen=True)
class Stand:
    """The composition of a forest stand.

    Attributes:
        height: height of the tallest trees.
        evenness: height of the smallest trees of the canopy, as a share of that of the tallest.
        cover: area of all crowns of the canopy divided by that of the ground.
        understory: the same for the smaller trees below the canopy.
        conifers: share of the trees that are conifers, which keep their needles.
        foliage: leaves of broadleaf trees and shrubs, as a share of those in summer. About 0.15 of
            twigs remain in winter.
        shrubs: shrubs per square metre.
        dead_wood: fallen and dead standing trunks per square metre.
    """

    height: float
    evenness: float
    cover: float
    understory: float
    conifers: float
    foliage: float
    shrubs: float
    dead_wood: float


def random_stand(rng: np.random.Generator, conifers: float, leaf_on: bool) -> Stand:
    """A random stand, from a young or open one to an old, closed one with several layers."""
    return Stand(
        height=log_uniform(rng, 8, 38),
        evenness=rng.uniform(0.3, 0.85),
        cover=rng.uniform(0.4, 2.6),
        understory=log_uniform(rng, 0.1, 2.0),
        conifers=conifers,
        foliage=1.0 if leaf_on else rng.uniform(0.1, 0.22),
        shrubs=log_uniform(rng, 0.003, 0.1),
        dead_wood=log_uniform(rng, 0.002, 0.03),
    )


def plant_stand(site: Site, stand: Stand) -> None:
    """Plant a stand on a site, from the canopy downwards."""
    rng, area, top = site.rng, site.extent**2, stand.height
    # Tall trees stand close in some stands and have wide crowns in others.
    spread = rng.uniform(0.6, 1.3)
    layers = (
        (stand.cover, stand.evenness, 1.0),
        (stand.understory, 0.08, max(0.7 * stand.evenness, 0.3)),
    )
    for cover, low, high in layers:
        # Crowns overlap those of the same layer only in part, and lie below those of a taller one.
        site.taken = np.empty((0, 3))
        planted = 0.0
        while planted < cover * area:
            height = max(top * rng.uniform(low, high), 1.5)
            radius = 0.2 * spread * height
            evergreen = rng.random() < stand.conifers
            kind, leafy = (conifer, 1.0) if evergreen else (broadleaf, stand.foliage)
            make = partial(kind, rng, height, leafy, spread)
            if not site.grow(make, clearance=0.45 * radius):
                break
            planted += np.pi * radius**2
    for _ in range(rng.poisson(area * stand.shrubs)):
        size = log_uniform(rng, 0.4, 3)
        site.grow(partial(shrub, rng, size, stand.foliage), clearance=0.2)
    for _ in range(rng.poisson(area * stand.dead_wood)):
        if rng.random() < 0.7:
            site.lay(log(rng))
        else:
            site.put(snag(rng, top * rng.uniform(0.1, 0.7)), clearance=0.3, reach=1.0)


def ground(rng: np.random.Generator, steep: bool = False) -> Field:
    """A random height field: maps places (..., 2) to heights (...).

    A `steep` one has a slope of 20 to 45 degrees.
    """
    roughness = log_uniform(rng, 0.002, 0.015)
    lengths = (60.0, 25.0, 10.0, 4.0, 1.5)
    bumps = [(roughness * length, waves(rng, 4 / length, dimension=2)) for length in lengths]
    slope = rng.normal(size=2) * rng.choice([0.02, 0.1, 0.25])
    if steep:
        slope *= np.tan(np.radians(rng.uniform(20, 45))) / np.linalg.norm(slope)

    def hills(places: np.ndarray) -> np.ndarray:
        return places @ slope + sum(strength * wave(places) for strength, wave in bumps)

    height: Field = hills
    for _ in range(rng.choice([0, 1, 1, 2])):
        height = (road, ditch, terrace)[rng.integers(3)](rng, height)
    return height


def across(rng: np.random.Generator) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A random line: maps places (..., 2) to signed distances (...) and foot points (..., 2)."""
    angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-6, 6)
    normal = np.array([np.cos(angle), np.sin(angle)])

    def measure(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distance = places @ normal - offset
        return distance, places - distance[..., None] * normal

    return measure


def road(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a road that is level across its width, on a bank or in a cutting."""
    line, half_width = across(rng), rng.uniform(1.2, 4)
    rise, shoulder = rng.normal() * 0.3, rng.uniform(0.3, 2)

    def with_road(places: np.ndarray) -> np.ndarray:
        distance, foot = line(places)
        share = ((half_width + shoulder - np.abs(distance)) / shoulder).clip(0, 1)
        share = share * share * (3 - 2 * share)
        return height(places) * (1 - share) + (height(foot) + rise) * share

    return with_road


def ditch(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a flat-bottomed ditch or a dyke."""
    line, half_width, side = across(rng), rng.uniform(0.2, 1.5), rng.uniform(0.3, 1.5)
    depth = rng.uniform(0.3, 1.5) * rng.choice([1, 1, -1])

    def with_ditch(places: np.ndarray) -> np.ndarray:
        distance = np.abs(line(places)[0])
        return height(places) - depth * ((half_width + side - distance) / side).clip(0, 1)

    return with_ditch


def terrace(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a step, like a retaining wall, a quay or a bank."""
    line, rise, run = across(rng), rng.uniform(0.4, 2.5), log_uniform(rng, 0.1, 2)

    return lambda places: height(places) + rise * (line(places)[0] / run).clip(0, 1)


def terrain(height: Field, width: float, cell: float = 0.4) -> np.ndarray:
    """Triangles of the ground over a square of `width` centred on the origin."""
    axis = np.linspace(-width / 2, width / 2, round(width / cell) + 1)
    x, y = np.meshgrid(axis, axis, indexing="xy")
    places = np.stack([x, y], axis=-1)
    return grid(np.concatenate([places, height(places)[..., None]], axis=-1))
