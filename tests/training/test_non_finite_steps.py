"""Skipping of steps with a non-finite loss or gradient."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from pointup.errors import TrainingError
from pointup.training.faults.non_finite_steps import (
    MAX_NON_FINITE_STEPS,
    NonFiniteSteps,
    named,
    non_finite_clouds,
)
from pointup.training.step_totals import Piece

PartialState(cpu=True)
ALONE: Any = SimpleNamespace(is_main_process=True, scaler=None)


def piece(*names: str, losses: list[float] | None = None, sum_so_far: float = math.nan) -> Piece:
    given = torch.tensor(losses or [math.nan] * len(names))
    return Piece(list(names), given, torch.zeros(len(names)), torch.tensor(sum_so_far))


def non_finite_step(non_finite: NonFiniteSteps, step: int, *clouds: str) -> bool:
    return non_finite.may_step(step, math.nan, 1.0, 0.003, [piece(*clouds)])


def test_clouds_at_fault_have_such_a_loss_or_are_the_first_with_such_gradients():
    fine, spoiled = piece("a", "b", losses=[1.0, 2.0], sum_so_far=3.0), piece("c", losses=[1.0])
    assert non_finite_clouds([fine, spoiled, piece("d", losses=[2.0])]) == ["c"]
    assert non_finite_clouds([fine, spoiled, piece("d", "e", losses=[math.inf, 1.0])]) == ["d"]
    assert non_finite_clouds([fine]) == []


def test_non_finite_steps_end_a_run_only_in_a_row():
    non_finite = NonFiniteSteps(ALONE)
    for step in range(MAX_NON_FINITE_STEPS - 1):
        assert not non_finite_step(non_finite, step, "a")
    assert non_finite.may_step(MAX_NON_FINITE_STEPS, 1.0, 1.0, 0.003, [])
    assert not non_finite.may_step(11, 1.0, math.inf, 0.003, [piece("b")])
    for step in range(MAX_NON_FINITE_STEPS - 2):
        assert not non_finite_step(non_finite, 12 + step, "a")
    with pytest.raises(TrainingError, match=r"the last one step 40 at learning rate 0\.003"):
        non_finite_step(non_finite, 40, "a")


def test_a_cloud_common_to_all_non_finite_steps_is_distinguished_from_divergence():
    message = {}
    for others in (["culprit"], []):
        non_finite = NonFiniteSteps(ALONE)
        with pytest.raises(TrainingError) as ended:
            for step in range(MAX_NON_FINITE_STEPS):
                non_finite_step(non_finite, step, f"cloud_{step}", *others)
        message[len(others)] = str(ended.value)
    assert "all of them from culprit: check these clouds" in message[1]
    assert "other clouds each time: training has diverged; lower --learning-rate" in message[0]
    assert "diverged" not in message[1]


def test_only_the_first_of_many_clouds_are_named():
    assert named([]) == "no cloud in particular"
    assert named(["a", "b"]) == "a, b"
    assert named([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


class Fp16Run:
    """A weight, its optimizer, and torch's GradScaler, as Accelerate steps them."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        self.non_finite = NonFiniteSteps(SimpleNamespace(scaler=self.scaler, is_main_process=True))  # type: ignore[arg-type]

    def step(self, number: int, loss: float, gradient: float) -> bool:
        """Take a step if it may be taken; returns that."""
        self.scaler.scale(torch.ones(()))
        self.weight.grad = torch.tensor(gradient) * self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.weight.grad.abs().item()
        may_step = self.non_finite.may_step(number, loss, grad_norm, 1e-3, [piece("cloud_3")])
        if may_step:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return may_step


def test_with_fp16_a_non_finite_loss_with_finite_gradients_takes_no_step():
    run = Fp16Run()
    for number, loss in enumerate((math.nan, math.inf)):
        assert not run.step(number, loss, 1.0)
        assert run.weight.item() == 0.0
    assert run.step(2, 0.5, 1.0) and run.weight.item() == -1.0


def test_with_fp16_gradients_that_stay_non_finite_end_the_run(caplog):
    run = Fp16Run()
    with caplog.at_level(logging.WARNING, "pointup"):
        # Overflows while the scale decreases do not count as non-finite steps.
        for number in range(15):
            assert run.step(number, 1.0, math.inf)
            assert run.step(number, 1.0, 1.0)
        assert not caplog.records and run.non_finite.in_a_row == 0
        with pytest.raises(TrainingError, match=r"10 steps in a row, .* from cloud_3"):
            for number in range(200):
                run.step(number, 1.0, math.nan)
    # The scale is 2.0 after 15 overflows, and below 1 after two more.
    assert number == 1 + MAX_NON_FINITE_STEPS
    assert run.weight.item() == -15.0
