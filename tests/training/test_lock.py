"""The lock of a run directory: one run at a time."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointup.errors import ConfigError
from pointup.training.run_directory import lock
from pointup.training.run_directory.lock import RunLock

ALONE: Any = SimpleNamespace(is_main_process=True)


@contextmanager
def another_process_holding(directory: Path) -> Iterator[int]:
    """A process that holds the lock, with a forked worker like those of a DataLoader."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        with RunLock(directory, ALONE):
            (directory / "held").touch()
            os.fork()
            time.sleep(60)
        os._exit(0)
    while not (directory / "held").exists():
        time.sleep(0.01)
    try:
        yield pid
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_run_is_refused_with_pid_and_host_and_may_start_after_a_kill(tmp_path):
    with another_process_holding(tmp_path) as pid:
        with pytest.raises(ConfigError, match=f"process {pid} on {platform.node()} since 2"):
            RunLock(tmp_path, ALONE).__enter__()
        # Its worker still runs, without the lock.
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert json.loads((tmp_path / "lock").read_text())["pid"] == pid
        with RunLock(tmp_path, ALONE):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


def test_a_holder_on_another_machine_keeps_the_lock_while_it_shows_heartbeats(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_HEARTBEATS", 0.1)
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026"}))
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    holder = threading.Thread(target=touch)
    holder.start()
    with pytest.raises(ConfigError, match="process 1 on elsewhere"):
        RunLock(tmp_path, ALONE).__enter__()
    ended.set()
    holder.join()
    with RunLock(tmp_path, ALONE):
        written = path.stat().st_mtime_ns
        time.sleep(0.3)
        assert path.stat().st_mtime_ns > written


def test_without_locks_in_the_file_system_the_pid_decides(tmp_path, monkeypatch):
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    holder = {"pid": os.getppid(), "host": platform.node(), "since": "2026"}
    (tmp_path / "lock").write_text(json.dumps(holder))
    with pytest.raises(ConfigError, match=f"process {os.getppid()}"):
        RunLock(tmp_path, ALONE).__enter__()
    (tmp_path / "lock").write_text(json.dumps({**holder, "pid": 2**22 + 1}))
    with RunLock(tmp_path, ALONE):
        pass


def test_a_directory_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"lock: can't be written.*--output-dir"):
        RunLock(tmp_path / "file" / "run", ALONE).__enter__()


def test_heartbeats_go_on_after_one_that_the_file_system_refused(tmp_path, monkeypatch):
    refusals, has_heartbeat = iter([OSError(errno.ESTALE, "Stale file handle")]), threading.Event()

    def utime(path: Path) -> None:
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        has_heartbeat.set()

    monkeypatch.setattr(lock, "SECONDS_BETWEEN_HEARTBEATS", 0.01)
    monkeypatch.setattr(lock.os, "utime", utime)
    with RunLock(tmp_path, ALONE):
        assert has_heartbeat.wait(10.0)


def test_the_text_of_another_machine_is_awaited_up_to_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SECONDS_TO_BE_SEEN", 10.0)
    writer = threading.Timer(0.1, (tmp_path / "lock").write_text, ["text"])
    writer.start()
    assert lock.is_seen(tmp_path / "lock", "text")
    monkeypatch.setattr(lock, "SECONDS_TO_BE_SEEN", 0.1)
    assert not lock.is_seen(tmp_path / "lock", "another")
    assert not lock.is_seen(tmp_path / "none", "text")
