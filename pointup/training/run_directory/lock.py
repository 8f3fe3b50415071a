"""One run at a time in a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from pointup.errors import ConfigError

SECONDS_BETWEEN_HEARTBEATS = 5.0
"""How often the holder touches the lock, as a heartbeat for other machines."""
SECONDS_TO_BE_SEEN = 65.0
"""A little more than NFS keeps what it knows of a directory (acdirmax)."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Holds `output_dir/lock`, which names the process in it: pid, host, since when.

    The operating system frees the lock of a process that is gone, however it went. Where a file
    system doesn't carry locks from one machine to the other, or has none, the file itself decides:
    its pid on this machine, and heartbeats for a holder on another one.
    The main process takes it for all; every process must enter, and all of them raise ConfigError,
    naming pid and host, when another run holds it.
    """

    def __init__(self, output_dir: Path, accelerator: Accelerator) -> None:
        self.path = output_dir / "lock"
        self.is_main_process = accelerator.is_main_process
        self.file: IO[str] | None = None
        self.released = threading.Event()

    def __enter__(self) -> RunLock:
        # A refusal, or what the main process wrote, and where.
        told: list[str | None] = [None, None, platform.node()]
        if self.is_main_process:
            try:
                told[1] = self.take()
            except ConfigError as error:
                told[0] = str(error)
        broadcast_object_list(told)
        refusal, text, writer = told
        if refusal is not None:
            raise ConfigError(refusal)
        # The holder doesn't look: to close the file a second time would free the lock.
        sees = self.is_main_process or is_seen(self.path, text)
        unseen = gather_object(["" if sees else platform.node()])
        if any(unseen):
            self.__exit__(None, None, None)
            raise ConfigError(
                f"{self.path.parent}: {' and '.join(sorted(set(unseen) - {''}))} can't see what "
                f"{writer} writes there; give an --output-dir on a file system of all machines"
            )
        return self

    def take(self) -> str:
        """Write the lock and return what it says; ConfigError where that can't be done."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: can't be written ({error.strerror}); give another --output-dir"
            ) from error
        holder = read_holder(file)
        try:
            # Not flock: a worker forked from the holder would keep that after the holder's death.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise self.refusal(holder) from None
            if is_running_here(holder):
                raise self.refusal(holder) from None
        if holder and holder["host"] != platform.node() and has_heartbeat(self.path):
            file.close()
            raise self.refusal(holder)
        file.seek(0)
        file.truncate()
        mine = {
            "pid": os.getpid(),
            "host": platform.node(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        try:
            text = json.dumps(mine)
            file.write(text)
            file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self.path}: can't be written ({error.strerror}); free the disk, or give "
                "another --output-dir"
            ) from error
        self.file = file
        threading.Thread(target=self.write_heartbeat, name="lock", daemon=True).start()
        return text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.released.set()
        if self.file is not None:
            # Emptied, not deleted: another process may have it open, waiting for the lock.
            self.file.truncate(0)
            self.file.close()

    def refusal(self, holder: dict[str, Any]) -> ConfigError:
        who = "process {pid} on {host} since {since}".format_map(holder) if holder else "a process"
        return ConfigError(
            f"{self.path.parent}: {who} is training there; wait for its end, stop it, or give "
            "another --output-dir"
        )

    def write_heartbeat(self) -> None:
        while not self.released.wait(SECONDS_BETWEEN_HEARTBEATS):
            with contextlib.suppress(FileNotFoundError):  # Of a directory deleted under the run.
                os.utime(self.path)


def is_seen(path: Path, text: str | None) -> bool:
    """Whether a file that another machine has just written says so here, at the latest after the
    time for which a network file system may tell of the past."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def has_heartbeat(path: Path) -> bool:
    """Whether a lock is touched within the time in which a live holder does so."""
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + 4 * SECONDS_BETWEEN_HEARTBEATS
    while time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_HEARTBEATS / 5)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def inspect_lock(path: Path) -> tuple[dict[str, Any], bool]:
    """Who a lock names, and whether that run still holds it; which is left as it is.

    A holder on another machine is waited for, up to the time in which it shows heartbeats.
    """
    with path.open() as file:
        holder = read_holder(file)
        try:
            # Shared: it needs no right to write, and is given back at once.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)
        except OSError as error:
            return holder, error.errno not in UNSUPPORTED or is_running_here(holder)
    elsewhere = bool(holder) and holder["host"] != platform.node()
    return holder, elsewhere and has_heartbeat(path)


def read_holder(file: IO[str]) -> dict[str, Any]:
    """Who holds or held the lock; nothing for a new or a released one."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except (ValueError, RecursionError):
        return {}
    if not isinstance(holder, dict) or not isinstance(holder.get("pid"), int):
        return {}
    return holder if {"host", "since"} <= holder.keys() and 0 < holder["pid"] < 2**31 else {}


def is_running_here(holder: dict[str, Any]) -> bool:
    return bool(holder) and holder["host"] == platform.node() and psutil.pid_exists(holder["pid"])
