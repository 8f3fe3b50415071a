"""The samples of several datasets as one, read by their sample tables."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from pointup.datasets.names import Names
from pointup.datasets.samples import Samples


@dataclass(frozen=True)
class JoinedSamples:
    """The samples of several datasets, one dataset after another.

    Attributes:
        labels: a name of each dataset, before the names of its samples.
        parts: the samples of each dataset.
    """

    labels: tuple[str, ...]
    parts: tuple[Samples, ...]

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Dataset d has the samples bounds[d] to bounds[d + 1]."""
        return (0, *accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def names(self) -> JoinedNames:
        return JoinedNames(self.labels, tuple(part.names for part in self.parts), self.bounds)

    def array(self, column: str) -> np.ndarray:
        """A column of numbers of the tables, for these samples."""
        return np.concatenate([part.array(column) for part in self.parts])

    def is_vertical(self, index: int) -> bool:
        """Whether z is up in a sample; True if unknown."""
        samples, own = self._find(index)
        return samples.is_vertical(own)

    def surface(self, index: int) -> Path | None:
        """The file of the true surface of a sample; None without one."""
        samples, own = self._find(index)
        return samples.surface(own)

    def points(self, index: int) -> dict[str, np.ndarray]:
        """The points of a sample by column; raises UnreadableSample."""
        samples, own = self._find(index)
        return samples.points(own)

    def select(self, indices: np.ndarray) -> JoinedSamples:
        """These samples only; ValueError if they are not ascending."""
        if np.any(indices[1:] < indices[:-1]):
            raise ValueError("samples of several datasets can be selected in ascending order only")
        parts = tuple(
            part.select(indices[(indices >= low) & (indices < high)] - low)
            for part, low, high in zip(self.parts, self.bounds[:-1], self.bounds[1:], strict=True)
        )
        return JoinedSamples(self.labels, parts)

    def _find(self, index: int) -> tuple[Samples, int]:
        part = bisect_right(self.bounds, index) - 1
        return self.parts[part], index - self.bounds[part]


class JoinedNames(Names):
    """The names of the samples of several datasets, each after the label of its dataset."""

    def __init__(
        self, labels: tuple[str, ...], parts: tuple[Names, ...], bounds: tuple[int, ...]
    ) -> None:
        self._labels, self._parts, self._bounds = labels, parts, bounds

    def __len__(self) -> int:
        return self._bounds[-1]

    def _name(self, index: int) -> str:
        part = bisect_right(self._bounds, index) - 1
        return f"{self._labels[part]}/{self._parts[part][index - self._bounds[part]]}"

    def checksum(self) -> int:
        """A checksum of all names without labels, which depend on where a dataset is stored."""
        checksums = [names.checksum() for names in self._parts]
        return zlib.crc32(np.array(checksums, np.uint32).tobytes())
