"""An order of work on blocks that border on each other."""

from __future__ import annotations

import numpy as np


def touching(low: np.ndarray, high: np.ndarray, box: int, margin: float = 0.0) -> np.ndarray:
    """Indices of the boxes, low and high (B, 3), that touch one of them, itself left out.

    Or come closer to it than `margin`, along every axis.
    """
    touched = ((low <= high[box] + margin) & (high >= low[box] - margin)).all(axis=1)
    touched[box] = False
    return np.flatnonzero(touched)


def color_boxes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A color (B,) int64 for each box such that boxes which touch have different ones."""
    colors = np.full(len(low), -1, dtype=np.int64)
    for box in range(len(low)):
        taken = colors[touching(low, high, box)]
        colors[box] = np.setdiff1d(np.arange(len(taken) + 1), taken)[0]
    return colors
