"""Puts clouds of known sizes into bins of one capacity, for the plans of `packing`.

A bin is the batch of one slot of an optimizer step. All functions number bins from 0, and give the
bin of each cloud as an array.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

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
