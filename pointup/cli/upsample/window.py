"""Collects the points of a cloud, or of a part of a large one, for `pointup upsample --picture`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pointup.io.length_unit import UNKNOWN, length_unit
from pointup.upsampling.store.point_store import Store

MAX_POINTS = 1_000_000
"""A cloud of at most this many measured points is shown as a whole."""

_SPACINGS = 400
_FLAT = 0.25


class Window:
    """The points of a cloud before and after upsampling; of a large one, those near its middle."""

    def __init__(self, store: Store) -> None:
        self._low, self._high = np.full(2, -np.inf), np.full(2, np.inf)
        lows, highs = store.bounds_in_file()
        extent = highs.max(axis=0) - lows.min(axis=0)
        self._is_flat = bool(extent[2] < _FLAT * extent[:2].max())
        if len(store) > MAX_POINTS:
            middle = int(np.searchsorted(store.block_ptr, len(store) // 2, side="right")) - 1
            low, high = lows[middle, :2], highs[middle, :2]
            points = store.block_ptr[middle + 1] - store.block_ptr[middle]
            half = _SPACINGS / 2 * np.sqrt((high - low).prod() / points)
            self._low, self._high = (low + high) / 2 - half, (low + high) / 2 + half
        touched = (lows[:, :2] <= self._high) & (highs[:, :2] >= self._low)
        self._before, self._new = [], list[np.ndarray]()
        self._num_before, self._num_new = int(store.num_read.sum()), 0
        for block in np.flatnonzero(touched.all(axis=1)).tolist():
            positions = store.frame.to_file(store.read_block(block)["position"])
            self._before.append(self._inside(positions))

    def add(self, positions: np.ndarray) -> None:
        """Add new points (N, 3)."""
        self._num_new += len(positions)
        self._new.append(self._inside(positions))

    def draw(self, source: Path, with_originals: bool, path: Path, has_heights: bool) -> None:
        """Write the picture, with the numbers of points of the whole files in its captions.

        Points that are copied without upsampling are counted, but not drawn. Raises FileError if
        the picture can't be written.
        """
        from pointup.visualization import before_after_picture

        before = np.concatenate(self._before)
        after = np.concatenate([before[: with_originals * len(before)], *self._new])
        # A cloud that is flat and wide is a survey, too.
        vertical = self._is_flat or has_heights
        unit = length_unit(source)
        totals = self._num_before, with_originals * self._num_before + self._num_new
        name = "" if unit == UNKNOWN else unit.name
        before_after_picture(before, after, path, vertical=vertical, unit=name, totals=totals)

    def _inside(self, positions: np.ndarray) -> np.ndarray:
        xy = positions[:, :2]
        return positions[((xy >= self._low) & (xy <= self._high)).all(axis=1)]
