"""The common extent of surveys, and the vertical offset between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy import ndimage

from pointup.errors import DataError
from pointup.geometry.grids import without_holes
from pointup.io.length_unit import LengthUnit

# A larger grid means stray points, or coordinates that are not in metres.
MOST_CELLS = 200_000_000


WHOLE = 0.95
"""Share of the extent that a survey must cover so that nothing is said of it."""


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

    def density(self, positions: np.ndarray) -> np.ndarray:
        """Points per unit of area in each cell, (X, Y) float64; NaN outside the extent."""
        place = self.place(positions)
        count = np.bincount(place[place >= 0], minlength=self.covered.size)
        density = count.reshape(self.covered.shape) / self.cell**2
        return np.where(self.covered, density, np.nan)


def notes_on_partial(extent: Extent, surveys: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each of the named surveys, (N, 3) each, that covers a part of the extent only."""
    return [
        f"the {name} covers {share:.0%} of the common extent, and its figures are of all of it: "
        "cut the other surveys to the same area"
        for name, positions in surveys.items()
        if (share := extent.share_within(positions)) < WHOLE
    ]


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


SQUARE = 10.0
"""Side of a square in metres. Most squares of this size have returns from the ground."""
LARGEST = 2.0
"""Largest offset in metres without a note. In most places heights above the ellipsoid and above the
geoid differ by tens of metres."""


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
    lowest: np.ndarray = low.reshape(width, num_cells, height, num_cells).min(axis=(1, 3))
    return lowest
