"""The next epoch is planned in another process, with the same result."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pointup.datasets import plan_ahead, sampler
from pointup.datasets.plan_ahead import PlanAhead, Request
from pointup.datasets.sampler import TokenBudgetBatchSampler

SIZES = np.random.default_rng(0).integers(10, 400, 3000).astype(np.int32)


def no_planning(*_: Any) -> Any:
    raise AssertionError("planned in this process")


def test_a_plan_of_another_process_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TokenBudgetBatchSampler(SIZES, 2000, num_processes=3, seed=4)
    expected.set_epoch(1)
    monkeypatch.setattr(sampler, "PLANNED_AHEAD_FROM", 1)
    ahead = TokenBudgetBatchSampler(SIZES, 2000, num_processes=3, seed=4)
    batches = iter(ahead)
    next(batches)
    batches_of_one = list(expected)
    with monkeypatch.context() as only_there:
        only_there.setattr(sampler, "plan_epoch", no_planning)
        ahead.set_epoch(1)
        assert list(ahead) == batches_of_one
    # A change of the budget in the epoch is planned here, from what is left.
    for one in (ahead, expected):
        one.advance(2)
        one.change_budget(1500)
    assert list(ahead) == list(expected)


def test_a_planner_that_fails_is_reported_and_the_epoch_is_planned_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler, "PLANNED_AHEAD_FROM", 1)
    monkeypatch.setattr(plan_ahead.sys, "executable", "/bin/false")
    ahead = TokenBudgetBatchSampler(SIZES, 2000)
    next(iter(ahead))
    with caplog.at_level(logging.WARNING, logger="pointup"):
        ahead.set_epoch(1)
        assert sum(map(len, ahead)) == len(SIZES)
    assert "planning ahead failed with status 1" in caplog.text


def test_an_epoch_is_planned_here_if_no_planner_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler, "PLANNED_AHEAD_FROM", 1)
    monkeypatch.setattr(plan_ahead.sys, "executable", "/nowhere/python")
    ahead = TokenBudgetBatchSampler(SIZES, 2000)
    with caplog.at_level(logging.WARNING, logger="pointup"):
        assert sum(map(len, ahead)) == len(SIZES)
    assert "can't plan epoch 1 ahead (" in caplog.text and "/nowhere/python" in caplog.text
    ahead.set_epoch(1)
    assert sum(map(len, ahead)) == len(SIZES)


def test_only_the_requested_plan_is_given_and_an_unneeded_planner_ends() -> None:
    planner = PlanAhead()
    request = Request(seed=0, epoch=1, token_budget=2000, slots=1, max_clouds=None)
    planner.start(request, SIZES)
    process = planner._process
    assert process is not None
    assert planner.result(Request(0, 2, 2000, 1, None)) is None
    planner.end()
    assert process.returncode is not None and planner.result(request) is None
