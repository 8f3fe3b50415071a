"""Events that a run survives and events that end it: evaluations, names, data, skipped steps."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import metrics_of, wavy_pair
from runs import final_weights, options, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import ConfigError, DataError, TrainingError
from pointup.training import evaluation, training_state
from pointup.training.evaluation import Evaluation
from pointup.visualization import columns


def evaluations_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "validation" in line]


def test_an_evaluation_that_ends_the_process_loses_no_step_and_is_repeated_at_the_next_start(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    whole, run = (
        options(pair_directory, tmp_path / name, eval_every=3) for name in ("whole", "run")
    )
    training.train(whole, accelerator)
    real = Evaluation.records_of

    def dies(*given: Any, **named: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Evaluation, "records_of", dies)
    with pytest.raises(MemoryError):
        training.train(run, accelerator)
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text() == "step_3"

    # The next evaluation ends the process while it writes the model.
    monkeypatch.setattr(Evaluation, "records_of", real)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(training_state, "save_model", dies)
        training.train(run, accelerator)

    training.train(run, accelerator)
    assert evaluations_of(tmp_path / "run") == evaluations_of(tmp_path / "whole")
    expected, actual = final_weights(tmp_path / "whole"), final_weights(tmp_path / "run")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    states = [
        json.loads((tmp_path / name / "checkpoints" / "step_6" / "state.json").read_text())
        for name in ("whole", "run")
    ]
    assert states[0]["best"] == states[1]["best"] and not states[1]["evaluation_due"]


def pairs(names: list[str], num_points: int = 40, seed: int = 0) -> Iterator[Pair]:
    rng = np.random.default_rng(seed)
    for name in names:
        yield wavy_pair(name, num_points, 3.0, rng)


@pytest.mark.usefixtures("small_panels")
def test_samples_that_can_not_be_measured_or_drawn_are_reported_and_the_rest_is_evaluated(
    tmp_path, accelerator, monkeypatch
):
    held_out = list(pairs(["good", "other_surface", "bad_resample"]))
    held_out[1].surface = "other.npz"
    write_pairs(pairs(["a", "b", "c"]), held_out, tmp_path / "data", info={})
    # A valid archive, which the check before a run accepts, but not of a surface.
    (tmp_path / "data" / "surfaces").mkdir()
    np.savez(tmp_path / "data" / "surfaces" / "other.npz", a=np.zeros(3))
    real, real_picture = evaluation.clouds_of_pairs, columns.evaluation_picture

    def clouds_of_pairs(batch: Any, *given: Any) -> Any:
        # Set here, because the check of a dataset excludes such a sample from the dataset.
        if batch.name == ["bad_resample"]:
            batch.resample[0] = np.nan
        return real(batch, *given)

    def picture(*given: Any, title: str, **named: Any) -> Any:
        if title == "good":
            raise RuntimeError("no font")
        return real_picture(*given, title=title, **named)

    monkeypatch.setattr(evaluation, "clouds_of_pairs", clouds_of_pairs)
    monkeypatch.setattr(columns, "evaluation_picture", picture)
    run = tmp_path / "run"
    training.train(
        options(tmp_path / "data", run, steps=2, eval_every=1, num_pictures=3), accelerator
    )
    log = (run / "logs" / "rank_0.log").read_text()
    assert re.search(r"other.npz: not a surface: .*; its sample has no P2F", log)
    assert "1 of 3 validation samples can't be measured; the first one, bad_resample" in log
    assert "no picture of good: no font" in log
    lines = evaluations_of(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["share_of_midpoints"]) for line in lines)
    # The sample that can't be measured is not counted, and the model may still be the best.
    assert (run / "model" / "config.json").exists()


def test_a_model_that_fails_on_a_cloud_is_never_the_best():
    def result(is_complete: bool, *shares: float) -> evaluation.EvaluationResult:
        parts = {str(index): [share, share] for index, share in enumerate(shares)}
        return evaluation.EvaluationResult({}, list(shares), is_complete, parts=parts)

    assert result(True, 0.5, 0.7).score == 0.6
    assert result(False, 0.5).score == result(True).score == np.inf
    assert evaluation.share_of_midpoints({"model": {"chamfer": 1.0}}) is None
    rows = {"model": {"chamfer": 1.0}, "midpoints": {"chamfer": 0.0}}
    assert evaluation.share_of_midpoints(rows) is None


@pytest.mark.usefixtures("small_panels")
def test_names_are_shown_as_they_are_in_pictures_logs_and_trackers(tmp_path, accelerator, capsys):
    held_out = ["cost $5 or $\\frac$", "\x1b[2J\x1b[31mred\r", "../x\u202eabc", "$_{$"]
    broken = next(pairs(["bad\x1b[1m"], num_points=3))
    data, run = tmp_path / "data", tmp_path / "run"
    write_pairs([*pairs(["a", "b", "c"]), broken], pairs(held_out), data, info={})
    training.train(options(data, run, steps=1, num_pictures=4), accelerator)
    console = capsys.readouterr().err
    message = console + (run / "logs" / "rank_0.log").read_text()
    assert "no picture of" not in message and "tensorboard failed" not in message
    assert "train sample bad\\x1b[1m" in console
    assert not {"\x1b", "\r", "\u202e"} & set(message)
    events = EventAccumulator(str(run), size_guidance={"images": 0})
    tags = set(events.Reload().Tags()["images"])
    shown = ["cost $5 or $\\frac$", "\\x1b[2J\\x1b[31mred\\r", "../x\\u202eabc", "$_{$"]
    assert tags == {f"pictures/{name}" for name in shown}


def test_a_dataset_replaced_by_another_of_the_same_sizes_is_refused(tmp_path, accelerator):
    names = [f"cloud_{i}" for i in range(5)]
    data = tmp_path / "data"

    def write(seed: int, change: int | None = None) -> None:
        shutil.rmtree(data, ignore_errors=True)
        clouds = list(pairs(names * 12, seed=seed))
        if change is not None:
            clouds[change].source[0] += 0.01
        write_pairs(clouds, pairs(["held_out"], seed=seed), data, info={})

    write(seed=0)
    config = options(data, tmp_path / "run", steps=4, num_pictures=0)
    training.train(config, accelerator, stop_after=3)
    write(seed=1)
    with pytest.raises(
        ConfigError, match=r"has changed .*the contents of the train pairs.*restore"
    ):
        training.train(config, accelerator)
    # Only a source differs, which is not sampled; the digest of all contents differs.
    write(seed=0, change=1)
    with pytest.raises(ConfigError, match=r"has changed .*contents of the train pairs"):
        training.train(config, accelerator)
    write(seed=0)
    training.train(config, accelerator)


def test_a_run_that_never_took_a_step_is_a_failure(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    real = training.losses_of_model
    config = options(pair_directory, tmp_path, steps=3, num_pictures=0)
    monkeypatch.setattr(training, "losses_of_model", lambda *given: real(*given) * float("nan"))
    for _ in range(2):  # At the end, and again when the run is found to be over.
        with pytest.raises(TrainingError, match="all 3 steps were skipped"):
            training.train(config, accelerator)


@pytest.mark.parametrize(
    "fused", [pytest.param(set(), marks=pytest.mark.slow), {"cpu"}], ids=["", "fused"]
)
def test_a_run_whose_every_step_the_scaler_of_fp16_skipped_is_a_failure(
    fused, pair_directory, tmp_path, accelerator, monkeypatch
):
    monkeypatch.setattr("pointup.training.distributed.accelerator.FUSED", fused)

    def unscale() -> None:  # As the accelerator does with fp16.
        for optimizer in accelerator._optimizers:
            accelerator.scaler.unscale_(optimizer.optimizer)

    monkeypatch.setattr(accelerator, "unscale_gradients", unscale)
    # On the CPU, where the product of loss and scale overflows as in fp16 on other devices.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    real = training.losses_of_model
    monkeypatch.setattr(training, "losses_of_model", lambda *given: real(*given) * 1e36)
    config = options(pair_directory, tmp_path, steps=3, num_pictures=0)
    for _ in range(2):
        with pytest.raises(TrainingError, match="all 3 steps were skipped"):
            training.train(config, accelerator)
    assert accelerator.scaler.get_scale() == 2.0**13
    # Some steps overflow first, then steps are taken.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**95)
    monkeypatch.setattr(training, "losses_of_model", lambda *given: real(*given) * 1e10)
    fine = options(pair_directory, tmp_path / "fine", steps=8, eval_every=8, num_pictures=0)
    training.train(fine, accelerator)
    state = json.loads((tmp_path / "fine" / "checkpoints" / "step_8" / "state.json").read_text())
    assert 0 < state["skipped"] < 8


def test_a_dataset_truncated_during_a_run_is_named(tmp_path, accelerator, monkeypatch):
    data = tmp_path / "data"
    write_pairs(pairs([f"c{i}" for i in range(40)], num_points=900), pairs(["v"]), data, info={})
    real = training.StepMeter
    steps = 0

    def cut_short(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            (arrow,) = (data / "train").glob("*.arrow")
            os.truncate(arrow, 4096)
        return real(*given)

    monkeypatch.setattr(training, "StepMeter", cut_short)
    config = options(
        data, tmp_path / "run", steps=40, token_budget=4000, num_workers=1, num_pictures=0
    )
    with pytest.raises(DataError, match=r"can't be read: .*\.arrow has only 4,096 bytes; restore"):
        training.train(config, accelerator)
