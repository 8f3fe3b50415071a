"""The work directory of a survey, and the store of its points; unreadable files are left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.disk import UNFINISHED, acquire_lock, os_errors, remove, short_name
from pointup.errors import DataError, FileError
from pointup.io.cloud import CLASSIFICATION, attribute, is_synthetic, is_vegetation
from pointup.io.files import PointCloud, iter_points
from pointup.progress import ProgressBar
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.ground import GROUND_CLASS
from pointup.upsampling.store.point_store import (
    CHUNK_SIZE,
    Store,
    build_survey_store,
)


@contextmanager
def work_directory(jobs: Sequence[Job], workers: LaunchedWorkerGroup) -> Iterator[Path]:
    """An empty directory for the files of a survey, deleted at the end; makes the output folders.

    It is beside the first output file and named after it. A call that is killed leaves it, and the
    next call for the same files deletes what is in it. Raises FileError, in all processes, while
    another call works on the survey.
    """
    path = ""
    with ExitStack() as stack:
        with workers.barrier():
            if workers.is_main:
                targets = [job.target for job in jobs if not job.is_context]
                first = min(targets)
                folder = first.with_name(f".{short_name(first)}.work")
                refusal = f"{first}: another call upsamples into it; wait for its end"
                with os_errors(first, "written"):
                    for target in targets:
                        target.parent.mkdir(parents=True, exist_ok=True)
                    folder.mkdir(exist_ok=True)
                    stack.enter_context(acquire_lock(folder / "lock", refusal))
                    # Before the release: only the holder of a lock may delete it.
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    remove(folder / "survey")
                    (folder / "survey").mkdir()
                    _delete_unfinished(targets)
                path = str(folder / "survey")
        yield Path(workers.from_main(path))


def _delete_unfinished(targets: Sequence[Path]) -> None:
    """Delete the output files that a killed call was writing."""
    for folder in {target.parent for target in targets}:
        names = {short_name(target) for target in targets if target.parent == folder}
        for path in folder.glob(".*.part"):
            of = UNFINISHED.fullmatch(path.name)
            if of and of[1] in names:
                path.unlink()


@dataclass
class SortedFiles:
    """What the files of a survey gave.

    Attributes:
        num_read: the number of points of each file that were read, by its number.
        num_inside: the number of these that lie within the bounds of the file.
        num_synthetic: the number of these that have the synthetic flag, of the files with any.
        left_out: the errors of files that can't be read, by number.
        num_vegetation: the number of points to upsample that are vegetation.
        num_class_2: the number of points to upsample that have class 2, ground.
        too_few: the error for fewer than two points to upsample in all files; None for more.
    """

    num_read: dict[int, int] = field(default_factory=dict)
    num_inside: dict[int, int] = field(default_factory=dict)
    num_synthetic: dict[int, int] = field(default_factory=dict)
    left_out: dict[int, FileError] = field(default_factory=dict)
    num_vegetation: int = 0
    num_class_2: int = 0
    too_few: FileError | None = None


class _Unreadable(Exception):
    """Stops the building of a store at a file that can't be read."""


def sort_points(
    jobs: Sequence[Job],
    directory: Path,
    point_filter: PointFilter,
    upright: bool,
    progress: ProgressBar,
) -> SortedFiles:
    """Build the store of a survey; there is none if the files have too few points.

    Raises FileError if no file can be read, or if the points can't be upsampled.
    """
    files = SortedFiles()
    num_taken = 0

    def chunks(number: int) -> Iterator[PointCloud]:
        job = jobs[number]
        files.num_read[number] = files.num_inside[number] = 0
        files.num_synthetic.pop(number, None)
        try:
            bounds = job.bounds.grown(job.margin) if job.bounds else None
            for chunk in iter_points(job.source, CHUNK_SIZE, bounds=bounds):
                if job.extent and not job.extent.holds(chunk.positions):
                    remedy = "" if job.bounds else ", or add --separate"
                    raise FileError(
                        f"{job.source}: has points outside of the extent in its header, so "
                        f"that its neighbours are unknown; repair the header{remedy}"
                    )
                inside = job.bounds.inside(chunk.positions).sum() if job.bounds else len(chunk)
                files.num_inside[number] += int(inside)
                files.num_read[number] += len(chunk)
                if num_synthetic := int(is_synthetic(chunk).sum()):
                    before = files.num_synthetic.get(number, 0)
                    files.num_synthetic[number] = before + num_synthetic
                yield chunk
                progress.add(len(chunk))
        except FileError as error:
            files.left_out[number] = error
            raise _Unreadable from error

    def takes_part(cloud: PointCloud) -> np.ndarray:
        nonlocal num_taken
        try:
            taken = point_filter(cloud)
        except DataError as error:
            raise FileError(f"{survey_text(jobs)}: {error}") from None
        num_taken += int(taken.sum())
        files.num_vegetation += int((taken & is_vegetation(cloud)).sum())
        classes = attribute(cloud, CLASSIFICATION)
        if classes is not None:
            files.num_class_2 += int((taken & (classes == GROUND_CLASS)).sum())
        return taken

    while True:
        progress.begin("reading")
        num_taken = files.num_vegetation = files.num_class_2 = 0
        readable = [number for number in range(len(jobs)) if number not in files.left_out]
        try:
            build_survey_store(
                map(chunks, readable), directory, takes_part=takes_part, upright=upright
            )
            return files
        except _Unreadable:
            if len(files.left_out) == len(jobs):
                raise files.left_out.popitem()[1] from None
        except DataError as error:
            named = FileError(f"{survey_text(jobs)}: {error}")
            if num_taken >= 2:
                raise named from None
            files.too_few = named
            return files


def open_store(directory: Path) -> Store:
    """Open the store that the main process has built; FileError where it is not seen."""
    try:
        return Store(directory)
    except FileNotFoundError:
        raise FileError(
            f"{directory}: not seen by all processes; write to a folder that all machines share"
        ) from None


def survey_text(jobs: Sequence[Job]) -> str:
    """The files of a survey in an error."""
    others = f" and {len(jobs) - 1} files that border on it" if len(jobs) > 1 else ""
    return f"{jobs[0].source}{others}"
