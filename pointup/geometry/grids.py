"""Grids: Morton codes of cells, near in number where near in space, and cells of covered ground;
boxes around points, hashes and evenly spread numbers.

Morton 1966, "A computer oriented geodetic data base".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

# Shifts and masks that spread 21 bits to every third bit.
_STEPS = (
    (32, 0x001F00000000FFFF),
    (16, 0x001F0000FF0000FF),
    (8, 0x100F00F00F00F00F),
    (4, 0x10C30C30C30C30C3),
    (2, 0x1249249249249249),
)


def morton_codes(cells: np.ndarray) -> np.ndarray:
    """The codes (N,) int64 of cells (N, D) int64 of up to three axes, each from 0 to 2**21 - 1."""
    code = np.zeros(len(cells), dtype=np.int64)
    for axis in range(cells.shape[1]):
        bits = cells[:, axis]
        for shift, mask in _STEPS:
            bits = (bits | (bits << shift)) & mask
        code |= bits << axis
    return code


def codes_in_cube(points: np.ndarray, bits: int) -> np.ndarray:
    """The codes (N,) int64 of points (N, D) in a cube around them, 2**bits cells wide."""
    low, _ = box_of(points)
    side = max(float((points - low).max()), 1e-12)
    return morton_codes(((points - low) * ((2**bits - 1) / side)).astype(np.int64))


def box_of(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest coordinates (D,) of points (N, D), N > 0.

    NumPy takes twenty times as long along the first axis of an array with short rows.
    """
    axes = points.T
    return np.array([axis.min() for axis in axes]), np.array([axis.max() for axis in axes])


def in_box(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Mask (N,) of the points (N, D or more) in a box from `low` to `high` (D,), with its border.

    Axis by axis, a tenth of the time of a comparison of rows.
    """
    inside = np.ones(len(points), dtype=bool)
    for values, first, last in zip(points.T, low, high, strict=False):
        inside &= (values >= first) & (values <= last)
    return inside


def hashed(numbers: Iterable[np.ndarray]) -> np.ndarray:
    """Hashes (N,) uint64 of several numbers (N,) of 64 bits each, by their bits."""
    key: Any = np.uint64(0)
    for number in numbers:
        key = (key ^ number.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def spread(number: int, most: int) -> np.ndarray:
    """Numbers from 0 to `number` - 1, at most `most` of them, evenly spread."""
    return np.linspace(0, number - 1, min(number, most)).astype(np.int64)


# Largest width in cells of a hole that counts as covered: shadows and water have no points.
LARGEST_HOLE = 3


def without_holes(
    occupied: np.ndarray, beyond: Literal["constant", "symmetric"] = "constant"
) -> np.ndarray:
    """Mask (X, Y) of the covered cells, from the mask (X, Y) of the cells with points.

    Holes up to three cells wide are filled. Beyond the grid there are no points, or with
    "symmetric" its mirror image, for a grid that is cut out of a larger survey.
    """
    from scipy import ndimage  # It takes a tenth of a second, and few commands need it.

    # Twice the width of a hole, so that the border of the mirror image does not reach the grid.
    margin = 2 * LARGEST_HOLE
    block = np.ones((LARGEST_HOLE + 1, LARGEST_HOLE + 1), dtype=bool)
    closed = ndimage.binary_closing(np.pad(occupied, margin, mode=beyond), block)
    return closed[margin:-margin, margin:-margin]
