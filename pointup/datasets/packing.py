"""Packs clouds of known sizes into batches: pure functions of sizes and of one random generator.

A bin is what one slot of an optimizer step holds. Windows of shuffled samples are packed
best-fit-decreasing; the fullest bins are dealt, neighbours in load to a step, so that no slot waits
for another, and the rest goes on to the next window. Uneven windows, and the last one, are packed
anew longest-first (Graham 1969, *Bounds on multiprocessing timing anomalies*).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

BINS_PER_WINDOW = 512
STEPS_PER_WINDOW = 16
# A window takes in so many times what it deals: bins that pack badly get another chance.
SURPLUS = 1.25
# Sizes are multiplied by 1 +- this before sorting. Without it, a dataset of one window would be cut
# into the same batches every epoch: 98 % of the pairs in a batch met again, now as by chance.
BLUR = 0.2
ACCEPTED_IDLE = 5e-4
MOST_PEELS = 16


@dataclass(frozen=True)
class Plan:
    """Batches of an epoch; batch b = step * slots + slot holds samples[ptr[b]:ptr[b + 1]].

    Attributes:
        samples: (n,) int64 indices, every one once.
        ptr: (num_steps * slots + 1,) int64.
        slots: batches of one optimizer step.
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
        """Tokens of every batch, (num_steps, slots)."""
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
    """Deals samples to as few full and even steps of `slots` batches as it can.

    `samples` (n,) are indices into `sizes`, which must be within the budget. No batch exceeds the
    budget or `max_clouds`. Batches are empty only where there are fewer samples than batches.
    Without `rng` nothing is random.
    """
    limit = max_clouds or len(samples) + 1
    samples = samples if rng is None else rng.permutation(samples)
    ends = np.concatenate([[0], np.cumsum(sizes[samples], dtype=np.int64)])
    bins_to_deal = slots * max(STEPS_PER_WINDOW, BINS_PER_WINDOW // slots)
    bins_to_fill = int(SURPLUS * bins_to_deal)
    pieces = [samples[:0]]
    counts = [np.zeros(0, np.int64)]
    carried = samples[:0]
    start = 0
    while start < len(samples) or len(carried):
        tokens = bins_to_fill * token_budget - int(sizes[carried].sum())
        stop = int(np.searchsorted(ends, ends[start] + tokens, side="right")) - 1
        stop = max(min(stop, start + bins_to_fill * limit - len(carried)), start + 1)
        window = np.concatenate([carried, samples[start:stop]])
        blur = 1.0 if rng is None else rng.uniform(1 - BLUR, 1 + BLUR, len(window))
        window = window[np.argsort(-blur * sizes[window], kind="stable")]
        start, last = stop, stop >= len(samples)
        bins = _best_fit_decreasing(sizes[window].tolist(), token_budget, limit)
        num_bins = int(bins.max()) + 1
        if last:
            num_dealt = -(-num_bins // slots) * slots
        else:
            num_dealt = min(num_bins // slots * slots, bins_to_deal)
        bins = _by_load(bins, sizes[window], max(num_bins, num_dealt))
        carried = window[bins >= num_dealt]
        window, bins = window[bins < num_dealt], bins[bins < num_dealt]
        peels = MOST_PEELS if last else 0
        bins = _even_out(bins, sizes[window], num_dealt, token_budget, slots, limit, peels)
        pieces.append(window[np.argsort(bins, kind="stable")])
        counts.append(np.bincount(bins, minlength=num_dealt))
    plan = Plan(np.concatenate(pieces), _ptr(np.concatenate(counts)), slots)
    return plan if rng is None else _shuffled(plan, rng)


def idle_share(loads: np.ndarray) -> float:
    """Share of slot time spent waiting for the largest of a step, for loads (num_steps, slots)."""
    longest = loads.max(axis=1).sum() * loads.shape[1]
    return float(1 - loads.sum() / longest) if longest else 0.0


def _best_fit_decreasing(
    sizes: list[int], capacity: int, limit: int, most_bins: int | None = None
) -> np.ndarray:
    """The bin of every size, in the order given, each going where least room is left.

    With `most_bins`, what does not fit into so many gets bin -1.
    """
    # Room and number of a bin share one integer, which sorts by room first.
    rooms: list[int] = []
    counts: list[int] = []
    bins: list[int] = []
    wanted = [size << 32 for size in sizes]
    smallest = min(wanted)
    for want in wanted:
        at = bisect_left(rooms, want)
        if at < len(rooms):
            room = rooms.pop(at)
            b = room & 0xFFFFFFFF
            counts[b] += 1
        elif len(counts) == most_bins:
            bins.append(-1)
            continue
        else:
            b = len(counts)
            room = (capacity << 32) + b
            counts.append(1)
        bins.append(b)
        room -= want
        if room >= smallest and counts[b] < limit:
            insort(rooms, room)
    return np.array(bins)


def _longest_first(sizes: list[int], num_bins: int, capacity: int, limit: int) -> np.ndarray | None:
    """The bin of every size, each going to the emptiest; None where one would not fit."""
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


def _even_out(
    bins: np.ndarray,
    sizes: np.ndarray,
    num_bins: int,
    capacity: int,
    slots: int,
    limit: int,
    peels: int,
) -> np.ndarray:
    """Bins in the order of their loads, packed anew where the steps they make are uneven.

    Longest-first is even unless single clouds are larger than the mean load. Then up to `peels`
    steps are peeled off, largest clouds first, each filled to the height of its largest cloud.
    """
    best = _by_load(_fill_empty(bins, num_bins), sizes, num_bins)
    idle = _idle(best, sizes, num_bins, slots)
    peeled = np.empty_like(best)
    rest = np.arange(len(sizes))
    for done in range(0, min(num_bins, (peels + 1) * slots), slots):
        left = num_bins - done
        if done:
            items = sizes[rest].tolist()
            height = min(capacity, max(max(items), -(-sum(items) // (left + slots))))
            step = _best_fit_decreasing(items, height, limit, most_bins=slots)
            peeled[rest] = step + done - slots
            rest = rest[step < 0]
        if idle <= ACCEPTED_IDLE or len(rest) < left:
            break
        even = _longest_first(sizes[rest].tolist(), left, capacity, limit)
        if even is not None:
            peeled[rest] = even + done
            candidate = _by_load(peeled, sizes, num_bins)
            if _idle(candidate, sizes, num_bins, slots) < idle:
                best, idle = candidate, _idle(candidate, sizes, num_bins, slots)
    return best


def _fill_empty(bins: np.ndarray, num_bins: int) -> np.ndarray:
    """Gives every bin a cloud where there are enough: half of those in the bin with the most."""
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
    """The same bins numbered from the fullest to the emptiest."""
    loads = np.bincount(bins, sizes, minlength=num_bins)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(-loads, kind="stable")] = np.arange(num_bins)
    return rank[bins]


def _idle(bins: np.ndarray, sizes: np.ndarray, num_bins: int, slots: int) -> float:
    return idle_share(np.bincount(bins, sizes, minlength=num_bins).reshape(-1, slots))


def _shuffled(plan: Plan, rng: np.random.Generator) -> Plan:
    """Steps in random order, and the batches of a step among its slots."""
    steps = rng.permutation(plan.num_steps)
    slots = rng.random((plan.num_steps, plan.slots)).argsort(axis=1)
    batches = (steps[:, None] * plan.slots + slots).reshape(-1)
    counts = np.diff(plan.ptr)[batches]
    ptr = _ptr(counts)
    places = np.arange(len(plan.samples)) + np.repeat(plan.ptr[batches] - ptr[:-1], counts)
    return Plan(plan.samples[places], ptr, plan.slots)


def _ptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
