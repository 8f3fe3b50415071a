"""How far from measured points new ones may lie: a bound that holds whatever a model says."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.blockfiles import BlockFiles
from pointup.upsampling.store import Store

SLACK = "slack"
"""Attribute of points between two passes: how far from each of them a point of the next pass may
lie. By the triangle inequality that point is within reach of a measured one, too."""


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
        """How much nearer than they must be points (Q,) are to measured ones; below 0: too far.

        rows: (Q, k) rows of the measured store, -1 for none, distance: (Q, k) to each of them.
        """
        if not rows.size:
            return np.zeros(len(rows))
        block = np.searchsorted(self._ptr, rows, side="right") - 1
        slack = np.full(rows.shape, -np.inf)
        for number in np.unique(block[rows >= 0]).tolist():
            here = block == number
            reach = self.of_block(number)[rows[here] - self._ptr[number]]
            slack[here] = reach - distance[here]
        return slack.max(axis=1)
