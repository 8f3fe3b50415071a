"""Collects the new points of a survey from all passes, file by file of the input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pointup.io.bounds import Bounds
from pointup.io.cloud import PointCloud, cast_values
from pointup.upsampling.attributes import PARENT, PARENT_TYPE
from pointup.upsampling.free_places import move_to_free_places
from pointup.upsampling.ground import GROUND_CLASS
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.pass_output import PassOutput
from pointup.upsampling.store.point_store import Store


@dataclass(frozen=True)
class Summary:
    """Statistics of the new points of a survey, for the lines that `pointup upsample` prints.

    They are of the points that are written. One that is written to several files counts once.
    """

    num_new: int = 0
    farthest: float = 0.0
    """Largest distance of a new point to its nearest measured point."""
    num_below: int = 0
    """Number of new points below all measured points around them; 0 without `above_ground`."""
    num_ground: int = 0
    """Number of new points on the ground below crowns."""
    farthest_ground: float = 0.0
    """Largest distance of one of these to its nearest measured point."""
    within: float = 0.0
    """99.9th percentile of the distances to the nearest measured point."""
    num_beyond: int = 0
    """Number of new points beyond the bound, the model's `reach` in local spacings."""
    num_class_2: int = 0
    """Number of new points that have class 2."""
    uncertainty: Mapping[str, Uncertain] = field(default_factory=dict)
    """Of `UncertaintyByClass`."""


_BITS = 12


class _Distances:
    """Counts distances by their size, so that any number of them takes the same memory.

    Of a float32, `_BITS` are left out: sizes differ by one in 2,000. Sizes that do not occur take
    no memory, as zeros that are never written.
    """

    def __init__(self) -> None:
        self.farthest = 0.0
        self._counts = np.zeros(1 << (31 - _BITS), np.int64)

    def add(self, distances: np.ndarray) -> None:
        sizes = distances.astype(np.float32).view(np.uint32) >> _BITS
        first = int(sizes.min(initial=len(self._counts) - 1))
        counts = np.bincount(sizes - first)
        self._counts[first : first + len(counts)] += counts
        self.farthest = max(self.farthest, float(distances.max(initial=0.0)))

    def number(self) -> int:
        return int(self._counts.sum())

    def within(self, share: float) -> float:
        """The distance that a share of them does not exceed, at most the farthest."""
        counts = np.cumsum(self._counts)
        size = np.searchsorted(counts, share * counts[-1]) + 1
        above = np.array(size << _BITS, np.uint32).view(np.float32)
        return min(float(above), self.farthest)


class Uncertain(NamedTuple):
    """Number of new points, and the median and 90th percentile of their uncertainty."""

    num_points: int
    median: float
    within_90: float


class UncertaintyByClass:
    """Uncertainties of new points, of all of them and of each class."""

    def __init__(self) -> None:
        self._all = _Distances()
        self._of_class = defaultdict[int, _Distances](_Distances)

    def add(self, uncertainty: np.ndarray, classes: np.ndarray) -> None:
        """Add new points with uncertainties (M,) and classes (M,); those below 0 and above 255 are
        none."""
        self._all.add(uncertainty)
        for value in np.unique(classes[(classes >= 0) & (classes < 256)].astype(np.uint8)).tolist():
            self._of_class[value].add(uncertainty[classes == value])

    def found(self) -> dict[str, Uncertain]:
        """By "all" and, if there are several, by the class; empty without an uncertainty."""
        several = self._of_class.items() if len(self._of_class) > 1 else ()
        counted = {"all": self._all} | {str(value): counts for value, counts in sorted(several)}
        return {
            of: Uncertain(counts.number(), counts.within(0.5), counts.within(0.9))
            for of, counts in counted.items()
            if counts.farthest
        }


class NewPoints:
    """The outputs of all passes over the store of a survey, `measured`, read block by block."""

    def __init__(
        self,
        measured: Store,
        passes: Sequence[PassOutput],
        ground: PassOutput | None = None,
        has_uncertainty: bool = False,
    ) -> None:
        self.has_uncertainty = has_uncertainty
        self._measured, self._ground = measured, ground
        self._passes = passes = [*passes, *([ground] if ground else [])]
        self._is_survey = len(measured.num_read) > 1
        self._blocks: list[list[tuple[PassOutput, int, bool]]] = [[] for _ in measured.num_read]
        for output in passes:
            for block in range(output.store.num_blocks):
                files = self._files_of(output, block)
                for file in files:
                    self._blocks[file].append((output, block, len(files) == 1))

    def move_to_free_places(
        self, scale: np.ndarray, offset: np.ndarray, options: UpsampleOptions
    ) -> int:
        """Call it before `summary`; see the function of this name."""
        return move_to_free_places(self._passes, self._measured, scale, offset, options)

    def summary(self, written: Collection[int], bounds: Bounds | None = None) -> Summary:
        """Statistics of the new points that are written: to the files with the numbers `written`,
        and within `bounds`. Call it before `of_file`, which deletes block files.
        """
        num_below = num_beyond = num_class_2 = 0
        of_ground, of_others, uncertain = _Distances(), _Distances(), UncertaintyByClass()
        for output in self._passes:
            for block in range(output.store.num_blocks):
                is_written = self._are_of_files(output, block, written)
                if bounds is not None:
                    is_written &= bounds.inside(output.positions(block))
                num_below += int(output.values(block, "is_below")[is_written].sum())
                distance = output.distances(block)[is_written]
                if output is self._ground:
                    of_ground.add(distance)
                else:
                    of_others.add(distance)
                    num_beyond += int(output.are_beyond(block)[is_written].sum())
                classes = output.classes(block)[is_written]
                num_class_2 += int((classes == GROUND_CLASS).sum())
                if self.has_uncertainty:
                    uncertain.add(output.uncertainties(block)[is_written], classes)
        return Summary(
            num_new=of_ground.number() + of_others.number(),
            farthest=of_others.farthest,
            num_below=num_below,
            num_ground=of_ground.number(),
            farthest_ground=of_ground.farthest,
            within=of_others.within(0.999),
            num_beyond=num_beyond,
            num_class_2=num_class_2,
            uncertainty=uncertain.found(),
        )

    def of_file(self, file: int = 0) -> Iterator[PointCloud]:
        """The new points whose parents are in a file, by pass and block. Can be iterated once only.

        The clouds have the attributes of `PassOutput.cloud`, but `PARENT` is the index in the file.
        A new point whose parent is in several files belongs to each of them.
        """
        for output, block, is_only_file in self._blocks[file]:
            cloud = output.cloud(block, self.has_uncertainty)
            if is_only_file:
                output.delete(block)
            place = self._measured.places_in_file(cloud.attributes[PARENT], file)
            is_in_file = place >= 0
            if not is_in_file.all():
                cloud, place = cloud.select(is_in_file), place[is_in_file]
            cloud.attributes[PARENT] = cast_values(place, PARENT_TYPE, PARENT)
            if len(cloud):
                yield cloud

    def _are_of_files(self, output: PassOutput, block: int, files: Collection[int]) -> np.ndarray:
        """(M,) bool, whether the parents of the new points of a block are in one of `files`."""
        parents = output.values(block, "parent")
        if len(files) == len(self._blocks):
            return np.ones(len(parents), bool)
        is_in_one = np.zeros(len(parents), bool)
        for file in set(files).intersection(self._files_of(output, block)):
            is_in_one |= self._measured.places_in_file(parents, file) >= 0
        return is_in_one

    def _files_of(self, output: PassOutput, block: int) -> list[int]:
        """Numbers of the files that may contain parents of the new points of a block."""
        if not self._is_survey:
            return [0]
        origins = [block]
        if output.measured is not None:
            ends = self._measured.block_ptr
            parents = output.values(block, "parent")
            origins = np.unique(np.searchsorted(ends, parents, "right") - 1).tolist()
        files = [self._measured.files_of(origin) for origin in origins]
        return np.unique(np.concatenate([np.empty(0, np.int64), *files])).tolist()
