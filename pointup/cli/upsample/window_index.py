"""Numbers the measured points of a window, where only the window of a file is written."""

from __future__ import annotations

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.io.files import iter_points

NOT_WRITTEN = np.iinfo(np.uint32).max
"""`parent_index` of a new point whose parent lies outside of the window."""


def index_in_window(job: Job, chunk_size: int) -> np.ndarray:
    """For each point that is read for a job with bounds (N,): its index among those in the window.

    The points are those of the window and of the margin around it, in the order of the file. Points
    of the margin are not written: they have `NOT_WRITTEN`.
    """
    assert job.bounds is not None
    parts, number = [np.empty(0, np.uint32)], 0
    for chunk in iter_points(job.source, chunk_size, bounds=job.bounds.grown(job.margin)):
        inside = job.bounds.inside(chunk.positions)
        index = number + np.cumsum(inside) - 1
        parts.append(np.where(inside, index, NOT_WRITTEN).astype(np.uint32))
        number += int(inside.sum())
    return np.concatenate(parts)
