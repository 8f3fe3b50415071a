"""A rectangle in x and y, by which a part of a survey is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pointup.errors import ConfigError
from pointup.geometry.grids import in_box


@dataclass(frozen=True)
class Bounds:
    """The points with low <= (x, y) < high, in the coordinates of the file.

    Attributes:
        low, high: (2,) the corners.
    """

    low: tuple[float, float]
    high: tuple[float, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Bounds:
        """From xmin, ymin, xmax, ymax; raises ConfigError for a rectangle without an area."""
        xmin, ymin, xmax, ymax = values
        if not (np.isfinite(values).all() and xmin < xmax and ymin < ymax):
            raise ConfigError(
                f"--bounds {' '.join(f'{value:.10g}' for value in values)}: give XMIN YMIN XMAX "
                "YMAX, with XMIN below XMAX and YMIN below YMAX"
            )
        return cls((xmin, ymin), (xmax, ymax))

    def grown(self, margin: float) -> Bounds:
        """The same rectangle with `margin` more on each side."""
        return Bounds(
            (self.low[0] - margin, self.low[1] - margin),
            (self.high[0] + margin, self.high[1] + margin),
        )

    def inside(self, positions: np.ndarray) -> np.ndarray:
        """Mask (N,) of the points (N, 3) inside."""
        return in_box(positions, np.array(self.low), np.nextafter(self.high, -np.inf))

    def touch(self, low: np.ndarray, high: np.ndarray) -> bool:
        """Whether a rectangle from `low` to `high` (2,) may have points inside."""
        return bool((low < self.high).all() and (high >= self.low).all())
