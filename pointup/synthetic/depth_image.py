"""A depth image of triangles: what a laser beam sees from a direction."""

from __future__ import annotations

import numpy as np


class DepthImage:
    """The first hit of one ray at a random place in each pixel of a window.

    The rays run along the third axis. `low` and `high` (2,) are the corners of the window, `pixel`
    is the side of a pixel.

    Attributes:
        hit: (rays, 3) position of each hit; the third coordinate is inf for a ray without a hit.
        normal: (rays, 3) unit normal of the surface there, towards the scanner; 0 where unknown.
        shape: (2,) numbers of pixels.
    """

    def __init__(
        self, low: np.ndarray, high: np.ndarray, pixel: float, rng: np.random.Generator
    ) -> None:
        self.low, self.pixel = low, pixel
        self.shape = np.ceil((high - low) / pixel).astype(int)
        size = int(self.shape.prod())
        corner = np.stack(np.divmod(np.arange(size), self.shape[1]), axis=1)
        self.hit = np.empty((size, 3))
        self.hit[:, :2] = low + pixel * (corner + rng.random((size, 2)))
        self.hit[:, 2] = np.inf
        self.normal = np.zeros((size, 3))

    def splat(self, triangles: np.ndarray, rng: np.random.Generator) -> None:
        """Add hits on facets smaller than a pixel, at random in proportion to their area."""
        if not len(triangles):
            return
        a, b, c = np.moveaxis(triangles, 1, 0)
        area = 0.5 * np.linalg.norm(np.cross(b - a, c - a), axis=1)
        # The projected area of a facet with random orientation is half its area on average.
        count = rng.poisson(0.5 * area / self.pixel**2)
        face = np.repeat(np.arange(len(triangles)), count)
        root, share = np.sqrt(rng.random((len(face), 1))), rng.random((len(face), 1))
        points = a[face] + root * ((b - a)[face] + share * (c - b)[face])
        where = np.floor((points[:, :2] - self.low) / self.pixel).astype(int)
        inside = ((where >= 0) & (where < self.shape)).all(axis=1)
        points, where = points[inside], where[inside]
        ray = where[:, 0] * self.shape[1] + where[:, 1]
        nearest = self._nearest(ray, points[:, 2])
        self.hit[ray[nearest]] = points[nearest]

    def rasterize(self, triangles: np.ndarray) -> None:
        """Add the exact hits of all rays on triangles."""
        first, last = (
            np.floor((corner - self.low) / self.pixel).astype(int) for corner in bounds(triangles)
        )
        first, last = first.clip(0), np.minimum(last, self.shape - 1)
        extent = (last - first + 1).clip(0)
        a, b, c = np.moveaxis(triangles, 1, 0)
        normal = np.cross(b - a, c - a)
        normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-300
        normal = np.where(normal[:, 2:] > 0, -normal, normal)
        # Triangles nearly parallel to the beam get no hits: their depth would be lost in rounding.
        count = extent.prod(axis=1) * (normal[:, 2] < -1e-6)

        # All rays in the bounding rectangle of each triangle.
        face = np.repeat(np.arange(len(triangles), dtype=np.int32), count)
        step = np.arange(len(face), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
        width = extent[:, 1].astype(np.int32)[face]
        corner = first[:, 0] * self.shape[1] + first[:, 1]
        ray = corner[face] + step + step // width * (self.shape[1] - width)
        along, across = self.hit[ray, 0], self.hit[ray, 1]
        turning = (b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]
        for start, end in ((a, b), (b, c), (c, a)):
            edge = (end - start)[:, :2] * np.sign(turning)[:, None]
            offset = edge[:, 1] * start[:, 0] - edge[:, 0] * start[:, 1]
            inside = edge[face, 0] * across - edge[face, 1] * along + offset[face] >= 0
            face, ray, along, across = face[inside], ray[inside], along[inside], across[inside]

        a, normal = a[face], normal[face]
        lower = normal[:, 0] * (along - a[:, 0]) + normal[:, 1] * (across - a[:, 1])
        depth = a[:, 2] - lower / normal[:, 2]
        nearest = self._nearest(ray, depth)
        ray, normal = ray[nearest], normal[nearest]
        self.hit[ray, 2] = depth[nearest]
        self.hit[ray, 0], self.hit[ray, 1] = along[nearest], across[nearest]
        self.normal[ray] = normal

    def _nearest(self, ray: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """Indices of the hits that are the nearest on their ray so far."""
        least = self.hit[:, 2].copy()
        np.minimum.at(least, ray, depth)
        return np.flatnonzero((depth == least[ray]) & (depth < self.hit[ray, 2]))


def bounds(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest coordinates (T, 2) of triangles (T, 3, 2 or more)."""
    a, b, c = np.moveaxis(places[..., :2], 1, 0)
    # Much faster than a reduction over an axis of three.
    return np.minimum(np.minimum(a, b), c), np.maximum(np.maximum(a, b), c)
