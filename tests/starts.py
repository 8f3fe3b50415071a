"""Starts train.py by its command line, in this process, and checks its output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import metrics_of
from runs import training
from test_distributed import SMALL

Start = Callable[..., tuple[int, str]]
"""Takes an output directory and options; returns the status and stderr."""


def start_in_process(data: Path | None, output_dir: Path, *options: object) -> int:
    given = () if data is None else ("--data", data)
    words = ("train.py", *given, "--output-dir", output_dir, *SMALL,
             "--num-workers", 0, "--save-every", 1, "--eval-every", 9, "--steps", 2,
             "--log-with", "all", *options)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in words])
        return training.main()


def refused_in_a_line(outcome: tuple[int, str], *words: str) -> None:
    status, stderr = outcome
    assert status == 1, stderr
    errors = [line for line in stderr.splitlines() if "train.py: error:" in line]
    assert len(errors) == 1 and "Traceback" not in stderr, stderr
    assert all(word in errors[0] for word in words), errors[0]


def continues(outcome: tuple[int, str], run: Path) -> str:
    status, stderr = outcome
    assert status == 0 and "Traceback" not in stderr, stderr
    assert "Continuing from" in stderr and "step_2" in stderr
    assert [line["step"] for line in metrics_of(run) if "loss" in line] == [1, 2]
    return stderr
