"""Second-pass candidates: the output of a pass over the output of the first pass.

The first pass selects among children of measured points only. A child of a new point can fill a
place that no child of a measured point reaches, and has more points of the surface around it.
"""

from __future__ import annotations

import numpy as np

from pointup.upsampling.attributes import PARENT
from pointup.upsampling.single_pass.candidates import Candidates
from pointup.upsampling.single_pass.pass_output import PassOutput


class OversampledCandidates:
    """Candidates from the outputs of two passes, block by block of the first pass's store.

    The measured cloud of `second` is the store of `first`, and its `PARENT` are rows of that store.
    """

    def __init__(self, first: PassOutput, second: PassOutput) -> None:
        self._first, self._second = first, second
        self._ptr = first.store.block_ptr
        # For each block of the first pass: blocks of the second one with children of its rows.
        self._sources: list[list[int]] = [[] for _ in range(first.store.num_blocks)]
        for number in range(second.store.num_blocks):
            parent = second.store.read_block(number)["attributes"][PARENT]
            for block in np.unique(np.searchsorted(self._ptr, parent, side="right") - 1).tolist():
                self._sources[block].append(number)

    def candidates(
        self, block: int, spacing: np.ndarray, reach: np.ndarray, quota: np.ndarray
    ) -> Candidates:
        """All points of both passes whose parents are the rows of a block.

        spacing, reach, quota: (N,) values of the rows, see `Candidates`.
        """
        start, stop = self._ptr[block], self._ptr[block + 1]
        with self._first.files.load(block, "points") as saved:
            rows, points, distances = [saved["row"]], [saved["position"]], [saved["distance"]]
        for number in self._sources[block]:
            with self._second.files.load(number, "points") as saved:
                parent, position, distance = (
                    saved[name] for name in ("parent", "position", "distance")
                )
            in_block = (parent >= start) & (parent < stop)
            rows.append(parent[in_block] - start)
            points.append(self._second.store.frame.to_file(position[in_block]))
            distances.append(distance[in_block])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        row = row[order]
        of_row = self._first.store.read_block(block)["position"][row]
        return Candidates(
            np.bincount(row, minlength=stop - start),
            (np.concatenate(points)[order] - of_row).astype(np.float32),
            np.concatenate(distances)[order],
            np.ones(len(row), dtype=np.float32),
            spacing,
            reach,
            quota,
        )
