"""Copies files of `pointup upsample` that have nothing to upsample."""

from __future__ import annotations

from collections.abc import Sequence

from pointup.cli.upsample.plan import Job
from pointup.errors import FileError
from pointup.io.files import copy_file


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
