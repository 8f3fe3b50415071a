"""Writes the output files of a survey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from pointup.cli.progress import ProgressBar
from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.window import Window
from pointup.cli.upsample.window_index import index_in_window
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.errors import PointupError
from pointup.io.cloud import PointWriter
from pointup.io.files import LAS_EXTENSIONS, PointCloud, copy_points, open_writer, read_extremes
from pointup.io.noise import SYNTHETIC
from pointup.upsampling.attributes import PARENT, added_dimensions
from pointup.upsampling.new_points import NewPoints
from pointup.upsampling.store.point_store import CHUNK_SIZE, Store


class _Discarded(Exception):
    """Leaves a writer without a file."""


def check_outputs(jobs: Sequence[Job], store: Store) -> None:
    """Raise the error of the first output if none can be opened: before any work, not after it."""
    first: PointupError | None = None
    for job in jobs:
        if job.is_context:
            continue
        try:
            with suppress(_Discarded), _opened(job, store):
                raise _Discarded
            return
        except PointupError as error:
            first = first or error
    if first:
        raise first


def write_each(
    jobs: Sequence[Job],
    store: Store,
    new_points: NewPoints,
    with_originals: bool,
    window: Window | None,
    workers: LaunchedWorkerGroup,
    progress: ProgressBar,
) -> list[tuple[int, int, Exception | None]]:
    """Write the files of this process. Returns number, points written and error of each."""
    written: list[tuple[int, int, Exception | None]] = []
    own = [number for number, job in enumerate(jobs) if not job.is_context]
    for number in workers.shard(own):
        job = jobs[number]
        try:
            num_points = _write(
                job, store, new_points.of_file(number), with_originals, window, progress
            )
            written.append((number, num_points, None))
        except (PointupError, ValueError, OSError) as error:
            written.append((number, 0, error))
    return written


def _write(
    job: Job,
    store: Store,
    new_points: Iterator[PointCloud],
    with_originals: bool,
    window: Window | None,
    progress: ProgressBar,
) -> int:
    """Write the points of a file, then the new points. Returns the number of points."""
    with _opened(job, store) as writer:
        if with_originals:
            copy_points(job.source, writer, CHUNK_SIZE, bounds=job.bounds)
            progress.add(writer.num_points)
        index = None if job.bounds is None else index_in_window(job, CHUNK_SIZE)
        for cloud in new_points:
            if job.bounds is not None and index is not None:
                cloud = cloud.select(job.bounds.inside(cloud.positions))
                cloud.attributes[PARENT] = index[cloud.attributes[PARENT]]
            writer.write(cloud)
            progress.add(len(cloud))
            if window:
                window.add(cloud.positions)
        return writer.num_points


def _opened(job: Job, store: Store) -> PointWriter:
    """The writer of an output file."""
    like = read_extremes(job.source)
    if len(store.num_read) > 1:
        # If the input is not LAS, the files of a survey get one scale, computed from its extent.
        both = np.concatenate([like.positions, *store.bounds_in_file()])
        like.positions = np.stack([both.min(axis=0), both.max(axis=0)])
    added = added_dimensions(like)
    if job.target.suffix.lower() in LAS_EXTENSIONS:
        # LAS has a flag bit for synthetic points.
        added = [dimension for dimension in added if dimension.name != SYNTHETIC]
    return open_writer(job.target, like, added)
