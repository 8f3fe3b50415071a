"""Processes of the tests: commands that are watched to their end, and what they leave."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import psutil


class Run(subprocess.CompletedProcess[str]):
    """A completed command, with the pids of all its observed processes."""

    pids: frozenset[int] = frozenset()


def free_port() -> int:
    """A free port, below those that connections get, as of other tests until it is used."""
    while True:
        port = SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_and_watch(command: Sequence[object], timeout: float, **environment: str) -> Run:
    """Run a command to its end; `pids` of the result are those of all processes that were seen."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    pids: set[int] = set()
    deadline = time.monotonic() + timeout
    while True:
        pids |= pids_of(process.pid)
        try:
            stdout, stderr = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                process.kill()
                raise
    ended = Run(words, process.returncode, stdout, stderr)
    ended.pids = frozenset(pids)
    return ended


def pids_of(pid: int) -> set[int]:
    """The pids of a process and of its descendants that still run."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def shared_memory_of(pids: Collection[int]) -> set[str]:
    """Files in shared memory whose names contain one of these pids."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return {name for name in names if set(map(int, re.findall(r"\d+", name))) & set(pids)}
