"""Counts and names training samples that can't be read; too many end the run."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence

from accelerate.utils import gather_object

from pointup.errors import DataError

logger = logging.getLogger("pointup")

Fault = tuple[int, str, str]
"""Index, name and reason of a sample that can't be read."""


class UnreadableSamples:
    """The samples of a training set that couldn't be read, on any process, since the start.

    They are left out of their step: they have weight zero, and the gradient of the step is divided
    by the number of the other clouds. `datasets` are their names; dataset d has the samples
    bounds[d] to bounds[d + 1]. The run ends when more than `max_share` of the samples, rounded up,
    couldn't be read.
    """

    def __init__(self, datasets: Sequence[str], bounds: Sequence[int], max_share: float) -> None:
        self.datasets, self.bounds, self.num_samples = datasets, bounds, bounds[-1]
        self.max_share, self.most = max_share, math.ceil(max_share * self.num_samples)
        self.indices: set[int] = set()

    def report(self, step: int, number: int, faults: Sequence[Fault]) -> None:
        """Log the samples that were left out of a step; every process must call this.

        `number` is their number on all processes, `faults` are those of this process. Raises
        DataError, on every process, if there are too many.
        """
        if not number:
            return
        everywhere: list[Fault] = sorted(gather_object(list(faults)))
        for _, name, reason in everywhere:
            logger.warning("step %d: left out %s: %s", step, name, reason)
        self.indices.update(index for index, _, _ in everywhere)
        if len(self.indices) > self.most:
            index, name, reason = everywhere[-1]
            dataset = self.datasets[bisect_right(self.bounds, index) - 1]
            raise DataError(
                f"{len(self.indices)} of {self.num_samples:,} training samples can't be read, more "
                f"than --max-unreadable {self.max_share:g} allows; {name}: {reason}; restore the "
                f"files, then run the same command again; `pointup inspect --deep {dataset}` "
                "lists all"
            )
