"""Computes the target count of new points of every cell, from ratios or predicted quotas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pointup.geometry.midpoints import slots_for_ratio
from pointup.model.config import ModelConfig
from pointup.upsampling.options import MAX_LOCAL_RATIO, PASS_RATIO, UpsampleOptions
from pointup.upsampling.single_pass.pass_output import TARGET_COUNT
from pointup.upsampling.store.bisection import BlockFiles
from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region

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
        saved = files.load(block, "candidates")
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
    noise: float,
) -> list[np.ndarray]:
    """Target count of each cell of each block, `num_new` in all, by the quotas of their points.

    With `originals` each point of the store counts as one output point. With `equal` all points
    have the same quota, whatever was predicted. `noise` is the variance of the errors of log
    quotas: deviations from their mean shrink by its share of their variance.
    """

    def mean_of(values: Callable[[Any], np.ndarray]) -> float:
        total = 0.0
        for block in range(num_blocks):
            total += float(values(files.load(block, "candidates")).sum())
        return total / num_points

    def log_quota(saved: Any) -> np.ndarray:
        return np.asarray(saved["quota"], np.float64)

    mean_log, trust = 0.0, 1.0
    if not equal:
        mean_log = mean_of(log_quota)
        if noise:
            variance = mean_of(lambda saved: (log_quota(saved) - mean_log) ** 2)
            trust = 1 - noise / max(variance, noise)

    def shares(saved: Any) -> np.ndarray:
        quota = log_quota(saved)
        return np.ones(len(quota)) if equal else quota_shares(quota, mean_log, trust)

    mean = mean_of(shares)
    weights, num_candidates = [], []
    for block in range(num_blocks):
        saved = files.load(block, "candidates")
        target_count = saved["ratio"] * shares(saved) / mean
        if originals:
            target_count = (target_count - 1).clip(min=0.0)
        weights.append(np.bincount(saved["cell"], target_count))
        num_candidates.append(np.stack(_num_candidates(saved, originals), axis=1))
    places, children = np.concatenate(num_candidates).T
    # Copies of parents are output only if there are too few distinct positions.
    num_places = places if places.sum() >= num_new else children
    return _rounded(scale_to_total(num_new, np.concatenate(weights), num_places), weights)


def quota_shares(quota: np.ndarray, mean_log: float, trust: float = 1.0) -> np.ndarray:
    """Relative share of the output, (N,) in [1/4, 4], of points with the log quota `quota` (N,).

    A point whose log quota is `mean_log` has a share of 1; `trust` is the power of the shares.
    """
    limit = np.log(_MAX_SHARE)
    return np.exp((trust * (quota.astype(np.float64) - mean_log)).clip(-limit, limit))


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


class TargetCounts:
    """Target counts of one pass over a store.

    `ratio` is the ratio of this pass; None computes it from the target density, point by point,
    less what is made already around each point, `num_made` (N,). In a later pass
    (`is_first` is False) it is the attribute `TARGET_COUNT` of the points.
    """

    def __init__(
        self,
        store: Store,
        options: UpsampleOptions,
        config: ModelConfig,
        ratio: float | None,
        is_first: bool,
        num_made: np.ndarray | None = None,
    ) -> None:
        self._store, self._options, self._config = store, options, config
        self._ratio, self._is_first, self._num_made = ratio, is_first, num_made

    def ratios(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Ratios (N,) of the points of a block in this pass, and those (N,) left for the next.

        The first pass saves the `UnreachedArea` of a target density.
        """
        start, stop = self._store.block_ptr[block : block + 2].tolist()
        if self._ratio is not None:
            return np.full(stop - start, self._ratio), np.ones(stop - start)
        if self._is_first:
            assert self._options.density is not None
            largest = max(MAX_LOCAL_RATIO, self._config.max_pass_ratio)
            needed = ratios_for_density(self._store, block, self._options.density)
            if self._num_made is not None:
                needed -= self._num_made[start:stop]
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
        noise = self._config.quota_noise
        return by_quota(files, store.num_blocks, len(store), num_new, originals, equal, noise)


# Measures the density of a cloud on the ground, the ratios that reach a target density, and the
# area where none does.

NUM_IN_CIRCLE = 32
"""Number of neighbours in the circle in which the density around a point is measured."""

# Distance from the centre of the circle to the mean of its points, in radii: by chance in a full
# circle, and in a half circle at the straight edge of a survey.
_OFF_BY_CHANCE = (2 * NUM_IN_CIRCLE) ** -0.5
_OFF_AT_EDGE = 4 / (3 * np.pi)

# Distance of the mean from which on a circle may lie at the border of a denser strip, and how far
# the points on its other side reach then: 0.25 in one of fifty full circles by chance, where the
# two halves are counted instead.
_OFF_AT_STRIP, _BEHIND = 0.25, 0.6
# Number of the nearest neighbours that decide on which side of such a border a point lies.
_NUM_NEAR = 8

# Largest area that a point counts for, in areas of a point where the density is just reached: a
# point far from the survey has its neighbours there, and would count for all the land between.
_LARGEST_AREA = 16.0


def ground_density(query: np.ndarray, distance: np.ndarray, neighbors: np.ndarray) -> np.ndarray:
    """Points per unit of area around each query, (Q,); inf where all neighbours coincide.

    Points are counted in the circle through the last neighbour. At the edge of a survey the circle
    is partly empty and the mean of its points lies off the centre; the area is reduced by that.

    query: (Q, 2), distance: (Q, k) ascending horizontal distances to `neighbors` (Q, k, 2), the
    first of which is the query itself.
    """
    radius = distance[:, -1]
    mean = (neighbors[:, 1:] - query[:, None]).mean(axis=1)
    off = np.divide(
        np.linalg.norm(mean, axis=1), radius, out=np.zeros(len(query)), where=radius > 0
    )
    missing = (off - _OFF_BY_CHANCE) / (_OFF_AT_EDGE - _OFF_BY_CHANCE)
    area = np.pi * radius**2 * (1 - 0.5 * missing.clip(0.0, 1.5))
    # The last neighbour lies on the circle and the first is the query: both are not counted.
    count = max(distance.shape[1] - 2, 1)
    density = np.divide(count, area, out=np.full(len(query), np.inf), where=area > 0)
    # Beside a denser strip all of the circle has points, but most of them on one side.
    rows = np.flatnonzero((off > _OFF_AT_STRIP) & (area > 0))
    ahead = np.einsum("qki,qi->qk", neighbors[rows, 1:] - query[rows, None], mean[rows])
    ahead /= (radius * np.linalg.norm(mean, axis=1))[rows, None]
    is_strip = ahead.min(axis=1, initial=0.0) < -_BEHIND
    rows, ahead = rows[is_strip], ahead[is_strip]
    half = np.pi / 2 * radius[rows] ** 2
    sides = np.stack([(ahead < 0).sum(axis=1), (ahead > 0).sum(axis=1)]) / half
    nearest = distance[rows, : _NUM_NEAR + 1]
    near = (_NUM_NEAR - 1) / (np.pi * np.maximum(nearest[:, -1], np.finfo(float).tiny) ** 2)
    of_side = np.abs(np.log(sides / near)).argmin(axis=0)
    density[rows] = sides[of_side, np.arange(len(rows))]
    return density


def ratios_for_density(store: Store, block: int, density: float) -> np.ndarray:
    """The ratio (N,) that reaches a density on the ground, 0 or more, for each point of a block."""
    region = Region(store, block, block + 1, dims=2)
    places = region.places(block)
    distance, near = region.neighbors_of(places, min(NUM_IN_CIRCLE + 1, len(store)))
    positions = region.rows["position"][:, :2]
    return density / ground_density(positions[places], distance, positions[near])


class UnreachedArea:
    """The share of a survey's area where no possible ratio reaches the target density.

    The first pass saves it block by block in the store's directory, for all processes.
    """

    def __init__(self, measured: Store) -> None:
        self._files = BlockFiles(measured.directory)
        self._num_blocks = measured.num_blocks

    def save(self, block: int, ratio: np.ndarray, largest: float) -> None:
        """Save the areas of a block, from the ratios (N,) of `ratios_for_density`."""
        # The area of a point is proportional to the ratio that it needs.
        area = np.minimum(ratio, _LARGEST_AREA * largest)
        areas = np.array([area[ratio > largest].sum(), area.sum()])
        self._files.save(block, "areas", areas=areas)

    def share(self) -> float:
        """The share, 0 to 1."""
        total = np.zeros(2)
        for block in range(self._num_blocks):
            total += self._files.load(block, "areas")["areas"]
        return float(total[0] / total[1]) if total[1] else 0.0
