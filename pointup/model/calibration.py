"""Calibration of predicted errors: the distance that nine in ten points stay within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHARE = 0.9
"""Share of the points that stay within their uncertainty."""


@dataclass(frozen=True)
class Calibration:
    """A monotone map from predicted errors to distances in local spacings.

    `log_errors`, ascending, are logarithms of predicted errors, and `log_distances` those of the
    distances to the true surface that nine in ten points with this prediction stay within.
    """

    log_errors: Sequence[float]
    log_distances: Sequence[float]

    def within(self, log_error: np.ndarray) -> np.ndarray:
        """Distances (M,) float64 in local spacings for log errors (M,)."""
        return np.exp(np.interp(log_error, self.log_errors, self.log_distances))
