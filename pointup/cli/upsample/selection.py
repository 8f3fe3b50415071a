"""Selects what a call of `pointup upsample` does of its surveys: bounds, a shard, what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.errors import FileError, PointupError
from pointup.geometry.morton import morton_codes
from pointup.io.bounds import Bounds
from pointup.io.extents import FileExtent, read_extent
from pointup.io.files import iter_points

MARGIN = 64.0
"""Width of the strip that is read around what is written, in mean point spacings of the file. New
points depend on measured points within about 20 local spacings."""
GRID = 2**20


def within_bounds(
    surveys: Sequence[Sequence[Job]], bounds: Bounds
) -> tuple[list[list[Job]], list[str], list[Exception]]:
    """The surveys cut to `bounds`, notes on files that touch them without a point inside, and the
    errors of files without a valid extent.

    Files outside are dropped, or only read near the bounds. Raises FileError if no file has points
    inside.
    """
    found, notes, complaints = [], [], list[Exception]()
    for survey in surveys:
        jobs = []
        for job in survey:
            try:
                extent = job.extent or read_extent(job.source)
            except PointupError as error:
                complaints.append(error)
                continue
            margin = MARGIN * extent.spacing
            if not bounds.grown(margin).touch(extent.low, extent.high):
                continue
            touches = bounds.touch(extent.low, extent.high)
            is_context = not touches or not _has_points_inside(job, bounds)
            if touches and is_context:
                notes.append(f"{job.source}: no points within --bounds, skipped")
            cut = replace(job, extent=extent, bounds=bounds, margin=margin, is_context=is_context)
            jobs.append(cut)
        if not all(job.is_context for job in jobs):
            found.append(jobs)
    if not found and complaints:
        raise complaints[0]
    if not found and not any(surveys):
        raise FileError("no file has points within --bounds: no file has points")
    if not found:
        extents = [job.extent or read_extent(job.source) for survey in surveys for job in survey]
        low = np.min([extent.low for extent in extents], axis=0)
        high = np.max([extent.high for extent in extents], axis=0)
        raise FileError(
            f"no file has points within --bounds: the files span x {low[0]:.10g} to "
            f"{high[0]:.10g}, y {low[1]:.10g} to {high[1]:.10g}"
        )
    return found, notes, complaints


def _has_points_inside(job: Job, bounds: Bounds) -> bool:
    """Whether a file has points inside; a damaged file counts as one that has.

    Files are read until the first point inside; an extent alone may have empty corners.
    """
    try:
        chunks = iter_points(job.source, attributes=False, bounds=bounds)
        return any(len(chunk) for chunk in chunks)
    except FileError:
        # Reported when the file is read for upsampling.
        return True


def of_shard(surveys: Sequence[Sequence[Job]], shard: tuple[int, int]) -> list[list[Job]]:
    """Shard k of n: consecutive files in space, of about as many points in each shard.

    Files of the same survey that border on them are kept as context: they are read, not written.
    """
    ordered = [[survey[i] for i in _order(survey)] for survey in surveys]
    sizes = np.array([_size(job) for survey in ordered for job in survey], dtype=np.float64)
    middles = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1.0)
    number, total = shard
    jobs = [job for survey in ordered for job in survey]
    chosen = {
        id(job)
        for job, middle in zip(jobs, middles, strict=True)
        if min(int(middle * total), total - 1) == number - 1
    }
    found = []
    for survey in surveys:
        own = [job for job in survey if id(job) in chosen and not job.is_context]
        if own:
            found.append(
                [
                    job if id(job) in chosen else replace(job, is_context=True)
                    for job in survey
                    if id(job) in chosen or _borders(job, own)
                ]
            )
    return found


def _order(survey: Sequence[Job]) -> np.ndarray:
    """The files of a survey along a Morton curve."""
    extents = [job.extent for job in survey]
    if len(survey) < 2 or any(extent is None for extent in extents):
        return np.arange(len(survey))
    centres = np.array([(e.low + e.high) / 2 for e in extents if e is not None])
    low = centres.min(axis=0)
    side = float((centres - low).max()) or 1.0
    cells = ((centres - low) * ((GRID - 1) / side)).astype(np.int64)
    return np.argsort(morton_codes(cells), kind="stable")


def _size(job: Job) -> float:
    return float(job.extent.num_points if job.extent else job.source.stat().st_size)


def _borders(job: Job, own: Sequence[Job]) -> bool:
    return any(_near(job.extent, other.extent) for other in own if job.extent and other.extent)


def _near(one: FileExtent, other: FileExtent) -> bool:
    margin = MARGIN * max(one.spacing, other.spacing)
    gap = np.maximum(one.low, other.low) - np.minimum(one.high, other.high)
    return bool((gap <= margin).all())
