"""`pointup prepare` leaves no folder and no process when a signal stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from pointup.processes import STOP_SIGNALS, interrupts_held_back, stopping_as_interrupts

# Workers at once, and work for much longer than the test waits.
SCRIPT = """
import sys
from pointup import processes
processes.SECONDS_ALONE = 0.0
from pointup.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
KINDS = [
    ("SIGTERM", 1, "process"), ("SIGHUP", 1, "process"), ("SIGINT", 1, "process"),
    ("SIGTERM", 2, "process"), ("SIGHUP", 2, "group"), ("SIGTERM", 2, "group"),
]  # fmt: skip


def wait_until(condition: object, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_every_signal_leaves_nothing_with_one_process_and_with_several(tmp_path: Path) -> None:
    # So many that the command is far from its end when the first pairs are written.
    points = np.random.default_rng(0).random((2_000_000, 3)) * [1000, 1000, 3]
    np.save(tmp_path / "dense.npy", points)
    for name, num_workers, whom in KINDS:
        folder = tmp_path / f"{name}-{num_workers}-{whom}"
        folder.mkdir()
        process = subprocess.Popen(
            [
                sys.executable, "-c", SCRIPT, "prepare", "thin", str(tmp_path / "dense.npy"),
                "--tile", "20", "--pattern", "poisson", "--num-workers", str(num_workers),
                "-o", str(folder / "pairs"),
            ],
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        wait_until(lambda folder=folder: any(folder.rglob("train/data-*.arrow")))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= num_workers if num_workers > 1 else True
        number = signal.Signals[name]
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, (name, whom, error)
        assert "Traceback" not in error
        assert list(folder.iterdir()) == []
        psutil.wait_procs(children, timeout=30)
        assert not [child for child in children if child.is_running()]


def test_a_second_signal_does_not_disturb_the_clean_up() -> None:
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


def test_signals_are_held_back_to_the_end() -> None:
    done = []
    with stopping_as_interrupts(), pytest.raises(KeyboardInterrupt):
        with interrupts_held_back():
            signal.raise_signal(signal.SIGTERM)
            done.append(1)
        done.append(2)
    assert done == [1]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_as_interrupts():
            signal.raise_signal(signal.SIGHUP)
            with interrupts_held_back():
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
