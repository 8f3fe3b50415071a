"""The vertical offset between two surveys, which those in different height systems have."""

from __future__ import annotations

import numpy as np

from pointup.evaluation.common_extent import Extent, height_grids
from pointup.io.length_unit import LengthUnit

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
