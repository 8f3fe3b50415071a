"""Shares the work of a command among processes of this machine, without a launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pointup.errors import ConfigError, PointupError
from pointup.io.cloud import LAS_EXTENSIONS
from pointup.processes import (
    STOP_SIGNALS,
    end_with_parent,
    from_fork_server,
    ignore_signals,
    interrupts_held_back,
    stopping_as_interrupts,
)
from pointup.training.distributed.accelerator import is_cpu_requested
from pointup.training.distributed.preemption import (
    LAUNCHER_VARIABLES,
    end_at_once,
    start_thread,
)
from pointup.training.distributed.process_group import interface_of
from pointup.training.faults.available_memory import cores_of_process, memory_limit

# A thread holds Python's lock for 19 % (lidar) to 28 % (forest) of its time: more threads in a
# process wait for it. Two hardly do.
_MOST_THREADS, _CORES_OF_PROCESS = 4, 2
# A process takes 0.6 to 0.8 GB. Its start, some seconds, pays from so many points on.
_MEMORY, _POINTS_OF_PROCESS = 1e9, 250_000
# Bytes of a point in compressed LAS, and in other files.
_COMPRESSED, _UNCOMPRESSED = 6, 30
# Processes that wait for each other in a collective see a signal only after it.
_SECONDS_TO_END = 5.0
_HAS_DIED = "another process of this call died, perhaps for lack of memory: give fewer --processes"


def num_local_processes(sources: Sequence[Path], requested: int | None) -> int:
    """How many processes of this machine upsample these files: as requested, or as is fastest.

    One with an accelerator, with up to four cores, and for a process that was launched. Raises
    ConfigError if several are requested for an accelerator, or from a launched process.
    """
    is_launched = not os.environ.keys().isdisjoint(("WORLD_SIZE", *LAUNCHER_VARIABLES))
    if is_launched or (torch.accelerator.is_available() and not is_cpu_requested()):
        if requested is not None and requested > 1:
            raise ConfigError(
                f"--processes {requested}: is for CPUs, without `accelerate launch`; leave it out"
            )
        return 1
    if requested is not None:
        return requested
    num_threads = _num_threads()
    # On Windows groups of gloo are not tried.
    if num_threads <= _MOST_THREADS or sys.platform == "win32":
        return 1
    # Files of a scanner may be one survey; of others each is a cloud by itself.
    scans, others = [0.0], [0.0]
    for source in sources:
        extension = source.suffix.lower()
        size = source.stat().st_size / (_COMPRESSED if extension == ".laz" else _UNCOMPRESSED)
        (scans if extension in LAS_EXTENSIONS else others).append(size)
    num_points = max(sum(scans), *others)
    room = memory_limit(torch.device("cpu"), 1) / _MEMORY
    most = min(num_threads / _CORES_OF_PROCESS, num_points / _POINTS_OF_PROCESS, room)
    return max(1, int(most))


def _num_threads() -> int:
    return int(max(1, min(torch.get_num_threads(), cores_of_process())))


@contextmanager
def local_group(run: Callable[[], int], num_processes: int) -> Iterator[None]:
    """The block runs as the main process of a group, in which all other processes call `run`.

    The environment describes the group, as a launcher does; `run` must be picklable. All share the
    threads of this process. The others end with the block. Raises PointupError if one of them dies;
    if the block waits nevertheless, this process ends as well.
    """
    if num_processes == 1:
        yield
        return
    environment, num_threads = os.environ.copy(), torch.get_num_threads()
    own_threads = max(1, _num_threads() // num_processes)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        group = {
            "WORLD_SIZE": num_processes,
            "LOCAL_WORLD_SIZE": num_processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": unused.getsockname()[1],
            "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": interface_of("127.0.0.1") or "lo",
            "OMP_NUM_THREADS": own_threads,
        }

    def of_rank(rank: int) -> dict[str, str]:
        values = {**group, "RANK": rank, "LOCAL_RANK": rank}
        return {name: str(value) for name, value in values.items()}

    context: Any = from_fork_server(__name__, run.__module__)
    others: list[BaseProcess] = []
    try:
        with interrupts_held_back():
            for rank in range(1, num_processes):
                process = context.Process(target=_run_as_other, args=(run, of_rank(rank)))
                process.start()
                others.append(process)
        os.environ.update(of_rank(0))
        torch.set_num_threads(own_threads)
        with _ending_after(others):
            yield
        for process in others:
            process.join()
    except RuntimeError as error:
        if not _is_of_group(error):
            raise
        raise PointupError(_HAS_DIED) from error
    finally:
        for process in others:
            process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in others:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _ending_after(others: Sequence[BaseProcess]) -> Iterator[None]:
    """Ends this process if one of the others fails and the block goes on.

    The block may wait for a process that died before it joined the group.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            if any(process.exitcode for process in others) and not ended.wait(_SECONDS_TO_END):
                end_at_once(1, f"pointup: error: {_HAS_DIED}")

    start_thread("local group", watch)
    try:
        yield
    finally:
        ended.set()


def _run_as_other(run: Callable[[], int], environment: dict[str, str]) -> None:
    ignore_signals(number for number in STOP_SIGNALS if number != signal.SIGTERM)
    end_with_parent()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    with stopping_as_interrupts():
        try:
            sys.exit(run())
        except KeyboardInterrupt:
            sys.exit(1)
        except RuntimeError as error:
            if _is_of_group(error):
                sys.exit(1)  # The main process says so, or was stopped.
            raise


def _is_of_group(error: RuntimeError) -> bool:
    """Whether another process has left the group; torch has no class for errors of gloo."""
    return "gloo" in str(error)
