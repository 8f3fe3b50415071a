"""Copies files of `pointup upsample` that have nothing to upsample."""

from __future__ import annotations

from collections.abc import Sequence

from pointup.cli.upsample.plan import Job
from pointup.errors import FileError
from pointup.io.files import copy_file, copy_points, open_writer, read_extremes
from pointup.upsampling.store.point_store import CHUNK_SIZE


def copy_without_points(jobs: Sequence[Job]) -> list[Exception]:
    """Copy files that have no points, and report each. Returns the errors."""
    complaints: list[Exception] = []
    for job in jobs:
        try:
            copy_file(job.source, job.target)
            print(f"{job.source}: no points in it, copied: {job.target}")
        except FileError as error:
            complaints.append(error)
    return complaints


def copy_unchanged(job: Job, num_points: int) -> int:
    """Copy a file of `num_points`, or its part within bounds. Returns the number of points copied.

    Raises FileError if it can't be read or written.
    """
    if job.bounds is None and job.source.suffix.lower() == job.target.suffix.lower():
        copy_file(job.source, job.target)
        return num_points
    with open_writer(job.target, read_extremes(job.source)) as writer:
        copy_points(job.source, writer, CHUNK_SIZE, bounds=job.bounds)
        return writer.num_points
