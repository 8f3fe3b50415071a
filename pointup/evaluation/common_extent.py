"""The common extent of surveys, the vertical offset between them, and the ground below them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy import ndimage
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError, cKDTree

from pointup.errors import DataError
from pointup.geometry.grids import without_holes
from pointup.io.bounds import Bounds
from pointup.io.length_unit import METRE, LengthUnit

# A larger grid means stray points, or coordinates that are not in metres.
MOST_CELLS = 200_000_000
WHOLE = 0.95
"""Share of the extent that a survey must cover so that nothing is said of it."""
SQUARE = 10.0
"""Side of a square in metres. Most squares of this size have returns from the ground."""
LARGEST = 2.0
"""Largest offset in metres without a note. In most places heights above the ellipsoid and above the
geoid differ by tens of metres."""
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


@dataclass(frozen=True)
class Extent:
    """The area that all surveys cover, as square cells.

    Attributes:
        cell: side length of a cell.
        origin: (2,) float64, lower corner of the first cell.
        covered: (X, Y) bool, the cells that belong to the extent.
    """

    cell: float
    origin: np.ndarray
    covered: np.ndarray

    @property
    def area(self) -> float:
        return float(self.covered.sum()) * self.cell**2

    @property
    def bounds(self) -> Bounds:
        """The rectangle of all cells."""
        corner = self.origin + self.cell * np.array(self.covered.shape)
        return Bounds.of((*self.origin, *corner))

    def place(self, positions: np.ndarray) -> np.ndarray:
        """Flat cell indices (N,) int64 of positions (N, 3); -1 outside the extent."""
        xy = np.floor((positions[:, :2] - self.origin) / self.cell)
        inside = ((xy >= 0) & (xy < self.covered.shape)).all(axis=1)
        xy = np.where(inside[:, None], xy, 0).astype(np.int64)
        inside &= self.covered[xy[:, 0], xy[:, 1]]
        return np.where(inside, xy[:, 0] * self.covered.shape[1] + xy[:, 1], -1)

    def contains(self, positions: np.ndarray) -> np.ndarray:
        """Mask (N,) bool of the positions (N, 3) that lie on the extent."""
        return self.place(positions) >= 0

    def share_within(self, positions: np.ndarray) -> float:
        """Share of the cells that touch the bounding rectangle of the positions (N, 3)."""
        corner = self.origin + np.argwhere(self.covered) * self.cell
        low, high = positions[:, :2].min(axis=0), positions[:, :2].max(axis=0)
        return float(((corner + self.cell >= low) & (corner <= high)).all(axis=1).mean())


def notes_on_partial(extent: Extent, surveys: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each of the named surveys, (N, 3) each, that covers a part of the extent only."""
    return [
        f"the {name} covers {share:.0%} of the common extent, and its figures are of all of it: "
        "cut the other surveys to the same area"
        for name, positions in surveys.items()
        if (share := extent.share_within(positions)) < WHOLE
    ]


def note_on_cells(extent: Extent, surveys: Mapping[str, np.ndarray]) -> list[str]:
    """A note if a cell reaches beyond the area that the named surveys, (N, 3) each, cover."""
    high = np.min([points[:, :2].max(axis=0) for points in surveys.values()], axis=0)
    # `common_extent` has whole cells, up to rounding; a narrow ground gets a single wider one.
    if (extent.bounds.high - high <= 0.02 * extent.cell).all():
        return []
    return ["note: a cell is wider than the common ground, densities are too low; lower --cell"]


def common_extent(surveys: Mapping[str, np.ndarray], cell: float = 1.0) -> Extent:
    """The cells that all of the named surveys, (N, 3) each, cover.

    A survey covers the cells with points, and holes between them up to three cells wide. So a small
    gap in one survey belongs to the extent, and a large gap does not. Raises DataError if no cell
    is covered by all surveys.
    """
    low = np.max([points[:, :2].min(axis=0) for points in surveys.values()], axis=0)
    high = np.min([points[:, :2].max(axis=0) for points in surveys.values()], axis=0)
    if (high < low).any():
        raise DataError(f"the surveys don't overlap: {_ranges(surveys)}")
    # Whole cells only, from the lower corner on: a cell beyond the border would lower the density.
    shape = np.maximum(np.floor((high - low) / cell + 0.01), 1)
    if shape.prod() > MOST_CELLS:
        raise DataError(
            f"{shape.prod():.2g} cells of {cell:g} in common; are the coordinates in metres, "
            f"without stray points? {_ranges(surveys)}"
        )
    width, height = (int(n) for n in shape)
    everywhere = Extent(cell, low, np.ones((width, height), dtype=bool))
    covered = reduce(np.logical_and, [_covered(everywhere, points) for points in surveys.values()])
    if not covered.any():
        raise DataError(f"the surveys have no ground in common: {_ranges(surveys)}")
    return Extent(cell, low, covered)


def whole_extent(points: np.ndarray, cell: float) -> Extent:
    """All cells of the bounding box of points (N, 3)."""
    low, high = points[:, :2].min(axis=0), points[:, :2].max(axis=0)
    width, height = (int(n) for n in np.floor((high - low) / cell) + 1)
    return Extent(cell, low, np.ones((width, height), dtype=bool))


def height_grids(positions: np.ndarray, extent: Extent) -> tuple[np.ndarray, np.ndarray]:
    """Heights of the lowest and highest point of each cell, (X, Y) each; NaN without points."""
    place = extent.place(positions)
    order = np.lexsort((positions[:, 2], place))
    order = order[np.searchsorted(place[order], 0) :]
    cells, first, count = np.unique(place[order], return_index=True, return_counts=True)
    grids = np.full((2, extent.covered.size), np.nan)
    grids[0, cells] = positions[order[first], 2]
    grids[1, cells] = positions[order[first + count - 1], 2]
    low, high = grids.reshape(2, *extent.covered.shape)
    return low, high


def filled(grid: np.ndarray) -> np.ndarray:
    """A grid (X, Y) with every NaN replaced by the nearest value."""
    index = ndimage.distance_transform_edt(
        np.isnan(grid), return_distances=False, return_indices=True
    )
    return grid[tuple(index)]


def _covered(extent: Extent, positions: np.ndarray) -> np.ndarray:
    """Mask (X, Y) of the cells with points, small holes between them filled."""
    occupied = np.zeros(extent.covered.size, dtype=bool)
    place = extent.place(positions)
    occupied[place[place >= 0]] = True
    return without_holes(occupied.reshape(extent.covered.shape))


def _ranges(surveys: Mapping[str, np.ndarray]) -> str:
    parts = []
    for name, points in surveys.items():
        (x0, y0), (x1, y1) = points[:, :2].min(axis=0), points[:, :2].max(axis=0)
        parts.append(f"{name} x {x0:.0f} to {x1:.0f}, y {y0:.0f} to {y1:.0f}")
    return "; ".join(parts)


def vertical_offset(
    source: np.ndarray, reference: np.ndarray, extent: Extent, side: float
) -> float:
    """Median of the lowest height of `source` minus that of `reference`, in their unit, over the
    squares of this side in the extent that have points of both; 0 without such squares.

    Shapes: (N, 3) and (M, 3).
    """
    num_cells = max(1, round(side / extent.cell))
    low, below = (
        _lowest_of_squares(height_grids(points, extent)[0], num_cells)
        for points in (source, reference)
    )
    both = np.isfinite(low) & np.isfinite(below)
    return float(np.median(low[both] - below[both])) if both.any() else 0.0


def notes_on_heights(
    source: np.ndarray, reference: np.ndarray, extent: Extent, unit: LengthUnit
) -> list[str]:
    """A note if the ground of two surveys (N, 3), (M, 3) seems to lie at different heights."""
    offset = vertical_offset(source, reference, extent, unit.of_metres(SQUARE))
    return note_on_offset(offset, unit, "reference")


def note_on_offset(offset: float, unit: LengthUnit, other: str) -> list[str]:
    """A note if the lowest points of a source are this far above those of the `other` survey, or,
    negative, below: by more than `LARGEST`."""
    if abs(offset) <= unit.of_metres(LARGEST):
        return []
    where = "above" if offset > 0 else "below"
    return [
        f"the lowest points of the source are {abs(offset):.3g} {unit.name} {where} those of the "
        f"{other}: are the heights of both in the same system, above the geoid or the ellipsoid?"
    ]


def _lowest_of_squares(grid: np.ndarray, num_cells: int) -> np.ndarray:
    """The lowest value of each square of `num_cells` cells a side; infinite where all are NaN."""
    padding = [(0, -size % num_cells) for size in grid.shape]
    low = np.pad(np.where(np.isnan(grid), np.inf, grid), padding, constant_values=np.inf)
    width, height = (size // num_cells for size in low.shape)
    return low.reshape(width, num_cells, height, num_cells).min(axis=(1, 3))


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
