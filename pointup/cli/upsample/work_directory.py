"""The scratch directory of a survey, beside its first output file, and the locks of all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pointup.cli.upsample.plan import Job
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.disk import UNFINISHED, os_errors
from pointup.errors import FileError


@contextmanager
def work_directory(jobs: Sequence[Job], workers: LaunchedWorkerGroup) -> Iterator[Path]:
    """An empty directory for the files of a survey, deleted at the end; makes the output folders.

    It is beside the first output file and named after it. A call that is killed leaves it, and the
    next call for the same files deletes what is in it. Raises FileError, in all processes, while
    another call works on one of the files.
    """
    path = ""
    with ExitStack() as stack:
        with workers.barrier():
            if workers.is_main:
                targets = [job.target for job in jobs if not job.is_context]
                with os_errors(targets[0], "written"):
                    for target in targets:
                        target.parent.mkdir(parents=True, exist_ok=True)
                _lock_each(targets, stack)
                with os_errors(targets[0], "written"):
                    directory = _hidden(targets[0]) / "survey"
                    if directory.exists():
                        shutil.rmtree(directory)
                    directory.mkdir()
                    path = str(directory)
                    _delete_unfinished(targets)
        yield Path(workers.from_main(path))


def _hidden(target: Path) -> Path:
    """The folder of a target's lock."""
    return target.with_name(f".{target.name}.work")


def _lock_each(targets: Sequence[Path], stack: ExitStack) -> None:
    """Lock all targets, for this process alone, until the stack is closed.

    A survey may have more files than a process may open: their locks are links to one file, where
    the file system has such links. Of two calls for some of the same files, one gets all: the order
    is the same in both.
    """
    held: Path | None = None
    for target in sorted(targets):
        lock = _hidden(target) / "lock"
        with os_errors(target, "written"):
            lock.parent.mkdir(exist_ok=True)
            try:
                _delete_stale(lock)
                if held is None or not _is_linked(held, lock):
                    own = FileLock(lock)
                    own.acquire(blocking=False)
                    stack.callback(own.release)
                    held = lock
            except (Timeout, FileExistsError, FileNotFoundError):
                # Not found: the other call ends, and deletes its folder at this moment.
                message = f"{target}: another call upsamples into it; wait for its end"
                raise FileError(message) from None
            # Before the release: only the holder of a lock may delete it.
            stack.callback(shutil.rmtree, lock.parent, ignore_errors=True)


def _delete_stale(lock: Path) -> None:
    """Delete the lock of a call that was killed. Raises Timeout or FileExistsError if another call
    holds it or is faster to replace it."""
    try:
        seen = lock.stat()
    except FileNotFoundError:
        return
    stale = FileLock(lock)
    stale.acquire(blocking=False)
    try:
        if not os.path.samestat(seen, lock.stat()):
            raise FileExistsError
        # Windows deletes no open file; there each target has a lock of its own.
        with suppress(PermissionError):
            lock.unlink()
    finally:
        stale.release()


def _is_linked(held: Path, lock: Path) -> bool:
    """Make `lock` another name of the lock that is held. False where that is not possible: between
    file systems, on some of them, and for more links than a file may have."""
    if os.name == "nt":
        return False
    try:
        os.link(held, lock)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _delete_unfinished(targets: Sequence[Path]) -> None:
    """Delete the output files that a killed call was writing."""
    for folder in {target.parent for target in targets}:
        names = {target.name for target in targets if target.parent == folder}
        for path in folder.glob(".*.part"):
            of = UNFINISHED.fullmatch(path.name)
            if of and of[1] in names:
                path.unlink()
