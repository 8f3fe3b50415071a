"""`pointup prepare` leaves no folder and no process when a signal stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

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
def test_every_signal_leaves_nothing_with_one_process_and_with_several(tmp_path):
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
