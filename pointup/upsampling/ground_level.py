"""The ground of a survey at one size of cells: planes through its lowest returns."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.ground_raster import Raster

# The lowest return of a cell comes from the ground if it is within this many sides of the next
# coarser cells of their plane.
_TOLERANCE = 0.5
# Fits of the planes of the coarsest cells; lowest returns far above one are left out of the next.
_FITS = 3


class Level:
    """Planes and lowest returns in the 3 x 3 cells around each cell of a raster.

    `low_returns` (L,) are the lowest points of small cells. `coarser` decides which of them came
    from the ground; None: all of them, but for the very lowest of a cell with many.

    Attributes:
        planes: (C, 3), see `Raster.planes`.
        deviation: (C,) standard deviation of the points of class 2 there, NaN with too few.
        lowest: (C,) height of the lowest return, inf without one.
        below: (C,) lowest height of a return relative to the plane of its cell, -inf without plane.
        has_plane: (C,) whether enough returns came from the ground.
    """

    def __init__(
        self,
        raster: Raster,
        points: np.ndarray,
        is_ground: np.ndarray,
        low_returns: np.ndarray,
        coarser: Level | None,
    ) -> None:
        self.raster, self._coarser = raster, coarser
        lowest = raster.lowest(
            points[low_returns, 2], raster.cells(points[low_returns]), robust=coarser is None
        )
        from_ground = low_returns[lowest[lowest >= 0]]
        if coarser is not None:
            near = coarser.is_near(points[from_ground]) | is_ground[from_ground]
            from_ground = from_ground[near]
        num_fits = _FITS if coarser is None else 1
        planes, enough = self._fit(points, from_ground, num_fits)
        by_class, deviation, known = raster.planes(points[is_ground])
        self.planes = np.where(known[:, None], by_class, planes)
        self.deviation = np.where(known, deviation, np.nan)
        self.has_plane = enough | known
        cell = raster.cells(points)
        self.lowest = raster.minimum(points[:, 2], cell)
        height = points[:, 2] - raster.height_of(self.planes, points, cell)
        self.below = np.where(self.has_plane, raster.minimum(height, cell), -np.inf)

    def _fit(
        self, points: np.ndarray, from_ground: np.ndarray, num_fits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Planes through the lowest returns `from_ground`, and the mask of `Raster.planes`.

        Returns that lie far above a fit are left out of the next one.
        """
        for _ in range(num_fits):
            lowest = points[from_ground]
            planes, _, enough = self.raster.planes(lowest)
            cell = self.raster.cells(lowest)
            above = lowest[:, 2] - self.raster.height_of(planes, lowest, cell)
            is_ground = (above <= _TOLERANCE * self.raster.side) | ~enough[cell]
            if is_ground.all():
                break
            from_ground = from_ground[is_ground]
        return planes, enough

    def is_near(self, points: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) are near the plane of their cell, or of the coarser one if it has
        none. Without any plane they are."""
        cell = self.raster.cells(points)
        height = np.abs(points[:, 2] - self.raster.height_of(self.planes, points, cell))
        otherwise = True if self._coarser is None else self._coarser.is_near(points)
        return np.where(self.has_plane[cell], height <= _TOLERANCE * self.raster.side, otherwise)

    def floor(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lowest allowed height (Q,) of points (Q, 3), and whether it follows the ground there."""
        cell = self.raster.cells(points)
        plane = self.raster.height_of(self.planes, points, cell) + self.below[cell]
        lowest = self.lowest[cell]
        floor = np.where(np.isfinite(lowest), np.fmax(lowest, plane), -np.inf)
        return floor, self.has_plane[cell]
