"""train.py as people launch it: real processes over gloo, signals, bad input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, metrics_of, shared_memory

Launch = Callable[..., Run]
SMALL = (
    "--model.feature-dim", "16", "--model.k", "6", "--model.num-layers", "1", "--model.heads", "2",
    "--model.child-heads", "2", "--model.position-hidden", "8", "--num-pictures", "0",
    "--log-every", "1", "--token-budget", "800",
)  # fmt: skip


def succeeded(ended: Run) -> Run:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "loss" in line]


def test_one_two_and_four_processes_train_the_same_model(
    pair_directory: Path, tmp_path: Path, launch: Launch
) -> None:
    runs = {}
    for num_processes, accumulation_steps in ((1, 4), (2, 2), (4, 1)):
        run = tmp_path / f"{num_processes}x{accumulation_steps}"
        succeeded(
            launch(
                "--data", pair_directory, "--output-dir", run, *SMALL, "--steps", "20",
                "--accumulation-steps", str(accumulation_steps), "--eval-every", "20",
                "--num-workers", "0", num_processes=num_processes, timeout=280,
            )
        )  # fmt: skip
        runs[num_processes] = metrics_of(run)
        assert f"{num_processes}" in (run / "logs" / "rank_0.log").read_text()
        assert (run / "logs" / f"rank_{num_processes - 1}.log").exists()
    for num_processes in (2, 4):
        for expected, actual in zip(runs[1], runs[num_processes], strict=True):
            assert actual["step"] == expected["step"]
            if "validation" in expected:
                assert actual["validation"] == expected["validation"]
            else:
                assert actual["num_clouds"] == expected["num_clouds"]
                assert actual["num_tokens"] == expected["num_tokens"]
                assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
                assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("num_processes, num_workers, precision", [(1, 1, "bf16"), (2, 2, "no")])
def test_the_quick_check_passes_and_leaves_shared_memory_as_it_was(
    pair_directory: Path,
    tmp_path: Path,
    launch: Launch,
    num_processes: int,
    num_workers: int,
    precision: str,
) -> None:
    before = shared_memory()
    ended = succeeded(
        launch(
            "--data", pair_directory, "--output-dir", tmp_path, *SMALL, "--quick",
            "--num-workers", str(num_workers),
            num_processes=num_processes, mixed_precision=precision,
        )
    )  # fmt: skip
    assert "The setup works" in ended.stdout
    assert [line["step"] for line in steps_of(tmp_path / "quick")] == [1, 2, 3, 4]
    assert shared_memory() <= before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "/nowhere/pairs"], "/nowhere/pairs"),
        (["--token-budget", "0"], "--token-budget"),
        (["--ratio", "0.5"], "ratio"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_a_failed_exit(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--output-dir", str(tmp_path / "run"), *arguments],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("train.py: error: ") and message in lines[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--learning-rat", "1"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "--learning-rate" in ended.stderr + ended.stdout
