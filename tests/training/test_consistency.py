"""The consistency check of two processes, as two threads that exchange values."""

from __future__ import annotations

import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pointup.errors import TrainingError
from pointup.training.config import TrainConfig
from pointup.training.faults import consistency


def outcomes(monkeypatch: pytest.MonkeyPatch, *facts: dict[str, Any]) -> list[str]:
    """The error of each process, or an empty text."""
    barrier, place, sent = threading.Barrier(len(facts), timeout=60), threading.local(), {}

    def exchange(value: Any) -> list[Any]:
        sent[place.rank] = value
        barrier.wait()
        found = [sent[rank] for rank in range(len(facts))]
        barrier.wait()
        return found

    group: Any = SimpleNamespace(
        num_processes=len(facts),
        device=torch.device("cpu"),
        gather=lambda values: torch.cat(exchange(values)),
    )

    def check(rank: int) -> str:
        place.rank = rank
        try:
            consistency.check_consistency(group, facts[rank])
        except TrainingError as error:
            return str(error)
        return ""

    monkeypatch.setattr(consistency, "gather_object", lambda one: [f for (f,) in exchange(one)])
    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(check, range(len(facts))))


def facts_with(learning_rate: float) -> dict[str, Any]:
    return consistency.facts_of_start(TrainConfig(learning_rate=learning_rate))


def test_processes_with_the_same_facts_pass(monkeypatch):
    assert outcomes(monkeypatch, facts_with(0.1), facts_with(0.1)) == ["", ""]


def test_all_processes_name_the_one_that_differs_its_option_and_the_fix(monkeypatch):
    rates = (0.1, 0.1, 0.5)
    found = outcomes(monkeypatch, *map(facts_with, rates))
    expected = (
        f"process 2 on {platform.node()} differs from process 0 and process 1 in options: "
        "learning_rate 0.5, there 0.1; give all processes the same options, code, packages and data"
    )
    assert found == [expected] * 3


def test_machines_with_another_mixed_precision_are_refused(monkeypatch):
    facts = [consistency.facts_of_start(TrainConfig(), dtype) for dtype in ("fp16", "no")]
    found = outcomes(monkeypatch, *facts)
    assert all("differs" in text and "mixed_precision no, there fp16" in text for text in found)
