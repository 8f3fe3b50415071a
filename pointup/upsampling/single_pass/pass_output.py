"""The output of a pass, block by block: for the written cloud, a next pass or a second pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pointup.io.cloud import SYNTHETIC, PointCloud
from pointup.upsampling.attributes import DISTANCE, PARENT, UNCERTAINTY
from pointup.upsampling.ground import class_attribute
from pointup.upsampling.single_pass.candidates import SLACK, Reach
from pointup.upsampling.store.bisection import BlockFiles
from pointup.upsampling.store.point_store import Store

TARGET_COUNT = "target_count"
"""Attribute of points between two passes: number of output points that each is still to give."""


# Of their uncertainty, for the measured point among them when its children are made.
_SHARE_OF_NEW = 0.25
# Relative rounding error of the positions of candidates, which are float32.
ROUNDING = 1e-4


@dataclass(frozen=True)
class PassOutput:
    """The new points of a pass over a store, read from its block files.

    In a later pass, `measured` is the store of the first pass, and `store` has points in the frame
    of `measured`. With `originals` the points of the store are kept beside the new ones.
    """

    store: Store
    files: BlockFiles
    measured: Store | None
    originals: bool
    saved: tuple[str, ...] = ("picked", "points")
    """Kinds of block files that the pass leaves."""

    def cloud(self, block: int, has_uncertainty: bool = False) -> PointCloud:
        """The new points of a block, with their attributes, `SYNTHETIC`, `PARENT`, `DISTANCE` and,
        with `has_uncertainty`, `UNCERTAINTY`.

        `PARENT` is the row of the parent point in the measured store.
        """
        saved = self.files.load(block, "points")
        rows = saved["attributes"]
        attributes = {name: rows[name] for name in rows.dtype.names or ()}
        attributes[SYNTHETIC] = np.ones(len(rows), dtype=np.uint8)
        unit = np.float32(self._measured.frame.unit)
        attributes |= {PARENT: saved["parent"], DISTANCE: saved["distance"] * unit}
        if has_uncertainty:
            attributes[UNCERTAINTY] = saved["uncertainty"] * unit
        return PointCloud(self._in_file(saved["position"]), attributes)

    def delete(self, block: int) -> None:
        """Delete the files of a block that are no longer needed."""
        for what in self.saved:
            self.files.delete(block, what)

    def positions(self, block: int) -> np.ndarray:
        """(M, 3) float64, the new points of a block in the coordinates of the file."""
        return self._in_file(self.values(block, "position"))

    def distances(self, block: int) -> np.ndarray:
        """(M,) float64, distances of the new points of a block to their nearest measured point."""
        return self.values(block, "distance").astype(np.float64) * self._measured.frame.unit

    def uncertainties(self, block: int) -> np.ndarray:
        """(M,) float64, uncertainties of the new points of a block, in the unit of the file."""
        return self.values(block, "uncertainty").astype(np.float64) * self._measured.frame.unit

    def are_beyond(self, block: int) -> np.ndarray:
        """(M,) bool, whether new points are farther from measured ones than the model's `reach`."""
        return self.values(block, "slack") < -ROUNDING * self.values(block, "distance")

    def classes(self, block: int) -> np.ndarray:
        """(M,) classes of the new points of a block; zeros without."""
        attributes = self.values(block, "attributes")
        name = class_attribute(attributes.dtype)
        return np.zeros(len(attributes), np.uint8) if name is None else attributes[name]

    def num_new(self) -> int:
        """Number of new points."""
        return sum(len(self.values(block, "row")) for block in range(self.store.num_blocks))

    def num_points(self) -> int:
        """Number of points after this pass."""
        return self.num_new() + self.originals * len(self.store)

    def largest_target_count(self) -> float:
        """Largest target count of any point, the ratio that later passes have to reach."""
        return max(
            float(self.values(block, "target_count").max())
            for block in range(self.store.num_blocks)
        )

    def for_next_pass(self) -> Iterator[PointCloud]:
        """The cloud after this pass, in the frame of the measured store, for a next pass.

        It has the attributes `PARENT`, `TARGET_COUNT`, `SLACK` and `UNCERTAINTY`.
        """
        for block in range(self.store.num_blocks):
            rows = self.store.read_block(block)
            position, row, target_count, of_points = self._with_originals(block, rows)
            parent = self.store.block_ptr[block] + np.arange(len(rows))
            if self.measured is not None:
                parent = rows["attributes"][PARENT]
                position = self.store.frame.to_file(position)
            if len(position):
                of_parents = {PARENT: parent[row], TARGET_COUNT: target_count[row]}
                yield PointCloud(position, of_parents | of_points)

    def for_second_pass(self) -> Iterator[PointCloud]:
        """The cloud after this pass, in the coordinates of the store, for a second pass over it.

        It has the attributes `PARENT`, here the row in the store, `SLACK` and `UNCERTAINTY`.
        """
        for block in range(self.store.num_blocks):
            position, row, _, of_points = self._with_originals(block, self.store.read_block(block))
            if len(position):
                parent = self.store.block_ptr[block] + row
                yield PointCloud(position, {PARENT: parent} | of_points)

    @property
    def _measured(self) -> Store:
        return self.measured or self.store

    def _in_file(self, position: np.ndarray) -> np.ndarray:
        """Positions (M, 3) of block files in the coordinates of the file."""
        positions = self.store.frame.to_file(position)
        return positions if self.measured is None else self.measured.frame.to_file(positions)

    def values(self, block: int, name: str) -> np.ndarray:
        """What a pass saved of the new points of a block, by its name."""
        return self.files.load(block, "points")[name]

    def _with_originals(
        self, block: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Positions (M, 3), their parents' rows (M,) in the block, the target count (N,) of each
        row of the block, and `SLACK` and `UNCERTAINTY` (M,) float32 of each position."""
        saved = self.files.load(block, "points")
        position, row, slack = saved["position"], saved["row"], saved["slack"].clip(min=0)
        target_count, uncertainty = saved["target_count"], saved["uncertainty"]
        if self.originals:
            number = np.bincount(row, minlength=len(rows)).clip(min=1)
            of_new = _SHARE_OF_NEW * np.bincount(row, uncertainty, len(rows)) / number
            position = np.concatenate([rows["position"], position])
            row = np.append(np.arange(len(rows)), row)
            if self.measured is None:
                before = Reach(self.store).of_block(block), of_new.astype(np.float32)
            else:
                before = rows["attributes"][SLACK], rows["attributes"][UNCERTAINTY]
            slack, uncertainty = np.append(before[0], slack), np.append(before[1], uncertainty)
        return position, row, target_count, {SLACK: slack, UNCERTAINTY: uncertainty}
