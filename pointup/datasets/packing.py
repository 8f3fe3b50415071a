"""Packs clouds of known sizes into batches, for `TokenBudgetBatchSampler`.

All functions are pure functions of the sizes and one random generator. A bin is the batch of one
slot of an optimizer step. Windows of shuffled samples are packed best-fit-decreasing. The fullest
bins of a window are kept, and topped up with samples of its other bins, whose samples go to the
next window. All bins are then assigned to steps in the order of their loads, so that the slots of a
step have similar loads and none waits for another. Unbalanced steps, and the last ones, are packed
again longest-first (Graham 1969, *Bounds on multiprocessing timing anomalies*).
"""

from __future__ import annotations

import heapq
import operator
import zlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from pointup.errors import ConfigError

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
        return self.samples[self.ptr[b] : self.ptr[b + 1]].tolist()

    def loads(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens of each batch, (num_steps, slots)."""
        ends = np.concatenate([[0], np.cumsum(sizes[self.samples % len(sizes)], dtype=np.int64)])
        return np.diff(ends[self.ptr]).reshape(-1, self.slots)


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
    samples = _concatenated(plan.samples, plan.ptr, batches)
    return Plan(samples, bounds_of(np.diff(plan.ptr)[batches]), plan.slots)


# The functions below put clouds into bins of one capacity. They number bins from 0, and give the
# bin of each cloud as an array.

# Share of the budget that a kept bin may have free before it is topped up, and the largest number
# of samples that are added or exchanged to do so.
ACCEPTED_ROOM = 4e-3
MAX_EXCHANGES = 4
# Share of idle slot time up to which bins are not packed again.
ACCEPTED_IDLE = 5e-4


def best_fit_decreasing(
    sizes: list[int], capacity: int, limit: int, max_bins: int | None = None
) -> np.ndarray:
    """The bin of each size: sizes go, in their order, to the fullest bin that has room for them.

    With `max_bins`, sizes that do not fit into that many bins get bin -1.
    """
    # The free room and the index of a bin are packed into one integer, which sorts by room first.
    rooms: list[int] = []
    counts: list[int] = []
    bins: list[int] = []
    shifted_sizes = [size << 32 for size in sizes]
    smallest = min(shifted_sizes)
    for shifted_size in shifted_sizes:
        at = bisect_left(rooms, shifted_size)
        if at < len(rooms):
            room = rooms.pop(at)
            b = room & 0xFFFFFFFF
            counts[b] += 1
        elif len(counts) == max_bins:
            bins.append(-1)
            continue
        else:
            b = len(counts)
            room = (capacity << 32) + b
            counts.append(1)
        bins.append(b)
        room -= shifted_size
        if room >= smallest and counts[b] < limit:
            insort(rooms, room)
    return np.array(bins)


def _longest_first(sizes: list[int], num_bins: int, capacity: int, limit: int) -> np.ndarray | None:
    """The bin of each size: each goes to the emptiest bin. None if one does not fit."""
    loads = [(0, b) for b in range(num_bins)]
    counts = [0] * num_bins
    bins: list[int] = []
    for size in sizes:
        if not loads or loads[0][0] + size > capacity:
            return None
        load, b = loads[0]
        bins.append(b)
        counts[b] += 1
        if counts[b] < limit:
            heapq.heapreplace(loads, (load + size, b))
        else:
            heapq.heappop(loads)
    return np.array(bins)


def topped_up(
    bins: np.ndarray, sizes: np.ndarray, num_kept: int, capacity: int, limit: int
) -> np.ndarray:
    """Bins in which the first `num_kept` are filled with samples of the others, by exchanges.

    Each exchange moves one sample of the other bins into a kept bin, and at most one sample of that
    bin out of it, so that the load grows as much as possible within the capacity. Some sizes don't
    add up to the capacity in the order of best-fit: of sizes from 2,000 to 2,500 eight leave up to
    4,000 tokens free, but the right eight leave none. All bins exchange at a time; of bins that ask
    for the same sample, all but one get the next smaller ones.
    """
    accepted = int(ACCEPTED_ROOM * capacity)
    bins, sizes = bins.copy(), sizes.astype(np.int64)
    loads = np.bincount(bins, sizes, minlength=num_kept)[:num_kept]
    rooms = capacity - loads.astype(np.int64)
    counts = np.bincount(bins, minlength=num_kept)[:num_kept]
    for _ in range(MAX_EXCHANGES):
        pool = np.flatnonzero(bins >= num_kept)
        unfilled = rooms > accepted
        if not len(pool) or not unfilled.any():
            break
        pool = pool[np.argsort(sizes[pool], kind="stable")]
        offered = sizes[pool]
        # All exchanges that a bin can make: with nothing that leaves it, or with each of its
        # samples.
        open_bins = np.flatnonzero(unfilled & (counts < limit))
        members = np.flatnonzero(np.append(unfilled, False)[np.minimum(bins, num_kept)])
        owners = np.concatenate([open_bins, bins[members]])
        leaving = np.concatenate([np.full(len(open_bins), -1), members])
        left = np.concatenate([np.zeros(len(open_bins), np.int64), sizes[members]])
        place = np.searchsorted(offered, left + rooms[owners], side="right") - 1
        gain = np.where(place >= 0, offered[place] - left, 0).clip(0)
        order = np.argsort(owners * (capacity + 1) + gain, kind="stable")
        best = order[np.append(np.diff(owners[order]) > 0, True)]
        # Bins that ask for the same place get that one and those before it.
        best = best[np.argsort(-place[best], kind="stable")]
        steps = np.arange(len(best))
        got = np.minimum.accumulate(place[best] + steps) - steps
        best, got = best[got >= 0], got[got >= 0]
        gain = offered[got] - left[best]
        best, got, gain = best[gain > 0], got[gain > 0], gain[gain > 0]
        if not len(best):
            break
        out, changed = leaving[best], owners[best]
        bins[pool[got]] = changed
        bins[out[out >= 0]] = num_kept
        rooms[changed] -= gain
        counts[changed] += out < 0
    return bins


def balance(
    bins: np.ndarray,
    sizes: np.ndarray,
    num_bins: int,
    capacity: int,
    slots: int,
    limit: int,
    max_peeled: int,
) -> np.ndarray:
    """Bins in the order of their loads, packed again if the steps are unbalanced.

    Longest-first packing balances the loads unless single clouds exceed the mean load. Then up to
    `max_peeled` steps are packed separately, with the largest clouds first. Each such step is
    filled up to the size of its largest cloud.
    """
    best = by_load(_fill_empty(bins, num_bins), sizes, num_bins)
    idle = _idle(best, sizes, num_bins, slots)
    peeled = np.empty_like(best)
    rest = np.arange(len(sizes))
    for done in range(0, min(num_bins, (max_peeled + 1) * slots), slots):
        left = num_bins - done
        if done:
            items = sizes[rest].tolist()
            height = min(capacity, max(max(items), -(-sum(items) // (left + slots))))
            step = best_fit_decreasing(items, height, limit, max_bins=slots)
            peeled[rest] = step + done - slots
            rest = rest[step < 0]
        if idle <= ACCEPTED_IDLE or len(rest) < left:
            break
        balanced = _longest_first(sizes[rest].tolist(), left, capacity, limit)
        if balanced is not None:
            peeled[rest] = balanced + done
            candidate = by_load(peeled, sizes, num_bins)
            if _idle(candidate, sizes, num_bins, slots) < idle:
                best, idle = candidate, _idle(candidate, sizes, num_bins, slots)
    return best


def _fill_empty(bins: np.ndarray, num_bins: int) -> np.ndarray:
    """Fill each empty bin with half of the clouds of the bin with the most, if that has several."""
    counts = np.bincount(bins, minlength=num_bins)
    for b in np.flatnonzero(counts == 0):
        fullest = int(counts.argmax())
        if counts[fullest] < 2:
            break
        moved = np.flatnonzero(bins == fullest)[1::2]
        bins[moved] = b
        counts[b] = len(moved)
        counts[fullest] -= len(moved)
    return bins


def by_load(bins: np.ndarray, sizes: np.ndarray, num_bins: int) -> np.ndarray:
    """The same bins, renumbered from the fullest to the emptiest."""
    loads = np.bincount(bins, sizes, minlength=num_bins)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(-loads, kind="stable")] = np.arange(num_bins)
    return rank[bins]


def _idle(bins: np.ndarray, sizes: np.ndarray, num_bins: int, slots: int) -> float:
    return idle_share(np.bincount(bins, sizes, minlength=num_bins).reshape(-1, slots))


def idle_share(loads: np.ndarray) -> float:
    """Share of slot time spent waiting for the largest batch of a step, from (num_steps, slots)."""
    longest = loads.max(axis=1).sum() * loads.shape[1]
    return float(1 - loads.sum() / longest) if longest else 0.0


def bounds_of(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def checked_integer(name: str, value: SupportsIndex, least: int) -> int:
    """An integer of any type, also NumPy's, as an int; ValueError below `least` and for others."""
    try:
        number = int(operator.index(value))
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def cropped_sizes(sizes: np.ndarray, limit: int) -> np.ndarray:
    """The sizes (n,), with `limit` for those above it; `limit` may be too large for their type."""
    return np.minimum(sizes, min(limit, np.iinfo(sizes.dtype).max))


def checked_sizes(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Sizes (n,) int32, or int64 if one needs it; ValueError if they are no sizes.

    An array of the right type is not copied.
    """
    array = np.asarray(sizes)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"sizes must be a list of integers, one per sample; got {array.dtype} {array.shape}"
        )
    if array.min() < 0:
        raise ValueError(f"size of sample {array.argmin()} is {array.min()}")
    return array.astype(np.int32 if array.max() < 2**31 else np.int64, copy=False)


def checksum_of_sizes(sizes: np.ndarray) -> int:
    """The CRC-32 of the sizes as int64."""
    return zlib.crc32(sizes.astype(np.int64).data)


def check_budget(
    sizes: np.ndarray, token_budget: int, names: Sequence[str] | np.ndarray | None
) -> None:
    """Raise ConfigError, naming the largest sample, if it exceeds the budget."""
    too_large = int((sizes > token_budget).sum())
    if too_large:
        largest = int(sizes.argmax())
        name = f"sample {largest}" if names is None else names[largest]
        others = f" ({too_large} samples are too large)" if too_large > 1 else ""
        raise ConfigError(
            f"{name} has {sizes[largest]} points, more than the token budget of {token_budget}"
            f"{others}: raise --token-budget to at least {sizes[largest]}, or give --crop"
        )
