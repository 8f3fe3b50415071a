"""Which cells of a grid a survey covers: those with points, and small holes between them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import ndimage

# Largest width in cells of a hole that counts as covered: shadows and water have no points.
LARGEST_HOLE = 3


def without_holes(
    occupied: np.ndarray, beyond: Literal["constant", "symmetric"] = "constant"
) -> np.ndarray:
    """Mask (X, Y) of the covered cells, from the mask (X, Y) of the cells with points.

    Holes up to three cells wide are filled. Beyond the grid there are no points, or with
    "symmetric" its mirror image, for a grid that is cut out of a larger survey.
    """
    # Twice the width of a hole, so that the border of the mirror image does not reach the grid.
    margin = 2 * LARGEST_HOLE
    block = np.ones((LARGEST_HOLE + 1, LARGEST_HOLE + 1), dtype=bool)
    closed = ndimage.binary_closing(np.pad(occupied, margin, mode=beyond), block)
    return closed[margin:-margin, margin:-margin]
