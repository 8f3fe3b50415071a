"""Calibration of predicted errors: the distance that nine in ten points stay within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

SHARE = 0.9
"""Share of the points that stay within their uncertainty."""
_NUM_GROUPS, _LEAST_POINTS = 14, 100
_SMALLEST = 1e-4  # Distance in spacings; without one, a truth without noise has logarithms of 0.


@dataclass(frozen=True)
class Calibration:
    """A monotone map from predicted errors to distances in local spacings.

    `log_errors`, ascending, are logarithms of predicted errors, and `log_distances` those of the
    distances to the true surface that nine in ten points with this prediction stay within.
    """

    log_errors: Sequence[float]
    log_distances: Sequence[float]

    @classmethod
    def fit(cls, log_error: np.ndarray, distance: np.ndarray) -> Calibration:
        """The calibration of points with predictions (M,) and distances (M,) in local spacings.

        The knots are groups of equally many points: their median prediction, and the distance that
        nine in ten of them stay within, made monotone by isotonic regression.
        """
        order = np.argsort(log_error, kind="stable")
        groups = np.array_split(order, max(1, min(_NUM_GROUPS, len(order) // _LEAST_POINTS)))
        middles = [float(np.median(log_error[rows])) for rows in groups]
        within = [np.quantile(distance[rows], SHARE) for rows in groups]
        rising = isotonic_regression(np.log(np.maximum(within, _SMALLEST))).x
        return cls(np.round(middles, 4).tolist(), np.round(rising, 4).tolist())

    def within(self, log_error: np.ndarray) -> np.ndarray:
        """Distances (M,) float64 in local spacings for log errors (M,)."""
        return np.exp(np.interp(log_error, self.log_errors, self.log_distances))
