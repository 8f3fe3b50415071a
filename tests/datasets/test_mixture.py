"""Several datasets with weights: how often an epoch has each sample, also resumed in mid-epoch."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.datasets.sampler import Mixture, TokenBudgetBatchSampler
from pointup.errors import ConfigError

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
