"""The points around those of a block, for its relaxation."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from pointup.upsampling.store.point_store import BLOCK_SIZE

MOST_AROUND = 8
"""Largest number of points around each point of a block, or of `BLOCK_SIZE` if it has fewer. Of
more, those nearest to its points are taken: a block of a few points far from each other, such as
wrong measurements in the air, has the whole cloud around it."""


class Surroundings:
    """Points in a box around `points` (M, 3), the nearest to them if there are many.

    low, high: (3,) corners of the box.
    """

    def __init__(self, points: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        self._points, self._low, self._high = points, low, high
        self._most = MOST_AROUND * max(len(points), BLOCK_SIZE)
        self._parts = [np.empty((0, 3))]
        self._number = 0
        self._tree: cKDTree | None = None

    def add(self, points: np.ndarray) -> None:
        """Take those of points (N, 3) that lie in the box."""
        inside = points[((points >= self._low) & (points <= self._high)).all(axis=1)]
        self._parts.append(inside)
        self._number += len(inside)
        if self._number > 2 * self._most:
            self._parts = [self.nearest()]
            self._number = self._most

    def nearest(self) -> np.ndarray:
        """All points taken (N, 3), or, of more than `most`, those nearest to the points inside."""
        points = np.concatenate(self._parts)
        if len(points) <= self._most or not len(self._points):
            return points[: self._most]
        if self._tree is None:
            self._tree = cKDTree(self._points)
        distance = np.asarray(self._tree.query(points)[0])
        return points[np.sort(np.argpartition(distance, self._most)[: self._most])]
