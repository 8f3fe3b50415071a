"""Launches train.py with a fault, and checks how the run ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import tyro
from conftest import ROOT, SECONDS_TO_OUTCOME, metrics_of
from processes import free_port
from safetensors.torch import load_file
from test_distributed import SMALL, steps_of

sys.path.insert(0, str(ROOT))

import train as training
from pointup.training.config import TrainConfig

FAULTY = ROOT / "tests" / "faulty.py"
STEPS = 12
LENGTH = ("--steps", STEPS, "--eval-every", 6, "--save-every", 4)
PATIENCE = 900
"""Time limit in seconds of an undisturbed run on a busy machine."""


@contextmanager
def launched(
    data: Path,
    run: Path,
    *options: object,
    fault: str = "none none 0 none",
    restarts: int = 0,
    num_workers: int = 0,
    num_processes: int = 2,
    mixed_precision: str = "no",
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """Launch train.py with a fault; kills all processes of the run at the exit."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", ROOT / "accelerate_configs" / "cpu2.yaml", "--max_restarts", restarts,
        "--num_processes", num_processes, "--monitor_interval", "0.1",
        "--mixed_precision", mixed_precision, "--main_process_port", free_port(), FAULTY,
        *arguments(data, run, *options), "--num-workers", num_workers,
    ]  # fmt: skip
    with output_file(run).open("w") as file:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=file, stderr=file, text=True,
            env={**os.environ, "FAULT": fault, **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        for member in processes_of(run):
            member.kill()
        process.wait()


def arguments(data: Path, run: Path, *options: object) -> list[str]:
    words = ("--data", data, "--output-dir", run, *SMALL, *LENGTH, *options)
    return [str(word) for word in words]


def ends(data: Path, run: Path, *options: object, **settings: int) -> None:
    """Launch a run, or continue a stopped one, until its end."""
    with launched(data, run, *options, **settings) as process:
        assert process.wait(PATIENCE) == 0, output_of(run)


def continues(data: Path, run: Path, *options: object) -> None:
    """Run or continue a run with two slots in this process, until its end."""
    slots = ("--accumulation-steps", 2, "--num-workers", 0)
    config = tyro.cli(TrainConfig, args=arguments(data, run, *slots, *options))
    training.train(config, training.make_accelerator(config))


def processes_of(run: Path) -> list[psutil.Process]:
    """Live processes of a run, with or without a launcher."""

    def is_member(process: psutil.Process) -> bool:
        try:
            return str(run) in process.cmdline() and process.status() != "zombie"
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return False

    return [process for process in psutil.process_iter() if is_member(process)]


def output_file(run: Path) -> Path:
    return run.with_name(run.name + ".txt")


def output_of(run: Path) -> str:
    return output_file(run).read_text()


def log_of(run: Path, rank: int = 0) -> str:
    return (run / "logs" / f"rank_{rank}.log").read_text()


def latest_of(run: Path) -> str:
    return (run / "checkpoints" / "LATEST").read_text()


def has_ended_within(seconds: float, run: Path, outcome: str) -> bool:
    """Whether no process of a run is left `seconds` after its fault; records the time it took."""
    found = re.search(r"^FAULT .* at ([\d.]+)$", output_of(run), re.MULTILINE)
    assert found, output_of(run)
    return has_ended(float(found[1]), seconds, run, outcome)


@contextmanager
def timed(outcome: str) -> Iterator[None]:
    """Record the time from the launch to an outcome, for a fault that exists from the start."""
    began = time.time()
    yield
    SECONDS_TO_OUTCOME.append((f"{outcome} (from the launch)", time.time() - began))


def has_ended(since: float, seconds: float, run: Path, outcome: str) -> bool:
    while processes_of(run) and time.time() - since < seconds:
        time.sleep(0.05)
    SECONDS_TO_OUTCOME.append((outcome, time.time() - since))
    return not processes_of(run)


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len(metrics_of(run)) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(output_of(run))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{STEPS}" / "model.safetensors")


def assert_ends_like(run: Path, undisturbed: Path) -> None:
    """Assert the same weights, bit for bit, the same evaluations, and each step recorded once."""
    expected, actual = weights_of(undisturbed), weights_of(run)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))
    evaluations = [
        [line for line in metrics_of(path) if "validation" in line] for path in (run, undisturbed)
    ]
    assert evaluations[0] == evaluations[1]
