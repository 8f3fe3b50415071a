"""Groups of processes forked from this one, which share its imports: a launch takes them anew."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from accelerate.state import AcceleratorState, GradientState
from conftest import free_port

SECONDS = 120.0
"""Until a group that does not end is killed."""


def run_forked(
    main: Callable[[], int], output: Path, num_processes: int = 2, **environment: str
) -> list[int]:
    """The exit statuses of `main` in so many processes over gloo; what they print is in `output`.

    They find the environment that `accelerate launch` gives to processes on CPUs.
    """
    place = {
        "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no", **environment,
    }  # fmt: skip
    output.touch()
    running = {}
    for rank in map(str, range(num_processes)):
        pid = os.fork()
        if not pid:
            _run(main, output, {**place, "RANK": rank, "LOCAL_RANK": rank})
        running[pid] = int(rank)
    statuses = [0] * num_processes
    until = time.monotonic() + SECONDS
    try:
        while running and time.monotonic() < until:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not running, output.read_text()
    return statuses


def _run(main: Callable[[], int], output: Path, environment: dict[str, str]) -> NoReturn:
    """Be one of the processes, and end it without what pytest would do at an end."""
    status = 1
    try:
        with output.open("a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        os.environ.update(environment)
        # What this process knew of its own group of one.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        status = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
