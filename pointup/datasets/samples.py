"""The samples of one split of a pair dataset, read by their sample table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.checks import BadSample, bad_surface
from pointup.datasets.pair import Pair, surface_path
from pointup.datasets.sample_table import SampleTable, TableNames, UnreadableSample
from pointup.datasets.workers import call_each
from pointup.errors import DataError

MAX_WORKERS = 8
SAMPLES_PER_CALL = 4096


@dataclass(frozen=True)
class Samples:
    """The samples of a split, by their position in it.

    `folder` is the directory of the dataset, `rows` the rows of `table` that are used (None: all).
    """

    folder: Path
    table: SampleTable
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.table) if self.rows is None else len(self.rows)

    @property
    def bounds(self) -> tuple[int, int]:
        """All samples are of one dataset; see `JoinedSamples`."""
        return 0, len(self)

    @property
    def names(self) -> TableNames:
        return TableNames(self.table, self.rows)

    def row(self, index: int) -> int:
        """The row of a sample in the table."""
        return index if self.rows is None else int(self.rows[index])

    def array(self, column: str) -> np.ndarray:
        """A column of numbers of the table, for these samples."""
        values = self.table.array(column)
        return values if self.rows is None else values[self.rows]

    def value(self, column: str, index: int) -> Any:
        """The value of a column of the table for one sample."""
        return self.table.value(column, self.row(index))

    def is_vertical(self, index: int) -> bool:
        """Whether z is up in a sample; True if unknown."""
        return self.value("vertical", index) is not False

    def surface(self, index: int) -> Path | None:
        """The file of the true surface of a sample; None without one."""
        name = self.value("surface", index)
        return surface_path(self.folder, name) if name else None

    def points(self, index: int) -> dict[str, np.ndarray]:
        """The points of a sample by column; raises UnreadableSample."""
        return self.table.points(self.row(index))

    def pair(self, index: int) -> Pair:
        """A sample as it was written; raises UnreadableSample."""
        clouds = self.points(index)
        return Pair(
            name=self.names[index],
            origin=np.array(self.value("origin", index)),
            vertical=self.is_vertical(index),
            surface=self.value("surface", index) or "",
            **clouds,
        )

    def select(self, indices: np.ndarray) -> Samples:
        """These samples only, in this order."""
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def bad_samples(self, min_points: int) -> list[BadSample]:
        """The samples that can't be used, by the table: see `find_bad_samples` for what is bad.

        The files of surfaces are looked at; points are not read.
        """
        reasons: dict[int, str] = {}
        for column in ("source", "target"):
            numbers = self.array(f"num_{column}")
            for index in np.flatnonzero(numbers < min_points).tolist():
                text = f"{column} has {numbers[index]} points, fewer than {min_points}"
                reasons.setdefault(index, text)
        unusable = self.table.unusable()
        if self.rows is not None:
            unusable = np.flatnonzero(np.isin(self.rows, unusable))
        for index in unusable.tolist():
            reasons[index] = self.value("reason", index)
        for index, text in self._bad_surfaces():
            reasons.setdefault(index, text)
        names = self.names
        return [BadSample(index, names[index], reasons[index]) for index in sorted(reasons)]

    def _bad_surfaces(self) -> Iterator[tuple[int, str]]:
        column = self.table.column("surface")
        bad = {
            file: text
            for file in column.unique().to_pylist()
            if file and (text := bad_surface(self.folder, file))
        }
        if bad:
            files = column if self.rows is None else column.take(self.rows)
            for index, file in enumerate(files.to_pylist()):
                if file in bad:
                    yield index, bad[file]


def usable_samples(
    samples: Samples, min_points: int, split: str
) -> tuple[Samples, list[BadSample]]:
    """The samples that can be used, and the others. Raises DataError if none can."""
    bad = samples.bad_samples(min_points)
    if not bad:
        return samples, bad
    keep = np.setdiff1d(np.arange(len(samples)), [sample.index for sample in bad])
    if not len(keep):
        raise DataError(
            f"{samples.folder}: none of the {len(samples)} {split} samples can be used; "
            f"`pointup inspect {samples.folder}` lists why"
        )
    return samples.select(keep), bad


def damaged_samples(samples: Samples) -> Iterator[list[BadSample]]:
    """Read all points and compare them with their checksums: lists of the samples that differ.

    There is a list for each `SAMPLES_PER_CALL` samples, in their order. Samples that the table
    calls bad are left out.
    """
    calls = [
        partial(_damaged, samples, start, min(start + SAMPLES_PER_CALL, len(samples)))
        for start in range(0, len(samples), SAMPLES_PER_CALL)
    ]
    for found in call_each(calls, min(MAX_WORKERS, os.cpu_count() or 1, len(calls))):
        if isinstance(found, Exception):
            raise found
        yield found


def _damaged(samples: Samples, start: int, stop: int) -> list[BadSample]:
    found = []
    for index in range(start, stop):
        if samples.value("reason", index) is not None:
            continue
        try:
            samples.points(index)
        except UnreadableSample as error:
            found.append(BadSample(index, samples.names[index], str(error)))
    return found
