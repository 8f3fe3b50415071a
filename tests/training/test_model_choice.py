"""A run from a model keeps that model until another one is better by more than noise."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import metrics_of
from runs import SMALL, options, training

from pointup.datasets.sampler import Mixture, TokenBudgetBatchSampler
from pointup.errors import ConfigError
from pointup.model.calibration import Calibration
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.training.model_choice import (
    MeasuredModel,
    chamfer_of_parts,
    is_better,
    outcome,
    parts_per_side,
)
from pointup.training.progress import Progress, RunSchedule, spread_samples


def measured(parts: np.ndarray, step: int = 0, **figures: float) -> MeasuredModel:
    by_pair = {str(pair): row for pair, row in enumerate(np.atleast_2d(parts.T).T.tolist())}
    return {"step": step, "score": float(parts.mean()), "parts": by_pair, "figures": figures}


def test_the_parts_of_a_pair_have_its_chamfer_distance_by_a_brute_force():
    rng = np.random.default_rng(0)
    target, cloud = rng.random((90, 3)), rng.random((50, 3))
    distances = np.linalg.norm(cloud[:, None] - target, axis=2)
    expected = []
    for column in np.array_split(target[:, 0].argsort(), 3):
        for rows in np.array_split(column[target[column, 1].argsort()], 3):
            of_part = np.isin(distances.argmin(axis=1), rows)
            to_target = distances[of_part].min(axis=1)
            expected.append(to_target.mean() + distances[:, rows].min(axis=0).mean())
    np.testing.assert_allclose(chamfer_of_parts(cloud, target, 3), expected)
    (whole,) = chamfer_of_parts(cloud, target, 1)
    np.testing.assert_allclose(whole, distances.min(axis=1).mean() + distances.min(axis=0).mean())
    core = np.array([[0.2, 0.1], [0.7, 0.8]])
    inside = [((p[:, :2] >= core[0]) & (p[:, :2] <= core[1])).all(axis=1) for p in (cloud, target)]
    (on_core,) = chamfer_of_parts(cloud, target, 1, core)
    ways = distances[inside[0]].min(axis=1), distances[:, inside[1]].min(axis=0)
    np.testing.assert_allclose(on_core, sum(way.mean() for way in ways))
    assert [parts_per_side(number) for number in (1, 2, 5, 15, 16, 500)] == [4, 3, 2, 2, 1, 1]


def test_noise_hardly_ever_makes_a_model_better_and_a_small_steady_gain_does():
    rng = np.random.default_rng(0)
    level = rng.uniform(0.3, 2.0, (2, 9))
    before = measured(level)
    chosen = [is_better(measured(level + rng.normal(0, 0.02, (2, 9))), before) for _ in range(500)]
    assert np.mean(chosen) < 0.08
    gains = [measured(level - rng.normal(0.02, 0.02, (2, 9))) for _ in range(100)]
    assert np.mean([is_better(gain, before) for gain in gains]) > 0.95
    assert is_better(measured(level - 0.001), before)
    assert not is_better(before, before)
    assert not is_better(measured(level * 0.9999), before), "a gain of 0.01 %"
    one = measured(np.array([[1.0]]))
    assert not is_better(measured(np.array([[0.5]])), one), "one part shows nothing"


def test_the_score_alone_does_not_replace_the_initial_model():
    rng = np.random.default_rng(0)
    level, config, progress = rng.uniform(0.5, 1.5, (20, 1)), TrainConfig(), Progress()
    assert progress.judge(measured(level), config)
    progress.step = 10
    uneven = level - np.where(np.arange(20) < 1, 0.4, 0.0)[:, None]
    assert not progress.judge(measured(uneven, 10), config), "one pair of twenty is better"
    assert progress.judge(measured(level - 0.01, 20), config)
    assert not progress.judge(measured(level - 0.005, 30), config), "better than the initial one"
    assert progress.kept is not None and progress.kept["step"] == 20
    assert progress.evaluations_since_best == 1


def test_the_end_says_by_how_much_the_model_is_better_and_what_is_worse():
    before = measured(
        np.ones((2, 9)), chamfer=0.8, canopy_bias_shifted=-0.3, beyond_1=0.2, below_ground=0
    )
    after = measured(
        np.ones((2, 9)), 40, chamfer=0.76, canopy_bias_shifted=0.5, beyond_1=0.2, below_ground=0
    )
    text = outcome("forest", "chamfer", before, after)
    assert "holds step 40, better than the initial model forest on 18 parts of the 2" in text
    assert "Chamfer 0.76, not 0.8 (-5.0%, as written). Worse: canopy height bias 0.5, not" in text
    assert "beyond" not in text and "below" not in text
    assert "no step was better by more than noise" in outcome("x", "chamfer", before, before)


def test_samples_to_validate_are_spread_evenly_and_have_the_tokens_that_were_asked_for():
    sizes = np.full(1000, 50)
    chosen = spread_samples(sizes, 100 * 50)
    assert len(chosen) == 100 and min(np.diff(chosen)) >= 3 and max(np.diff(chosen)) <= 17
    assert spread_samples(sizes[:7], 1e9) == list(range(7))
    assert len(spread_samples(sizes, 0)) == 4


def test_the_share_of_validation_does_not_depend_on_the_weight_of_a_dataset():
    validated = []
    for weight in (0.1, 1.0, 10.0):
        mixture = Mixture((200,), (weight,))
        sampler = TokenBudgetBatchSampler(np.full(200, 1000), 10_000, mixture=mixture)
        config = TrainConfig(steps=400, eval_every=100, validation_share=0.2)
        schedule = RunSchedule(config, sampler)
        validated.append(len(schedule.samples_to_validate(np.full(400, 1000))))
    # In 100 steps of 10 clouds.
    assert validated == [200, 200, 200]


def test_a_dataset_of_few_validation_pairs_among_many_of_another_one_is_measured():
    schedule = RunSchedule(
        TrainConfig(steps=8, eval_every=4), TokenBudgetBatchSampler(np.full(200, 1000), 10_000)
    )
    bounds, sizes = (0, 32, 32, 34, 40), np.full(40, 1000)
    assert len(schedule.samples_to_validate(sizes)) == 8
    validated = schedule.samples_to_validate(sizes, bounds)
    counts = [sum(a <= i < b for i in validated) for a, b in pairwise(bounds)]
    assert counts[1] == 0 and min(counts[0], *counts[2:]) >= 1, counts


def test_a_run_that_only_makes_its_initial_model_worse_ends_with_that_model(
    pair_directory, tmp_path, accelerator
):
    torch.manual_seed(0)
    initial = Upsampler(**asdict(replace(SMALL, predict_error=True)))
    initial.calibration = Calibration((0.0, 1.0), (0.5, 2.0))
    initial.save_pretrained(tmp_path / "initial")
    config = options(
        pair_directory, tmp_path / "run", steps=2, eval_every=1, save_every=1, warmup_steps=0,
        learning_rate=10.0, initial_model=str(tmp_path / "initial"),
    )  # fmt: skip
    # Also when it is stopped before the end.
    training.train(config, accelerator, stop_after=1)
    training.train(replace(config, patience=5), accelerator)
    kept = Upsampler.from_pretrained(tmp_path / "run" / "model")
    state = kept.state_dict()
    assert all(torch.equal(state[name], value) for name, value in initial.state_dict().items())
    assert kept.calibration.within(np.arange(3.0)) == pytest.approx(np.exp([0.5, 2.0, 2.0]))
    lines = [line for line in metrics_of(tmp_path / "run") if "validation" in line]
    assert [(line["step"], line["is_kept"]) for line in lines] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "model/ holds the initial model" in log


def test_a_run_that_keeps_a_share_of_its_initial_model_continues_from_no_other(
    pair_directory, tmp_path, accelerator
):
    Upsampler(**asdict(SMALL)).save_pretrained(tmp_path / "initial")
    config = options(
        pair_directory, tmp_path / "run", steps=2, eval_every=2, save_every=1,
        initial_model=str(tmp_path / "initial"), initial_share=0.5,
    )  # fmt: skip
    training.train(config, accelerator, stop_after=1)
    other = Upsampler.from_pretrained(tmp_path / "initial")
    next(other.parameters()).data += 1e-6
    other.save_pretrained(tmp_path / "initial")
    with pytest.raises(ConfigError, match=r"its weights have changed since .*step_1.*restore them"):
        training.train(config, accelerator)
    # A checkpoint of an earlier version has no checksum of the initial weights.
    path = tmp_path / "run" / "checkpoints" / "step_1" / "state.json"
    state = json.loads(path.read_text())
    del state["initial_weights"]
    path.write_text(json.dumps(state))
    training.train(config, accelerator)
