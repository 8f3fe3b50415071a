"""Target counts of a pass: output points for each point of its store and for each cell."""

from __future__ import annotations

import numpy as np
import torch

from pointup.geometry.midpoints import slots_for_ratio
from pointup.model.config import ModelConfig
from pointup.upsampling.options import MAX_LOCAL_RATIO, PASS_RATIO, UpsampleOptions
from pointup.upsampling.single_pass.density import UnreachedArea, ratios_for_density
from pointup.upsampling.single_pass.pass_output import TARGET_COUNT
from pointup.upsampling.single_pass.quotas import by_quota, by_ratio
from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store


class TargetCounts:
    """Target counts of one pass over a store.

    `ratio` is the ratio of this pass; None computes it from the target density, point by point. In
    a later pass (`is_first` is False) it is the attribute `TARGET_COUNT` of the points.
    """

    def __init__(
        self,
        store: Store,
        options: UpsampleOptions,
        config: ModelConfig,
        ratio: float | None,
        is_first: bool,
    ) -> None:
        self._store, self._options, self._config = store, options, config
        self._ratio, self._is_first = ratio, is_first

    def ratios(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Ratios (N,) of the points of a block in this pass, and those (N,) left for the next.

        The first pass saves the `UnreachedArea` of a target density.
        """
        size = int(self._store.block_ptr[block + 1] - self._store.block_ptr[block])
        if self._ratio is not None:
            return np.full(size, self._ratio), np.ones(size)
        if self._is_first:
            assert self._options.density is not None
            largest = max(MAX_LOCAL_RATIO, self._config.max_pass_ratio)
            needed = ratios_for_density(self._store, block, self._options.density)
            UnreachedArea(self._store).save(block, needed, largest)
            target_count = needed.clip(1.0, largest)
        else:
            target_count = self._store.read_block(block)["attributes"][TARGET_COUNT]
        ratio = np.where(target_count > self._config.max_pass_ratio, PASS_RATIO, target_count)
        return ratio, target_count / ratio

    def num_slots(self, ratio: np.ndarray) -> np.ndarray:
        """Number of candidates (N,) of points with the ratios (N,)."""
        slots = slots_for_ratio(torch.from_numpy(ratio), self._config.slots_per_ratio).numpy()
        return np.where(ratio > 1, slots, 0) if self._options.originals else slots

    def of_cells(self, files: BlockFiles) -> list[np.ndarray]:
        """Target counts of new points in the cells of each block; exact in sum with a ratio."""
        store, originals = self._store, self._options.originals
        if self._ratio is None:  # A density gives the target count of each place directly.
            return by_ratio(files, store.num_blocks, originals)
        num_new = round(self._ratio * len(store)) - originals * len(store)
        # The output of an earlier pass already follows the predicted density.
        equal = not self._is_first
        return by_quota(files, store.num_blocks, len(store), num_new, originals, equal)
