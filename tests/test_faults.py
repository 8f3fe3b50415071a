"""Faults caused for real, on real processes: each has a known end, within seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, Run, free_port, metrics_of
from safetensors.torch import load_file
from test_distributed import SMALL, shared_memory, steps_of

Launch = Callable[..., Run]
FAULTY = ROOT / "tests" / "faulty.py"
STEPS = 12
LENGTH = ("--steps", STEPS, "--eval-every", 6, "--save-every", 4)


@pytest.fixture(scope="session")
def undisturbed(pair_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the disturbed ones are compared with."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with launched(pair_directory, run) as process:
        assert process.wait(300) == 0
    return run


@contextmanager
def launched(
    data: Path,
    run: Path,
    *options: object,
    fault: str = "none none 0 none",
    restarts: int = 0,
    num_workers: int = 0,
    num_processes: int = 2,
) -> Iterator[subprocess.Popen[str]]:
    """train.py with a fault in it; nothing of it is left running."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", ROOT / "accelerate_configs" / "cpu2.yaml", "--max_restarts", restarts,
        "--num_processes", num_processes, "--monitor_interval", "0.1",
        "--main_process_port", free_port(), FAULTY,
        "--data", data, "--output-dir", run, *SMALL, *LENGTH, "--num-workers", num_workers,
        *options,
    ]  # fmt: skip
    output = run.with_suffix(".txt")
    with output.open("w") as file:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=file, stderr=file, text=True,
            env={**os.environ, "FAULT": fault},
        )  # fmt: skip
    try:
        yield process
    finally:
        for member in processes_of(run):
            member.kill()
        process.wait()


def processes_of(run: Path) -> list[psutil.Process]:
    """Those that still run, whatever became of their launcher."""

    def is_member(process: psutil.Process) -> bool:
        try:
            return str(run) in process.cmdline() and process.status() != "zombie"
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return False

    return [process for process in psutil.process_iter() if is_member(process)]


def output_of(run: Path) -> str:
    return run.with_suffix(".txt").read_text()


def seconds_since_fault(run: Path) -> float:
    found = re.search(r"^FAULT .* at ([\d.]+)$", output_of(run), re.MULTILINE)
    assert found, output_of(run)
    return time.time() - float(found[1])


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len(metrics_of(run)) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(output_of(run))


def assert_ends_like(run: Path, undisturbed: Path) -> None:
    expected, actual = (
        load_file(path / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
        for path in (undisturbed, run)
    )
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))
    evaluations = [
        [line for line in metrics_of(path) if "validation" in line] for path in (run, undisturbed)
    ]
    assert evaluations[0] == evaluations[1]


def test_a_stopped_process_is_found_and_the_stacks_of_the_others_are_told(
    pair_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--hang-timeout", 3)
    with launched(pair_directory, run, *options, fault="stop forward 3 1") as process:
        assert process.wait(300) != 0
        assert seconds_since_fault(run) < 30
    told = output_of(run)
    assert "the training hangs: process 1 stopped" in told
    assert re.search(r"process 1 \(pid \d+ on \S+\): step 2, forward and backward, for", told)
    assert re.search(r"process 0 \(pid \d+ on \S+\): step 2, reduction, for", told)
    assert "no sign of life" in told and "in finish" in told
    assert "the training hangs" in (run / "logs" / "rank_0.log").read_text()


def test_a_killed_process_is_started_again_and_the_run_ends_like_the_undisturbed_one(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="kill reduction 7 1", restarts=1) as process:
        assert process.wait(300) == 0, output_of(run)
    assert "step_4" in output_of(run)
    assert_ends_like(run, undisturbed)


@pytest.mark.parametrize("what", ["options", pytest.param("points", marks=pytest.mark.slow)])
def test_a_process_that_differs_is_named_with_what_differs(
    pair_directory: Path, tmp_path: Path, what: str
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault=f"differ {what} 0 1") as process:
        assert process.wait(300) != 0
    differs = {"options": "options: learning_rate 0.5, there 0.001", "points": "dataset: "}[what]
    told = output_of(run)
    assert re.search(rf"process 1 on \S+ differs from process 0 in {differs}", told), told
    assert told.count("train.py: error:") == 1
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_running_and_the_next_start_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, num_workers=1) as process:
        wait_for_step(run, 2)
        killed = time.monotonic()
        process.kill()
        while processes_of(run):
            time.sleep(0.05)
        assert time.monotonic() - killed < 20
    assert not (run / "checkpoints" / f"step_{STEPS}").exists(), "over before the launcher was"
    assert (run / "checkpoints" / "LATEST").exists()
    with launched(pair_directory, run) as process:
        assert process.wait(300) == 0
    assert_ends_like(run, undisturbed)


def test_a_signal_to_one_process_in_evaluation_saves_and_the_evaluation_is_made_later(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="usr1 reduction 6 1") as process:
        assert process.wait(300) == 0, output_of(run)
    assert (run / "checkpoints" / "LATEST").read_text() == "step_6"
    assert not any("validation" in line for line in metrics_of(run))
    with launched(pair_directory, run) as process:
        assert process.wait(300) == 0
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused(
    pair_directory: Path, tmp_path: Path, launch: Launch
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, "--steps", "100000", num_processes=1) as process:
        wait_for_step(run, 1)
        ended = launch("--data", pair_directory, "--output-dir", run, *SMALL)
        assert ended.returncode != 0
        assert re.search(r"train.py: error: .*run: process \d+ on \S+ since", ended.stderr)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_saves_and_the_next_start_ends_like_the_undisturbed_run(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    before = shared_memory()
    run = tmp_path / "run"
    with launched(pair_directory, run, num_workers=2) as process:
        wait_for_step(run, 2)
        process.send_signal(number)
        process.wait(60)
    stopped_at = (run / "checkpoints" / "LATEST").read_text()
    assert stopped_at != f"step_{STEPS}", "the run was over before the signal came"
    with launched(pair_directory, run, num_workers=2) as process:
        assert process.wait(300) == 0
    assert_ends_like(run, undisturbed)
    assert shared_memory() == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["start", "data", "forward", "backward", "evaluation", "saving"])
def test_a_process_killed_anywhere_ends_the_run_and_the_next_start_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, where: str, rank: int
) -> None:
    if (where, rank) == ("saving", 1):
        pytest.skip("the main process saves for all")
    run = tmp_path / "run"
    number = {"data": 30, "saving": 8, "evaluation": 2 - rank}.get(
        where, 1 + 4 * (where != "start")
    )
    with launched(pair_directory, run, fault=f"kill {where} {number} {rank}") as process:
        assert process.wait(300) != 0
        assert seconds_since_fault(run) < 40
    with launched(pair_directory, run) as process:
        assert process.wait(300) == 0, output_of(run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "hang", "raise"])
def test_a_data_worker_that_dies_hangs_or_raises_ends_the_run_within_its_timeout(
    pair_directory: Path, tmp_path: Path, what: str
) -> None:
    run = tmp_path / "run"
    options = ("--worker-timeout", 5)
    fault = f"{what} data 30 1"
    with launched(pair_directory, run, *options, fault=fault, num_workers=1) as process:
        assert process.wait(300) != 0
        assert seconds_since_fault(run) < 45
    log = (run / "logs" / "rank_1.log").read_text()
    assert re.search({"kill": "killed", "hang": "timed out", "raise": "broken"}[what], log)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_one_process_changes_nothing(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, where: str
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault=f"oom {where} 3 1") as process:
        assert process.wait(300) == 0, output_of(run)
    assert "done again in halves" in (run / "logs" / "rank_1.log").read_text()
    for expected, actual in zip(steps_of(undisturbed), steps_of(run), strict=True):
        assert actual["num_clouds"] == expected["num_clouds"]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_hang_in_python_is_told_with_its_line(pair_directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, "--hang-timeout", 3, fault="hang forward 3 0") as process:
        assert process.wait(300) != 0
        assert seconds_since_fault(run) < 30
    assert "the training hangs: process 0 stopped" in output_of(run)
    assert "time.sleep(600)" in output_of(run)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    for num_processes, fault in ((1, "terminate reduction 3"), (2, "terminate reduction 4 1")):
        options = ("--accumulation-steps", 2 // num_processes)
        with launched(
            pair_directory, run, *options, fault=fault, num_processes=num_processes
        ) as process:
            process.wait(300)
    with launched(pair_directory, run, "--accumulation-steps", 2, num_processes=1) as process:
        assert process.wait(300) == 0
    assert_ends_like(run, undisturbed)
