"""Memory in training: automatic budget, lowered budget, gradient checkpointing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics_of
from test_train import final_weights, options
from torch import Tensor
from torch_geometric.data import Batch

import train as training
from pointup.training.faults import token_budget as budget
from pointup.training.faults.available_memory import PeakMemory


class Device:
    """Runs out of memory above `most` clouds; counts failures and records processed clouds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most, self.failures, self.done = most, 0, list[str]()
        self.real = training.losses_of_model
        monkeypatch.setattr(training, "losses_of_model", self.losses)

    def losses(self, model: Any, batch: Batch, *rest: Any) -> Tensor:
        if batch.num_graphs > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.done += batch.name
        losses: Tensor = self.real(model, batch, *rest)
        return losses


def test_after_several_times_out_of_memory_the_budget_is_lowered_and_each_cloud_seen_once(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    device = Device(monkeypatch, most=7)
    changes = {"steps": None, "epochs": 1.0, "token_budget": 3000, "num_pictures": 0}
    config = options(pair_directory, tmp_path / "run", **changes)
    training.train(config, accelerator)
    steps = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert sorted(device.done) == sorted(f"train_{i}" for i in range(40))
    assert sum(line["out_of_memory"] for line in steps) == device.failures > 2
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "lowered from 3,000 to 2,400 for all processes" in log
    budgets = [segment[1] for segment in saved_state(tmp_path / "run")["sampler"]["segments"]]
    assert budgets[:2] == [3000, 2400]
    assert [line["num_tokens"] <= 2400 for line in steps][-1]


def test_out_of_memory_between_the_lines_of_the_metrics_is_counted_in_the_next_one(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    monkeypatch.setattr(budget, "EVENTS_BEFORE_LOWERING", 1000)
    device = Device(monkeypatch, most=7)
    changes = {"token_budget": 3000, "log_every": 2, "save_every": 1, "eval_every": 9}
    config = options(pair_directory, tmp_path / "run", steps=4, **changes)
    failures = []
    for stop_after in (1, 2, 4):
        training.train(config, accelerator, stop_after=stop_after)
        failures.append(device.failures)
    lines = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4] and failures[0] > 0
    counts = [line["out_of_memory"] for line in lines]
    assert counts == [failures[1], failures[2] - failures[1]]


def saved_state(run: Path) -> dict[str, Any]:
    latest = (run / "checkpoints" / "LATEST").read_text()
    state: dict[str, Any] = json.loads((run / "checkpoints" / latest / "state.json").read_text())
    return state


@pytest.mark.parametrize("crop", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_stopped_around_the_lowering_continues_with_the_same_batches(
    pair_directory, tmp_path, accelerator, monkeypatch, crop
):
    Device(monkeypatch, most=7)
    changes = {
        "token_budget": 3000 if not crop else 600, "num_pictures": 0, "save_every": 1, "crop": crop,
        "keep_checkpoints": 9,
    }  # fmt: skip
    if crop:
        monkeypatch.setattr(budget, "EVENTS_BEFORE_LOWERING", 1)
        Device(monkeypatch, most=1)
    training.train(options(pair_directory, tmp_path / "whole", **changes), accelerator)
    parts = options(pair_directory, tmp_path / "parts", **changes)
    for stop_after in (1, 3):
        training.train(parts, accelerator, stop_after=stop_after)
    training.train(parts, accelerator)
    assert saved_state(tmp_path / "parts")["lowered_budget"] < changes["token_budget"]
    expected, actual = final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


# In short: the search itself, in test_token_budget.py.
@pytest.mark.slow
def test_a_continued_run_keeps_its_automatic_budget(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    def little_more(*_: Any) -> int:
        with PeakMemory(accelerator.device) as now:
            pass
        return int((now.bytes + 6e6) / budget.SHARE_TO_USE)

    monkeypatch.setattr(budget, "memory_limit", little_more)
    changes = {"steps": 3, "token_budget": "auto", "num_pictures": 0, "save_every": 1}
    config = options(pair_directory, tmp_path / "run", **changes)
    training.train(config, accelerator, stop_after=1)
    found = json.loads((tmp_path / "run" / "config.json").read_text())["found_token_budget"]
    monkeypatch.setattr(budget, "memory_limit", lambda *_: pytest.fail("searched again"))
    training.train(config, accelerator)
    assert all(line["num_tokens"] <= found for line in metrics_of(tmp_path / "run")[:3])
    number = options(pair_directory, tmp_path / "number", **{**changes, "token_budget": found})
    training.train(number, accelerator)
    for name, expected in final_weights(tmp_path / "number", 3).items():
        assert torch.equal(expected, final_weights(tmp_path / "run", 3)[name])
