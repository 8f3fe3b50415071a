"""Colours blocks such that touching blocks can be processed one after another."""

from __future__ import annotations

import numpy as np


def touching(low: np.ndarray, high: np.ndarray, box: int, margin: float = 0.0) -> np.ndarray:
    """Indices of the other boxes that touch box number `box`, or lie within `margin` of it.

    low, high: (B, 3) bounds of the boxes. The margin applies along every axis.
    """
    touched = ((low <= high[box] + margin) & (high >= low[box] - margin)).all(axis=1)
    touched[box] = False
    return np.flatnonzero(touched)


def color_boxes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A colour (B,) int64 for each box; boxes that touch have different colours."""
    colors = np.full(len(low), -1, dtype=np.int64)
    for box in range(len(low)):
        taken = colors[touching(low, high, box)]
        colors[box] = np.setdiff1d(np.arange(len(taken) + 1), taken)[0]
    return colors
