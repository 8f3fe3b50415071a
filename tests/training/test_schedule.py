"""Learning rate and progress as functions of the position in a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pointup.training.run_plan import length_of_run, plan_of_run
from pointup.training.schedule import learning_rate_at, scaled_learning_rate

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.config import TrainConfig
from pointup.training.faults.token_budget import describe_budget
from pointup.training.progress import Progress, RunSchedule, length_in_steps


def test_the_learning_rate_rises_linearly_then_falls_as_half_a_cosine() -> None:
    rates = [learning_rate_at(s, s / 100, 1.0, warmup_steps=4, final_fraction=0) for s in range(4)]
    cosine = [0.5 * (1 + math.cos(math.pi * s / 100)) for s in range(4)]
    assert rates == pytest.approx(
        [c * w for c, w in zip(cosine, (0.25, 0.5, 0.75, 1), strict=True)]
    )
    assert learning_rate_at(50, 0.5, 1.0, 4, final_fraction=0) == pytest.approx(0.5)
    assert learning_rate_at(100, 1.0, 1.0, 4, final_fraction=0.02) == pytest.approx(0.02)


@given(step=st.integers(0, 10**7), progress=st.floats(0, 1), warmup=st.integers(0, 1000))
def test_the_learning_rate_is_positive_and_never_above_its_peak(
    step: int, progress: float, warmup: int
) -> None:
    assert 0 < learning_rate_at(step, progress, 2e-3, warmup) <= 2e-3


def test_scaling_grows_with_the_clouds_in_a_step() -> None:
    assert scaled_learning_rate(1e-3, "none", 64, 16) == 1e-3
    assert scaled_learning_rate(1e-3, "sqrt", 64, 16) == pytest.approx(2e-3)
    assert scaled_learning_rate(1e-3, "linear", 64, 16) == pytest.approx(4e-3)


def test_the_length_of_a_run_is_given_in_steps_or_epochs_or_hours() -> None:
    assert length_in_steps(TrainConfig(data=("pairs",)), 7) == 200
    assert length_in_steps(TrainConfig(), 7) == 120
    assert length_in_steps(TrainConfig(steps=50), 7) == 50
    assert length_in_steps(TrainConfig(epochs=2.5), 7) == 18
    assert length_in_steps(TrainConfig(hours=3.0), 7) is None
    sampler = TokenBudgetBatchSampler([10] * 40, 40)
    assert Progress(step=25).share_done(TrainConfig(steps=50), sampler) == 0.5
    assert Progress(elapsed_seconds=1800).share_done(TrainConfig(hours=1.0), sampler) == 0.5
    assert Progress(step=60).share_done(TrainConfig(steps=50), sampler) == 1.0


def test_the_plan_of_a_run_in_hours_names_the_hours_and_the_intervals() -> None:
    sampler = TokenBudgetBatchSampler([10] * 40, 40)
    for config, expected in (
        (TrainConfig(steps=50), "50, 10 per epoch"),
        (
            TrainConfig(hours=1.5, eval_every=510),
            "as many as fit into 1.5 h, 10 per epoch; evaluated every 510, saved every 500 or "
            "10 min",
        ),
    ):
        schedule = RunSchedule.of(config, sampler)
        assert length_of_run(config, schedule, sampler.num_steps) == expected


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.1, 3.0])
def test_a_run_given_in_epochs_ends_with_them_although_the_budget_changes(epochs: float) -> None:
    sampler, config = TokenBudgetBatchSampler([10] * 40, 40), TrainConfig(epochs=epochs)
    shares, num_seen, progress = [0.0], 0, Progress()
    while shares[-1] < 1.0:
        if not len(sampler):
            sampler.set_epoch(sampler.epoch + 1)
        num_seen += len(next(iter(sampler)))
        sampler.advance()
        if sampler.epoch == 0 and sampler.steps_done == 3:
            sampler.change_budget(20)
        shares.append(progress.share_done(config, sampler))
    assert shares == sorted(shares) and 0 <= num_seen - 40 * epochs < 4


def test_a_lowered_budget_applies_until_another_one_is_given() -> None:
    progress = Progress(budget_at_start=1000, lowered_budget=800)
    assert progress.budget(1000) == 800
    assert progress.budget(2000) == 2000
    assert Progress().budget(1000) == 1000


def test_a_run_ends_after_patience_evaluations_without_a_better_one() -> None:
    progress = Progress()
    verdicts = [progress.judge(score, patience=2, target=None) for score in (0.9, 0.8, 0.85)]
    assert verdicts == [True, True, False]
    assert not progress.finished
    progress.judge(0.81, patience=2, target=None)
    assert progress.finished and progress.best == 0.8


def test_a_run_ends_when_the_target_is_reached() -> None:
    progress = Progress()
    progress.judge(0.7, patience=None, target=0.65)
    assert not progress.finished
    progress.judge(0.64, patience=None, target=0.65)
    assert progress.finished


def test_a_run_that_patience_ended_goes_on_with_more_patience_or_another_target() -> None:
    sampler, progress = TokenBudgetBatchSampler([10] * 40, 40), Progress(step=10)
    for score in (0.8, 0.9, 0.85):
        progress.judge(score, patience=2, target=None)
    assert progress.finished

    def has_ended(**changes: Any) -> bool:
        return progress.has_ended(TrainConfig(steps=50, **changes), sampler)

    assert has_ended(patience=2) and has_ended(patience=1) and has_ended(target_chamfer=0.8)
    assert not has_ended() and not has_ended(patience=3) and not has_ended(target_chamfer=0.79)
    assert progress.has_ended(TrainConfig(steps=10, patience=3), sampler)


def test_an_evaluation_equal_to_the_best_is_no_improvement() -> None:
    progress = Progress()
    assert progress.judge(0.8, patience=2, target=None)
    assert not progress.judge(0.8, patience=2, target=None)
    assert not progress.judge(0.8, patience=2, target=None)
    assert progress.finished


def test_a_run_on_the_default_data_is_evaluated_at_half_and_end_another_at_each_quarter() -> None:
    sampler = TokenBudgetBatchSampler([10] * 40, 40)
    for config, interval in (
        (TrainConfig(), 60),
        (TrainConfig(data=("pairs",)), 50),
        (TrainConfig(data=("pairs",), epochs=2.0), 5),
        (TrainConfig(hours=1.0), 500),
    ):
        schedule = RunSchedule.of(config, sampler)
        assert schedule.eval_every == schedule.save_every == interval
    own = RunSchedule.of(TrainConfig(eval_every=7, save_every=9), sampler)
    assert (own.eval_every, own.save_every) == (7, 9)


def test_the_end_of_a_run_names_the_option_that_ended_it() -> None:
    sampler = TokenBudgetBatchSampler([10] * 40, 40)
    progress = Progress(step=1200, best=0.8, evaluations_since_best=2)
    for options, end in (
        ({"steps": 1200, "patience": 2}, "."),
        ({"steps": 2000, "target_chamfer": 0.8}, ": its score 0.8 reaches --target-chamfer 0.8."),
        (
            {"steps": 2000, "patience": 2, "target_chamfer": 0.7},
            ": 2 evaluations without a better score (--patience 2).",
        ),
    ):
        message = progress.end_of_run(TrainConfig(**options), sampler)
        assert message == f"The run is complete at step 1,200{end}"


def test_the_plan_at_the_end_of_an_epoch_claims_no_use_of_a_budget_that_no_sample_is_left_for() -> (
    None
):
    config = TrainConfig(data=("pairs",), token_budget=40)
    data: Any = None  # Only for a budget that was raised.
    assert describe_budget(config, data, 40, 0.0) == "40"
    assert describe_budget(config, data, 40, 0.5) == "40, 50.0% used"


def plan(config: TrainConfig, mixed_precision: str = "no") -> dict[str, str]:
    """The rows of the table at the start of a run with `config`."""
    sampler: Any = SimpleNamespace(
        num_samples=64, num_steps=8, token_budget=config.token_budget,
        statistics=lambda: SimpleNamespace(fill=0.5),
    )  # fmt: skip
    run: Any = SimpleNamespace(
        config=config,
        data=SimpleNamespace(description="pairs, 64 for training", left_out=[]),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), mixed_precision=mixed_precision, num_processes=1
        ),
        sampler=sampler,
        reduction=SimpleNamespace(num_weights=1000),
        schedule=RunSchedule.of(config, sampler),
        checkpoint=None,
    )
    rows = (line.split("  ", 1) for line in plan_of_run(run).splitlines())
    return {name: value.strip() for name, value in rows}


@pytest.mark.parametrize(("name", "shown"), [("forest", "forest"), (None, "none, random weights")])
def test_the_plan_names_the_model_that_a_run_starts_from(name: str | None, shown: str) -> None:
    config = TrainConfig(initial_model=name, token_budget=1000)
    assert plan(config)["initial model"] == shown


@pytest.mark.parametrize(("mixed", "shown"), [("no", "fp32"), ("bf16", "bf16")])
def test_the_plan_names_the_precision_and_only_a_scaling_that_there_is(
    mixed: str, shown: str
) -> None:
    rows = plan(TrainConfig(learning_rate=5e-4, token_budget=1000), mixed)
    assert rows["device"] == f"cpu, precision {shown}"
    assert rows["learning rate"] == "0.0005"
    scaled = TrainConfig(learning_rate=5e-4, token_budget=1000, lr_scaling="sqrt")
    assert plan(scaled)["learning rate"] == "0.000354, scaling sqrt"
