"""The best model of a run when it can't be written, and when the validation pairs are large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from conftest import metrics_of, wavy_pair
from runs import options, training

from pointup.datasets.pair_writer import write_pairs
from pointup.training import training_state
from pointup.training.evaluation import EvaluationResult
from pointup.training.run_directory.checkpoint import CheckpointError

Disk = Callable[[Iterator[bool]], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Sets which writes of the best model fail as on a full disk."""
    real = training_state.save_model

    def set_full(is_full: Iterator[bool]) -> None:
        def save_model(*given: Any) -> None:
            if next(is_full):
                raise CheckpointError("model: the model can't be written (full)")
            real(*given)

        monkeypatch.setattr(training_state, "save_model", save_model)

    return set_full


def set_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    left = iter(scores)
    monkeypatch.setattr(EvaluationResult, "score", property(lambda _: next(left)))


def test_a_best_model_that_could_not_be_written_does_not_keep_later_ones_from_being_written(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    disk: Disk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk(iter([True, False]))
    set_scores(monkeypatch, 0.5, 0.9)
    training.train(options(pair_directory, tmp_path / "run", eval_every=3), accelerator)
    assert caplog.text.count("can't be written (full); training continues") == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_run_whose_last_model_could_not_be_written_fails_and_writes_it_at_the_next_start(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    disk: Disk,
) -> None:
    disk(iter([False, True, False]))
    set_scores(monkeypatch, 0.9, 0.5, 0.5)
    config, model = (
        options(pair_directory, tmp_path / "run", eval_every=3),
        tmp_path / "run" / "model",
    )
    with pytest.raises(CheckpointError, match="can't be written"):
        training.train(config, accelerator)
    before = (model / "model.safetensors").read_bytes()
    training.train(config, accelerator)
    assert (model / "model.safetensors").read_bytes() != before
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 7)), "trained further"


def test_a_run_without_a_complete_evaluation_says_that_it_saved_no_model(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_scores(monkeypatch, np.inf)
    training.train(options(pair_directory, tmp_path / "run"), accelerator)
    assert not (tmp_path / "run" / "model").exists()
    assert caplog.text.count("no model was saved") == 1


def test_a_budget_found_by_memory_does_not_refuse_a_larger_validation_pair(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    rng = np.random.default_rng(0)
    train = [wavy_pair(f"train_{i}", 40, 2.0, rng) for i in range(4)]
    write_pairs(train, [wavy_pair("validation_0", 400, 2.0, rng)], tmp_path / "data", info={})
    changes = {"token_budget": "auto", "steps": 2, "eval_every": 2}
    training.train(options(tmp_path / "data", tmp_path / "run", **changes), accelerator)
    evaluations = [line for line in metrics_of(tmp_path / "run") if "validation" in line]
    assert len(evaluations) == 1
