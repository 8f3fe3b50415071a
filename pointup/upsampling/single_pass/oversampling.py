"""A pass over what a pass has made, whose points are its candidates in a second choice.

The first choice is among children of the measured points alone. A child of a child can lie where
none of these comes to, and knows more of the surface around it.
"""

from __future__ import annotations

import numpy as np

from pointup.upsampling.attributes import PARENT
from pointup.upsampling.single_pass.candidates import Candidates
from pointup.upsampling.single_pass.pass_output import PassOutput


class OversampledCandidates:
    """The points of a pass, `made`, and those of a pass over them, block by block of the former.

    Of the latter, `finer`, the measured cloud is the former's store, and `PARENT` its rows.
    """

    def __init__(self, made: PassOutput, finer: PassOutput) -> None:
        self._made, self._finer = made, finer
        self._ptr = made.store.block_ptr
        # Of each block of the former, those of the latter that have children of its rows.
        self._sources: list[list[int]] = [[] for _ in range(made.store.num_blocks)]
        for number in range(finer.store.num_blocks):
            parent = finer.store.read_block(number)["attributes"][PARENT]
            for block in np.unique(np.searchsorted(self._ptr, parent, side="right") - 1).tolist():
                self._sources[block].append(number)

    def candidates(
        self, block: int, spacing: np.ndarray, reach: np.ndarray, quota: np.ndarray
    ) -> Candidates:
        """All points that came from the rows of a block.

        spacing, reach, quota: (N,), those of the rows.
        """
        start, stop = self._ptr[block], self._ptr[block + 1]
        with self._made.files.load(block, "points") as saved:
            rows, points, distances = [saved["row"]], [saved["position"]], [saved["distance"]]
        for number in self._sources[block]:
            with self._finer.files.load(number, "points") as saved:
                parent, position, distance = (
                    saved[name] for name in ("parent", "position", "distance")
                )
            ours = (parent >= start) & (parent < stop)
            rows.append(parent[ours] - start)
            points.append(position[ours] + self._finer.store.anchor)
            distances.append(distance[ours])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        row = row[order]
        of_row = self._made.store.read_block(block)["position"][row]
        return Candidates(
            np.bincount(row, minlength=stop - start),
            (np.concatenate(points)[order] - of_row).astype(np.float32),
            np.concatenate(distances)[order],
            spacing,
            reach,
            quota,
        )
