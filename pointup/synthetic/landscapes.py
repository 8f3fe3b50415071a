"""Procedural landscapes and simulated lidar surveys of them, for training without real surveys.

A landscape has ground with slopes, roads and ditches; houses, walls, cars, poles and wires; trees,
shrubs and grass. `scan` simulates a survey from an aeroplane or a drone. Metres, z up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pointup.geometry.surfaces import Surface
from pointup.synthetic.buildings import car, fence, house, pole, wires
from pointup.synthetic.implicit_surfaces import Field
from pointup.synthetic.plants import broadleaf, conifer, grass, shrub
from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.scanner import airborne, drone
from pointup.synthetic.scanner import scan as scan_triangles
from pointup.synthetic.terrain import ground, terrain
from pointup.synthetic.tessellation import surface_of

# Width of the margin around the scanned square. Objects in the margin can occlude the square.
MARGIN = 4.0
KINDS = ("forest", "garden", "street", "field")


@dataclass(frozen=True)
class Scene:
    """A landscape centred on the origin.

    Attributes:
        solid: (S, 3, 3) float64 triangles that stop every beam.
        rough: (R, 3, 3) float64 facets of leaves, grass and wires, between which beams can pass.
        width: side length of the square to scan.
    """

    solid: np.ndarray
    rough: np.ndarray
    width: float

    def surface(self) -> Surface:
        """The surface of all triangles that reach into the square."""
        return surface_of(_within(np.concatenate([self.solid, self.rough]), self.width))


def scan(
    scene: Scene, density: float, rng: np.random.Generator, from_drone: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate a survey of a scene with `density` pulses per square metre.

    An aeroplane flies one to three lines with wide beams, several returns per pulse and 1 to 3 cm
    of range noise. A drone flies two or three crossing lines with narrow beams and 2 to 6 mm of
    range noise. Returns points (N, 3) in the scene's square, and the unit normals (N, 3) of the
    surfaces that they hit; normals are zero on leaves, grass and wires. N is the number of returns:
    pulses among trees have several.
    """
    scanner = (drone if from_drone else airborne)(rng, density)
    return scan_triangles(scene.solid, scene.rough, scene.width, scanner, rng)


def random_scene(rng: np.random.Generator, width: float, kind: str = "") -> Scene:
    """A random landscape: a square of `width` to scan, and a margin around it.

    `kind` is one of `KINDS`; it is drawn if empty.
    """
    height = ground(rng)
    extent = width + 2 * MARGIN
    site = _Site(rng, height, extent)
    kind = kind or str(rng.choice(KINDS, p=[0.4, 0.25, 0.2, 0.15]))
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
    area = extent**2
    if kind == "forest":
        site.plant(rng.poisson(area * log_uniform(rng, 0.015, 0.05)), log_uniform(rng, 8, 32))
        site.plant_shrubs(rng.poisson(area * log_uniform(rng, 0.003, 0.1)))
    else:
        site.plant(rng.poisson(area * log_uniform(rng, 0.0005, 0.01)), log_uniform(rng, 4, 16))
        site.plant_shrubs(rng.poisson(area * log_uniform(rng, 0.001, 0.03)))
    if rng.random() < 0.5:
        site.sow(int(area * log_uniform(rng, 0.5, 15)))
    solid = np.concatenate([terrain(height, extent), *site.solid])
    rough = np.concatenate([np.empty((0, 3, 3)), *site.rough])
    return Scene(solid, _within(rough, extent), width)


def _within(triangles: np.ndarray, width: float) -> np.ndarray:
    """The triangles that reach into a square of `width` centred on the origin."""
    places, half = triangles[..., :2], width / 2
    inside = (places.min(axis=1) < half).all(axis=1) & (places.max(axis=1) > -half).all(axis=1)
    return triangles[inside]


class _Site:
    """Places objects on the ground at distances from each other."""

    def __init__(self, rng: np.random.Generator, height: Field, extent: float) -> None:
        self.rng, self.height, self.extent = rng, height, extent
        self.solid: list[np.ndarray] = []
        self.rough: list[np.ndarray] = []
        self.taken = np.empty((0, 3))

    def place(self, clearance: float, reach: float = 1.0) -> np.ndarray | None:
        """A random free spot (3,) on the ground; None if 10 attempts find none."""
        for _ in range(10):
            spot = self.rng.uniform(-0.5, 0.5, 2) * self.extent * reach
            apart = np.linalg.norm(self.taken[:, :2] - spot, axis=1)
            if (apart >= self.taken[:, 2] + clearance).all():
                self.taken = np.concatenate([self.taken, [[*spot, clearance]]])
                return np.array([*spot, self.height(spot)])
        return None

    def turned(self, triangles: np.ndarray, angle: float | None = None) -> np.ndarray:
        """Rotate triangles about the vertical, by a random angle if none is given."""
        angle = self.rng.uniform(0, 2 * np.pi) if angle is None else angle
        c, s = np.cos(angle), np.sin(angle)
        return triangles @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])

    def put(self, triangles: np.ndarray, clearance: float) -> None:
        """Place a solid object near the centre of the site, if there is a free spot."""
        spot = self.place(clearance, reach=0.7)
        if spot is not None:
            self.solid.append(self.turned(triangles) + spot)

    def put_line(self) -> None:
        """Place a power line across the site: a row of poles with wires between them."""
        angle, tall = self.rng.uniform(0, 2 * np.pi), self.rng.uniform(5, 11)
        along = np.array([np.cos(angle), np.sin(angle)])
        aside = np.array([-along[1], along[0]]) * self.rng.uniform(-0.3, 0.3) * self.extent
        span = self.rng.uniform(25, 45)
        first = self.rng.uniform(-1, 0) * span
        feet = [along * (first + i * span) + aside for i in range(-1, 3)]
        heads = [np.array([*foot, self.height(foot) + tall]) for foot in feet]
        post = self.turned(pole(self.rng, tall), angle)
        self.solid += [post + head - [0, 0, tall] for head in heads]
        for start, end in pairwise(heads):
            self.rough.append(wires(start - [0, 0, 0.3], end - [0, 0, 0.3], 0.02 * span))

    def plant(self, num_trees: int, tall: float) -> None:
        """Plant trees of about the height `tall`, with one share of conifers."""
        conifers = self.rng.choice([0, 0, 0.5, 1])
        # One survey in four is in winter, when broadleaf trees have few leaves.
        foliage = self.rng.choice([1, 1, 1, 0.1])
        for _ in range(num_trees):
            height = tall * self.rng.uniform(0.6, 1.15)
            spot = self.place(clearance=0.08 * height)
            if spot is not None:
                evergreen = self.rng.random() < conifers
                kind, leafy = (conifer, 1.0) if evergreen else (broadleaf, foliage)
                self.grow(kind(self.rng, height, leafy), spot)

    def plant_shrubs(self, num_shrubs: int) -> None:
        """Plant shrubs, also under trees."""
        for _ in range(num_shrubs):
            spot = self.place(clearance=0.2)
            if spot is not None:
                self.grow(shrub(self.rng, log_uniform(self.rng, 0.4, 3), 1.0), spot)

    def grow(self, plant: tuple[np.ndarray, np.ndarray], spot: np.ndarray) -> None:
        """Add the wood and the leaves of a plant at a spot (3,)."""
        wood, foliage = plant
        self.solid.append(wood + spot)
        self.rough.append(foliage + spot)

    def sow(self, num_blades: int) -> None:
        """Add blades of grass at uniformly random places."""
        spots = self.rng.uniform(-0.5, 0.5, (num_blades, 2)) * self.extent
        self.rough.append(grass(self.rng, np.column_stack([spots, self.height(spots)])))
