"""Faults of real runs: each has a known outcome within seconds, and the run ends as without it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import metrics_of, wavy_pair
from disturbed import (
    PATIENCE,
    STEPS,
    arguments,
    assert_ends_like,
    continues,
    ends,
    has_ended,
    has_ended_within,
    latest_of,
    launched,
    log_of,
    output_of,
    processes_of,
    timed,
    wait_for_step,
    weights_of,
)
from forked import run_forked
from processes import pids_of, shared_memory_of
from test_distributed import steps_of

from pointup.datasets.opening import open_samples
from pointup.datasets.pair_writer import write_pairs
from pointup.training.config import TrainConfig
from pointup.training.run_directory.checkpoint import FILES, step_of

pytestmark = pytest.mark.slow

GRACE_SECONDS = 30
"""Grace period of the launcher for its processes; a busy machine takes as long to end it."""
"""Approximate time of a launched run until its first step."""


def fails(data: Path, run: Path, outcome: str, *options: object, **settings: str | int) -> str:
    """Launch a run with a fault that ends all its processes within a minute; returns its output."""
    with launched(data, run, *options, **settings) as process:
        assert process.wait(PATIENCE) != 0
        assert has_ended_within(60, run, outcome)
    return output_of(run)


def goes_on(data: Path, run: Path, outcome: str, *options: object, **settings: str | int) -> str:
    """Launch a run with a fault, which it survives; returns its output."""
    with launched(data, run, *options, **settings) as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(120, run, outcome)
    return output_of(run)


def continues_like(data: Path, run: Path, undisturbed: Path) -> None:
    """Start a run again, which ends like the undisturbed one."""
    continues(data, run)
    assert_ends_like(run, undisturbed)


# Processes that hang, die or differ.


@pytest.mark.parametrize(
    ("where", "number", "rank"), [("forward", 3, 1), ("reduction", 5, 0), ("evaluation", 1, 0)]
)
def test_a_stopped_process_is_reported_with_the_stacks_of_the_others(
    pair_directory, tmp_path, where, number, rank
):
    run = tmp_path / "run"
    outcome = f"SIGSTOP of process {rank} in {where}, --hang-timeout 3: exit not 0"
    fault = f"stop {where} {number} {rank}"
    message = fails(pair_directory, run, outcome, "--hang-timeout", 3, fault=fault)
    assert f"the training hangs: process {rank} stopped" in message
    assert "no heartbeat" in message and "the training hangs" in log_of(run, 1 - rank)
    if where == "forward":
        state = r"process {} \(pid \d+ on \S+\): step 2, {}, for"
        assert re.search(state.format(1, "forward and backward"), message)
        assert re.search(state.format(0, "reduction"), message)


def test_a_hang_in_python_is_reported_with_its_line(pair_directory, tmp_path):
    outcome = "hang in Python, --hang-timeout 3: the line is reported, exit not 0"
    options, fault = ("--hang-timeout", 3), "hang forward 3 0"
    message = fails(pair_directory, tmp_path / "run", outcome, *options, fault=fault)
    assert "the training hangs: process 0 stopped" in message and "time.sleep(600)" in message


def test_a_killed_process_is_started_again_and_the_run_ends_like_the_undisturbed_one(
    pair_directory, tmp_path, undisturbed
):
    run = tmp_path / "run"
    outcome = "kill -9 of process 1, --max_restarts 1: restarts, continues, ends bit for bit"
    message = goes_on(pair_directory, run, outcome, fault="kill reduction 7 1", restarts=1)
    assert "step_4" in message
    assert_ends_like(run, undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("start", 1), ("consistency", 1), ("forward", 5), ("backward", 5), ("reduction", 5),
        ("evaluation", 1), ("checkpoint", 2), ("saving", 10),
    ],
)  # fmt: skip
def test_a_process_killed_anywhere_ends_the_run_and_the_next_start_continues(
    pair_directory, tmp_path, undisturbed, where, number, rank
):
    if (where, rank) == ("saving", 1):
        pytest.skip("the main process saves for all")
    run = tmp_path / "run"
    outcome = f"kill -9 of process {rank}, {where}: exit not 0, continues bit for bit"
    fails(pair_directory, run, outcome, fault=f"kill {where} {number} {rank}")
    continues_like(pair_directory, run, undisturbed)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_launcher_leaves_nothing_running_and_the_next_start_continues(
    pair_directory, tmp_path, undisturbed, num_processes
):
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
    assert latest_of(run) != f"step_{STEPS}", "over before the launcher was"
    continues_like(pair_directory, run, undisturbed)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_launcher_killed_during_the_start_leaves_nothing_training(
    pair_directory, tmp_path, num_processes
):
    run = tmp_path / "run"
    with launched(pair_directory, run, "--steps", 100_000, num_processes=num_processes) as process:
        while len(processes_of(run)) < 1 + num_processes:
            time.sleep(0.02)
        time.sleep(1.0)
        killed = time.time()
        process.kill()
        assert has_ended(
            killed, 90, run, f"kill -9 of the launcher of {num_processes} during start-up: all end"
        )


# In short: the check of processes as threads, in test_consistency.py.
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("options", f"options: learning_rate 0.5, there {TrainConfig().learning_rate}"),
        ("points", "dataset: "),
        ("a corrupt sample", "dataset: .*train.samples 39, there 40"),
    ],
)
def test_a_process_that_differs_is_named_with_what_differs(
    pair_directory, tmp_path, what, difference
):
    run, other = tmp_path / "run", tmp_path / "other"
    written = [open_samples(pair_directory, split) for split in ("train", "validation")]
    train, validation = ([part.pair(i) for i in range(len(part))] for part in written)
    train[20].target[0] += 0.01 if what == "points" else np.nan
    write_pairs(train, validation, other, {})
    words = arguments(pair_directory, run, "--num-workers", 0)
    with timed(f"other {what}: reported"):
        differing = what if what == "options" else other
        ended = run_forked("faulty", *words, FAULT=f"differ {differing} 0 1")
    assert ended.returncode == 1
    message = ended.stderr
    assert re.search(rf"process 1 on \S+ differs from process 0 in {difference}", message), message
    assert message.count("train.py: error:") == 1
    assert not (run / "checkpoints").exists()


# Data and numbers.


@pytest.mark.parametrize(
    ("what", "message"), [("kill", "killed by signal"), ("hang", "timed out"), ("raise", "broken")]
)
def test_a_data_worker_that_dies_hangs_or_raises_ends_the_run_within_its_timeout(
    pair_directory, tmp_path, undisturbed, what, message
):
    run = tmp_path / "run"
    # At about step 8: a process reads two or three clouds a step.
    settings = {"fault": f"{what} worker 22 1", "num_workers": 1}
    outcome = f"data worker, {what}: exit not 0, continues bit for bit"
    fails(pair_directory, run, outcome, "--worker-timeout", 5, **settings)
    assert message in log_of(run, 1), log_of(run, 1)
    continues_like(pair_directory, run, undisturbed)


def test_a_dataset_that_one_process_can_not_read_is_reported_with_its_path(
    pair_directory, tmp_path
):
    run, broken = tmp_path / "run", tmp_path / "broken"
    shutil.copytree(pair_directory, broken)
    for path in (broken / "train").glob("*.arrow"):
        path.write_bytes(path.read_bytes()[:1000])
    with (
        launched(pair_directory, run, fault=f"differ {broken} 0 1") as process,
        timed("unreadable dataset: reported"),
    ):
        assert process.wait(PATIENCE) != 0
    assert re.search(rf"train.py: error: {broken}: can't be opened", output_of(run)), output_of(run)


def test_a_cloud_with_a_non_finite_loss_on_one_process_is_named_and_all_skip_the_step(
    pair_directory, tmp_path, undisturbed
):
    run = tmp_path / "run"
    outcome = "NaN in one micro-batch: step skipped by all, trained on"
    goes_on(pair_directory, run, outcome, fault="nan forward 5 1")
    assert re.search(
        r"step 5 skipped: loss nan, gradient nan, at learning rate \S+, from train_\d+", log_of(run)
    )
    assert all(weight.isfinite().all() for weight in weights_of(run).values())
    before = [line["loss"] for line in steps_of(undisturbed)]
    now = [line["loss"] for line in steps_of(run)]
    assert now[:4] == before[:4] and now[4] is None and len(now) == STEPS


def test_processes_with_only_empty_batches_change_nothing(tmp_path):
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"cloud_{i}", 30 + 40 * i, 3.0, rng) for i in range(5)]
    write_pairs(pairs[:3], pairs[3:], tmp_path / "few", info={})  # Fewer than slots.
    runs = {}
    for num_processes in (1, 4):
        runs[num_processes] = tmp_path / f"run_{num_processes}"
        options = ("--accumulation-steps", 4 // num_processes)
        ends(tmp_path / "few", runs[num_processes], *options, num_processes=num_processes)
    expected, actual = (steps_of(run) for run in runs.values())
    assert [line["num_clouds"] for line in actual] == [3] * STEPS
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in actual] == [line[name] for line in expected]
    for name, weight in weights_of(runs[1]).items():
        assert torch.equal(weight, weights_of(runs[4])[name])


def test_weights_without_gradient_on_one_process_count_as_zero_there(pair_directory, tmp_path):
    run = tmp_path / "run"
    outcome = "weights without gradient on one process: trained on"
    goes_on(pair_directory, run, outcome, fault="lose window 5 1")
    steps = steps_of(run)
    assert len(steps) == STEPS and all(np.isfinite(line["loss"]) for line in steps)
    assert [line for line in metrics_of(run) if "validation" in line]


# Memory.


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_one_process_changes_nothing(pair_directory, tmp_path, undisturbed, where):
    run = tmp_path / "run"
    outcome = f"out of memory in {where}: done again in halves, ends with the same losses"
    goes_on(pair_directory, run, outcome, fault=f"oom {where} 3 1")
    assert "done again in halves" in log_of(run, 1)
    for expected, actual in zip(steps_of(undisturbed), steps_of(run), strict=True):
        assert actual["num_clouds"] == expected["num_clouds"]
        assert actual["out_of_memory"] == (actual["step"] == 3)
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_repeated_out_of_memory_on_one_process_lowers_the_budget_of_both(pair_directory, tmp_path):
    options, fault = ("--token-budget", 1600), "small forward 3 1"
    for name in ("whole", "stopped"):
        run = tmp_path / name
        with launched(pair_directory, run, *options, fault=fault) as process:
            if name == "stopped":
                while "lowered from" not in output_of(run):
                    assert process.poll() is None, output_of(run)
                process.terminate()
            process.wait(PATIENCE)
    assert latest_of(tmp_path / "stopped") != "step_12", "over before the signal came"
    ends(pair_directory, tmp_path / "stopped", *options, fault=fault)
    for rank in (0, 1):
        assert "lowered from 1,600 to 1,280 for all processes" in log_of(tmp_path / "whole", rank)
    for name, weight in weights_of(tmp_path / "whole").items():
        assert torch.equal(weight, weights_of(tmp_path / "stopped")[name])


def test_the_automatic_budget_is_that_of_the_process_with_least_memory(pair_directory, tmp_path):
    found = {}
    options = ("--token-budget", "auto", "--steps", 1)
    for name, fault in (("much", "memory none 60000000"), ("little", "memory none 12000000 1")):
        run = tmp_path / name
        ends(pair_directory, run, *options, fault=fault)
        found[name] = json.loads((run / "config.json").read_text())["found_token_budget"]
        assert all(line["num_tokens"] <= 2 * found[name] for line in steps_of(run))
    assert found["little"] < found["much"]
    again = tmp_path / "little"
    continues(pair_directory, again, *options)
    assert len(re.findall("Searching for the largest token budget", log_of(again))) == 1


# Full disks and damaged checkpoints.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes privileges that are not there")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("on_save_error", ["go-on", "end"])
def test_a_full_disk_leaves_the_last_checkpoint_whole_and_the_run_continues_when_it_is_freed(
    pair_directory, small_disk, tmp_path, undisturbed, on_save_error
):
    run = tmp_path / "run"
    run.symlink_to(small_disk)
    filler = small_disk / "filler"
    options = ("--on-save-error", on_save_error)
    with launched(pair_directory, run, *options, STEP_SECONDS="0.3") as process:
        wait_for_step(run, 5)
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while file.write(bytes(4096)):
                pass
        full = time.time()
        assert process.wait(PATIENCE) != 0, "the last checkpoint could not be saved"
        assert has_ended(
            full, 120, run, f"full disk, --on-save-error {on_save_error}: reported, ends"
        )
    message = output_of(run)
    # The model of the evaluation at step 6 is the first thing to be written.
    first = "(model: the model|step_8: the checkpoint)"
    failed = first if on_save_error == "end" else f"step_{STEPS}: the checkpoint"
    assert re.search(rf"{failed} can't be written \(.*No space left on device", message)
    assert ("training continues" in message) == (on_save_error == "go-on")
    assert latest_of(run) == "step_4"
    filler.unlink()
    continues(pair_directory, run, *options)
    assert_ends_like(run, undisturbed)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_offered_one_leads_to_the_same_end(
    pair_directory, tmp_path, undisturbed, name, damage
):
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="terminate reduction 9") as process:
        process.wait(PATIENCE)
    latest = latest_of(run)
    assert latest in ("step_9", "step_10"), "the step of the signal, or the next one"
    for step in (latest, "step_8"):
        path = run / "checkpoints" / step / name
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with launched(pair_directory, run) as process, timed(f"{damage} {name}: refused"):
        assert process.wait(PATIENCE) != 0
    message = output_of(run)
    assert re.search(rf"{latest}: the checkpoint .*{name}", message)
    assert message.count("error:") == 1 and "write step_4 into" in message
    (run / "checkpoints" / "LATEST").write_text("step_4")
    continues_like(pair_directory, run, undisturbed)
    assert "Continuing from" in log_of(run) and latest_of(run) == f"step_{STEPS}"


# Signals at any moment: a run saves within the grace period, and the next start continues.


def test_a_signal_to_one_process_in_evaluation_saves_and_defers_the_evaluation(
    pair_directory, tmp_path, undisturbed
):
    run = tmp_path / "run"
    goes_on(pair_directory, run, "SIGUSR1 in evaluation: saved", fault="usr1 reduction 6 1")
    assert latest_of(run) == "step_6"
    assert not any("validation" in line for line in metrics_of(run))
    continues_like(pair_directory, run, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_and_the_next_start_ends_like_the_undisturbed_run(
    pair_directory, tmp_path, undisturbed, number
):
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
    continues_like(pair_directory, run, undisturbed)
    assert shared_memory_of(pids) == set()


@pytest.mark.parametrize("where", ["start", "forward", "saving", "worker"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_anywhere_saves_and_the_next_start_continues(
    pair_directory, tmp_path, undisturbed, where, rank
):
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
    continues_like(pair_directory, run, undisturbed)


# Runs that continue with other numbers of processes, slots, budgets and precisions.


def test_a_run_of_four_slots_continues_with_one_two_and_four_processes(pair_directory, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    ends(pair_directory, whole, "--accumulation-steps", 4, num_processes=1)
    steps = [0]
    for num_processes, step in ((4, 1), (1, 2), (2, 1), (4, 2)):
        options = ("--accumulation-steps", 4 // num_processes)
        fault = f"terminate reduction {step} {num_processes - 1}"
        with launched(
            pair_directory, run, *options, fault=fault, num_processes=num_processes
        ) as process:
            process.wait(PATIENCE)
        steps.append(step_of(Path(latest_of(run))))
        assert steps[-2] < steps[-1] < STEPS, "stopped under way"
    ends(pair_directory, run, "--accumulation-steps", 2, num_processes=2)
    assert_ends_like(run, whole)


def test_with_other_slots_and_budgets_each_cloud_of_an_epoch_is_still_seen_once(
    pair_directory, tmp_path
):
    run, seen = tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    settings = (
        (2, ("--token-budget", 900), "terminate reduction 2 1"),
        (1, ("--token-budget", 600), "terminate reduction 3"),
        (4, ("--token-budget", 700), "terminate reduction 1 3"),
        (2, ("--token-budget", 800, "--accumulation-steps", 2), "none none 0 none"),
    )
    for num_processes, options, fault in settings:
        command = ("--steps", None, "--epochs", 1, *options)
        with launched(
            pair_directory, run, *command, fault=fault, num_processes=num_processes, SEEN=str(seen)
        ) as process:
            ended = process.wait(PATIENCE)
    assert ended == 0, output_of(run)
    counts = Counter(name for path in seen.iterdir() for name in path.read_text().split())
    assert counts == Counter(f"train_{i}" for i in range(40))
    assert "token_budget changed from 900 to 600" in log_of(run)
    assert "slots changed from 1 to 4" in log_of(run, 3)


def test_a_run_continues_in_bf16_with_a_warning_in_the_logs(pair_directory, tmp_path):
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="terminate reduction 5 1") as process:
        process.wait(PATIENCE)
    ends(pair_directory, run, mixed_precision="bf16")
    for rank in (0, 1):
        assert "mixed_precision changed from no to bf16" in log_of(run, rank)
    assert [line for line in metrics_of(run) if line.get("step") == 12]
