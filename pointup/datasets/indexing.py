"""Makes the rows of a sample table from Arrow files of pairs: reads all points, once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from pointup.datasets.checks import check_samples
from pointup.datasets.pair import POINT_COLUMNS
from pointup.datasets.samples import PLACE, SCHEMA, TRIPLE
from pointup.errors import DataError
from pointup.processes import results_of

BYTES_PER_CALL = 1 << 28
"""Bytes of points that a worker reads at a time."""


@dataclass(frozen=True)
class Part:
    """Some consecutive batches of an Arrow file: [start, stop). `first_row` counts the rows of all
    files before them, and `file` is the number of their file."""

    path: Path
    file: int
    start: int
    stop: int
    first_row: int
    num_rows: int


def parts_of(paths: Sequence[Path]) -> list[Part]:
    """Cut Arrow stream files into parts of about `BYTES_PER_CALL`; reads no points.

    Raises DataError, naming the file, if a file is no Arrow stream or is cut short.
    """
    parts: list[Part] = []
    row = 0
    for file, path in enumerate(paths):
        start, num_rows, num_bytes, batch = 0, 0, 0, -1
        for batch, (table, _) in enumerate(_batches(path)):
            num_rows += table.num_rows
            num_bytes += table.nbytes
            if num_bytes >= BYTES_PER_CALL:
                parts.append(Part(path, file, start, batch + 1, row, num_rows))
                row += num_rows
                start, num_rows, num_bytes = batch + 1, 0, 0
        if num_rows:
            parts.append(Part(path, file, start, batch + 1, row, num_rows))
            row += num_rows
    return parts


def index_parts(parts: Sequence[Part], num_workers: int) -> Iterator[pa.Table]:
    """Tables of `SCHEMA` for all samples of the parts, in their order."""
    calls = [partial(index_part, part) for part in parts]
    return results_of(calls, min(num_workers, len(calls)))


def index_part(part: Part) -> pa.Table:
    """The rows of a sample table for the samples of one part."""
    tables = []
    row = part.first_row
    for number, (batch, mapped_at) in enumerate(_batches(part.path)):
        if number >= part.stop:
            break
        if number >= part.start:
            tables.append(_index_batch(batch, mapped_at, part, row))
            row += batch.num_rows
    return pa.concat_tables(tables)


def _batches(path: Path) -> Iterator[tuple[pa.RecordBatch, range]]:
    """The batches of an Arrow stream file, with the addresses at which the file is mapped."""
    try:
        with pa.memory_map(str(path)) as file:
            address = file.read_buffer(1).address
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    yield batch, range(address, address + file.size())
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: can't be read ({error}); restore it") from error


def _index_batch(batch: pa.RecordBatch, mapped_at: range, part: Part, first_row: int) -> pa.Table:
    try:
        # Reading through offsets beyond the end of a damaged file would crash the process.
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{part.path}: is damaged ({error}); restore it") from error
    number = batch.num_rows
    checked = check_samples(pa.Table.from_batches([batch]), min_points=1)
    places = np.full((number, len(PLACE)), -1, np.int64)
    places[:, 0] = part.file
    checksums = [0] * number
    sizes = {column: np.zeros(number, np.int64) for column in POINT_COLUMNS}
    for field, column in enumerate(POINT_COLUMNS, start=1):
        if column not in batch.schema.names:
            continue
        begins, sizes[column], points = _places_of(batch.column(column))
        if points.nbytes:
            address = points.ctypes.data
            if address not in mapped_at:
                raise DataError(f"{part.path}: is compressed, so that points can't be read singly")
            is_stored = (sizes[column] > 0) | (column in ("source", "target"))
            places[:, field] = np.where(is_stored, address - mapped_at.start + 12 * begins, -1)
        ends = (begins + sizes[column]).tolist()
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends, strict=True)):
            checksums[i] = zlib.crc32(points[begin:end].data, checksums[i])
    places[:, -1] = sizes["resample"]

    def given(name: str, kind: pa.DataType, default: pa.Array) -> pa.Array:
        return batch.column(name).cast(kind) if name in batch.schema.names else default

    names = [f"sample_{first_row + i}" for i in range(number)]
    return pa.table(
        {
            "name": given("name", pa.string(), pa.array(names)),
            "num_source": pa.array(sizes["source"], pa.int32()),
            "num_target": pa.array(sizes["target"], pa.int32()),
            "reason": pa.array([reason or None for reason in checked.reasons], pa.string()),
            "checksum": pa.array(checksums, pa.uint32()),
            "place": _rows(places),
            "source_extent": pa.array(checked.source_extent, pa.float32()),
            "low": _rows(checked.low),
            "high": _rows(checked.high),
            "origin": given("origin", TRIPLE, _rows(np.zeros((number, 3)))),
            "vertical": given("vertical", pa.bool_(), pa.nulls(number, pa.bool_())),
            "surface": given("surface", pa.string(), pa.array([""] * number)),
        },
        SCHEMA,
    )


def _places_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the clouds of a column begin in its points, their sizes, and the points (N, 3)."""
    triples = column.values
    points = triples.values.slice(3 * triples.offset, 3 * len(triples))
    # Missing points are stored, as anything; a sample that has them isn't read.
    values = np.frombuffer(points.buffers()[1] or b"", np.float32)
    values = values[points.offset : points.offset + len(points)].reshape(-1, 3)
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return column.offsets.to_numpy()[:-1].astype(np.int64), sizes.astype(np.int64), values


def _rows(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
