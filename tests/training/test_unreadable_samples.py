"""Samples that turn out damaged during a run are left out of their step, which stays exact."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics_of
from disturbed import ends
from runs import final_weights, options, training
from test_distributed import steps_of

from pointup.datasets.opening import open_samples
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import DataError
from pointup.training.run_directory.checkpoint import has_checkpoints


def damage(directory: Path, split: str, names: list[str]) -> None:
    """Overwrite points of samples on disk with other numbers."""
    samples = open_samples(directory, split)
    for name in names:
        file, place, *_ = samples.value("place", list(samples.names).index(name))
        with samples.table.files[file][0].open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\x00" * 16)


@pytest.fixture
def damaged(pair_directory, tmp_path) -> Path:
    shutil.copytree(pair_directory, tmp_path / "damaged")
    damage(tmp_path / "damaged", "train", ["train_7"])
    return tmp_path / "damaged"


def without_train_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove train_7 from the batches of every step, without planning the epoch again."""
    real = TokenBudgetBatchSampler.__iter__

    def iterate(sampler: TokenBudgetBatchSampler) -> Iterator[list[tuple[int, int]]]:
        for keys in real(sampler):
            yield [(epoch, index) for epoch, index in keys if index != 7 or not sampler.shuffle]

    monkeypatch.setattr(TokenBudgetBatchSampler, "__iter__", iterate)


def test_a_step_with_a_damaged_sample_equals_the_step_without_it(
    pair_directory, damaged, tmp_path, accelerator, monkeypatch
):
    changes: dict[str, Any] = {"steps": 6, "token_budget": 3000, "max_unreadable": 0.03}
    training.train(options(damaged, tmp_path / "run", **changes), accelerator)
    lines = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    # Six steps are more than one epoch; the sample is met again in the second.
    assert lines[-1]["unreadable_clouds"] >= 1 and lines[0]["epoch"] < lines[-1]["epoch"]
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "left out train_7: " in log and "has been damaged since" in log

    without_train_7(monkeypatch)
    training.train(options(pair_directory, tmp_path / "without", **changes), accelerator)
    expected = [line for line in metrics_of(tmp_path / "without") if "loss" in line]
    for name in ("loss", "grad_norm", "num_clouds", "num_tokens"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    weights = final_weights(tmp_path / "without")
    for name, weight in final_weights(tmp_path / "run").items():
        assert torch.equal(weight, weights[name])


def test_too_many_damaged_samples_end_the_run_with_the_last_one_named(
    damaged, tmp_path, accelerator
):
    damage(damaged, "train", ["train_3", "train_20"])
    # Seven steps are more than one epoch.
    changes: dict[str, Any] = {"steps": 7, "token_budget": 3000, "save_every": 1}
    config = options(damaged, tmp_path / "run", max_unreadable=0.05, **changes)
    message = r"3 of 40 training samples can't be read, more than --max-unreadable 0.05 allows"
    with pytest.raises(DataError, match=message) as error:
        training.train(config, accelerator)
    assert any(f"; train_{i}: " in str(error.value) for i in (3, 7, 20))
    assert "\n" not in str(error.value)
    assert has_checkpoints(tmp_path / "run" / "checkpoints")
    training.train(replace(config, max_unreadable=0.1), accelerator)


def test_a_damaged_validation_sample_is_reported_and_the_others_are_evaluated(
    damaged, tmp_path, accelerator
):
    damage(damaged, "validation", ["validation_1"])
    training.train(options(damaged, tmp_path / "run", steps=2, validation_share=9.0), accelerator)
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "1 of 2 validation samples can't be measured; the first one, validation_1" in log
    assert any("validation" in line for line in metrics_of(tmp_path / "run"))
    assert (tmp_path / "run" / "model").is_dir()


def test_a_run_continues_from_a_checkpoint_after_a_sample_was_damaged(
    pair_directory, tmp_path, accelerator
):
    data = shutil.copytree(pair_directory, tmp_path / "data")
    training.train(options(data, tmp_path / "run", steps=6), accelerator, stop_after=3)
    damage(data, "train", ["train_0"])
    training.train(options(data, tmp_path / "run", steps=6), accelerator)
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_processes_leave_out_the_same_sample_as_one(damaged, tmp_path):
    runs = {}
    for num_processes in (1, 2):
        runs[num_processes] = tmp_path / f"run_{num_processes}"
        more = ("--accumulation-steps", 2 // num_processes, "--max-unreadable", 0.03)
        ends(damaged, runs[num_processes], *more, num_processes=num_processes)
    one, two = (steps_of(run) for run in runs.values())
    assert one[-1]["unreadable_clouds"] >= 1
    for name in ("loss", "grad_norm", "num_clouds", "unreadable_clouds"):
        assert [line[name] for line in two] == [line[name] for line in one]
    assert "left out train_7" in (runs[2] / "logs" / "rank_0.log").read_text()
    assert "left out train_7" in (runs[2] / "logs" / "rank_1.log").read_text()


def test_a_step_without_a_readable_sample_changes_no_weight(pair_directory, tmp_path, accelerator):
    shutil.copytree(pair_directory, tmp_path / "data")
    names = [str(name) for name in open_samples(tmp_path / "data", "train").names]
    damage(tmp_path / "data", "train", names[::2])
    changes: dict[str, Any] = {"steps": 8, "save_every": 8, "max_clouds": 1, "max_unreadable": 1.0}
    training.train(options(tmp_path / "data", tmp_path / "run", **changes), accelerator)
    lines = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    num_taken = sum(line["num_clouds"] > 0 for line in lines)
    assert 0 < num_taken < len(lines) == 8
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step_8" / "optimizer.pt")
    assert {float(state["step"]) for state in saved["optimizer"]["state"].values()} == {num_taken}
