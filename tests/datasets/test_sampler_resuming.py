"""Resuming the sampler in mid-epoch, on other processes, budgets and limits."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import BUDGET, limits

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError


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


def test_eight_four_six_and_one_process_in_turn_visit_each_sample_once():
    sizes = np.random.default_rng(0).integers(50, 900, 2000)
    seen: list[int] = []
    state = None
    for num_processes, budget, num_steps in (
        (8, 4000, 9),
        (4, 4000, 20),
        (6, 2500, 11),
        (1, 2500, 0),
    ):
        for p in range(num_processes):
            sampler = TokenBudgetBatchSampler(sizes, budget, num_processes, p)
            if state is not None:
                sampler.load_state_dict(state)
            batches = list(sampler)[: num_steps or None]
            seen += [index for batch in batches for _, index in batch]
        sampler.advance(num_steps)
        state = sampler.state_dict()
    assert sorted(seen) == list(range(2000))
    assert [segment[:2] for segment in state["segments"]] == [[8, 4000], [4, 4000], [6, 2500]]


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
