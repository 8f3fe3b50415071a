"""Worker processes: order, errors, workers that die; signals that are held back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from processes import pids_of

from pointup import processes
from pointup.errors import DataError, PointupError
from pointup.processes import (
    STOP_SIGNALS,
    call_each,
    interrupts_held_back,
    stopping_as_interrupts,
)


def slow_square(number: int) -> tuple[int, int]:
    time.sleep(0.05 * (number % 3 == 0))
    if number == 5:
        raise DataError("five")
    return number**2, os.getpid()


def die() -> None:
    os._exit(1)


def test_results_and_errors_are_in_the_order_of_the_calls(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_ALONE", 0.08)
    results = list(call_each([partial(slow_square, i) for i in range(20)], num_workers=2))
    assert str(results.pop(5)) == "five"
    squares = [result[0] for result in results if not isinstance(result, PointupError)]
    assert squares == [i**2 for i in range(20) if i != 5]
    # The first call ran in this process, the last one in a worker.
    pids = [result[1] for result in results if not isinstance(result, PointupError)]
    assert pids[0] == os.getpid() != pids[-1]


def test_one_worker_runs_all_calls_in_this_process():
    results = list(call_each([partial(slow_square, i) for i in range(4)], num_workers=1))
    assert results == [(i**2, os.getpid()) for i in range(4)]


def test_a_worker_that_dies_raises_an_error(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_ALONE", 0.0)
    with pytest.raises(PointupError, match="--num-workers"):
        list(call_each([die, die], num_workers=2))


# Workers of a command and of a training, of one server.
WITH_WORKERS = """
import sys, time, torch
from functools import partial
from pointup import processes
from pointup.datasets.batch import make_loader
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
samples = PairDataset(open_samples(sys.argv[1], "train"))
keys = [[(0, 0)]] * 40
batches = iter(make_loader(samples, keys, num_workers=2, device=torch.device("meta")))
processes.SECONDS_ALONE = 0.0
list(processes.call_each([partial(time.sleep, 600)] * 2, num_workers=2))
"""


def test_workers_and_their_fork_server_end_when_their_parent_is_killed(pair_directory):
    parent = subprocess.Popen([sys.executable, "-c", WITH_WORKERS, str(pair_directory)])
    try:
        deadline = time.monotonic() + 120
        # The program, the server with four workers, and the tracker of resources.
        while len(pids := pids_of(parent.pid)) < 7:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_folder_of_temporary_files_with_a_long_name_is_named(tmp_path):
    folder = tmp_path / ("n" * 100)
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", "from pointup import processes; processes.from_fork_server()"],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"pointup.errors.PointupError: {folder}: no process can be started")


def test_a_second_signal_does_not_disturb_the_clean_up():
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    cleaned = False
    with pytest.raises(KeyboardInterrupt), stopping_as_interrupts():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            cleaned = True
    assert cleaned
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_signals_are_held_back_to_the_end():
    done = []
    with stopping_as_interrupts(), pytest.raises(KeyboardInterrupt):
        with interrupts_held_back():
            signal.raise_signal(signal.SIGTERM)
            done.append(1)
        done.append(2)
    assert done == [1]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_as_interrupts():
            signal.raise_signal(signal.SIGHUP)
            with interrupts_held_back():
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
