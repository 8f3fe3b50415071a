"""The samples of a split, or of several datasets: their tables, and their points from the files."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa

from pointup.datasets.pair import POINT_COLUMNS, Pair, is_within, surface_path
from pointup.errors import DataError
from pointup.processes import num_cores, results_of

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
of all its points. `low` and `high` bound source and target relative to `origin`, in x and y only
their core if the sample has one."""
MAX_OPEN = 64
"""Files that a process keeps open; a dataset may have more files than a process may open."""
MAX_WORKERS = 8
SAMPLES_PER_CALL = 4096


class UnreadableSample(DataError):
    """The points of a sample can't be read, or are not those that were written."""


class SampleTable:
    """What training must know of each sample of a split without reading its points; read-only.

    `pointup prepare` writes the table beside the points. It is an Arrow file that is read through a
    memory map, so that all processes of a machine share it, and each reads only the columns and
    rows that it needs. Points are read from the files without a memory map, because a read beyond
    the end of a mapped file, or of a damaged disk, kills the process. Safe to use after a fork and
    to send to another process; not safe for several threads.

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
        # Looked up for each sample that is read: views of the mapped file, one per batch.
        self._places = [
            chunk.values.to_numpy().reshape(-1, len(PLACE)) for chunk in self._table["place"].chunks
        ]
        self._numbers = [
            [chunk.to_numpy() for chunk in self._table[name].chunks]
            for name in ("num_source", "num_target", "checksum")
        ]
        self._streams: dict[tuple[int, int], FileIO] = {}

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
        return np.flatnonzero(self.column("reason").is_valid().to_numpy())

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
                clouds[column] = self._read(file, at, number)
                found = zlib.crc32(clouds[column].data, found)
        except OSError as error:
            raise UnreadableSample(f"can't be read: {error}") from error
        if found != checksum:
            raise UnreadableSample(
                f"{self.files[file][0]} has been damaged since the sample was written: its "
                f"checksum is {found:08x}, not {checksum:08x}"
            )
        return clouds

    def _read(self, file: int, at: int, num_points: int) -> np.ndarray:
        """The points (num_points, 3) float32 at byte `at` of a file."""
        points = np.empty((num_points, 3), np.float32)
        if num_points:
            stream = self._stream(file)
            stream.seek(at)
            if (stream.readinto(points.data.cast("B")) or 0) < points.nbytes:
                path = self.files[file][0]
                raise OSError(f"{path} has only {path.stat().st_size:,} bytes")
        return points

    def _stream(self, file: int) -> FileIO:
        # Not one that was opened before a fork: both processes would share its position.
        key = os.getpid(), file
        if key not in self._streams:
            if len(self._streams) >= MAX_OPEN:
                self._streams.pop(next(iter(self._streams))).close()
            # Unbuffered: the buffer would be 4 MB on some network file systems.
            self._streams[key] = self.files[file][0].open("rb", buffering=0)
        return self._streams[key]

    def changed_file(self) -> str:
        """A file of points that is missing or has another size than it had; "" if there is none."""
        for path, size in self.files:
            now = path.stat().st_size if path.exists() else -1
            if now != size:
                return f"{path} is missing" if now < 0 else f"{path} has {now:,} of {size:,} bytes"
        return ""


def write_sample_table(
    path: Path, parts: Iterable[pa.Table], description: Mapping[str, Any]
) -> None:
    """Write tables of `SCHEMA`, one after another, as one sample table.

    `description` has the `fingerprint` of the data and `files`: the name, relative to the dataset
    or absolute, and the size of each file of points, in the order of their numbers in `place`.
    """
    metadata = {"pointup": json.dumps({"format": FORMAT, **description})}
    schema = SCHEMA.with_metadata(metadata)
    waiting = SCHEMA.empty_table()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for part in parts:
            waiting = pa.concat_tables([waiting, part])
            if len(waiting) >= ROWS_PER_BATCH:
                table = waiting.combine_chunks()
                whole = len(table) // ROWS_PER_BATCH * ROWS_PER_BATCH
                writer.write_table(table.slice(0, whole), max_chunksize=ROWS_PER_BATCH)
                waiting = table.slice(whole)
        writer.write_table(waiting.combine_chunks())


@dataclass(frozen=True)
class BadSample:
    """A sample that must be left out: its row in the dataset, its name, and the reason."""

    index: int
    name: str
    reason: str


def bad_surface(folder: Path, file: str) -> str:
    """The reason why the surface file of a sample can't be used; "" if it can."""
    try:
        path = surface_path(folder, file)
    except DataError as error:
        return str(error)
    if not path.is_file():
        return f"surface {path} is missing"
    # The directory of a zip archive is at its end, so this detects a truncated file.
    return "" if is_zipfile(path) else f"surface {path} is damaged"


class Names(Sequence[str]):
    """The names of samples, looked up when they are asked for."""

    def __init__(self, samples: SamplesOfTables) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return self._samples.name(range(len(self))[index])


class SamplesOfTables(ABC):
    """Samples by their position: `Samples`, or `JoinedSamples` of several datasets."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def _find(self, index: int) -> tuple[SampleTable, int]:
        """The table of a sample, and its row in it."""

    @property
    def names(self) -> Names:
        return Names(self)

    def value(self, column: str, index: int) -> Any:
        """The value of a column of the table for one sample, as a Python object."""
        table, row = self._find(index)
        return table.column(column)[row].as_py()

    def is_vertical(self, index: int) -> bool:
        """Whether z is up in a sample; True if unknown."""
        return self.value("vertical", index) is not False

    def origin(self, index: int) -> np.ndarray:
        """(3,) float64: origin + points are the coordinates of the input file."""
        return np.array(self.value("origin", index))

    def core(self, index: int, clouds: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The core (2, 2) of a sample with these points, relative to its origin; None for a sample
        that has no points around."""
        box = np.array([self.value(name, index)[:2] for name in ("low", "high")])
        reaches_beyond = any(
            not is_within(clouds[side], box).all() for side in ("source", "target")
        )
        return box if reaches_beyond and np.isfinite(box).all() else None

    def surface(self, index: int) -> Path | None:
        """The file of the true surface of a sample; None without one."""
        name = self.value("surface", index)
        return surface_path(self._find(index)[0].folder, name) if name else None

    def points(self, index: int) -> dict[str, np.ndarray]:
        """The points of a sample by column; raises UnreadableSample."""
        table, row = self._find(index)
        return table.points(row)


@dataclass(frozen=True)
class Samples(SamplesOfTables):
    """The samples of a split, by their position in it.

    `rows` are the rows of `table` that are used (None: all).
    """

    table: SampleTable
    rows: np.ndarray | None = None

    @property
    def folder(self) -> Path:
        """The directory of the dataset."""
        return self.table.folder

    def __len__(self) -> int:
        return len(self.table) if self.rows is None else len(self.rows)

    @property
    def bounds(self) -> tuple[int, int]:
        """All samples are of one dataset; see `JoinedSamples`."""
        return 0, len(self)

    def name(self, index: int) -> str:
        return self.value("name", index)

    def names_checksum(self) -> int:
        """The CRC-32 of all names, joined by line breaks."""
        checksum = 0
        for start in range(0, len(self), ROWS_PER_BATCH):
            if self.rows is None:
                names = self.table.column("name").slice(start, ROWS_PER_BATCH)
            else:
                names = self.table.column("name").take(self.rows[start : start + ROWS_PER_BATCH])
            text = "\n" * bool(start) + "\n".join(names.to_pylist())
            checksum = zlib.crc32(text.encode(), checksum)
        return checksum

    def array(self, column: str) -> np.ndarray:
        """A column of numbers of the table, for these samples."""
        values = self.table.array(column)
        return values if self.rows is None else values[self.rows]

    def pair(self, index: int) -> Pair:
        """A sample as it was written; raises UnreadableSample."""
        clouds, origin = self.points(index), self.origin(index)
        core = self.core(index, clouds)
        return Pair(
            name=self.name(index),
            origin=origin,
            vertical=self.is_vertical(index),
            surface=self.value("surface", index) or "",
            core=None if core is None else core + origin[:2],
            **clouds,
        )

    def select(self, indices: np.ndarray) -> Samples:
        """These samples only, in this order."""
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def bad_samples(self, min_points: int) -> list[BadSample]:
        """The samples that can't be used, in their order, each with one reason.

        They have fewer than `min_points` points on a side, are bad by the table (`check_samples`
        says what is bad), or their surface file is missing or damaged. Points are not read.
        """
        reasons: dict[int, str] = {}
        unusable = self.table.unusable()
        if self.rows is not None:
            unusable = np.flatnonzero(np.isin(self.rows, unusable))
        for index in unusable.tolist():
            reasons[index] = self.value("reason", index)
        for column in ("source", "target"):
            numbers = self.array(f"num_{column}")
            for index in np.flatnonzero(numbers < min_points).tolist():
                text = f"{column} has {numbers[index]} points, fewer than {min_points}"
                reasons.setdefault(index, text)
        for index, text in self._bad_surfaces():
            reasons.setdefault(index, text)
        return [BadSample(index, self.name(index), reasons[index]) for index in sorted(reasons)]

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

    def _find(self, index: int) -> tuple[SampleTable, int]:
        return self.table, index if self.rows is None else int(self.rows[index])


@dataclass(frozen=True)
class JoinedSamples(SamplesOfTables):
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

    def name(self, index: int) -> str:
        """The name of a sample after the label of its dataset."""
        number = bisect_right(self.bounds, index) - 1
        return f"{self.labels[number]}/{self.value('name', index)}"

    def names_checksum(self) -> int:
        """A checksum of all names without labels, which depend on where a dataset is stored."""
        checksums = [part.names_checksum() for part in self.parts]
        return zlib.crc32(np.array(checksums, np.uint32).tobytes())

    def array(self, column: str) -> np.ndarray:
        """A column of numbers of the tables, for these samples."""
        return np.concatenate([part.array(column) for part in self.parts])

    def _find(self, index: int) -> tuple[SampleTable, int]:
        number = bisect_right(self.bounds, index) - 1
        return self.parts[number]._find(index - self.bounds[number])


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
