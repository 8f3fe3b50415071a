"""Locks the directory of a run, so that only one run at a time trains in it."""

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
from typing import IO, Any

import psutil
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from pointup.errors import ConfigError

SECONDS_BETWEEN_HEARTBEATS = 5.0
"""Interval in which the holder touches the lock, as a heartbeat for other machines."""
SECONDS_TO_BE_SEEN = 65.0
"""Slightly more than the time for which NFS caches a directory (acdirmax, 60 s)."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""


class RunLock:
    """Holds `output_dir/lock`, a file with the pid, host and start time of its holder.

    The operating system releases the lock of a process that ends, in whatever way. If the file
    system has no locks, or doesn't share them between machines, the file decides: by the pid on
    this machine, by heartbeats (changes of its time stamp) for a holder on another one.
    `disk.acquire_lock` doesn't serve here: it uses flock, which a forked data worker keeps after
    the death of the holder.

    The main process acquires the lock for all. Every process must enter; all of them raise
    ConfigError, with pid and host, if another run holds it.
    """

    def __init__(self, output_dir: Path, accelerator: Accelerator) -> None:
        self.path = output_dir / "lock"
        self.is_main_process = accelerator.is_main_process
        self.file: IO[str] | None = None
        self.released = threading.Event()

    def __enter__(self) -> RunLock:
        # The main process's error, or the text it wrote, and its host.
        outcome: list[str | None] = [None, None, platform.node()]
        if self.is_main_process:
            try:
                outcome[1] = self.acquire()
            except ConfigError as error:
                outcome[0] = str(error)
        broadcast_object_list(outcome)
        refusal, text, writer = outcome
        if refusal is not None:
            raise ConfigError(refusal)
        # The holder must not read the file: closing it a second time would release the lock.
        sees = self.is_main_process or is_seen(self.path, text)
        unseen = gather_object(["" if sees else platform.node()])
        if any(unseen):
            self.__exit__()
            raise ConfigError(
                f"{self.path.parent}: {' and '.join(sorted(set(unseen) - {''}))} can't see what "
                f"{writer} writes there; give an --output-dir on a file system shared by all "
                "machines"
            )
        return self

    def acquire(self) -> str:
        """Acquire the lock and return its text; raises ConfigError if another run holds it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
            holder = read_holder(file)
            if not acquired(file, holder) or has_heartbeat_elsewhere(self.path, holder):
                file.close()
                who = "a process"
                if holder:
                    who = "process {pid} on {host} since {since}".format_map(holder)
                raise ConfigError(
                    f"{self.path.parent}: {who} is training there; wait for its end, stop it, or "
                    "give another --output-dir"
                )
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            text = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since})
            file.truncate(0)
            file.write(text)
            file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self.path}: can't be written ({error.strerror}); give another --output-dir, or "
                "free space if the disk is full"
            ) from error
        self.file = file
        threading.Thread(target=self.write_heartbeat, name="lock", daemon=True).start()
        return text

    def __exit__(self, *error: object) -> None:
        self.released.set()
        if self.file is not None:
            # Emptied, not deleted: another process may have opened it to acquire the lock.
            self.file.truncate(0)
            self.file.close()

    def write_heartbeat(self) -> None:
        while not self.released.wait(SECONDS_BETWEEN_HEARTBEATS):
            # The directory's server may be out of reach for a while.
            with contextlib.suppress(OSError):
                os.utime(self.path)


def is_seen(path: Path, text: str | None) -> bool:
    """Whether a file that another machine has written has this text here, within the time for which
    a network file system may serve cached data."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == text:
                return True
        time.sleep(0.2)
    return False


def has_heartbeat_elsewhere(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder is on another machine, and shows a heartbeat within four intervals."""
    if not holder or holder["host"] == platform.node():
        return False
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + 4 * SECONDS_BETWEEN_HEARTBEATS
    while time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_HEARTBEATS / 5)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def inspect_lock(path: Path) -> tuple[dict[str, Any], bool]:
    """The holder that a lock names, and whether it still holds the lock; changes nothing."""
    with path.open() as file:
        holder = read_holder(file)
        # A shared lock needs no permission to write; it ends with the file.
        is_held = not acquired(file, holder, fcntl.LOCK_SH)
    return holder, is_held or has_heartbeat_elsewhere(path, holder)


def acquired(file: IO[str], holder: dict[str, Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed; returns False if another process has locked it.

    Without locks in the file system, `holder` has locked it if its process runs on this machine.
    """
    try:
        # Not flock: a worker forked from the holder would keep that lock after the holder's death.
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            return False
        is_here = bool(holder) and holder["host"] == platform.node()
        return not (is_here and psutil.pid_exists(holder["pid"]))
    return True


def read_holder(file: IO[str]) -> dict[str, Any]:
    """The process that holds or held the lock; {} for a new, a released or a damaged lock."""
    file.seek(0)
    try:
        holder: dict[str, Any] = json.loads(file.read())
    except ValueError:
        return {}
    return holder
