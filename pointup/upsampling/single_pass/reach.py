"""Reach: the largest distance of new points to measured points, for any weights of a model."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store

SLACK = "slack"
"""Attribute of points between two passes: the largest distance of a point of the next pass to each
of them. By the triangle inequality, such a point is within reach of a measured point."""


class Reach:
    """The reach of each measured point: `ModelConfig.reach` times its local spacing.

    The first pass computes it block by block and saves it in the store's directory, where later
    passes and other processes read it.
    """

    def __init__(self, measured: Store) -> None:
        self._ptr = measured.block_ptr
        self._files = BlockFiles(measured.directory)

    def save(self, block: int, reach: np.ndarray) -> None:
        """Save the reach (N,) of the points of a block."""
        self._files.save(block, "reach", reach=reach.astype(np.float32))

    def of_block(self, block: int) -> np.ndarray:
        """The reach (N,) float32 of the points of a block."""
        with self._files.load(block, "reach") as saved:
            reach: np.ndarray = saved["reach"]
        return reach

    def slack(self, rows: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Reach minus distance (Q,) of points to their nearest measured points; negative: too far.

        rows: (Q,) rows of the nearest points in the measured store, distance: (Q,) to them.
        """
        block = np.searchsorted(self._ptr, rows, side="right") - 1
        slack = -distance.astype(np.float64)
        for number in np.unique(block).tolist():
            here = block == number
            slack[here] += self.of_block(number)[rows[here] - self._ptr[number]]
        return slack
