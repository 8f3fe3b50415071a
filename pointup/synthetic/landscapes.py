"""Procedural landscapes and simulated lidar surveys of them, for training without real surveys.

A landscape has ground with slopes, roads and ditches; houses, walls, cars, poles and wires; trees,
shrubs and grass. `scan` simulates a survey from an aeroplane or a drone. Metres, z up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pointup.geometry.surfaces import Surface
from pointup.synthetic.buildings import car, fence, house
from pointup.synthetic.depth_image import bounds
from pointup.synthetic.forests import Stand, plant_stand, random_stand
from pointup.synthetic.implicit_surfaces import Field
from pointup.synthetic.plants import broadleaf, conifer, shrub
from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.scanner import Returns, airborne, drone
from pointup.synthetic.scanner import scan as scan_triangles
from pointup.synthetic.site import Site
from pointup.synthetic.terrain import ground, terrain
from pointup.synthetic.tessellation import surface_of

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
class Scene:
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
    scene: Scene,
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


def random_scene(rng: np.random.Generator, width: float, kind: str = "") -> Scene:
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


def stand_site(rng: np.random.Generator, width: float, stand: Stand) -> Site:
    """A forest of the given composition, on random ground."""
    site = Site(rng, ground(rng), width + 2 * MARGIN)
    plant_stand(site, stand)
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


def scene_of(site: Site, width: float) -> Scene:
    """The scene of a furnished site, with copies of it around."""
    objects = [*site.solid, *site.rough]
    top = max((float(np.ptp(part[..., 2])) for part in objects), default=0.0)
    reach = min(site.extent, STEEPEST * top)
    solid = np.concatenate(
        [terrain(site.height, site.extent), site.with_surroundings(site.solid, reach)]
    )
    return Scene(solid, site.with_surroundings(site.rough, reach, every=4), width, site.height)


def _within(triangles: np.ndarray, width: float) -> np.ndarray:
    """The triangles that reach into a square of `width` centred on the origin."""
    low, high = bounds(triangles)
    inside = (low < width / 2) & (high > -width / 2)
    return triangles[inside[:, 0] & inside[:, 1]]
