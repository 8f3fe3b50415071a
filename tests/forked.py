"""Forks a group of processes after their imports, which take seconds per process in a launch.

As a script, `forked.py NUMBER MODULES WORDS...` imports the modules, which are separated by commas.
It runs main() of the first module with these words in NUMBER processes over gloo, in the
environment that `accelerate launch` sets for processes on CPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

SECONDS = 300.0
"""Timeout of a group."""


def run_forked(
    modules: str, *words: object, num_processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `num_processes` processes; the status is 0 only if that of each process is 0."""
    # The script itself imports no tests.
    from processes import run_and_watch

    command = [sys.executable, __file__, num_processes, modules, *words]
    return run_and_watch(command, SECONDS, **environment)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from pointup.training.distributed import preemption

    number, modules, *words = sys.argv[1:]
    first, *_ = [import_module(name) for name in modules.split(",")]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(
        WORLD_SIZE=number, LOCAL_WORLD_SIZE=number, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "no")
    for rank in range(int(number)):
        if not os.fork():
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            # `preemption` was imported before the fork; the parent of this process launches it.
            preemption.LAUNCHER = os.getppid()
            sys.argv = [first.__name__, *words]
            return int(first.main())
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(number))]
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
