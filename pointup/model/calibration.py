"""Calibration of predicted errors: the distance that nine in ten points stay within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    distances to the true surface that nine in ten points with this prediction stay within at an
    upsampling ratio of `ratio`. With `log_distances_at_2`, which are those at 2, they change in
    between with 1 / ratio. `scatter` times that of the measured points is added, in squares.
    """

    log_errors: Sequence[float]
    log_distances: Sequence[float]
    ratio: float = 2.0
    log_distances_at_2: Sequence[float] = ()
    scatter: float = 0.0

    @classmethod
    def fit(
        cls, log_error: np.ndarray, distance: np.ndarray, ratio: np.ndarray | None = None
    ) -> Calibration:
        """The calibration of points with predictions (M,) and distances (M,) in local spacings,
        made at ratios (M,) of at most 2 and larger ones, or at any one.

        The knots are groups of equally many points: their median prediction, and the distance that
        nine in ten of them stay within, made monotone by isotonic regression.
        """
        if ratio is not None and 0 < (is_few := ratio <= 2).sum() < len(ratio):
            many, few = (cls.fit(log_error[of], distance[of]) for of in (~is_few, is_few))
            at_2 = np.interp(many.log_errors, few.log_errors, few.log_distances)
            larger = round(float(np.median(ratio[~is_few])), 4)
            return replace(many, ratio=larger, log_distances_at_2=np.round(at_2, 4).tolist())
        order = np.argsort(log_error, kind="stable")
        groups = np.array_split(order, max(1, min(_NUM_GROUPS, len(order) // _LEAST_POINTS)))
        middles = [float(np.median(log_error[rows])) for rows in groups]
        within = [np.quantile(distance[rows], SHARE) for rows in groups]
        rising = isotonic_regression(np.log(np.maximum(within, _SMALLEST))).x
        return cls(np.round(middles, 4).tolist(), np.round(rising, 4).tolist())

    def within(self, log_error: np.ndarray, ratio: np.ndarray | float = 2.0) -> np.ndarray:
        """Distances (M,) float64 in local spacings for log errors (M,), at ratios (M,)."""
        log_distance = np.interp(log_error, self.log_errors, self.log_distances)
        if self.log_distances_at_2:
            at_2 = np.interp(log_error, self.log_errors, self.log_distances_at_2)
            share = np.interp(1 / np.asarray(ratio), (1 / self.ratio, 0.5), (0.0, 1.0))
            log_distance += share * (at_2 - log_distance)
        return np.exp(log_distance)
