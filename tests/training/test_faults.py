"""Processes that really stop, die or differ: each fault has a known outcome, within seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disturbed import (
    PATIENCE,
    STEPS,
    arguments,
    assert_ends_like,
    continues,
    has_ended,
    has_ended_within,
    latest_of,
    launched,
    log_of,
    output_of,
    processes_of,
    timed,
    wait_for_step,
)
from forked import run_forked
from processes import Run
from test_distributed import SMALL

from pointup.datasets.pair_dataset import open_samples, write_pairs
from pointup.training.config import TrainConfig

Launch = Callable[..., Run]


@pytest.mark.slow
def test_a_stopped_process_is_reported_with_the_stacks_of_the_others(
    pair_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--hang-timeout", 3)
    with launched(pair_directory, run, *options, fault="stop forward 3 1") as process:
        assert process.wait(PATIENCE) != 0
        assert has_ended_within(
            60, run, "SIGSTOP of process 1, --hang-timeout 3: stacks reported, exit not 0"
        )
    message = output_of(run)
    assert "the training hangs: process 1 stopped" in message
    assert re.search(r"process 1 \(pid \d+ on \S+\): step 2, forward and backward, for", message)
    assert re.search(r"process 0 \(pid \d+ on \S+\): step 2, reduction, for", message)
    assert "no heartbeat" in message and "in finish" in message
    assert "the training hangs" in log_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("where, number, rank", [("reduction", 5, 0), ("evaluation", 1, 0)])
def test_a_stopped_first_process_is_reported_by_the_others(
    pair_directory: Path, tmp_path: Path, where: str, number: int, rank: int
) -> None:
    run = tmp_path / "run"
    fault = f"stop {where} {number} {rank}"
    with launched(pair_directory, run, "--hang-timeout", 3, fault=fault) as process:
        assert process.wait(PATIENCE) != 0
        assert has_ended_within(
            60, run, f"SIGSTOP of process 0 in {where}, --hang-timeout 3: exit not 0"
        )
    assert "the training hangs: process 0 stopped" in output_of(run)


@pytest.mark.slow
def test_a_hang_in_python_is_reported_with_its_line(pair_directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, "--hang-timeout", 3, fault="hang forward 3 0") as process:
        assert process.wait(PATIENCE) != 0
        assert has_ended_within(
            60, run, "hang in Python, --hang-timeout 3: the line is reported, exit not 0"
        )
    assert "the training hangs: process 0 stopped" in output_of(run)
    assert "time.sleep(600)" in output_of(run)


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_run_ends_like_the_undisturbed_one(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="kill reduction 7 1", restarts=1) as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(
            120,
            run,
            "kill -9 of process 1, --max_restarts 1: restarts, continues, ends bit for bit",
        )
    assert "step_4" in output_of(run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "where, number",
    [
        ("start", 1), ("consistency", 1), ("forward", 5), ("backward", 5), ("reduction", 5),
        ("evaluation", 1), ("checkpoint", 2), ("saving", 8),
    ],
)  # fmt: skip
def test_a_process_killed_anywhere_ends_the_run_and_the_next_start_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, where: str, number: int, rank: int
) -> None:
    if (where, rank) == ("saving", 1):
        pytest.skip("the main process saves for all")
    run = tmp_path / "run"
    with launched(pair_directory, run, fault=f"kill {where} {number} {rank}") as process:
        assert process.wait(PATIENCE) != 0
        assert has_ended_within(
            60, run, f"kill -9 of process {rank}, {where}: exit not 0, continues bit for bit"
        )
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_launcher_leaves_nothing_running_and_the_next_start_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, num_processes: int
) -> None:
    run = tmp_path / "run"
    slots = ("--accumulation-steps", 2 // num_processes)
    with launched(
        pair_directory, run, *slots, num_processes=num_processes, num_workers=1, STEP_SECONDS="0.3"
    ) as process:
        wait_for_step(run, 2)
        killed = time.time()
        process.kill()
        assert has_ended(
            killed, 20, run, f"kill -9 of the launcher of {num_processes}: saved, continues"
        )
    assert not (run / "checkpoints" / f"step_{STEPS}").exists(), "over before the launcher was"
    assert latest_of(run)
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_launcher_killed_during_the_start_leaves_nothing_training(
    pair_directory: Path, tmp_path: Path, num_processes: int
) -> None:
    run = tmp_path / "run"
    options = ("--steps", 100_000)
    with launched(pair_directory, run, *options, num_processes=num_processes) as process:
        while len(processes_of(run)) < 1 + num_processes:
            time.sleep(0.02)
        time.sleep(1.0)
        killed = time.time()
        process.kill()
        assert has_ended(
            killed, 90, run, f"kill -9 of the launcher of {num_processes} during start-up: all end"
        )


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused(
    pair_directory: Path, tmp_path: Path, launch: Launch
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, "--steps", "100000", num_processes=1) as process:
        wait_for_step(run, 1)
        with timed("second run in the directory: refused"):
            ended = launch("--data", pair_directory, "--output-dir", run, *SMALL)
        assert ended.returncode != 0
        assert re.search(r"train.py: error: .*run: process \d+ on \S+ since", ended.stderr)
        process.terminate()
        process.wait(60)


# In short: the check of processes as threads, in test_consistency.py.
@pytest.mark.slow
@pytest.mark.parametrize("what", ["options", "points"])
def test_a_process_that_differs_is_named_with_what_differs(
    pair_directory: Path, tmp_path: Path, what: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    if what == "points":
        written = [open_samples(pair_directory, split) for split in ("train", "validation")]
        train, validation = ([part.pair(i) for i in range(len(part))] for part in written)
        train[20].target[0] += 0.01
        write_pairs(train, validation, other, {})
    words = arguments(pair_directory, run, "--num-workers", 0)
    with timed(f"other {what}: reported"):
        differing = other if what == "points" else what
        ended = run_forked("faulty", *words, FAULT=f"differ {differing} 0 1")
    assert ended.returncode == 1
    usual = TrainConfig().learning_rate
    differs = {"options": f"options: learning_rate 0.5, there {usual}", "points": "dataset: "}[what]
    message = ended.stderr
    assert re.search(rf"process 1 on \S+ differs from process 0 in {differs}", message), message
    assert message.count("train.py: error:") == 1
    assert not (run / "checkpoints").exists()
