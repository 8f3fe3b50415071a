"""Reads the files of a survey into a store, and counts what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.errors import DataError, FileError
from pointup.io.cloud import (
    CLASSIFICATION,
    NUMBER_OF_RETURNS,
    PointCloud,
    attribute,
    is_synthetic,
    is_vegetation,
)
from pointup.io.files import iter_points
from pointup.progress import ProgressBar
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.ground import GROUND_CLASS
from pointup.upsampling.store.point_store import CHUNK_SIZE, Store, build_survey_store


@dataclass
class SortedFiles:
    """What the files of a survey gave.

    Attributes:
        left_out: the errors of files that can't be read, by number.
        num_inside: the number of points of each file that lie within its bounds, by its number; 0
            of a file that is only read.
        num_synthetic: how many of those read have the synthetic flag, of the files with any.
        num_taken: the number of points to upsample; of these are vegetation `num_vegetation`, of
            class 2, ground, `num_class_2`, and of pulses with several returns `num_several`, which
            is 0 with chosen classes.
        too_few: the error for fewer than two points to upsample in all files; None for more.
    """

    left_out: dict[int, FileError] = field(default_factory=dict)
    num_inside: Counter[int] = field(default_factory=Counter)
    num_synthetic: Counter[int] = field(default_factory=Counter)
    num_taken: int = 0
    num_vegetation: int = 0
    num_class_2: int = 0
    num_several: int = 0
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

    def chunks(number: int) -> Iterator[PointCloud]:
        job = jobs[number]
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
                files.num_inside[number] += 0 if job.is_context else int(inside)
                if num_synthetic := int(is_synthetic(chunk).sum()):
                    files.num_synthetic[number] += num_synthetic
                yield chunk
                progress.add(len(chunk))
        except FileError as error:
            files.left_out[number] = error
            raise _Unreadable from error

    def takes_part(cloud: PointCloud) -> np.ndarray:
        try:
            taken = point_filter(cloud)
        except DataError as error:
            raise FileError(f"{survey_text(jobs)}: {error}") from None
        files.num_taken += int(taken.sum())
        files.num_vegetation += int((taken & is_vegetation(cloud)).sum())
        classes = attribute(cloud, CLASSIFICATION)
        if classes is not None:
            files.num_class_2 += int((taken & (classes == GROUND_CLASS)).sum())
        number = attribute(cloud, NUMBER_OF_RETURNS)
        # Who names classes knows whether the ground is among them.
        if number is not None and point_filter.classes is None:
            files.num_several += int((taken & (number > 1)).sum())
        return taken

    while True:
        progress.begin("reading")
        files = SortedFiles(files.left_out)
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
            if files.num_taken >= 2:
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
