"""How many new points each cell of each block is to have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pointup.upsampling.store.block_files import BlockFiles

# Most that a point may stand for, in usual ones: around an outlier there is much space and nothing.
_MOST_SHARE = 4.0
# Share of a cell's candidates that may be kept.
_MOST_CHOSEN = 0.8


def by_ratio(files: BlockFiles, num_blocks: int, originals: bool) -> list[np.ndarray]:
    """New points of each cell of each block, as each point's own ratio asks for."""
    weights, most = [], []
    for block in range(num_blocks):
        with files.load(block, "candidates") as saved:
            weights.append(np.bincount(saved["cell"], saved["ratio"] - originals))
            most.append(_num_candidates(saved, originals)[0])
    return _whole(np.minimum(np.concatenate(weights), np.concatenate(most)), weights)


def _num_candidates(saved: Any, originals: bool) -> tuple[np.ndarray, np.ndarray]:
    """Places (C,) for new points in each cell of a block, and candidates (C,), copies among them.

    A copy of its parent is no place where the originals are kept, and one for all copies otherwise.
    """
    num_slots, cell = saved["num_slots"], saved["cell"]
    row = np.repeat(np.arange(len(num_slots)), num_slots)
    num_own = np.bincount(row[saved["distance"] > 0], minlength=len(num_slots))
    places = num_own if originals else np.minimum(num_own + 1, num_slots)
    return np.bincount(cell, places), np.bincount(cell, num_slots)


def by_quota(
    files: BlockFiles,
    num_blocks: int,
    num_points: int,
    num_new: int,
    originals: bool,
    trust: float,
) -> list[np.ndarray]:
    """New points of each cell of each block, `num_new` in all, by the quotas of their points.

    With `originals` a point counts for one itself. `trust` is the power of a quota that counts.
    """

    def mean_of(values: Callable[[Any], np.ndarray]) -> float:
        total = 0.0
        for block in range(num_blocks):
            with files.load(block, "candidates") as saved:
                total += float(values(saved).sum())
        return total / num_points

    usual = mean_of(lambda saved: saved["quota"].astype(np.float64))
    mean = mean_of(lambda saved: quota_shares(saved["quota"], usual, trust))
    weights, num_candidates = [], []
    for block in range(num_blocks):
        with files.load(block, "candidates") as saved:
            wanted = saved["ratio"] * quota_shares(saved["quota"], usual, trust) / mean
            if originals:
                wanted = (wanted - 1).clip(min=0.0)
            weights.append(np.bincount(saved["cell"], wanted))
            num_candidates.append(np.stack(_num_candidates(saved, originals), axis=1))
    places, children = np.concatenate(num_candidates).T
    # Copies are made only where there are not enough places.
    num_places = places if places.sum() >= num_new else children
    return _whole(scaled_to(num_new, np.concatenate(weights), num_places), weights)


def quota_shares(quota: np.ndarray, usual: float, trust: float) -> np.ndarray:
    """How much more of the output than others, (N,), points get by the logarithm of their quota.

    Quotas are predicted, so that only the power `trust` of them counts. `usual` is the one that
    gets a share of 1.
    """
    most = np.log(_MOST_SHARE)
    return np.exp((trust * (quota.astype(np.float64) - usual)).clip(-most, most))


def scaled_to(total: float, weights: np.ndarray, num_candidates: np.ndarray) -> np.ndarray:
    """Points wanted in each cell, (C,) in proportion to its weight, `total` of them together.

    No cell is to have more than four fifths of its candidates, which would leave nothing to choose,
    unless all are to have as many; what it would have beyond that goes to the others.
    """
    share = max(_MOST_CHOSEN, total / max(num_candidates.sum(), 1.0))
    most = share * num_candidates
    is_full = np.zeros(len(weights), dtype=bool)
    while True:
        left = weights[~is_full].sum()
        scale = (total - most[is_full].sum()) / left if left > 0 else 0.0
        overfull = ~is_full & (scale * weights > most)
        if not overfull.any():
            return np.where(is_full, most, scale * weights)
        is_full |= overfull


def _whole(wanted: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    """Whole numbers that add up to what is wanted, to within one, in parts like those given."""
    reached = np.floor(np.append(0.0, np.cumsum(wanted)) + 0.5)
    ptr = np.cumsum([len(part) for part in like])
    return np.split(np.diff(reached).astype(np.int64), ptr[:-1])
