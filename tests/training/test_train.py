"""train.py in this process: the files of a run, and continuing a stopped run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import metrics_of, wavy_pair
from runs import SMALL, final_weights, options, training
from torch import Tensor

from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import DataError
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.training.evaluation import EvaluationResult


def test_a_run_leaves_config_metrics_events_logs_checkpoints_and_the_best_model(
    pair_directory, tmp_path, accelerator
):
    config, run = options(pair_directory, tmp_path / "run", eval_every=3), tmp_path / "run"
    training.train(config, accelerator)
    saved = json.loads((run / "config.json").read_text())
    assert saved["model"]["feature_dim"] == 16 and saved["slots"] == 1
    lines = metrics_of(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    fields = {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "num_clouds", "num_tokens",
        "tokens_per_second", "step_seconds", "data_wait_seconds", "idle_fraction",
        "peak_memory_bytes", "data_reading_seconds", "data_augmenting_seconds",
        "data_packing_seconds", "limited_by",
    }  # fmt: skip
    assert fields <= steps[0].keys()
    assert all(line["num_tokens"] <= 1200 for line in steps)
    evaluations = [line["validation"] for line in lines if "validation" in line]
    assert len(evaluations) == 2
    assert set(evaluations[0]) == {"model", "midpoints", "source", "resampled"}
    assert (run / "logs" / "rank_0.log").stat().st_size > 0
    assert list(run.rglob("events.out.tfevents.*"))
    assert (run / "checkpoints" / "LATEST").read_text() == "step_6"
    assert Upsampler.from_pretrained(run / "model").config == SMALL

    # The same command again does not train further.
    training.train(config, accelerator)
    assert metrics_of(run) == lines
    log = (run / "logs" / "rank_0.log").read_text()
    assert log.count("The run is complete at step 6.") == 2


def test_a_run_can_start_from_another_model(pair_directory, tmp_path, accelerator):
    torch.manual_seed(1)
    first = Upsampler(**{**SMALL.__dict__, "k": 7})
    torch.nn.init.normal_(first.pull.weight, std=0.1)
    first.save_pretrained(tmp_path / "first")
    config = options(
        pair_directory, tmp_path / "run", steps=1, learning_rate=1e-12, model=ModelConfig(),
        initial_model=str(tmp_path / "first"),
    )  # fmt: skip
    training.train(config, accelerator)
    last = Upsampler.from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, weights in last.items():
        torch.testing.assert_close(weights, first.state_dict()[name], rtol=0, atol=1e-9)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["k"] == 7


def test_a_model_with_predicted_errors_is_calibrated_at_the_end(
    pair_directory, tmp_path, accelerator
):
    model = replace(SMALL, predict_error=True)
    training.train(options(pair_directory, tmp_path / "run", steps=2, model=model), accelerator)
    kept = Upsampler.from_pretrained(tmp_path / "run" / "model")
    found = kept.calibration
    pairs = open_samples(pair_directory, "validation")
    ratios = pairs.array("num_target") / pairs.array("num_source")
    assert found and found.log_distances_at_2
    assert 2 < min(ratios) - 1e-4 <= found.ratio <= max(ratios) + 1e-4
    assert (np.diff(found.log_distances) >= 0).all()
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert re.search(r"Calibrated the uncertainty on [\d,]+ new points", log)


def test_where_a_target_is_as_noisy_as_the_source_no_uncertainty_of_a_survey_is_near_zero(
    tmp_path, accelerator
):
    rng = np.random.default_rng(0)
    scans = [(rng.random((n, 3)) * [9, 9, 0.5]).astype(np.float32) for n in (200, 800) * 4]
    pairs = [Pair(str(i), *scans[2 * i : 2 * i + 2]) for i in range(4)]
    write_pairs(pairs[:2], pairs[2:], tmp_path / "pairs", {"made_by": "tests"})
    model = replace(SMALL, predict_error=True)
    training.train(options(tmp_path / "pairs", tmp_path / "run", steps=1, model=model), accelerator)
    found = Upsampler.from_pretrained(tmp_path / "run" / "model").calibration
    assert min(*found.log_distances, *found.log_distances_at_2) > np.log(0.079)


# Six steps are more than an epoch: step 2 is within the first, step 5 within the second.
@pytest.mark.parametrize(
    ("num_workers", "stops"), [(2, [5]), pytest.param(0, [2, 5], marks=pytest.mark.slow)]
)
def test_a_stopped_run_ends_bit_for_bit_where_the_undisturbed_one_ends(
    pair_directory, tmp_path, accelerator, num_workers, stops
):
    changes = {
        "token_budget": 4000, "ema_decay": 0.7,
        "model": ModelConfig(**{**SMALL.__dict__, "dropout": 0.1}),
    }  # fmt: skip
    training.train(options(pair_directory, tmp_path / "whole", **changes), accelerator)
    changes |= {"num_workers": num_workers, "save_every": 1}
    parts = options(pair_directory, tmp_path / "parts", **changes)
    for stop_after in stops:
        training.train(parts, accelerator, stop_after=stop_after)
        latest = (tmp_path / "parts" / "checkpoints" / "LATEST").read_text()
        assert latest == f"step_{stop_after}"
    training.train(parts, accelerator)

    def results_of(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        path = tmp_path / name / "checkpoints" / "step_6" / "optimizer.pt"
        average = torch.load(path, weights_only=True)["average"]
        assert average["num_steps"] == 6
        losses = [line["loss"] for line in metrics_of(tmp_path / name) if "loss" in line]
        return losses, final_weights(tmp_path / name), average["weights"]

    expected, actual = results_of("whole"), results_of("parts")
    assert actual[0] == expected[0] and len(actual[0]) == 6
    for found, value in zip(actual[1:], expected[1:], strict=True):
        assert all(torch.equal(found[name], value[name]) for name in value)
    _, last, average = expected
    shipped = Upsampler.from_pretrained(tmp_path / "whole" / "model").state_dict()
    assert all(torch.equal(shipped[name], value) for name, value in average.items())
    assert any(not torch.equal(shipped[name], value) for name, value in last.items())


def test_a_run_whose_epochs_differ_in_length_continues_with_the_same_learning_rate(
    tmp_path, accelerator
):
    rng = np.random.default_rng(0)
    sizes = [20, 150, 30, 90, 200, 25, 60]
    write_pairs(
        (wavy_pair(f"train_{i}", size, 2.0, rng) for i, size in enumerate(sizes)),
        [wavy_pair("validation_0", 60, 2.0, rng)],
        tmp_path / "data",
        info={},
    )
    # Half of the samples in each epoch, and other ones in the next.
    half = tmp_path / "data=0.5"
    changes = {"steps": 8, "lr_scaling": "linear", "token_budget": 620, "save_every": 1}

    def run(name: str, *stops: int) -> list[tuple[int, float, float]]:
        config = options(half, tmp_path / name, **changes)
        for stop in (*stops, None):
            training.train(config, accelerator, stop_after=stop)
        lines = [line for line in metrics_of(tmp_path / name) if "loss" in line]
        return [(line["epoch"], line["learning_rate"], line["loss"]) for line in lines]

    whole = run("whole")
    epochs = [epoch for epoch, *_ in whole]
    lengths = [epochs.count(epoch) for epoch in range(epochs[-1])]
    other = next(epoch for epoch, length in enumerate(lengths) if length != lengths[0])
    assert run("parts", epochs.index(other) + 1) == whole


@pytest.mark.parametrize(
    "place", [pytest.param("losses_of_model", marks=pytest.mark.slow), "evaluate"]
)
def test_a_run_that_is_stopped_before_its_last_evaluation_is_not_complete(
    pair_directory, tmp_path, accelerator, monkeypatch, place
):
    config = options(pair_directory, tmp_path / "run", steps=1)
    log = tmp_path / "run" / "logs" / "rank_0.log"
    stops: list[str] = []
    original = getattr(training, place)

    def stopped(*given: Any) -> Any:
        stops.append("SIGTERM")
        return original(*given)

    monkeypatch.setattr(training, place, stopped)
    monkeypatch.setattr(training.StopRequest, "requested", property(lambda _: bool(stops)))
    training.train(config, accelerator)
    assert "Stopped at step 1 and saved" in log.read_text()
    assert "complete" not in log.read_text() and "next: " not in log.read_text()
    monkeypatch.undo()
    training.train(config, accelerator)
    assert log.read_text().count("The run is complete at step 1.") == 1


def test_patience_ends_a_run_with_a_logged_step_and_more_patience_lets_it_go_on(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    scores = iter([0.9, 0.95, 0.96])
    monkeypatch.setattr(EvaluationResult, "score", property(lambda _: next(scores)))
    changes = {"steps": 9, "eval_every": 2, "save_every": 1, "log_every": 3}
    for patience, expected in ((1, [2, 3, 4]), (1, [2, 3, 4]), (2, [2, 3, 4, 6])):
        config = options(pair_directory, tmp_path / "run", patience=patience, **changes)
        training.train(config, accelerator)
        lines = metrics_of(tmp_path / "run")
        assert [line["step"] for line in lines if "loss" in line] == expected
        latest = (tmp_path / "run" / "checkpoints" / "LATEST").read_text()
        assert latest == f"step_{expected[-1]}"


def test_twenty_steps_beat_the_baseline_without_a_network(pair_directory, tmp_path, accelerator):
    config = options(
        pair_directory, tmp_path / "run", steps=20, eval_every=20, save_every=20, warmup_steps=3,
        augment=False, learning_rate=5e-3,
    )  # fmt: skip
    training.train(config, accelerator)
    (rows,) = [line["validation"] for line in metrics_of(tmp_path / "run") if "validation" in line]
    assert rows["model"]["chamfer"] < 0.99 * rows["midpoints"]["chamfer"]
    assert rows["model"]["cd"] < 0.95 * rows["midpoints"]["cd"]


def test_a_dataset_without_any_good_sample_is_an_error(tmp_path, accelerator):
    rng = np.random.default_rng(1)
    pairs = [wavy_pair(f"few_{i}", 3, 3, rng) for i in range(4)]
    write_pairs(pairs[:3], pairs[3:], tmp_path / "data", info={})
    with pytest.raises(DataError, match="none of the 3 train samples can be used"):
        training.train(options(tmp_path / "data", tmp_path / "run"), accelerator)
