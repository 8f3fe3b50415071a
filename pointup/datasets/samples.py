"""The samples of a split, or of several: their tables, and their points by byte position."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from pointup.datasets.checks import BadSample, bad_surface
from pointup.datasets.columns import POINT_COLUMNS
from pointup.datasets.pair import Pair, surface_path
from pointup.errors import DataError
from pointup.processes import num_cores, results_of


class Names(Sequence[str], ABC):
    """Names of samples; subclasses look up a single one."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        return self._name(index % len(self))

    @abstractmethod
    def _name(self, index: int) -> str:
        """The name at `index`, from 0 to `len(self)` - 1."""

    @abstractmethod
    def checksum(self) -> int:
        """A CRC-32 that changes with any name or with their order."""


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
    return results_of(calls, min(MAX_WORKERS, num_cores(), len(calls)))


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


# The sample table of a split: what training must know of each sample without reading its points.
#
# `pointup prepare` writes it beside the points. It is an Arrow file that is read through a memory
# map, so that all processes of a machine share it, and each reads only the columns and rows that it
# needs.

FORMAT = 1
"""Increased when the columns change; a table of another format is made again."""
ROWS_PER_BATCH = 1 << 16
TRIPLE = pa.list_(pa.float64(), 3)
PLACE = ("file", "source", "target", "target_normals", "resample", "num_resample")
"""Fields of the column `place`: the number of the file, the byte at which the points of each column
begin (-1 for a column without points), and the number of points of `resample`. They are in one
column, because rows are read at random, and each column costs a page of the file."""
SCHEMA = pa.schema(
    {
        "name": pa.string(),
        "num_source": pa.int32(),
        "num_target": pa.int32(),
        "reason": pa.string(),
        "checksum": pa.uint32(),
        "place": pa.list_(pa.int64(), len(PLACE)),
        "source_extent": pa.float32(),
        "low": TRIPLE,
        "high": TRIPLE,
        "origin": TRIPLE,
        "vertical": pa.bool_(),
        "surface": pa.string(),
    }
)
"""`reason` says why a sample can't be used; null if it can. `checksum` is the CRC-32 of the bytes
of all its points. `low` and `high` bound source and target relative to `origin`."""


class UnreadableSample(DataError):
    """The points of a sample can't be read, or are not those that were written."""


class SampleTable:
    """An opened sample table, read-only.

    Attributes:
        path: the file of the table.
        fingerprint: identifies the data files that the table describes.
        files: these files, with the size of each in bytes.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        """Open `path`; files of points are relative to `folder`. Raises DataError."""
        self.path, self.folder = path, folder
        try:
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            description = json.loads((self._table.schema.metadata or {})[b"pointup"])
            if description["format"] != FORMAT:
                raise ValueError(f"has format {description['format']}, not {FORMAT}")
            self.fingerprint: str = description["fingerprint"]
            self.files = tuple((folder / name, int(size)) for name, size in description["files"])
        except (OSError, pa.ArrowInvalid, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: no sample table of this version ({error})") from error
        self._points = PointFiles([file for file, _ in self.files])
        # Looked up for each sample that is read: views of the mapped file, one per batch.
        self._places = [
            chunk.values.to_numpy().reshape(-1, len(PLACE)) for chunk in self._table["place"].chunks
        ]
        self._numbers = [
            [chunk.to_numpy() for chunk in self._table[name].chunks]
            for name in ("num_source", "num_target", "checksum")
        ]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleTable, (self.path, self.folder)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of `SCHEMA`, mapped from the file."""
        return self._table[name]

    def rows(self, first: int, number: int) -> pa.Table:
        """Consecutive rows, with all columns."""
        return self._table.slice(first, number)

    def value(self, name: str, row: int) -> Any:
        """The value of a column in one row, as a Python object."""
        return self._table[name][row].as_py()

    def array(self, name: str) -> np.ndarray:
        """A column of numbers as an array (n,), or (n, 3) for triples; a copy."""
        chunks = self._table[name].chunks
        if self._table[name].type == TRIPLE:
            chunks = [chunk.values for chunk in chunks]
            return np.concatenate([np.empty(0), *(c.to_numpy() for c in chunks)]).reshape(-1, 3)
        dtype = self._table[name].type.to_pandas_dtype()
        return np.concatenate([np.empty(0, dtype), *(chunk.to_numpy() for chunk in chunks)])

    def unusable(self) -> np.ndarray:
        """Ascending rows of the samples that have a reason not to be used."""
        valid = [
            chunk.is_valid().to_numpy(zero_copy_only=False)
            for chunk in self.column("reason").chunks
        ]
        return np.flatnonzero(np.concatenate([np.empty(0, bool), *valid]))

    def points(self, row: int) -> dict[str, np.ndarray]:
        """The points of a sample by column, float32 and writable, without columns that are empty.

        Raises UnreadableSample, with the file and the reason, if they can't be read or differ from
        those that were written.
        """
        batch, i = divmod(row, ROWS_PER_BATCH)
        file, *places, num_resample = self._places[batch][i].tolist()
        num_source, num_target, checksum = (int(column[batch][i]) for column in self._numbers)
        numbers = (num_source, num_target, num_target, num_resample)
        clouds = {}
        found = 0
        try:
            for column, at, number in zip(POINT_COLUMNS, places, numbers, strict=True):
                if at < 0 and column not in ("source", "target"):
                    continue
                clouds[column] = self._points.read(file, at, number)
                found = zlib.crc32(clouds[column].data, found)
        except OSError as error:
            raise UnreadableSample(f"can't be read: {error}") from error
        if found != checksum:
            raise UnreadableSample(
                f"{self.files[file][0]} has been damaged since the sample was written: its "
                f"checksum is {found:08x}, not {checksum:08x}"
            )
        return clouds

    def changed_file(self) -> str:
        """A file of points that is missing or has another size than it had; "" if there is none."""
        for path, size in self.files:
            now = path.stat().st_size if path.exists() else -1
            if now != size:
                return f"{path} is missing" if now < 0 else f"{path} has {now:,} of {size:,} bytes"
        return ""


class TableNames(Names):
    """The names of some rows of a sample table."""

    def __init__(self, table: SampleTable, rows: np.ndarray | None) -> None:
        self._column, self._rows = table.column("name"), rows

    def __len__(self) -> int:
        return len(self._column) if self._rows is None else len(self._rows)

    def _name(self, index: int) -> str:
        row = index if self._rows is None else int(self._rows[index])
        name: str = self._column[row].as_py()
        return name

    def checksum(self) -> int:
        """The CRC-32 of all names, joined by line breaks."""
        checksum, separator = 0, ""
        for names in self._batches():
            joined = separator + "\n".join(names)
            checksum, separator = zlib.crc32(joined.encode(), checksum), "\n"
        return checksum

    def _batches(self) -> Iterator[list[str]]:
        for start in range(0, len(self), ROWS_PER_BATCH):
            if self._rows is None:
                yield self._column.slice(start, ROWS_PER_BATCH).to_pylist()
            else:
                yield self._column.take(self._rows[start : start + ROWS_PER_BATCH]).to_pylist()


def write_sample_table(
    path: Path, parts: Iterable[pa.Table], description: Mapping[str, Any]
) -> None:
    """Write tables of `SCHEMA`, one after another, as one sample table.

    `description` has the `fingerprint` of the data and `files`: the name, relative to the dataset
    or absolute, and the size of each file of points, in the order of their numbers in `place`.
    """
    metadata = {"pointup": json.dumps({"format": FORMAT, **description})}
    schema = SCHEMA.with_metadata(metadata)
    waiting: list[pa.RecordBatch] = []
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:

        def write(is_last: bool) -> None:
            nonlocal waiting
            table = pa.Table.from_batches(waiting, SCHEMA).combine_chunks()
            whole = len(table) if is_last else len(table) // ROWS_PER_BATCH * ROWS_PER_BATCH
            for start in range(0, whole, ROWS_PER_BATCH):
                part = table.slice(start, min(ROWS_PER_BATCH, whole - start)).combine_chunks()
                for batch in part.to_batches():
                    writer.write_batch(batch)
            waiting = table.slice(whole).to_batches()

        for part in parts:
            waiting += part.to_batches()
            if sum(map(len, waiting)) >= ROWS_PER_BATCH:
                write(is_last=False)
        write(is_last=True)


# Reads points from Arrow files by their byte positions, without a memory map.
#
# A read beyond the end of a memory-mapped file, or of a damaged disk, kills the process. These
# reads raise an OSError instead, which concerns one sample. They also touch exactly the bytes of a
# sample: one request per cloud to a network file system.

MAX_OPEN = 64
"""Files that a process keeps open; a dataset may have more files than a process may open."""


class PointFiles:
    """The files that hold the points of a dataset, opened when they are first read.

    Safe to use after a fork and to send to another process; not safe for several threads.
    """

    # Of the class, because the module's names are gone when the interpreter ends.
    _close = staticmethod(os.close)

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, at: int, num_points: int) -> np.ndarray:
        """The points (num_points, 3) float32 at byte `at` of a file, as a writable array.

        Raises OSError if the file can't be read or ends before the last point.
        """
        points = np.empty((num_points, 3), np.float32)
        left = points.data.cast("B") if num_points else memoryview(b"")
        descriptor = self._descriptor(file)
        while len(left):
            number = _read_into(descriptor, left, at)
            if not number:
                size = os.fstat(descriptor).st_size
                raise OSError(f"{self.paths[file]} has only {size:,} bytes")
            left, at = left[number:], at + number
        return points

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem()[1])

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self.paths[file], os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return self._open[file]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()


def _read_into(descriptor: int, buffer: memoryview, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], at)
    # Windows: every process has its own position in the file, because it opens the file itself.
    os.lseek(descriptor, at, os.SEEK_SET)
    data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)


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
