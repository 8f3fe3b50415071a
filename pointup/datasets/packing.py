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
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

VERSION = 2
"""Increased with each change of the plans. A checkpoint says by which version its epoch began."""
BINS_PER_WINDOW = 512
# A window fills this many times the bins that it keeps; badly packed bins are packed again.
SURPLUS = 1.25
# Sizes are multiplied by a random factor of 1 +- SIZE_JITTER before sorting. Without it, a dataset
# of one window has nearly the same batches every epoch: 98 % of the sample pairs that share a batch
# share one again. With it, they meet again as rarely as by chance.
SIZE_JITTER = 0.2
# Share of the budget that a kept bin may have free before it is topped up, and the largest number
# of samples that are added or exchanged to do so.
ACCEPTED_ROOM = 4e-3
MAX_EXCHANGES = 3
# Share of idle slot time up to which bins are not packed again.
ACCEPTED_IDLE = 5e-4
MAX_PEELED_STEPS = 16
# Bins and steps, before the shuffling of steps, over which the free room of an epoch is spread: at
# least so many bins, in at least so many steps.
BINS_OF_TAIL, STEPS_OF_TAIL = 128, 2
STEPS_PER_CHUNK = 16


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch; batch b = step * slots + slot holds samples[ptr[b]:ptr[b + 1]].

    Attributes:
        samples: (n,) int32 indices, each once; int64 if one needs it.
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
        ends = np.concatenate([[0], np.cumsum(sizes[self.samples], dtype=np.int64)])
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

    `samples` (n,) are indices into `sizes`, which must not exceed the budget. No batch exceeds the
    budget or `max_clouds`. A batch is empty only if there are fewer samples than batches. Without
    `rng` the plan is deterministic.
    """
    limit = max_clouds or len(samples) + 1
    packed, ptr = _pack_windows(sizes, samples, token_budget, limit, rng)
    loads = np.add.reduceat(sizes[packed], ptr[:-1], dtype=np.int64) if len(packed) else ptr[:0]
    order = np.argsort(-loads, kind="stable")
    pieces, counts = [packed[:0]], [np.zeros(0, np.int64)]
    num_steps = -(-len(loads) // slots)
    tail = max(0, num_steps - max(STEPS_OF_TAIL, BINS_OF_TAIL // slots))
    for first in [*range(0, tail, STEPS_PER_CHUNK), tail]:
        is_last = first == tail
        steps = num_steps - tail if is_last else min(STEPS_PER_CHUNK, tail - first)
        chunk = order[first * slots : (first + steps) * slots]
        chunk_loads = loads[chunk]
        items, numbers = _concatenated(packed, ptr, chunk), np.diff(ptr)[chunk]
        if is_last or idle_share(chunk_loads.reshape(-1, slots)) > ACCEPTED_IDLE:
            bins = np.repeat(np.arange(len(chunk)), numbers)
            largest = _largest_first(sizes[items], rng)
            items, bins = items[largest], bins[largest]
            max_peeled = MAX_PEELED_STEPS if is_last else 0
            bins = _balance(
                bins, sizes[items], steps * slots, token_budget, slots, limit, max_peeled
            )
            items = items[np.argsort(bins, kind="stable")]
            numbers = np.bincount(bins, minlength=steps * slots)
        pieces.append(items)
        counts.append(numbers)
    # A plan is kept for a whole epoch, in each process.
    kind = np.int32 if len(sizes) < 2**31 else np.int64
    plan = Plan(np.concatenate(pieces).astype(kind), _ptr(np.concatenate(counts)), slots)
    return plan if rng is None else _shuffled(plan, rng)


def _pack_windows(
    sizes: np.ndarray,
    samples: np.ndarray,
    token_budget: int,
    limit: int,
    rng: np.random.Generator | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Samples in full bins: the samples of all bins, one after another, and their bounds."""
    samples = samples if rng is None else rng.permutation(samples)
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
        bins = _best_fit_decreasing(sizes[window].tolist(), token_budget, limit)
        num_bins = int(bins.max()) + 1
        num_kept = num_bins if is_last else min(num_bins, BINS_PER_WINDOW)
        bins = _by_load(bins, sizes[window], num_bins)
        if num_kept < num_bins:
            bins = _topped_up(bins, sizes[window], num_kept, token_budget, limit)
        carried = window[bins >= num_kept]
        window, bins = window[bins < num_kept], bins[bins < num_kept]
        pieces.append(window[np.argsort(bins, kind="stable")])
        counts.append(np.bincount(bins, minlength=num_kept))
    return np.concatenate(pieces), _ptr(np.concatenate(counts))


def _largest_first(sizes: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Indices that sort sizes in decreasing order, up to the random factor of each."""
    if rng is not None:
        sizes = rng.uniform(1 - SIZE_JITTER, 1 + SIZE_JITTER, len(sizes)) * sizes
    return np.argsort(-sizes, kind="stable")


def _topped_up(
    bins: np.ndarray, sizes: np.ndarray, num_kept: int, capacity: int, limit: int
) -> np.ndarray:
    """Bins in which the first `num_kept` are filled with samples of the others, by exchanges.

    Each exchange moves one sample of the other bins into a kept bin, and at most one sample of that
    bin out of it, so that the load grows as much as possible within the capacity. Some sizes don't
    add up to the capacity in the order of best-fit: of sizes from 2,000 to 2,500 eight leave up to
    4,000 tokens free, but the right eight leave none.
    """
    accepted = int(ACCEPTED_ROOM * capacity)
    loads = np.bincount(bins, sizes, minlength=num_kept)[:num_kept].astype(np.int64)
    unfilled = np.flatnonzero(capacity - loads > accepted)
    others = np.flatnonzero(bins >= num_kept)
    if not len(unfilled) or not len(others):
        return bins
    # The size and the index of a sample are packed into one integer, which sorts by size first.
    items = ((sizes.astype(np.int64) << 32) + np.arange(len(sizes))).tolist()
    pool = sorted(items[i] for i in others.tolist())
    order = np.argsort(bins, kind="stable").tolist()
    ptr = _ptr(np.bincount(bins)).tolist()
    found = bins.tolist()
    for b in unfilled.tolist():
        room = capacity - int(loads[b])
        members = sorted(items[i] for i in order[ptr[b] : ptr[b + 1]])
        for _ in range(MAX_EXCHANGES):
            best, best_gain, leaves = -1, 0, -1
            if len(members) < limit:
                best = bisect_left(pool, (room + 1) << 32) - 1
                best_gain = pool[best] >> 32 if best >= 0 else 0
            for number, item in enumerate(members):
                if best_gain >= room - accepted:
                    break
                at = bisect_left(pool, ((item >> 32) + room + 1) << 32) - 1
                if at >= 0 and (pool[at] >> 32) - (item >> 32) > best_gain:
                    best, best_gain, leaves = at, (pool[at] >> 32) - (item >> 32), number
            if best_gain <= 0:
                break
            entering = pool.pop(best)
            found[entering & 0xFFFFFFFF] = b
            if leaves >= 0:
                leaving = members.pop(leaves)
                insort(pool, leaving)
                found[leaving & 0xFFFFFFFF] = num_kept
            room -= best_gain
            if room <= accepted or not pool:
                break
            insort(members, entering)
    return np.array(found)


def _concatenated(packed: np.ndarray, ptr: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """The samples of these bins, one bin after another."""
    counts = np.diff(ptr)[bins]
    places = np.arange(int(counts.sum())) + np.repeat(ptr[bins] - _ptr(counts)[:-1], counts)
    return packed[places]


def idle_share(loads: np.ndarray) -> float:
    """Share of slot time spent waiting for the largest batch of a step, from (num_steps, slots)."""
    longest = loads.max(axis=1).sum() * loads.shape[1]
    return float(1 - loads.sum() / longest) if longest else 0.0


def _best_fit_decreasing(
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


def _balance(
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
    best = _by_load(_fill_empty(bins, num_bins), sizes, num_bins)
    idle = _idle(best, sizes, num_bins, slots)
    peeled = np.empty_like(best)
    rest = np.arange(len(sizes))
    for done in range(0, min(num_bins, (max_peeled + 1) * slots), slots):
        left = num_bins - done
        if done:
            items = sizes[rest].tolist()
            height = min(capacity, max(max(items), -(-sum(items) // (left + slots))))
            step = _best_fit_decreasing(items, height, limit, max_bins=slots)
            peeled[rest] = step + done - slots
            rest = rest[step < 0]
        if idle <= ACCEPTED_IDLE or len(rest) < left:
            break
        balanced = _longest_first(sizes[rest].tolist(), left, capacity, limit)
        if balanced is not None:
            peeled[rest] = balanced + done
            candidate = _by_load(peeled, sizes, num_bins)
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


def _by_load(bins: np.ndarray, sizes: np.ndarray, num_bins: int) -> np.ndarray:
    """The same bins, renumbered from the fullest to the emptiest."""
    loads = np.bincount(bins, sizes, minlength=num_bins)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(-loads, kind="stable")] = np.arange(num_bins)
    return rank[bins]


def _idle(bins: np.ndarray, sizes: np.ndarray, num_bins: int, slots: int) -> float:
    return idle_share(np.bincount(bins, sizes, minlength=num_bins).reshape(-1, slots))


def _shuffled(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with its steps in random order, and the batches of each step in random slots."""
    steps = rng.permutation(plan.num_steps)
    slots = rng.random((plan.num_steps, plan.slots)).argsort(axis=1)
    batches = (steps[:, None] * plan.slots + slots).reshape(-1)
    counts = np.diff(plan.ptr)[batches]
    ptr = _ptr(counts)
    places = np.arange(len(plan.samples)) + np.repeat(plan.ptr[batches] - ptr[:-1], counts)
    return Plan(plan.samples[places], ptr, plan.slots)


def _ptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
