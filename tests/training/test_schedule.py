"""Learning rate, progress and plan as functions of the position in a run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.config import TrainConfig
from pointup.training.model_choice import MeasuredModel
from pointup.training.progress import (
    Progress,
    RunSchedule,
    learning_rate_at,
    length_in_steps,
    scaled_learning_rate,
)
from pointup.training.tracking.monitor import Monitor, describe_budget, describe_length


def schedule(**options: Any) -> RunSchedule:
    """The schedule of a run on 40 clouds, four of them in each of the 10 steps of an epoch."""
    return RunSchedule(TrainConfig(**options), TokenBudgetBatchSampler([10] * 40, 40))


def model(score: float, step: int = 1) -> MeasuredModel:
    return {"step": step, "score": score, "parts": {"0": [score]}, "figures": {}}


def test_the_learning_rate_rises_linearly_then_falls_as_half_a_cosine():
    for step, warmup in enumerate((0.25, 0.5, 0.75, 1.0)):
        cosine = 0.5 * (1 + math.cos(math.pi * step / 100))
        expected = warmup * (0.02 + 0.98 * cosine)
        assert learning_rate_at(step, step / 100, 1.0, 4) == pytest.approx(expected)
    assert learning_rate_at(50, 0.5, 1.0, 4) == pytest.approx(0.51)
    assert learning_rate_at(100, 1.0, 1.0, 4) == pytest.approx(0.02)


@given(step=st.integers(0, 10**7), progress=st.floats(0, 1), warmup=st.integers(0, 1000))
def test_the_learning_rate_is_positive_and_never_above_its_peak(step, progress, warmup):
    assert 0 < learning_rate_at(step, progress, 2e-3, warmup) <= 2e-3


def test_scaling_grows_with_the_clouds_in_a_step():
    assert scaled_learning_rate(1e-3, "none", 64, 16) == 1e-3
    assert scaled_learning_rate(1e-3, "sqrt", 64, 16) == pytest.approx(2e-3)
    assert scaled_learning_rate(1e-3, "linear", 64, 16) == pytest.approx(4e-3)


def test_the_length_of_a_run_is_given_in_steps_or_epochs_or_hours():
    assert length_in_steps(TrainConfig(data=("pairs",)), 7) == 200
    assert length_in_steps(TrainConfig(), 7) == 120
    assert length_in_steps(TrainConfig(steps=50), 7) == 50
    assert length_in_steps(TrainConfig(epochs=2.5), 7) == 18
    assert length_in_steps(TrainConfig(hours=3.0), 7) is None
    for progress, length, share in (
        (Progress(step=25), {"steps": 50}, 0.5),
        (Progress(elapsed_seconds=1800), {"hours": 1.0}, 0.5),
        (Progress(step=60), {"steps": 50}, 1.0),
    ):
        assert schedule(**length).share_done(progress) == share


def test_the_plan_of_a_run_in_hours_names_the_hours_and_the_intervals():
    for length, expected in (
        ({"steps": 50}, "50, 10 per epoch"),
        (
            {"hours": 1.5, "eval_every": 510},
            "as many as fit into 1.5 h, 10 per epoch; evaluated every 510, saved every 500 or "
            "10 min",
        ),
    ):
        assert describe_length(TrainConfig(**length), schedule(**length)) == expected


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.1, 3.0])
def test_a_run_given_in_epochs_ends_with_them_although_the_budget_changes(epochs):
    run, shares, num_seen = schedule(epochs=epochs), [0.0], 0
    sampler = run.sampler
    while shares[-1] < 1.0:
        if not len(sampler):
            sampler.set_epoch(sampler.epoch + 1)
        num_seen += len(next(iter(sampler)))
        sampler.advance()
        if sampler.epoch == 0 and sampler.steps_done == 3:
            sampler.change_budget(20)
        shares.append(run.share_done(Progress()))
    assert shares == sorted(shares) and 0 <= num_seen - 40 * epochs < 4


def test_a_lowered_budget_applies_until_another_one_is_given():
    progress = Progress(budget_at_start=1000, lowered_budget=800)
    assert progress.budget(1000) == 800
    assert progress.budget(2000) == 2000
    assert Progress().budget(1000) == 1000


@pytest.mark.parametrize(
    ("options", "scores", "best", "finished"),
    [
        ({"patience": 2}, [0.9, 0.8, 0.85], [True, True, False], False),
        ({"patience": 2}, [0.9, 0.8, 0.85, 0.81], [True, True, False, False], True),
        # Equal to the best is no improvement.
        ({"patience": 2}, [0.8, 0.8, 0.8], [True, False, False], True),
        ({"target_chamfer": 0.65}, [0.7], [True], False),
        ({"target_chamfer": 0.65}, [0.7, 0.64], [True, True], True),
    ],
)
def test_patience_and_a_target_end_a_run(options, scores, best, finished):
    progress = Progress(step=1)
    assert [progress.judge(model(score), TrainConfig(**options)) for score in scores] == best
    assert progress.finished == finished and progress.best == min(scores)


def test_a_run_that_patience_ended_goes_on_with_more_patience_or_another_target():
    progress = Progress(step=10, best=0.8, evaluations_since_best=2)

    def has_ended(steps: int = 50, **changes: Any) -> bool:
        return schedule(steps=steps, **changes).has_ended(progress)

    assert has_ended(patience=2) and has_ended(patience=1) and has_ended(target_chamfer=0.8)
    assert not has_ended() and not has_ended(patience=3) and not has_ended(target_chamfer=0.79)
    assert has_ended(steps=10, patience=3)


def test_a_run_on_the_default_data_is_evaluated_at_half_and_end_another_at_each_quarter():
    for options, intervals in (
        ({}, (60, 60)),
        ({"data": ("pairs",)}, (50, 50)),
        ({"data": ("pairs",), "epochs": 2.0}, (5, 5)),
        ({"hours": 1.0}, (500, 500)),
        ({"eval_every": 7, "save_every": 9}, (7, 9)),
    ):
        run = schedule(**options)
        assert (run.eval_every, run.save_every) == intervals


def test_the_end_of_a_run_names_the_option_that_ended_it():
    progress = Progress(step=1200, best=0.8, evaluations_since_best=2)
    for options, end in (
        ({"steps": 1200, "patience": 2}, "."),
        ({"steps": 2000, "target_chamfer": 0.8}, ": its score 0.8 reaches --target-chamfer 0.8."),
        (
            {"steps": 2000, "patience": 2, "target_chamfer": 0.7},
            ": 2 evaluations without a better score (--patience 2).",
        ),
    ):
        message = schedule(**options).end_of_run(progress, is_stopped=False)
        assert message == f"The run is complete at step 1,200{end}"


def test_the_plan_reports_a_raised_budget_and_its_use_where_samples_are_left():
    names, sizes = np.array(["a", "b"]), np.array([500, 30_000])
    part = SimpleNamespace(names=names, full_sizes=sizes)
    data: Any = SimpleNamespace(train=part)
    config = TrainConfig(data=("pairs",))
    assert describe_budget(config, data, 20_480, 0.5) == "20,480, 50.0% used"
    # At the end of an epoch that had another budget.
    assert describe_budget(config, data, 20_480, 0.0) == "20,480"
    text = describe_budget(config, data, 30_000, 0.5)
    assert text == "30,000, 50.0% used; raised from 20,480 to the largest pair, b"
    given = TrainConfig(data=("pairs",), token_budget=30_000)
    assert "raised" not in describe_budget(given, data, 30_000, 0.5)


@pytest.mark.parametrize(
    ("options", "mixed_precision", "row", "shown"),
    [
        ({"initial_model": "forest"}, "no", "initial model", "forest"),
        ({}, "no", "initial model", "none, random weights"),
        ({}, "no", "device", "cpu, precision fp32"),
        ({}, "bf16", "device", "cpu, precision bf16"),
        ({"learning_rate": 5e-4}, "no", "learning rate", "0.0005"),
        ({"lr_scaling": "sqrt", "learning_rate": 5e-4}, "no", "learning rate",
         "0.00025, scaling sqrt"),
    ],
)  # fmt: skip
def test_the_plan_names_model_precision_and_only_a_scaling_that_there_is(
    options, mixed_precision, row, shown
):
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), mixed_precision=mixed_precision, num_processes=1
    )
    data: Any = SimpleNamespace(
        description="pairs, 64 for training", left_out=[], notes=lambda: ["are they swapped?"]
    )
    config = TrainConfig(token_budget=1000, **options)
    monitor = Monitor(accelerator, config, data, Progress())
    text = monitor.plan_text(schedule(**options), num_weights=1000, checkpoint=None)
    *table, note = text.splitlines()
    rows = dict(line.split("  ", 1) for line in table)
    assert rows[row].strip() == shown and note == "Note: are they swapped?"
    assert "Note:" not in monitor.plan_text(schedule(**options), 1000, Path("step_3"))
