"""The best model of a run when it can't be written, and when the validation pairs are large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import metrics_of, wavy_pair
from runs import options, training

from pointup.datasets.pair_writer import write_pairs
from pointup.training import training_state
from pointup.training.evaluation import EvaluationResult
from pointup.training.run_directory.checkpoint import CheckpointError


def set_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    left = iter(scores)
    monkeypatch.setattr(EvaluationResult, "score", property(lambda _: next(left)))


def test_the_best_model_is_written_later_when_the_disk_was_full_and_the_last_at_the_next_start(
    pair_directory, tmp_path, accelerator, monkeypatch, caplog
):
    real, is_full, kept = training_state.save_model, iter([True, False, True, False]), []

    def save_model(*given: Any) -> None:
        if next(is_full):
            raise CheckpointError("model: the model can't be written (full)")
        real(*given)
        kept.append((model / "model.safetensors").read_bytes())

    monkeypatch.setattr(training_state, "save_model", save_model)
    set_scores(monkeypatch, 0.5, 0.9, 0.3, 0.3)
    config = options(pair_directory, tmp_path / "run", eval_every=2)
    model = tmp_path / "run" / "model"
    with pytest.raises(CheckpointError, match="can't be written"):
        training.train(config, accelerator)
    assert caplog.text.count("can't be written (full); training continues") == 1
    # The one of step 4, which is worse than that of step 2.
    assert [(model / "model.safetensors").read_bytes()] == kept
    training.train(config, accelerator)
    assert len(kept) == 2 and kept[0] != kept[1]
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 7)), "trained further"


def test_a_run_without_a_complete_evaluation_says_that_it_saved_no_model(
    pair_directory, tmp_path, accelerator, monkeypatch, caplog
):
    set_scores(monkeypatch, np.inf)
    training.train(options(pair_directory, tmp_path / "run", steps=1), accelerator)
    assert not (tmp_path / "run" / "model").exists()
    assert caplog.text.count("no model was saved") == 1


def test_a_budget_found_by_memory_does_not_refuse_a_larger_validation_pair(tmp_path, accelerator):
    rng = np.random.default_rng(0)
    train = [wavy_pair(f"train_{i}", 40, 2.0, rng) for i in range(4)]
    write_pairs(train, [wavy_pair("validation_0", 400, 2.0, rng)], tmp_path / "data", info={})
    changes = {"token_budget": "auto", "steps": 2, "eval_every": 2}
    training.train(options(tmp_path / "data", tmp_path / "run", **changes), accelerator)
    evaluations = [line for line in metrics_of(tmp_path / "run") if "validation" in line]
    assert len(evaluations) == 1
