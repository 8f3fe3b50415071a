"""The sample table of a split: what training must know of each sample without reading its points.

`pointup prepare` writes it beside the points. It is an Arrow file that is read through a memory
map, so that all processes of a machine share it, and each reads only the columns and rows that it
needs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pointup.datasets.columns import POINT_COLUMNS
from pointup.datasets.names import Names
from pointup.datasets.point_files import PointFiles
from pointup.errors import DataError

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
