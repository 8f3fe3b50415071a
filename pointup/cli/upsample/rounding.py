"""Keeps `--max-distance` of `pointup upsample` when new points are rounded to the scale of LAS."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.errors import ConfigError, FileError
from pointup.io.files import LAS_EXTENSIONS
from pointup.io.las import read_header


def before_rounding(max_distance: float | None, jobs: Sequence[Job]) -> float | None:
    """The largest distance of a new point before it is rounded, so that `max_distance` holds after.

    Rounding to the scale of a LAS file moves a point by up to half the diagonal of a cell. Raises
    ConfigError if that is more than `max_distance`.
    """
    if max_distance is None:
        return None
    largest = 0.0
    for job in jobs:
        names = job.source, job.target
        if all(path.suffix.lower() in LAS_EXTENSIONS for path in names):
            # A file that can't be read is reported when it is read.
            with suppress(FileError):
                scales = read_header(job.source).scales
                largest = max(largest, float(np.linalg.norm(scales)) / 2)
    if largest >= max_distance:
        raise ConfigError(
            f"{jobs[0].source}: its coordinates are rounded by up to {largest:.3g}, so that no new "
            f"point can keep --max-distance {max_distance:g}; give a larger one"
        )
    return max_distance - largest
