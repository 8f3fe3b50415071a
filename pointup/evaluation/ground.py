"""Finds the ground points of a reference survey, and triangulates them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from scipy import ndimage
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError, cKDTree

from pointup.evaluation.common_extent import Extent, filled, height_grids
from pointup.io.length_unit import METRE, LengthUnit

GROUND, WATER = 2, 9
"""ASPRS classes that count as ground. Water alone is a part of the ground only."""
LARGEST_OBJECT = 18.0
"""Largest width of an object in metres, in surveys without classes; wider ones count as ground."""
CLASSIFIED = "the reference's points of classes 2 and 9, triangulated"
LOWEST = "the reference's lowest points, triangulated"
STEEPEST = 0.15
"""Steepest slope of the ground relative to the plane below the survey; steeper is an object."""
MOST_VERTICES = 2_000_000
"""Largest number of triangulated ground points, to limit memory. With more, the lowest points of
larger cells are used."""
FEWEST_CLASSIFIED, SMALLEST_CLASSIFIED = 10, 0.01
"""Points of the class ground, and share of the cells with points that have some, from which on the
classes of a survey define its ground."""
_PLANE_FITS, _PULL_FROM_ABOVE = 12, 0.01


class TriangulatedGround:
    """Height of the ground at any place, by linear interpolation between ground points.

    Attributes:
        vertices: (V, 3) float64, the ground points.
        origin: description of these points, for the report.
    """

    def __init__(self, vertices: np.ndarray, origin: str) -> None:
        self.vertices, self.origin = vertices, origin
        self._centre = vertices.mean(axis=0)
        local = vertices - self._centre
        self._nearest = cKDTree(local[:, :2])
        self._heights = local[:, 2]
        self._surface: LinearNDInterpolator | None = None
        # Fewer than three points, or all on one line, span no triangle.
        with suppress(QhullError):
            self._surface = LinearNDInterpolator(local[:, :2], local[:, 2])

    def height(self, positions: np.ndarray) -> np.ndarray:
        """Ground height (N,) at positions (N, 3); outside all triangles of the nearest vertex."""
        xy = positions[:, :2] - self._centre[:2]
        height = np.full(len(xy), np.nan)
        if self._surface is not None and len(xy):
            height = np.asarray(self._surface(xy))
        beyond = np.isnan(height)
        if beyond.any():
            height[beyond] = self._heights[self._nearest.query(xy[beyond])[1]]
        return height + self._centre[2]

    def above(self, positions: np.ndarray) -> np.ndarray:
        """Heights (N,) of positions (N, 3) above the ground; negative below it."""
        return positions[:, 2] - self.height(positions)


def find_ground(
    points: np.ndarray,
    extent: Extent,
    classification: np.ndarray | None = None,
    unit: LengthUnit = METRE,
) -> TriangulatedGround:
    """The ground of a survey (N, 3) that has points on the extent.

    With classes, ground points are the lowest points of classes 2 and 9 in cells of half the
    extent's cell size. Without, or with class 2 in less than 1 % of the cells, they are the lowest
    points of all cells, objects removed by the simple morphological filter (Pingel et al. 2013)
    after subtraction of a plane.
    """
    if classification is not None and _has_ground(points, extent, classification):
        classified = points[np.isin(classification, (GROUND, WATER))]
        cell = max(extent.cell / 2, _smallest_cell(extent))
        return TriangulatedGround(_lowest_of_cells(classified, cell), CLASSIFIED)
    lowest = _lowest_of_cells(points[extent.contains(points)], extent.cell, extent.origin)
    level = lowest.copy()
    level[:, 2] -= _plane_below(lowest)
    surface = filled(height_grids(level, extent)[0])
    is_object = np.zeros(surface.shape, dtype=bool)
    cell = extent.cell
    for reach in range(1, round(unit.of_metres(LARGEST_OBJECT) / 2 / cell) + 1):
        window = (2 * reach + 1, 2 * reach + 1)
        opened = ndimage.grey_opening(surface, window, mode="nearest")
        is_object |= surface - opened > STEEPEST * reach * cell
        surface = opened
    is_ground = ~is_object.reshape(-1)[extent.place(lowest)]
    cell = max(cell, _smallest_cell(extent))
    ground = TriangulatedGround(_lowest_of_cells(lowest[is_ground], cell), LOWEST)
    # Lowest points below the triangulation are ground, too: it may bridge a hollow.
    is_ground |= ground.above(lowest) < 0
    return TriangulatedGround(_lowest_of_cells(lowest[is_ground], cell), LOWEST)


def _has_ground(points: np.ndarray, extent: Extent, classification: np.ndarray) -> bool:
    """Whether enough points of the class ground lie on the extent."""
    place = extent.place(points)
    ground = place[(classification == GROUND) & (place >= 0)]
    num_cells = len(np.unique(place[place >= 0]))
    num_ground = len(np.unique(ground))
    return len(ground) >= FEWEST_CLASSIFIED and num_ground >= SMALLEST_CLASSIFIED * num_cells


def _lowest_of_cells(
    points: np.ndarray, cell: float, origin: np.ndarray | None = None
) -> np.ndarray:
    """The lowest point of every square cell with points."""
    corner = points[:, :2].min(axis=0) if origin is None else origin
    column, row = np.floor((points[:, :2] - corner) / cell).astype(np.int64).T
    order = np.lexsort((points[:, 2], row, column))
    is_first = (np.diff(column[order], prepend=-1) != 0) | (np.diff(row[order], prepend=-1) != 0)
    return points[order[is_first]]


def _smallest_cell(extent: Extent) -> float:
    return float(np.sqrt(extent.area / MOST_VERTICES))


def _plane_below(points: np.ndarray) -> np.ndarray:
    """Height (N,) at points (N, 3) of a plane below nearly all of them.

    The fit is asymmetric least squares: points above the plane have a small weight.
    """
    xy = points[:, :2] - points[:, :2].mean(axis=0)
    terms = np.column_stack([xy, np.ones(len(xy))])
    weight = np.ones(len(points))
    height = np.zeros(len(points))
    for _ in range(_PLANE_FITS):
        root = np.sqrt(weight)
        height = terms @ np.linalg.lstsq(terms * root[:, None], points[:, 2] * root)[0]
        weight = np.where(points[:, 2] > height, _PULL_FROM_ABOVE, 1.0)
    return height
