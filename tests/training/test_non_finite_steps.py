"""Skipping of steps with a non-finite loss or gradient."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState

from pointup.errors import TrainingError
from pointup.training.faults.non_finite_steps import MAX_NON_FINITE_STEPS, NonFiniteSteps, named

PartialState(cpu=True)
ALONE: Any = SimpleNamespace(is_main_process=True, scaler=None)


def non_finite_step(non_finite: NonFiniteSteps, step: int, *clouds: str) -> bool:
    return non_finite.may_step(step, math.nan, 1.0, 0.003, lambda: list(clouds))


def test_non_finite_steps_end_a_run_only_in_a_row() -> None:
    non_finite = NonFiniteSteps(ALONE)
    for step in range(MAX_NON_FINITE_STEPS - 1):
        assert not non_finite_step(non_finite, step, "a")
    assert non_finite.may_step(MAX_NON_FINITE_STEPS, 1.0, 1.0, 0.003, list)
    assert not non_finite.may_step(11, 1.0, math.inf, 0.003, lambda: ["b"])
    for step in range(MAX_NON_FINITE_STEPS - 2):
        assert not non_finite_step(non_finite, 12 + step, "a")
    with pytest.raises(TrainingError, match=r"the last one step 40 at learning rate 0\.003"):
        non_finite_step(non_finite, 40, "a")


def test_a_cloud_common_to_all_non_finite_steps_is_distinguished_from_divergence() -> None:
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


def test_only_the_first_of_many_clouds_are_named() -> None:
    assert named([]) == "no cloud in particular"
    assert named(["a", "b"]) == "a, b"
    assert named([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
