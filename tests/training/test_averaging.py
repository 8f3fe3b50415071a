"""The exponential moving average of the weights; test_train.py has its place in a run."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SMALL

from pointup.model.upsampler import Upsampler
from pointup.training.training_state import WeightAverage


@settings(max_examples=10)
@given(st.floats(0.05, 0.999), st.integers(1, 30), st.integers(0, 2**16))
def test_the_average_follows_its_recursion(decay, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = Upsampler(**SMALL.__dict__)
    average = WeightAverage(weights, decay)
    expected = [w.detach().double() for w in weights.parameters()]
    for step in range(1, steps + 1):
        with torch.no_grad():
            for values in weights.parameters():
                values += torch.randn(values.shape, generator=generator)
        before = [w.detach().clone() for w in weights.parameters()]
        average.update()
        assert all(map(torch.equal, weights.parameters(), before))
        share = min(decay, (1 + step) / (10 + step))
        new = [w.detach().double() for w in weights.parameters()]
        expected = [share * e + (1 - share) * w for e, w in zip(expected, new, strict=True)]
    for found, value in zip(average.model().parameters(), expected, strict=True):
        torch.testing.assert_close(found.double(), value, atol=1e-4, rtol=1e-4)
        assert not found.requires_grad


def test_without_a_decay_the_model_is_that_of_the_weights():
    weights = Upsampler(**SMALL.__dict__)
    average = WeightAverage(weights, None)
    average.update()
    assert average.model() is weights and average.state_dict() is None


def test_a_share_of_the_initial_model_is_mixed_into_the_model_but_not_into_the_training():
    weights = Upsampler(**SMALL.__dict__)
    before = [w.detach().clone() for w in weights.parameters()]
    average = WeightAverage(weights, None, initial_share=0.75)
    assert all(map(torch.equal, average.model().parameters(), before))
    with torch.no_grad():
        for values in weights.parameters():
            values += 1
    for mixed, now, then in zip(
        average.model().parameters(), weights.parameters(), before, strict=True
    ):
        torch.testing.assert_close(mixed, then + 0.25)
        torch.testing.assert_close(now, then + 1)
