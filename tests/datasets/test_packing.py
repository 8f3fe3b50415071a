"""Bins are topped up by exchanges: fuller, and never over the budget or the number of clouds."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.datasets.packing import (
    ACCEPTED_ROOM,
    STEPS_PER_CHUNK,
    _chunks,
    best_fit_decreasing,
    by_load,
    topped_up,
)

CAPACITY = 20_000


def window(sizes: np.ndarray, limit: int) -> np.ndarray:
    """The bins of sizes (n,), packed largest first and numbered from the fullest."""
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), np.int64)
    bins[order] = best_fit_decreasing(sizes[order].tolist(), CAPACITY, limit)
    return by_load(bins, sizes, int(bins.max()) + 1)


@pytest.mark.parametrize("limit", [6, 8, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_each_kept_bin_is_at_least_as_full_as_before_and_within_its_limits(seed, limit):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(300, [2500, 9000][seed % 2], 800)
    bins = window(sizes, limit)
    num_kept = int(bins.max() * 0.8)
    found = topped_up(bins, sizes, num_kept, CAPACITY, limit)
    loads = [np.bincount(b.clip(max=num_kept), sizes)[:num_kept] for b in (bins, found)]
    assert (loads[1] >= loads[0]).all() and (loads[1] <= CAPACITY).all()
    assert np.bincount(found.clip(max=num_kept))[:num_kept].max() <= limit
    # A bin that was full enough keeps its samples.
    full = np.flatnonzero(loads[0] >= (1 - ACCEPTED_ROOM) * CAPACITY)
    assert np.array_equal(np.isin(bins, full), np.isin(found, full))


def test_sizes_that_do_not_add_up_in_the_order_of_best_fit_fill_the_bins():
    rng, capacity, num_kept = np.random.default_rng(2), 100_000, 40
    sizes = rng.integers(2000, 2501, 2850)
    order = np.argsort(-sizes * rng.uniform(0.8, 1.2, len(sizes)))
    bins = np.empty(len(sizes), np.int64)
    bins[order] = best_fit_decreasing(sizes[order].tolist(), capacity, len(sizes))
    bins = by_load(bins, sizes, int(bins.max()) + 1)
    found = topped_up(bins, sizes, num_kept, capacity, len(sizes))
    full = [np.bincount(b, sizes)[:num_kept].mean() / capacity for b in (bins, found)]
    assert full[0] < 0.996 and full[1] > 0.9975


def test_bins_that_ask_for_the_same_sample_get_different_ones():
    # Each of the bins 0 to 2 has room for 1,000; the others offer 1,000, 900 and 800.
    sizes = np.array([19_000, 19_000, 19_000, 1_000, 900, 800])
    found = topped_up(np.array([0, 1, 2, 3, 3, 3]), sizes, 3, CAPACITY, 10)
    assert sorted(found[3:].tolist()) == [0, 1, 2]


def test_nothing_is_exchanged_without_other_samples_or_room():
    sizes = np.array([9_000, 9_000, CAPACITY])
    for bins, num_kept in (([0, 0, 1], 2), ([1, 1, 0], 1)):
        assert topped_up(np.array(bins), sizes, num_kept, CAPACITY, 10).tolist() == bins


def test_steps_are_balanced_in_groups_where_a_slot_would_wait_for_the_fullest():
    even = np.full((STEPS_PER_CHUNK, 4), 10)
    uneven = even + np.array([10, 0, 0, 0])  # Three slots wait half of the time.
    found = _chunks(np.concatenate([even, even, uneven, even[:3]]))
    ends = np.cumsum([0, 2 * STEPS_PER_CHUNK, STEPS_PER_CHUNK])
    numbers = 2 * STEPS_PER_CHUNK, STEPS_PER_CHUNK, 3
    assert found == list(zip(ends.tolist(), numbers, [True, False, True], strict=True))
