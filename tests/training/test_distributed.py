"""train.py as users launch it: real processes over gloo, signals, bad input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import metrics_of
from processes import Run, shared_memory_of
from runs import training

from pointup.training.config import parse_command_line

Launch = Callable[..., Run]
SMALL = (
    "--model.feature-dim", "16", "--model.k", "6", "--model.num-layers", "1", "--model.heads", "2",
    "--model.child-heads", "2", "--model.position-hidden", "8", "--num-pictures", "0",
    "--log-every", "1", "--token-budget", "800",
)  # fmt: skip


def train_here(*arguments: object) -> None:
    """Run in this process, which is faster than a launch."""
    config = parse_command_line([str(word) for word in arguments], "")
    training.train(config, training.make_accelerator(config))


def succeeded(ended: Run) -> Run:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "loss" in line]


# In short: a run on two datasets, in test_several_datasets.py.
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_several_processes_train_the_model_that_one_trains(
    pair_directory, tmp_path, launch, num_processes
):
    arguments = (
        "--data", pair_directory, *SMALL, "--steps", "20", "--eval-every", "20",
        "--num-workers", "0",
    )  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    train_here(*arguments, "--output-dir", alone, "--accumulation-steps", "4")
    slots = ("--accumulation-steps", str(4 // num_processes))
    launched = launch(
        *arguments, "--output-dir", run, *slots, num_processes=num_processes, timeout=280
    )
    succeeded(launched)
    assert re.search(rf"processes +{num_processes}, of", (run / "logs" / "rank_0.log").read_text())
    assert (run / "logs" / f"rank_{num_processes - 1}.log").exists()
    for expected, actual in zip(metrics_of(alone), metrics_of(run), strict=True):
        assert actual["step"] == expected["step"]
        if "validation" in expected:
            assert actual["validation"] == expected["validation"]
        else:
            assert actual["num_clouds"] == expected["num_clouds"]
            assert actual["num_tokens"] == expected["num_tokens"]
            assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def quick_check(data: Path, run: Path, num_workers: int) -> tuple[object, ...]:
    return ("--data", data, "--output-dir", run, *SMALL, "--quick", "--num-workers", num_workers)


def assert_works(ended: Run, run: Path, num_processes: int) -> None:
    assert "The setup works" in succeeded(ended).stdout
    assert [line["step"] for line in steps_of(run / "quick")] == [1, 2, 3, 4]
    logs = run / "quick" / "logs"
    assert re.search(rf"processes +{num_processes}, of", (logs / "rank_0.log").read_text())
    assert (logs / f"rank_{num_processes - 1}.log").exists()


# In short: the main command with --quick, in .ci/run, and the group in test_several_datasets.py.
@pytest.mark.slow
@pytest.mark.parametrize("num_processes, num_workers, precision", [(1, 1, "no"), (2, 2, "bf16")])
def test_the_quick_check_passes_and_leaves_nothing_in_shared_memory(
    pair_directory, tmp_path, launch, num_processes, num_workers, precision
):
    words = quick_check(pair_directory, tmp_path, num_workers)
    ended = launch(*words, num_processes=num_processes, mixed_precision=precision)
    assert_works(ended, tmp_path, num_processes)
    assert len(ended.pids) >= num_processes * (1 + num_workers), "processes that were not seen"
    assert shared_memory_of(ended.pids) == set()


def test_an_unknown_option_is_refused_with_a_suggestion(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", "--learning-rat", "1"])
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 2
    assert "--learning-rate" in "".join(capfd.readouterr())
