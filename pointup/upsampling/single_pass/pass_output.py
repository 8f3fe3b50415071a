"""What a pass has made, block after block: for the output, for a next pass or for a draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pointup.io.cloud import PointCloud
from pointup.upsampling.attributes import DISTANCE, PARENT, SYNTHETIC
from pointup.upsampling.single_pass.reach import SLACK, Reach
from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store

TARGET_COUNT = "wanted"
"""Attribute of points between two passes: how many each of them is still to become."""


@dataclass(frozen=True)
class PassOutput:
    """The new points of a pass over a store, in its block files.

    Of a later pass, `measured` is the cloud that the first one began with, in whose coordinates the
    store is. With `originals` the points of the store are kept beside the new ones.
    """

    store: Store
    files: BlockFiles
    measured: Store | None
    originals: bool

    def cloud(self, block: int) -> PointCloud:
        """The points made in a block, with their attributes, `SYNTHETIC`, `PARENT` and `DISTANCE`.

        `PARENT` is here the row in the measured store of the point that each came from.
        """
        anchor = self.store.anchor
        if self.measured is not None:
            anchor = self.measured.anchor + anchor
        with self.files.load(block, "points") as saved:
            rows = saved["attributes"]
            attributes = {name: rows[name] for name in rows.dtype.names or ()}
            attributes[SYNTHETIC] = np.ones(len(rows), dtype=np.uint8)
            attributes |= {PARENT: saved["parent"], DISTANCE: saved["distance"]}
            return PointCloud(saved["position"] + anchor, attributes)

    def delete(self, block: int) -> None:
        """Delete the files of a block, of which nothing is needed any more."""
        for what in ("picked", "points"):
            self.files.delete(block, what)

    def parents(self, block: int) -> np.ndarray:
        """(M,) int64, `PARENT` of the points made in a block."""
        return self._load(block, "parent")

    def num_new(self) -> int:
        """Points made."""
        return sum(len(self._load(block, "row")) for block in range(self.store.num_blocks))

    def farthest(self) -> float:
        """Largest distance of a point made to the nearest measured one."""
        blocks = range(self.store.num_blocks)
        return max(float(self._load(block, "distance").max(initial=0.0)) for block in blocks)

    def num_below(self) -> int:
        """Points lower than every measured one around them; 0 where heights have no meaning."""
        return sum(int(self._load(block, "num_below")) for block in range(self.store.num_blocks))

    def num_points(self) -> int:
        """Points there are now."""
        return self.num_new() + self.originals * len(self.store)

    def largest_target_count(self) -> float:
        """Largest ratio that is left to reach."""
        return max(
            float(self._load(block, "wanted").max()) for block in range(self.store.num_blocks)
        )

    def for_next_pass(self) -> Iterator[PointCloud]:
        """The cloud as it is after this pass, in the coordinates of the measured one's store.

        With the attributes `PARENT`, `TARGET_COUNT` and `SLACK`.
        """
        anchor = np.zeros(3) if self.measured is None else self.store.anchor
        for block in range(self.store.num_blocks):
            rows = self.store.read_block(block)
            position, row, wanted, slack = self._with_originals(block, rows)
            parent = self.store.block_ptr[block] + np.arange(len(rows))
            if self.measured is not None:
                parent = rows["attributes"][PARENT]
            if len(position):
                yield PointCloud(
                    position + anchor,
                    {PARENT: parent[row], TARGET_COUNT: wanted[row], SLACK: slack},
                )

    def for_second_pass(self) -> Iterator[PointCloud]:
        """The cloud as it is after this pass, in the coordinates of the store.

        With the attributes `SLACK` and `PARENT`, here the row of the store that each point came
        from.
        """
        for block in range(self.store.num_blocks):
            position, row, _, slack = self._with_originals(block, self.store.read_block(block))
            if len(position):
                yield PointCloud(
                    position, {PARENT: self.store.block_ptr[block] + row, SLACK: slack}
                )

    def _load(self, block: int, name: str) -> np.ndarray:
        with self.files.load(block, "points") as saved:
            values: np.ndarray = saved[name]
        return values

    def _with_originals(
        self, block: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Positions (M, 3), rows (M,) in the block, what each row is still to become, and how far
        (M,) float32 from each position further points may lie."""
        with self.files.load(block, "points") as saved:
            position, row, wanted = saved["position"], saved["row"], saved["wanted"]
            slack = saved["slack"]
        if self.originals:
            position = np.concatenate([rows["position"], position])
            row = np.append(np.arange(len(rows)), row)
            of_rows = (
                Reach(self.store).of_block(block)
                if self.measured is None
                else rows["attributes"][SLACK]
            )
            slack = np.append(of_rows, slack)
        return position, row, wanted, slack
