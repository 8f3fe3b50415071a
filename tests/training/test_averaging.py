"""The exponential moving average of the weights: its values, and its place in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SMALL, final_weights, options, training

from pointup.model.upsampler import Upsampler
from pointup.training.training_state import WeightAverage


def state_of_average(run: Path, step: int) -> dict[str, object]:
    path = run / "checkpoints" / f"step_{step}" / "optimizer.pt"
    return dict(torch.load(path, weights_only=True)["average"])


@settings(max_examples=10)
@given(st.floats(0.05, 0.999), st.integers(1, 30), st.integers(0, 2**16))
def test_the_average_follows_its_recursion(decay: float, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = Upsampler(**SMALL.__dict__)
    average = WeightAverage(weights, decay)
    expected = [w.detach().double() for w in weights.parameters()]
    for step in range(1, steps + 1):
        with torch.no_grad():
            for values in weights.parameters():
                values += torch.randn(values.shape, generator=generator)
        average.update()
        share = min(decay, (1 + step) / (10 + step))
        new = [w.detach().double() for w in weights.parameters()]
        expected = [share * e + (1 - share) * w for e, w in zip(expected, new, strict=True)]
    for found, value in zip(average.model().parameters(), expected, strict=True):
        torch.testing.assert_close(found.double(), value, atol=1e-4, rtol=1e-4)
        assert not found.requires_grad


def test_without_a_decay_the_model_is_that_of_the_weights() -> None:
    weights = Upsampler(**SMALL.__dict__)
    average = WeightAverage(weights, None)
    average.update()
    assert average.model() is weights and average.state_dict() is None


def test_a_share_of_the_initial_model_is_mixed_into_the_model_but_not_into_the_training() -> None:
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


def test_a_run_saves_the_average_continues_it_exactly_and_trains_as_without_one(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    for name, decay, stop_after in (("whole", 0.7, None), ("parts", 0.7, 4), ("plain", None, None)):
        changes = {"ema_decay": decay, "eval_every": 6, "save_every": 1}
        config = options(pair_directory, tmp_path / name, **changes)
        training.train(config, accelerator, stop_after=stop_after)
        if stop_after is not None:
            training.train(config, accelerator)
    whole, parts = (state_of_average(tmp_path / name, 6) for name in ("whole", "parts"))
    assert whole["num_steps"] == parts["num_steps"] == 6
    averaged = whole["weights"]
    assert isinstance(averaged, dict) and isinstance(parts["weights"], dict)
    assert all(torch.equal(value, parts["weights"][name]) for name, value in averaged.items())
    last = final_weights(tmp_path / "whole")
    for other in (final_weights(tmp_path / "parts"), final_weights(tmp_path / "plain")):
        assert all(torch.equal(value, other[name]) for name, value in last.items())
    shipped = Upsampler.from_pretrained(tmp_path / "whole" / "model").state_dict()
    assert all(torch.equal(shipped[name], value) for name, value in averaged.items())
    assert any(not torch.equal(shipped[name], value) for name, value in last.items())


def test_a_checkpoint_without_an_average_is_refused() -> None:
    with pytest.raises(ValueError, match="no average of the weights"):
        WeightAverage(Upsampler(**SMALL.__dict__), 0.9).load_state_dict(None)
