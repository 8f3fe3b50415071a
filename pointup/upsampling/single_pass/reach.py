"""How far from measured points new ones may lie: a bound that holds whatever a model says."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store

SLACK = "slack"
"""Attribute of points between two passes: how far from each of them a point of the next pass may
lie. By the triangle inequality that point is in reach of the measured one nearest to the former."""


class Reach:
    """How far from each measured point new ones may lie: `REACH` times its local spacing.

    The first pass finds it block by block and saves it beside the store of the measured points,
    where later passes and other processes look it up.
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
        """How much farther points (Q,) might be from their nearest measured ones; below 0: too far.

        rows: (Q,) rows of the nearest in the measured store, distance: (Q,) to them.
        """
        block = np.searchsorted(self._ptr, rows, side="right") - 1
        slack = -distance.astype(np.float64)
        for number in np.unique(block).tolist():
            here = block == number
            slack[here] += self.of_block(number)[rows[here] - self._ptr[number]]
        return slack
