"""How many points a pass is to make, of each point of its store and in each cell."""

from __future__ import annotations

import numpy as np
import torch

from pointup.geometry.midpoints import slots_for_ratio
from pointup.model.config import ModelConfig
from pointup.upsampling.options import MAX_PASS_RATIO, PASS_RATIO, UpsampleOptions
from pointup.upsampling.single_pass.density import ratios_for_density
from pointup.upsampling.single_pass.pass_output import TARGET_COUNT
from pointup.upsampling.single_pass.quotas import by_quota, by_ratio
from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store


class TargetCounts:
    """What is wanted of one pass over a store.

    `ratio` is that of this pass; None takes what the density asks for, place by place. The points
    of a later pass, `is_first` being False, say themselves what is left to reach, by their
    attribute `TARGET_COUNT`.
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
        """Points wanted for each point of a block, and later for each of those."""
        size = int(self._store.block_ptr[block + 1] - self._store.block_ptr[block])
        if self._ratio is not None:
            return np.full(size, self._ratio), np.ones(size)
        if self._is_first:
            assert self._options.density is not None
            wanted = ratios_for_density(self._store, block, self._options.density)
        else:
            wanted = self._store.read_block(block)["attributes"][TARGET_COUNT]
        ratio = np.where(wanted > MAX_PASS_RATIO, PASS_RATIO, wanted)
        return ratio, wanted / ratio

    def num_slots(self, ratio: np.ndarray) -> np.ndarray:
        """Candidates (N,) to make of points of which so many (N,) points are wanted."""
        slots = slots_for_ratio(torch.from_numpy(ratio), self._config.slots_per_ratio).numpy()
        return np.where(ratio > 1, slots, 0) if self._options.originals else slots

    def of_cells(self, files: BlockFiles) -> list[np.ndarray]:
        """New points wanted in each cell of each block; as many in all as the ratio asks for."""
        store, originals = self._store, self._options.originals
        if self._ratio is None:  # A density says itself how many points each place is to have.
            return by_ratio(files, store.num_blocks, originals)
        num_new = round(self._ratio * len(store)) - originals * len(store)
        # Points that a pass has made are already where it took the surface to be.
        trust = self._config.density_exponent if self._is_first else 0.0
        return by_quota(files, store.num_blocks, len(store), num_new, originals, trust)
