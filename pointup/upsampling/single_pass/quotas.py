"""Computes the target count of new points of every cell, from ratios or predicted quotas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pointup.upsampling.store.block_files import BlockFiles

# Largest factor of a quota against the mean, and the inverse the smallest. The space around an
# outlier is large and empty.
_MAX_SHARE = 4.0
# Largest share of the candidates of a cell that is selected.
_MAX_SELECTED = 0.8
# Share of the total below which a rest is rounding.
_LEAST_REST = 1e-9


def by_ratio(files: BlockFiles, num_blocks: int, originals: bool) -> list[np.ndarray]:
    """Target count of each cell of each block, the sum over its points of their own ratios."""
    weights, places = [], []
    for block in range(num_blocks):
        with files.load(block, "candidates") as saved:
            weights.append(np.bincount(saved["cell"], saved["ratio"] - originals))
            places.append(_num_candidates(saved, originals)[0])
    counts = np.minimum(np.concatenate(weights), np.concatenate(places))
    return _rounded(counts, weights)


def _num_candidates(saved: Any, originals: bool) -> tuple[np.ndarray, np.ndarray]:
    """Number of distinct positions (C,) and of candidates (C,) in each cell of a block.

    Candidates that are copies of a parent give no new position if the originals are kept, and one
    position for all copies of the parent otherwise.
    """
    num_slots, cell = saved["num_slots"], saved["cell"]
    row = np.repeat(np.arange(len(num_slots)), num_slots)
    num_distinct = np.bincount(row[saved["distance"] > 0], minlength=len(num_slots))
    places = num_distinct if originals else np.minimum(num_distinct + 1, num_slots)
    return np.bincount(cell, places), np.bincount(cell, num_slots)


def by_quota(
    files: BlockFiles,
    num_blocks: int,
    num_points: int,
    num_new: int,
    originals: bool,
    equal: bool,
) -> list[np.ndarray]:
    """Target count of each cell of each block, `num_new` in all, by the quotas of their points.

    With `originals` each point of the store counts as one output point. With `equal` all points
    have the same quota, whatever was predicted.
    """

    def mean_of(values: Callable[[Any], np.ndarray]) -> float:
        total = 0.0
        for block in range(num_blocks):
            with files.load(block, "candidates") as saved:
                total += float(values(saved).sum())
        return total / num_points

    mean_log = 0.0 if equal else mean_of(lambda saved: saved["quota"].astype(np.float64))

    def shares(saved: Any) -> np.ndarray:
        quota = saved["quota"]
        return np.ones(len(quota)) if equal else quota_shares(quota, mean_log)

    mean = mean_of(shares)
    weights, num_candidates = [], []
    for block in range(num_blocks):
        with files.load(block, "candidates") as saved:
            target_count = saved["ratio"] * shares(saved) / mean
            if originals:
                target_count = (target_count - 1).clip(min=0.0)
            weights.append(np.bincount(saved["cell"], target_count))
            num_candidates.append(np.stack(_num_candidates(saved, originals), axis=1))
    places, children = np.concatenate(num_candidates).T
    # Copies of parents are output only if there are too few distinct positions.
    num_places = places if places.sum() >= num_new else children
    return _rounded(scale_to_total(num_new, np.concatenate(weights), num_places), weights)


def quota_shares(quota: np.ndarray, mean_log: float) -> np.ndarray:
    """Relative share of the output, (N,) in [1/4, 4], of points with the log quota `quota` (N,).

    A point whose log quota is `mean_log` has a share of 1.
    """
    limit = np.log(_MAX_SHARE)
    return np.exp((quota.astype(np.float64) - mean_log).clip(-limit, limit))


def scale_to_total(total: float, weights: np.ndarray, num_candidates: np.ndarray) -> np.ndarray:
    """Target counts (C,) in proportion to the weights of the cells, with the given total.

    No cell gets more than four fifths of its candidates, so that thinning has a choice; the excess
    goes to the other cells, and to cells of no weight only if all others are full. If the total
    exceeds four fifths of all candidates, the limit is that share instead.
    """
    share = max(_MAX_SELECTED, total / max(num_candidates.sum(), 1.0))
    limit = share * num_candidates
    is_full = np.zeros(len(weights), dtype=bool)
    while True:
        left, rest = weights[~is_full].sum(), total - limit[is_full].sum()
        if left <= 0.0 and rest > _LEAST_REST * total:
            # What all other cells have no room for goes to cells of no weight, which have some.
            weights = np.where(is_full, weights, limit)
            left = weights[~is_full].sum()
        scale = rest / left if left > 0 else 0.0
        overfull = ~is_full & (scale * weights > limit)
        if not overfull.any():
            return np.where(is_full, limit, scale * weights)
        is_full |= overfull


def _rounded(target_counts: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    """Integers with the same cumulative sums to within one, split into arrays as long as `like`."""
    reached = np.floor(np.append(0.0, np.cumsum(target_counts)) + 0.5)
    ptr = np.cumsum([len(part) for part in like])
    return np.split(np.diff(reached).astype(np.int64), ptr[:-1])
