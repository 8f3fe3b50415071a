"""Packs clouds of known sizes into batches, for `TokenBudgetBatchSampler`.

All functions are pure functions of the sizes and one random generator. A bin is the batch of one
slot of an optimizer step. Windows of shuffled samples are packed best-fit-decreasing. The fullest
bins of a window are kept, and topped up with samples of its other bins, whose samples go to the
next window. All bins are then assigned to steps in the order of their loads, so that the slots of a
step have similar loads and none waits for another. Unbalanced steps, and the last ones, are packed
again longest-first (Graham 1969, *Bounds on multiprocessing timing anomalies*).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.datasets.bins import (
    ACCEPTED_IDLE,
    balance,
    best_fit_decreasing,
    bounds_of,
    by_load,
    idle_share,
    topped_up,
)
from pointup.datasets.sizes import cropped_sizes

VERSION = 3
"""Increased with each change of the plans. A checkpoint says by which version its epoch began."""
BINS_PER_WINDOW = 512
# A window fills this many times the bins that it keeps; badly packed bins are packed again.
SURPLUS = 1.25
# Sizes are multiplied by a random factor of 1 +- SIZE_JITTER before sorting. Without it, a dataset
# of one window has nearly the same batches every epoch: 98 % of the sample pairs that share a batch
# share one again. With it, they meet again as rarely as by chance.
SIZE_JITTER = 0.2
MAX_PEELED_STEPS = 16
# Bins and steps, before the shuffling of steps, over which the free room of an epoch is spread: at
# least so many bins, in at least so many steps.
BINS_OF_TAIL, STEPS_OF_TAIL = 128, 2
STEPS_PER_CHUNK = 16


@dataclass(frozen=True)
class PlanStatistics:
    """How well the batches of an epoch use the processes.

    Attributes:
        fill: mean tokens of a batch as a share of the token budget.
        idle: share of slot time spent waiting for the largest batch of the step.
        num_empty: number of batches without a cloud.
    """

    fill: float
    idle: float
    num_empty: int


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch; batch b = step * slots + slot holds samples[ptr[b]:ptr[b + 1]].

    Attributes:
        samples: (n,) int32, those that were planned, each once; int64 if one needs it.
        ptr: (num_steps * slots + 1,) int64 bounds of the batches.
        slots: number of batches per optimizer step.
    """

    samples: np.ndarray
    ptr: np.ndarray
    slots: int

    @property
    def num_steps(self) -> int:
        return (len(self.ptr) - 1) // self.slots

    def batch(self, step: int, slot: int) -> list[int]:
        b = step * self.slots + slot
        samples: list[int] = self.samples[self.ptr[b] : self.ptr[b + 1]].tolist()
        return samples

    def loads(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens of each batch, (num_steps, slots)."""
        ends = np.concatenate([[0], np.cumsum(sizes[self.samples % len(sizes)], dtype=np.int64)])
        return np.diff(ends[self.ptr]).reshape(-1, self.slots)

    def statistics(self, sizes: np.ndarray, token_budget: int) -> PlanStatistics:
        """How full and balanced the batches are; sizes above the budget count as the budget."""
        loads = self.loads(cropped_sizes(sizes, token_budget))
        return PlanStatistics(
            fill=float(loads.sum() / max(1, loads.size * token_budget)),
            idle=idle_share(loads),
            num_empty=int((np.diff(self.ptr) == 0).sum()),
        )


def plan_epoch(
    sizes: np.ndarray,
    samples: np.ndarray,
    token_budget: int,
    slots: int,
    max_clouds: int | None,
    rng: np.random.Generator | None,
) -> Plan:
    """Assign samples to as few full and balanced steps of `slots` batches as possible.

    `samples` (n,) are indices into `sizes`, which must not exceed the budget; `index + k *
    len(sizes)` is repetition k of a sample. No batch exceeds the budget or `max_clouds`. A batch is
    empty only if there are fewer samples than batches. Without `rng` the plan is deterministic.
    """
    sizes = sizes[samples % len(sizes)]
    # Limits that nothing reaches may be too large for NumPy's integers.
    limit = min(max_clouds or len(samples) + 1, len(samples) + 1)
    token_budget = min(token_budget, max(1, int(sizes.sum(dtype=np.int64))))
    packed, ptr = _pack_windows(sizes, token_budget, limit, rng)
    loads = np.add.reduceat(sizes[packed], ptr[:-1], dtype=np.int64) if len(packed) else ptr[:0]
    order = np.argsort(-loads, kind="stable")
    pieces, counts = [packed[:0]], [np.zeros(0, np.int64)]
    num_steps = -(-len(loads) // slots)
    tail = max(0, num_steps - max(STEPS_OF_TAIL, BINS_OF_TAIL // slots))
    chunks = _chunks(loads[order[: tail * slots]].reshape(-1, slots))
    bin_sizes = np.diff(ptr)
    for first, steps, is_balanced in [*chunks, (tail, num_steps - tail, False)]:
        is_last = first == tail
        chunk = order[first * slots : (first + steps) * slots]
        items, numbers = _concatenated(packed, ptr, chunk), bin_sizes[chunk]
        if not is_balanced:
            bins = np.repeat(np.arange(len(chunk)), numbers)
            largest = _largest_first(sizes[items], rng)
            items, bins = items[largest], bins[largest]
            max_peeled = MAX_PEELED_STEPS if is_last else 0
            bins = balance(
                bins, sizes[items], steps * slots, token_budget, slots, limit, max_peeled
            )
            items = items[np.argsort(bins, kind="stable")]
            numbers = np.bincount(bins, minlength=steps * slots)
        pieces.append(items)
        counts.append(numbers)
    # A plan is kept for a whole epoch, in each process.
    kind = np.int32 if samples.max(initial=0) < 2**31 else np.int64
    planned = samples.astype(kind)[np.concatenate(pieces)]
    plan = Plan(planned, bounds_of(np.concatenate(counts)), slots)
    return plan if rng is None else _shuffled(plan, rng)


def _chunks(loads: np.ndarray) -> list[tuple[int, int, bool]]:
    """First step, number of steps, and whether they are balanced, from loads (num_steps, slots).

    Steps are judged in groups of `STEPS_PER_CHUNK`; consecutive balanced groups are one chunk.
    """
    chunks: list[tuple[int, int, bool]] = []
    if not len(loads):
        return chunks
    starts = np.arange(0, len(loads), STEPS_PER_CHUNK)
    longest = np.add.reduceat(loads.max(axis=1) * loads.shape[1], starts)
    idle = 1 - np.add.reduceat(loads.sum(axis=1), starts) / longest.clip(1)
    is_balanced = (idle <= ACCEPTED_IDLE) | (longest == 0)
    for first, balanced in zip(starts.tolist(), is_balanced.tolist(), strict=True):
        steps = min(STEPS_PER_CHUNK, len(loads) - first)
        if balanced and chunks and chunks[-1][2]:
            before, number, _ = chunks.pop()
            first, steps = before, number + steps
        chunks.append((first, steps, balanced))
    return chunks


def _pack_windows(
    sizes: np.ndarray, token_budget: int, limit: int, rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of `sizes` in full bins: those of all bins, one after another, and their bounds."""
    samples = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    ends = np.concatenate([[0], np.cumsum(sizes[samples], dtype=np.int64)])
    bins_to_fill = int(SURPLUS * BINS_PER_WINDOW)
    pieces, counts = [samples[:0]], [np.zeros(0, np.int64)]
    carried = samples[:0]
    start = 0
    while start < len(samples) or len(carried):
        tokens = bins_to_fill * token_budget - int(sizes[carried].sum())
        stop = int(np.searchsorted(ends, ends[start] + tokens, side="right")) - 1
        stop = max(min(stop, start + bins_to_fill * limit - len(carried)), start + 1)
        window = np.concatenate([carried, samples[start:stop]])
        window = window[_largest_first(sizes[window], rng)]
        start, is_last = stop, stop >= len(samples)
        bins = best_fit_decreasing(sizes[window].tolist(), token_budget, limit)
        num_bins = int(bins.max()) + 1
        num_kept = num_bins if is_last else min(num_bins, BINS_PER_WINDOW)
        bins = by_load(bins, sizes[window], num_bins)
        if num_kept < num_bins:
            bins = topped_up(bins, sizes[window], num_kept, token_budget, limit)
        carried = window[bins >= num_kept]
        window, bins = window[bins < num_kept], bins[bins < num_kept]
        pieces.append(window[np.argsort(bins, kind="stable")])
        counts.append(np.bincount(bins, minlength=num_kept))
    return np.concatenate(pieces), bounds_of(np.concatenate(counts))


def _largest_first(sizes: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Indices that sort sizes in decreasing order, up to the random factor of each."""
    if rng is not None:
        sizes = rng.uniform(1 - SIZE_JITTER, 1 + SIZE_JITTER, len(sizes)) * sizes
    return np.argsort(-sizes, kind="stable")


def _concatenated(packed: np.ndarray, ptr: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """The samples of these bins, one bin after another."""
    counts = np.diff(ptr)[bins]
    places = np.arange(int(counts.sum())) + np.repeat(ptr[bins] - bounds_of(counts)[:-1], counts)
    return packed[places]


def _shuffled(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with its steps in random order, and the batches of each step in random slots."""
    steps = rng.permutation(plan.num_steps)
    slots = rng.random((plan.num_steps, plan.slots)).argsort(axis=1)
    batches = (steps[:, None] * plan.slots + slots).reshape(-1)
    counts = np.diff(plan.ptr)[batches]
    ptr = bounds_of(counts)
    places = np.arange(len(plan.samples)) + np.repeat(plan.ptr[batches] - ptr[:-1], counts)
    return Plan(plan.samples[places], ptr, plan.slots)
