"""The new points of a survey, for each of the files that it came in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pointup.io.cloud import PointCloud
from pointup.upsampling.attributes import PARENT
from pointup.upsampling.single_pass.pass_output import PassOutput
from pointup.upsampling.store.point_store import Store


@dataclass(frozen=True)
class Summary:
    """What the new points of a survey are like."""

    num_new: int = 0
    farthest: float = 0.0
    """Largest distance of a new point to the nearest measured one."""
    num_below: int = 0
    """New points lower than every measured one around them; 0 where heights have no meaning."""


class NewPoints:
    """What all passes over a `measured` survey have made, in the block files of each."""

    def __init__(self, measured: Store, passes: Sequence[PassOutput]) -> None:
        self._measured, self._passes = measured, passes
        self._is_survey = len(measured.num_read) > 1
        self._blocks: list[list[tuple[PassOutput, int, bool]]] = [[] for _ in measured.num_read]
        for made in passes:
            for block in range(made.store.num_blocks):
                files = self._files_of(made, block)
                for file in files:
                    self._blocks[file].append((made, block, len(files) == 1))

    def summary(self) -> Summary:
        """What the points made are like; of a survey that is not written yet."""
        return Summary(
            num_new=sum(made.num_new() for made in self._passes),
            farthest=max(made.farthest() for made in self._passes),
            num_below=sum(made.num_below() for made in self._passes),
        )

    def of_file(self, file: int = 0) -> Iterator[PointCloud]:
        """The points made from those of a file, pass after pass and block after block; once.

        With the attributes of `PassOutput.cloud`, but `PARENT` is the place in the file. A point
        made from one that stands in several files comes for each of them.
        """
        for made, block, is_own in self._blocks[file]:
            cloud = made.cloud(block)
            if is_own:
                made.delete(block)
            place = self._measured.places_in_file(cloud.attributes[PARENT], file)
            cloud.attributes[PARENT] = place
            if (place < 0).any():
                cloud = cloud.select(place >= 0)
            if len(cloud):
                yield cloud

    def _files_of(self, made: PassOutput, block: int) -> list[int]:
        """Files that may have points which those made in a block came from."""
        if not self._is_survey:
            return [0]
        origins = [block]
        if made.measured is not None:
            ends = self._measured.block_ptr
            origins = np.unique(np.searchsorted(ends, made.parents(block), "right") - 1).tolist()
        files = [self._measured.files_of(origin) for origin in origins]
        return np.unique(np.concatenate([np.empty(0, np.int64), *files])).tolist()
