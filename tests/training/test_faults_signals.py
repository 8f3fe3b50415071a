"""Signals at any moment: a run saves within the grace period, and the next start continues."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import SECONDS_TO_OUTCOME, metrics_of
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
    output_of,
    wait_for_step,
)
from forked import run_forked
from processes import pids_of, shared_memory_of

from pointup.training.run_directory.checkpoint import latest_checkpoint

GRACE_SECONDS = 30
"""Grace period of the launcher for its processes; a busy machine takes as long to end it."""

START_SECONDS = 15.0
"""Approximate time of a launched run until its first step."""


@pytest.mark.slow
def test_a_signal_to_one_process_in_evaluation_saves_and_defers_the_evaluation(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="usr1 reduction 6 1") as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(GRACE_SECONDS, run, "SIGUSR1 to one process in evaluation: saved")
    assert latest_of(run) == "step_6"
    assert not any("validation" in line for line in metrics_of(run))
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


# In short: a run on two datasets, in test_several_datasets.py.
@pytest.mark.slow
def test_a_signal_to_one_process_of_a_group_saves_and_the_run_continues_bit_for_bit(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    words = arguments(pair_directory, run, "--num-workers", 1)
    ended = run_forked("faulty", *words, FAULT="terminate forward 5 1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert latest_of(run) == "step_5"
    assert len(ended.pids) >= 2 * (1 + 1), "processes that were not seen"
    assert shared_memory_of(ended.pids) == set()
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_and_the_next_start_ends_like_the_undisturbed_run(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, num_workers=2) as process:
        wait_for_step(run, 2)
        pids = pids_of(process.pid)
        assert len(pids) >= 7, "a launcher, two processes, two workers of each"
        sent = time.time()
        process.send_signal(number)
        assert has_ended(
            sent, 2 * GRACE_SECONDS, run, f"{number.name} to the launcher: saved, continues"
        )
    assert latest_of(run) != f"step_{STEPS}", "the run was over before the signal came"
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)
    assert shared_memory_of(pids) == set()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["start", "forward", "saving", "worker"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_anywhere_saves_and_the_next_start_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, where: str, rank: int
) -> None:
    if (where, rank) == ("saving", 1):
        pytest.skip("the main process saves for all")
    run = tmp_path / "run"
    fault = f"terminate {where} {1 if where == 'start' else 5} {rank}"
    with launched(pair_directory, run, fault=fault, num_workers=1) as process:
        process.wait(PATIENCE)
        assert where == "worker" or has_ended_within(
            GRACE_SECONDS, run, f"SIGTERM to process {rank}, {where}: continues bit for bit"
        )
    ended = latest_of(run) if (run / "checkpoints").exists() else ""
    assert (ended == f"step_{STEPS}") == (where == "worker"), "workers are deaf to signals"
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_signal_at_a_random_moment_leaves_a_whole_checkpoint_and_the_run_continues(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    chance = random.Random(seed)
    run = tmp_path / "run"
    step, share = max(0, chance.randrange(-2, STEPS + 2)), chance.random()
    with launched(pair_directory, run, num_workers=1) as process:
        if step:
            wait_for_step(run, step)  # Evaluations count as well.
        time.sleep(share * (0.5 if step else START_SECONDS))
        launcher = psutil.Process(process.pid)
        members = launcher.children() if process.poll() is None else []
        # The launcher as often as one of its processes.
        target = chance.choice([*members, *[launcher] * max(1, len(members))])
        whom = "the launcher" if target == launcher else "one process"
        sent = time.time()
        with contextlib.suppress(psutil.NoSuchProcess):
            target.terminate()
        outcome = (
            f"SIGTERM, seed {seed}, to {whom} {f'after line {step}' if step else 'in the start'}"
        )
        assert has_ended(sent, 2 * GRACE_SECONDS, run, outcome), output_of(run)
    checkpoint = latest_checkpoint(run / "checkpoints")
    saved = checkpoint.name if checkpoint else "nothing saved yet"
    SECONDS_TO_OUTCOME[-1] = f"{outcome}: {saved}", SECONDS_TO_OUTCOME[-1][1]
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)
