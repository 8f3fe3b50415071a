"""A building site of a landscape: places objects on the ground, and repeats them around it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pointup.synthetic.buildings import pole, wires
from pointup.synthetic.implicit_surfaces import Field
from pointup.synthetic.plants import Plant, grass

SHIFTS = np.array([[x, y] for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y])


class PlacedPlant(NamedTuple):
    """A tree or shrub of a site."""

    wood: int
    """Its place in `Site.solid`."""
    foliage: int
    """Its place in `Site.rough`."""
    foot: np.ndarray
    """(3,) where it stands."""


class Site:
    """Places objects on the ground at distances from each other."""

    def __init__(self, rng: np.random.Generator, height: Field, extent: float) -> None:
        self.rng, self.height, self.extent = rng, height, extent
        self.solid: list[np.ndarray] = []
        self.rough: list[np.ndarray] = []
        self.plants: list[PlacedPlant] = []
        self.taken = np.empty((0, 3))

    def clear(self) -> None:
        """Forget what is taken, so that the next objects stand between and below the others."""
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

    def put(self, triangles: np.ndarray, clearance: float, reach: float = 0.7) -> None:
        """Place a solid object in the inner part `reach` of the site, if there is a free spot."""
        spot = self.place(clearance, reach)
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

    def grow(self, make: Callable[[], Plant], clearance: float) -> bool:
        """Add the wood and the leaves of a plant; returns False if there is no free spot."""
        spot = self.place(clearance)
        if spot is None:
            return False
        wood, foliage = make()
        self.plants.append(PlacedPlant(len(self.solid), len(self.rough), spot))
        self.solid.append(wood + spot)
        self.rough.append(foliage + spot)
        return True

    def lay(self, triangles: np.ndarray) -> None:
        """Lay a long object along the ground at a random place."""
        middle = self.rng.uniform(-0.5, 0.5, 2) * self.extent
        lying = self.turned(triangles)
        lying[..., :2] += middle
        lying[..., 2] += self.height(lying[..., :2].mean(axis=1))[:, None]
        self.solid.append(lying)

    def sow(self, num_blades: int) -> None:
        """Add blades of grass at uniformly random places."""
        spots = self.rng.uniform(-0.5, 0.5, (num_blades, 2)) * self.extent
        self.rough.append(grass(self.rng, np.column_stack([spots, self.height(spots)])))

    def with_surroundings(
        self, objects: list[np.ndarray], reach: float, every: int = 1
    ) -> np.ndarray:
        """The triangles of all objects, and copies shifted by the extent, to `reach` around it.

        Oblique beams enter the scanned square through what stands around it. Without the copies
        they would pass below the crowns at its edge. Beyond the extent, where they only cast
        shadows, the copies have one of `every` facets, each `every` times as large.
        """
        parts = [np.empty((0, 3, 3)), *objects]
        half = self.extent / 2
        for triangles in filter(len, objects):
            # Sums and maxima by column: much faster than reductions over an axis of two or three.
            middle = (triangles[:, 0] + triangles[:, 1] + triangles[:, 2]) / 3
            chosen = middle[::every, None]
            coarse = chosen + (triangles[::every] - chosen) * every**0.5
            foot = middle[:, :2].mean(axis=0)
            x, y = middle[:, 0].copy(), middle[:, 1].copy()
            low, high = np.array([x.min(), y.min()]), np.array([x.max(), y.max()])
            for shift in self.extent * SHIFTS:
                if np.maximum(low + shift, -(high + shift)).max() - half > max(reach, 0):
                    continue
                away = np.maximum(np.abs(x + shift[0]), np.abs(y + shift[1])) - half
                away_coarse = away[::every]
                inside, near = away <= 0, (away_coarse > 0) & (away_coarse <= reach)
                if inside.any() or near.any():
                    move = [*shift, self.height(foot + shift) - self.height(foot)]
                    parts += [triangles[inside] + move, coarse[near] + move]
        return np.concatenate(parts)
