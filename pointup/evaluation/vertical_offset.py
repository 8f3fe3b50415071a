"""The vertical offset between two surveys, which those in different height systems have."""

from __future__ import annotations

import numpy as np

from pointup.evaluation.common_extent import Extent
from pointup.io.length_unit import LengthUnit

CELL = 10.0
"""Side of a cell in metres. Most cells of this size have returns from the ground."""
LARGEST = 2.0
"""Largest offset in metres without a note. In most places heights above the ellipsoid and above the
geoid differ by tens of metres."""
_FEWEST = 2  # points of a survey in a cell


def vertical_offset(source: np.ndarray, reference: np.ndarray, side: float) -> float:
    """Median over cells of the lowest height of `source` minus that of `reference`, in their unit.

    Shapes: (N, 3) and (M, 3). Cells are squares with this side that have at least two points of
    both. 0 without such cells.
    """
    lowest = [_lowest_by_cell(points, side) for points in (source, reference)]
    _, rows, others = np.intersect1d(
        lowest[0][0], lowest[1][0], assume_unique=True, return_indices=True
    )
    if not len(rows):
        return 0.0
    return float(np.median(lowest[0][1][rows] - lowest[1][1][others]))


def notes_on_heights(
    source: np.ndarray, reference: np.ndarray, extent: Extent, unit: LengthUnit
) -> list[str]:
    """A note if the ground of two surveys (N, 3), (M, 3) seems to lie at different heights."""
    source, reference = (points[extent.contains(points)] for points in (source, reference))
    offset = vertical_offset(source, reference, unit.of_metres(CELL))
    if abs(offset) <= unit.of_metres(LARGEST):
        return []
    where = "above" if offset > 0 else "below"
    return [
        f"the lowest points of the source are {abs(offset):.3g} {unit.name} {where} those of the "
        "reference: are the heights of both in the same system, above the geoid or the ellipsoid?"
    ]


def _lowest_by_cell(points: np.ndarray, side: float) -> tuple[np.ndarray, np.ndarray]:
    """Cells as complex numbers (C,), unique and ascending, and the lowest heights (C,) in them."""
    cells = np.floor(points[:, :2] / side)
    number = cells[:, 0] + 1j * cells[:, 1]
    order = np.lexsort((points[:, 2], number.imag, number.real))
    found, first, count = np.unique(number[order], return_index=True, return_counts=True)
    enough = count >= _FEWEST
    return found[enough], points[order[first[enough]], 2]
