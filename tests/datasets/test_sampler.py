"""The token-budget sampler: properties of a plan, resuming, and sharding by Accelerate."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable

import accelerate
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils.data import DataLoader, Dataset

from pointup.datasets.packing import idle_share
from pointup.datasets.sampler import Mixture, TokenBudgetBatchSampler
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
    assert sampler.fill > (0.99 if num_processes <= 64 else 0.9)


def test_a_few_hundred_samples_make_balanced_steps():
    for seed in range(5):
        sizes = np.random.default_rng(seed).lognormal(9, 1, 300).clip(16, 100_000).astype(int)
        plan = TokenBudgetBatchSampler(sizes, 100_000, num_processes=8).plan
        assert idle_share(plan.loads(sizes)) < 3e-3


def test_slots_beside_a_cloud_larger_than_the_mean_load_get_as_many_tokens():
    sizes = [900] + [100] * 43
    sampler = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=4)
    loads = sampler.plan.loads(np.array(sizes))
    assert sorted(loads.tolist()) == [[400] * 4, [900] * 4]


def test_fewer_samples_than_slots_leave_empty_batches():
    batches = list(itertools.chain(*batches_by_process([5, 6, 7], 8, 1)))
    assert len(batches) == 8 and batches.count([]) == 5


def test_fill_and_idle_share_equal_their_definitions():
    sizes = np.array([600, 700, 800, 900])
    sampler = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=2)
    assert sampler.fill == pytest.approx(3000 / 4000)
    idle = idle_share(sampler.plan.loads(sizes))
    assert idle == pytest.approx(1 - 3000 / (2 * (900 + 700)))


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
    for budget, crop in itertools.product((2**31, sys.maxsize), (False, True)):
        sampler = TokenBudgetBatchSampler([3, 4, 5], budget, max_clouds=sys.maxsize, crop=crop)
        assert [sorted(batch) for batch in sampler] == [[(0, 0), (0, 1), (0, 2)]]
        assert sampler.fill < 1e-8


class Keys(Dataset):
    """Returns the requested keys."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_accelerate_shards_a_global_plan_like_the_sampler_itself(num_processes, even_batches):
    if even_batches and Version(accelerate.__version__) < Version("1.14"):
        pytest.skip("before 1.14 Accelerate asks for even_batches=False itself")
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
        loader,
        torch.device("cpu"),
        num_processes,
        process_index=0,
        put_on_device=False,
        even_batches=False,
    )
    own = TokenBudgetBatchSampler(sizes, BUDGET, num_processes, 0, 4 // num_processes)
    for epoch in (0, 1, 5):
        prepared.set_epoch(epoch)
        own.set_epoch(epoch)
        assert list(prepared) == list(own)


SIZES = np.random.default_rng(0).integers(10, 300, 60)
THREE_TO_ONE = Mixture((40, 20), (1.0, 3.0))


def sampler(mixture: Mixture, num_processes: int = 1, process: int = 0) -> TokenBudgetBatchSampler:
    return TokenBudgetBatchSampler(SIZES, 1000, num_processes, process, mixture=mixture)


def visits(keys: Iterable[tuple[int, ...]]) -> Counter[int]:
    """How often each sample occurs; no key occurs twice."""
    keys = list(keys)
    assert len(set(keys)) == len(keys), "the same augmentation twice in an epoch"
    return Counter(index for _, index, *_ in keys)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.05, 5)), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_after_any_number_of_epochs_each_sample_was_seen_as_often_as_its_weight_says(parts, seed):
    lengths, weights = zip(*[(200, 1.0), *parts], strict=True)
    mixture = Mixture(lengths, weights)
    of_sample = np.repeat(weights, lengths)
    seen = np.zeros(len(mixture), np.int64)
    for epoch in range(7):
        samples = mixture.samples(seed, epoch)
        counts = np.bincount(samples % len(mixture), minlength=len(mixture))
        assert (abs(counts - of_sample) < 1).all(), "an epoch has floor or ceil of the weight"
        seen += counts
        assert (abs(seen - of_sample * (epoch + 1)) < 1 + 1e-6).all()
        sums = np.add.reduceat(counts, np.cumsum([0, *lengths[:-1]]))
        lasting = np.multiply(lengths, weights)
        assert (abs(sums - lasting) <= 1 + 1e-6).all(), "epochs are equally long"


def test_half_a_dataset_is_seen_in_one_epoch_and_the_other_half_in_the_next():
    mixture = Mixture((4, 10), (1.0, 0.5))
    first, second = (set(mixture.samples(0, epoch).tolist()) - {0, 1, 2, 3} for epoch in (0, 1))
    assert len(first) == len(second) == 5 and first | second == set(range(4, 14))
    assert mixture.samples(1, 0).tolist() != mixture.samples(0, 0).tolist()


def test_an_epoch_has_the_samples_of_each_dataset_by_their_weights():
    keys = itertools.chain(*sampler(THREE_TO_ONE))
    assert visits(keys) == Counter({i: 1 if i < 40 else 3 for i in range(60)})


def test_an_epoch_resumed_on_two_processes_sees_each_sample_as_often_as_planned():
    alone = sampler(Mixture((40, 20), (1.0, 2.5)))
    alone.set_epoch(3)
    batches, steps = list(alone), alone.num_steps // 2
    alone.advance(steps)
    groups = [sampler(Mixture((40, 20), (1.0, 2.5)), 2, process) for process in range(2)]
    for each in groups:
        each.load_state_dict(alone.state_dict())
        assert each.num_samples == 90
    rest = itertools.chain(*(keys for each in groups for keys in each))
    counts = visits([*itertools.chain(*batches[:steps]), *rest])
    assert all(counts[i] == 1 for i in range(40))
    assert Counter(counts[i] for i in range(40, 60)) == {2: 10, 3: 10}


def test_a_dataset_of_weight_one_is_planned_as_if_there_were_no_weights():
    plain = TokenBudgetBatchSampler(SIZES, 1000)
    joined = sampler(Mixture((40, 20), (1.0, 1.0)))
    assert list(plain) == list(joined) and plain.num_samples == 60


def test_a_checkpoint_of_other_weights_is_refused():
    state = sampler(THREE_TO_ONE).state_dict()
    with pytest.raises(ConfigError, match="the same --data in the same order"):
        sampler(Mixture((40, 20), (1.0, 2.0))).load_state_dict(state)


@pytest.mark.parametrize(
    "lengths, weights, message",
    [
        ((1, 2), (1.0,), "1 weights for 2 datasets"),
        ((3,), (0.0,), "greater than 0"),
        ((3,), (float("inf"),), "finite"),
        ((3, 5), (0.1, 0.1), "an epoch would have no sample"),
    ],
)
def test_impossible_weights_are_refused(lengths, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(lengths, weights)


def test_numpy_lengths_and_weights_give_a_state_of_json_values():
    given = Mixture(np.array([40, 20]), np.array([1, 3], np.float32))
    assert given == THREE_TO_ONE == Mixture([40, 20], [1, 3])
    assert json.dumps(given.as_state()) == "[[40, 1.0], [20, 3.0]]"
    for length, message in ((-1, "at least 0"), (2.5, "must be an integer")):
        with pytest.raises(ValueError, match=message):
            Mixture((length, 20), (1.0, 1.0))


def test_without_shuffling_only_fractional_weights_change_the_batches_of_an_epoch():
    for weights, is_same in (((1.0, 3.0), True), ((1.0, 0.5), False)):
        one = TokenBudgetBatchSampler(
            SIZES, 1000, mixture=Mixture((40, 20), weights), shuffle=False
        )
        batches = [[key[1:] for key in batch] for batch in one]
        one.set_epoch(1)
        assert ([[key[1:] for key in batch] for batch in one] == batches) == is_same


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=300),
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 2), st.integers(300, 2000), limits),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
@settings(max_examples=60)
def test_an_epoch_resumed_on_other_processes_and_budgets_visits_each_sample_once(
    sizes, parts, data
):
    seen: list[int] = []
    state = None
    for number, (num_processes, steps, budget, limit) in enumerate(parts):
        samplers = [
            TokenBudgetBatchSampler(sizes, budget, num_processes, p, steps, 5, limit)
            for p in range(num_processes)
        ]
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(3)
            else:
                sampler.load_state_dict(state)
        steps_left = len(samplers[0]) // steps
        last = number == len(parts) - 1
        num_steps = steps_left if last else data.draw(st.integers(0, steps_left))
        for sampler in samplers:
            batches = itertools.islice(sampler, num_steps * steps)
            seen += [index for batch in batches for _, index in batch]
            sampler.advance(num_steps)
        states = [json.dumps(sampler.state_dict()) for sampler in samplers]
        assert len(set(states)) == 1
        assert len(states[0]) < 500
        state = json.loads(states[0])
    assert sorted(seen) == list(range(len(sizes)))
    assert len(samplers[0]) == 0
    assert samplers[0].steps_done == samplers[0].num_steps


def test_an_epoch_resumed_with_another_limit_of_clouds_alone_sees_every_sample_once():
    sizes = np.random.default_rng(1).integers(1, 500, 300)
    before = TokenBudgetBatchSampler(sizes, BUDGET, max_clouds=None)
    before.advance(20)
    seen = [index for step in range(20) for index in before.plan.batch(step, 0)]
    after = TokenBudgetBatchSampler(sizes, BUDGET, max_clouds=2)
    after.load_state_dict(before.state_dict())
    batches = list(after)
    assert max(map(len, batches)) == 2
    assert sorted([*seen, *(index for batch in batches for _, index in batch)]) == list(range(300))


def test_with_the_same_slots_the_batches_continue_unchanged():
    sizes = np.random.default_rng(1).integers(1, 500, 300)
    before = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=2, accumulation_steps=3, seed=4)
    before.set_epoch(7)
    whole = list(before)
    before.advance(5)
    after = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=2, accumulation_steps=3)
    after.load_state_dict(before.state_dict())
    assert after.epoch == 7
    assert list(after) == whole[15:]
    assert len(after) == len(whole) - 15
    assert after.state_dict() == before.state_dict()
    alone = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=1, accumulation_steps=6)
    alone.load_state_dict(before.state_dict())
    assert alone.num_steps == before.num_steps


def test_only_advance_changes_the_position():
    sampler = TokenBudgetBatchSampler([400] * 20, BUDGET)
    whole = list(sampler)
    assert list(sampler) == whole
    assert sampler.state_dict()["segments"] == []
    sampler.advance(3)
    assert list(sampler) == whole[3:]
    sampler.set_epoch(0)
    assert list(sampler) == whole[3:]
    sampler.set_epoch(1)
    assert len(sampler) == len(whole)
    with pytest.raises(ValueError, match="can't advance by 11 from step 0 of 10"):
        sampler.advance(11)


def test_numpy_integers_give_a_state_of_json_values_that_can_be_loaded():
    one, two, many = np.int64(1), np.uint8(2), np.int32(BUDGET)
    sampler = TokenBudgetBatchSampler([400] * 20, many, two, one, two, two, two)
    sampler.set_epoch(two)
    sampler.advance(one)
    plain = TokenBudgetBatchSampler([400] * 20, BUDGET, 2, 1, 2, 2, 2)
    plain.set_epoch(2)
    plain.advance()
    assert json.dumps(sampler.state_dict()) == json.dumps(plain.state_dict())
    sampler.change_budget(np.int64(800))
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["segments"] == [[4, BUDGET, 2, 1]]
    plain.load_state_dict(state)
    plain.change_budget(800)
    assert list(plain) == list(sampler)
    for call, name in (
        (sampler.set_epoch, "epoch"),
        (sampler.advance, "num_steps"),
        (sampler.change_budget, "token_budget"),
    ):
        for value in (-1, 1.5):
            with pytest.raises(ValueError, match=f"^{name} is {value}"):
                call(value)


def test_cropped_sizes_count_as_the_budget_and_resume_with_another_one():
    sizes = [10, 1500, 1200] * 10
    first = TokenBudgetBatchSampler(sizes, BUDGET, crop=True)
    seen = [index for batch in list(first)[:7] for _, index in batch]
    first.advance(7)
    second = TokenBudgetBatchSampler(sizes, 800, crop=True)
    second.load_state_dict(first.state_dict())
    seen += [index for batch in second for _, index in batch]
    assert sorted(seen) == list(range(30))


def test_a_changed_dataset_is_refused_at_resume():
    state = TokenBudgetBatchSampler([1, 2, 3], 10).state_dict()
    with pytest.raises(ConfigError, match="dataset has changed"):
        TokenBudgetBatchSampler([1, 2, 4], 10).load_state_dict(state)
