"""The token-budget sampler: properties of a plan, resuming, and sharding by Accelerate."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pointup.datasets.packing import idle_share
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError

BUDGET = 1000
Batch = list[tuple[int, int]]

sizes_lists = st.one_of(
    st.lists(st.integers(0, BUDGET), min_size=1, max_size=200),
    st.lists(st.integers(1, 60), min_size=1, max_size=400),
    st.lists(st.sampled_from([3, 400, 501, BUDGET]), min_size=1, max_size=100),
)
limits = st.one_of(st.none(), st.integers(1, 5))


def batches_by_process(
    sizes: list[int], num_processes: int, steps: int, **options
) -> list[list[Batch]]:
    """The batches of each process, with `steps` accumulation steps."""
    return [
        list(
            TokenBudgetBatchSampler(
                sizes, BUDGET, num_processes, p, accumulation_steps=steps, **options
            )
        )
        for p in range(num_processes)
    ]


@given(sizes_lists, st.integers(1, 9), st.integers(1, 3), limits, st.integers(0, 3), st.booleans())
def test_each_sample_occurs_once_within_the_budget_and_all_processes_get_equally_many_batches(
    sizes, num_processes, steps, max_clouds, seed, shuffle
):
    per_process = batches_by_process(
        sizes, num_processes, steps, seed=seed, max_clouds=max_clouds, shuffle=shuffle
    )
    sampler = TokenBudgetBatchSampler(
        sizes, BUDGET, num_processes, 0, steps, seed, max_clouds, shuffle=shuffle
    )
    assert {len(batches) for batches in per_process} == {len(sampler)}
    assert len(sampler) == sampler.num_steps * steps
    batches = list(itertools.chain(*per_process))
    assert sorted(index for batch in batches for _, index in batch) == list(range(len(sizes)))
    assert all(sum(sizes[index] for _, index in batch) <= BUDGET for batch in batches)
    assert all(len(batch) <= (max_clouds or len(sizes)) for batch in batches)
    if len(sizes) >= len(batches):
        assert all(batches)


@given(sizes_lists, limits, st.integers(0, 2))
@settings(max_examples=30)
def test_a_slot_holds_the_same_samples_for_any_split_into_processes_and_accumulation_steps(
    sizes, limit, epoch
):
    plans = []
    for num_processes, steps in ((1, 8), (2, 4), (4, 2), (8, 1)):
        slots: dict[tuple[int, int], Batch] = {}
        for p in range(num_processes):
            sampler = TokenBudgetBatchSampler(
                sizes, BUDGET, num_processes, p, steps, max_clouds=limit
            )
            sampler.set_epoch(epoch)
            for number, batch in enumerate(sampler):
                step, micro_batch = divmod(number, steps)
                slots[step, micro_batch * num_processes + p] = batch
        plans.append(slots)
    assert plans[0] == plans[1] == plans[2] == plans[3]


def test_epochs_and_seeds_differ_and_evaluation_does_not():
    sizes = np.random.default_rng(2).integers(1, 500, 200)

    def indices(sampler: TokenBudgetBatchSampler, epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch)
        return [[index for _, index in batch] for batch in sampler]

    training = TokenBudgetBatchSampler(sizes, BUDGET, seed=0)
    assert indices(training, 0) != indices(training, 1)
    assert indices(training, 0) != indices(TokenBudgetBatchSampler(sizes, BUDGET, seed=1), 0)
    evaluation = TokenBudgetBatchSampler(sizes, BUDGET, shuffle=False)
    assert indices(evaluation, 0) == indices(evaluation, 5)
    evaluation.set_epoch(5)
    assert {epoch for batch in evaluation for epoch, _ in batch} == {5}


def test_a_small_dataset_has_different_batches_in_each_epoch():
    # Without jittered sizes, 98 % of the sample pairs of a batch share a batch in the next epoch.
    sizes = np.random.default_rng(3).lognormal(5, 0.7, 300).astype(int).clip(1, 5000)
    sampler = TokenBudgetBatchSampler(sizes, 5000, num_processes=4)

    def companions(epoch: int) -> set[tuple[int, int]]:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        batches = np.split(plan.samples, plan.ptr[1:-1])
        return {pair for batch in batches for pair in itertools.combinations(sorted(batch), 2)}

    first, second = companions(0), companions(1)
    assert len(first & second) < 0.2 * len(first)


def random_sizes(kind: str, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes (n,) of clouds: lognormal, with a Pareto tail, or nine small clouds for each large one.

    Those are "bimodal", or "two sizes": 2,000 to 2,500 and 40,000 to 40,500.
    """
    if kind == "lognormal":
        sizes = np.exp(rng.normal(8.0, 1.0, num_samples))
    elif kind == "Pareto":
        sizes = 500.0 * (1.0 + rng.pareto(1.2, num_samples))
    elif kind == "two sizes":
        small, large = rng.integers([[2000], [40_000]], [[2501], [40_501]], (2, num_samples))
        sizes = np.where(rng.random(num_samples) < 0.9, small, large)
    else:
        small, large = rng.normal([[2000.0], [40_000.0]], [[300.0], [5000.0]], (2, num_samples))
        sizes = np.where(rng.random(num_samples) < 0.9, small, large)
    return np.clip(sizes, 100, 100_000).astype(np.int64)


KINDS, GROUPS = ("lognormal", "Pareto", "bimodal", "two sizes"), (1, 8, 64, 512)


@pytest.mark.parametrize(
    ("kind", "num_processes"),
    [
        # Each kind and each number once; all combinations would be slow.
        pytest.param(kind, number, marks=[] if place == at else pytest.mark.slow)
        for place, kind in enumerate(KINDS)
        for at, number in enumerate(GROUPS)
    ],
)
def test_a_large_plan_has_full_batches_and_balanced_steps(kind, num_processes):
    # Without its last steps, which hold what is left of the epoch.
    rng = np.random.default_rng(1)
    sizes = random_sizes(kind, 200_000, rng)
    sampler = TokenBudgetBatchSampler(sizes, 100_000, num_processes=num_processes, seed=2)
    loads = sampler.plan.loads(sizes)
    fullest_first = loads[np.argsort(-loads.sum(axis=1))]
    full = fullest_first[: -max(2, 128 // num_processes)]
    assert full.mean() > 0.995 * 100_000
    assert idle_share(full) < 1e-3
    assert sampler.statistics().fill > (0.99 if num_processes <= 64 else 0.9)


def test_a_few_hundred_samples_make_balanced_steps():
    for seed in range(5):
        sizes = np.random.default_rng(seed).lognormal(9, 1, 300).clip(16, 100_000).astype(int)
        statistics = TokenBudgetBatchSampler(sizes, 100_000, num_processes=8).statistics()
        assert statistics.idle < 3e-3


def test_slots_beside_a_cloud_larger_than_the_mean_load_get_as_many_tokens():
    sizes = [900] + [100] * 43
    sampler = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=4)
    loads = sampler.plan.loads(np.array(sizes))
    assert sorted(loads.tolist()) == [[400] * 4, [900] * 4]


def test_fewer_samples_than_slots_leave_empty_batches():
    sampler = TokenBudgetBatchSampler([5, 6, 7], BUDGET, num_processes=8)
    assert sampler.num_steps == 1
    assert sampler.statistics().num_empty == 5


def test_statistics_equal_their_definitions():
    sampler = TokenBudgetBatchSampler([600, 700, 800, 900], BUDGET, num_processes=2)
    statistics = sampler.statistics()
    assert statistics.fill == pytest.approx(3000 / 4000)
    assert statistics.idle == pytest.approx(1 - 3000 / (2 * (900 + 700)))


def test_a_sample_over_the_budget_is_named_with_the_remedy():
    with pytest.raises(ConfigError) as error:
        TokenBudgetBatchSampler([10, 1500, 1200], BUDGET, names=["a", "church", "c"])
    assert str(error.value) == (
        "church has 1500 points, more than the token budget of 1000 (2 samples are too large): "
        "raise --token-budget to at least 1500, or give --crop"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget is 0"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0"),
        ({"max_clouds": 0}, "max_clouds is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"process_index": 2, "num_processes": 2}, "process_index is 2 of 2"),
        ({"process_index": -1}, "process_index is -1 of 1"),
        ({"sizes": []}, "integers"),
        ({"sizes": [1.5]}, "integers"),
        ({"sizes": [3, -2]}, "size of sample 1 is -2"),
        ({"seed": 0.5}, "seed is 0.5; it must be an integer"),
        ({"names": ["a"]}, "1 names for 2 sizes"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(**{"sizes": [1, 2], "token_budget": 10, **options})


def test_limits_that_nothing_reaches_may_be_larger_than_any_array_holds():
    for budget, crop in itertools.product((2**31, sys.maxsize, 10**30), (False, True)):
        sampler = TokenBudgetBatchSampler([3, 4, 5], budget, max_clouds=sys.maxsize, crop=crop)
        assert [sorted(batch) for batch in sampler] == [[(0, 0), (0, 1), (0, 2)]]
        assert sampler.statistics().fill < 1e-8


class Keys(Dataset):
    """Returns the requested keys."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_accelerate_shards_a_global_plan_like_the_sampler_itself(num_processes, even_batches):
    sizes = np.random.default_rng(5).integers(1, 500, 101)
    assert not hasattr(TokenBudgetBatchSampler, "batch_size")
    for process in range(num_processes):
        plan = TokenBudgetBatchSampler(sizes, BUDGET, accumulation_steps=8, seed=2)
        shard = BatchSamplerShard(plan, num_processes, process, even_batches=even_batches)
        own = TokenBudgetBatchSampler(
            sizes, BUDGET, num_processes, process, 8 // num_processes, seed=2
        )
        assert list(shard) == list(own)
        assert len(shard) == len(own)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_set_epoch_of_a_prepared_loader_reaches_the_sampler(num_processes):
    sizes = np.random.default_rng(6).integers(1, 500, 101)
    plan = TokenBudgetBatchSampler(sizes, BUDGET, accumulation_steps=4)
    loader = DataLoader(Keys(), batch_sampler=plan, collate_fn=list)
    prepared = prepare_data_loader(
        loader, torch.device("cpu"), num_processes, process_index=0, put_on_device=False
    )
    own = TokenBudgetBatchSampler(sizes, BUDGET, num_processes, 0, 4 // num_processes)
    for epoch in (0, 1, 5):
        prepared.set_epoch(epoch)
        own.set_epoch(epoch)
        assert list(prepared) == list(own)
