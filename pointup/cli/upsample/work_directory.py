"""The scratch directory of a survey, beside its first output file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pointup.cli.upsample.plan import Job
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.errors import FileError
from pointup.io.cloud import os_errors


@contextmanager
def work_directory(jobs: Sequence[Job], workers: LaunchedWorkerGroup) -> Iterator[Path]:
    """An empty directory for the files of a survey, deleted at the end; makes the output folders.

    It is beside the first output file and named after it. A call that is killed leaves it, and the
    next call for the same file deletes what is in it. Raises FileError, in all processes, while
    another call works on the same file.
    """
    path = ""
    with ExitStack() as stack:
        with workers.barrier():
            if workers.is_main:
                targets = [job.target for job in jobs if not job.is_context]
                with os_errors(targets[0], "written"):
                    for target in targets:
                        target.parent.mkdir(parents=True, exist_ok=True)
                    path = str(stack.enter_context(_locked(targets[0])))
                    _delete_unfinished(targets)
        yield Path(workers.from_main(path))


@contextmanager
def _locked(target: Path) -> Iterator[Path]:
    """The empty directory of a target, for this process alone."""
    directory = target.with_name(f".{target.name}.work")
    directory.mkdir(exist_ok=True)
    lock = FileLock(directory / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise FileError(f"{target}: another call upsamples into it; wait for its end") from None
    try:
        inner = directory / "survey"
        if inner.exists():
            shutil.rmtree(inner)
        inner.mkdir()
        yield inner
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def _delete_unfinished(targets: Sequence[Path]) -> None:
    """Delete the output files that a killed call was writing."""
    for folder in {target.parent for target in targets}:
        names = tuple(f".{target.name}." for target in targets if target.parent == folder)
        for path in folder.glob(".*.part"):
            if path.name.startswith(names):
                path.unlink()
