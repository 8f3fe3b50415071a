"""Processes of the tests: commands that are watched to their end, and what they leave."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil


class Run(subprocess.CompletedProcess[str]):
    """A completed command, with the pids of all its observed processes."""

    pids: frozenset[int] = frozenset()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
