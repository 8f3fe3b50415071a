"""Checks the samples of pair datasets, and makes the rows of sample tables from all points."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from pointup.datasets.columns import unpack_points
from pointup.datasets.pair import POINT_COLUMNS
from pointup.datasets.samples import PLACE, SCHEMA, TRIPLE, Samples, UnreadableSample
from pointup.errors import DataError
from pointup.processes import results_of

MIN_EXTENT = 1e-6
MAX_EXTENT = 1e5
FARTHEST_APART = 0.25
"""Of source and target, along an axis, in longest sides of the source."""


def check_samples(table: pa.Table) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Check the point columns of n samples: why each can't be used, "" if it can; the bounding
    boxes (n, 3) to (n, 3) float64 of source and target together, NaN if a cloud is empty or has a
    point that isn't finite; the longest side (n,) of that of the source. A source or target is bad
    if

    - it is empty, or one of its points is missing;
    - its number of points differs from `num_source` or `num_target`;
    - a coordinate is not finite, or all its points coincide;
    - its extent (the longest side of its bounding box) is outside 1e-6 to 1e5 units;
    - both lie apart along an axis, by more than a quarter of the source's extent.

    Normals must be finite and match the target in number; `resample` must be finite. Without the
    columns `num_source` and `num_target`, the numbers of points aren't compared.
    """
    number = len(table)
    reasons = [""] * number
    boxes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    num_target = np.zeros(number, np.int64)
    for column in POINT_COLUMNS:
        if column not in table.column_names:
            continue
        values, ptr, unreadable = _unpack_each(table[column].combine_chunks())
        sizes = np.diff(ptr)
        found = list(unreadable)
        if column in ("source", "target"):
            has_numbers = f"num_{column}" in table.column_names
            stated = table[f"num_{column}"].to_numpy() if has_numbers else sizes
            boxes[column] = _bounds(values, ptr)
            found += _bad_clouds(values, ptr, boxes[column], stated, column)
        else:
            found += _not_finite(values, ptr, column)
        if column == "target":
            num_target = sizes
        if column == "target_normals":
            wrong = np.flatnonzero((sizes > 0) & (sizes != num_target)).tolist()
            found += [(i, f"{sizes[i]} normals for {num_target[i]} points") for i in wrong]
        for i, reason in found:
            reasons[i] = reasons[i] or reason
    low = np.minimum(boxes["source"][0], boxes["target"][0])
    high = np.maximum(boxes["source"][1], boxes["target"][1])
    is_finite = np.isfinite(low + high)
    with np.errstate(invalid="ignore"):
        source_extent = (boxes["source"][1] - boxes["source"][0]).max(axis=1)
        gaps = [boxes[a][0] - boxes[b][1] for a, b in (POINT_COLUMNS[:2], POINT_COLUMNS[1::-1])]
        gap = np.maximum(*gaps).max(axis=1)
    for i in np.flatnonzero(gap > FARTHEST_APART * source_extent).tolist():
        reasons[i] = reasons[i] or f"source and target lie {gap[i]:.3g} apart"
    low, high = (np.where(is_finite, corner, np.nan) for corner in (low, high))
    return reasons, low, high, source_extent


Reasons = list[tuple[int, str]]
"""Rows of bad samples with the reasons."""


def _unpack_each(column: pa.Array) -> tuple[np.ndarray, np.ndarray, Reasons]:
    """`unpack_points` that replaces invalid rows by empty clouds and returns their reasons."""
    try:
        return *unpack_points(column), []
    except ValueError:
        clouds, reasons = [], []
        for row in range(len(column)):
            try:
                clouds.append(unpack_points(column[row : row + 1])[0])
            except ValueError as error:
                clouds.append(np.empty((0, 3)))
                reasons.append((row, str(error)))
        ptr = np.concatenate([[0], np.cumsum([len(cloud) for cloud in clouds])])
        return np.concatenate(clouds), ptr, reasons


def _not_finite(values: np.ndarray, ptr: np.ndarray, column: str) -> Reasons:
    rows = np.searchsorted(ptr, np.flatnonzero(~np.isfinite(values).all(axis=1)), side="right") - 1
    numbers = zip(*np.unique(rows, return_counts=True), strict=True)
    return [
        (int(row), f"{column} has {number} points that are not finite") for row, number in numbers
    ]


def _bounds(values: np.ndarray, ptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounding boxes (n, 3) to (n, 3) float64 of clouds; NaN and infinity propagate."""
    filled = np.flatnonzero(np.diff(ptr))
    low, high = (np.full((len(ptr) - 1, 3), np.nan) for _ in range(2))
    if len(filled):
        low[filled] = np.minimum.reduceat(values, ptr[filled], axis=0)
        high[filled] = np.maximum.reduceat(values, ptr[filled], axis=0)
    return low, high


def _bad_clouds(
    values: np.ndarray,
    ptr: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    stated: np.ndarray,
    column: str,
) -> Reasons:
    sizes = np.diff(ptr)
    with np.errstate(invalid="ignore"):
        extent = (bounds[1] - bounds[0]).max(axis=1)
    found = []
    for i, size in enumerate(sizes.tolist()):
        if size == 0:
            reason = f"{column} is empty"
        elif size != stated[i]:
            reason = f"num_{column} is {stated[i]}, but {column} has {size} points"
        elif not np.isfinite(extent[i]):
            number = int((~np.isfinite(values[ptr[i] : ptr[i + 1]])).any(axis=1).sum())
            reason = f"{column} has {number} points that are not finite"
        elif extent[i] == 0 and size > 1:
            reason = f"{column} has all its {size} points in one place"
        elif size > 1 and not MIN_EXTENT <= extent[i] <= MAX_EXTENT:
            reason = (
                f"{column} is {extent[i]:.3g} units wide, outside {MIN_EXTENT:g} to {MAX_EXTENT:g}"
            )
        else:
            continue
        found.append((i, reason))
    return found


NUM_READ = 32
"""Pairs of a split whose coordinates are looked at."""
COARSE_STEP = 0.2
"""Rounding to a larger share of the point spacing changes the shape of a cloud."""
LARGEST_SCALE = 2.0
"""Largest ratio of the longest sides of source and target in one unit; a metre is 3.3 feet. The
sides are those of nine tenths of the points, for each axis."""


def notes_on_pairs(samples: Samples) -> list[str]:
    """Notes on pairs whose sides may be exchanged or in different units, or whose coordinates were
    rounded.

    Up to `NUM_READ` pairs are read.
    """
    num_source, num_target = (samples.array(f"num_{c}") for c in ("source", "target"))
    notes = []
    if len(samples) and np.median(num_target / num_source.clip(1)) < 1:
        notes.append(
            "the target is sparser than the source in half of the pairs; are they swapped?"
        )
    steps, scales = [], []
    for row in np.linspace(0, len(samples) - 1, min(NUM_READ, len(samples))).round().astype(int):
        if samples.value("reason", row) is None:
            with contextlib.suppress(UnreadableSample):
                clouds = samples.points(row)
                steps.append(max(coarse_step(clouds[c]) for c in ("source", "target")))
                # Without stray returns high above the others.
                middle = (np.quantile(clouds[c], (0.05, 0.95), 0) for c in ("source", "target"))
                sides = [(high - low).max() for low, high in middle]
                if min(sides) > 0:
                    scales.append(sides[1] / sides[0])
    scale = float(np.median(scales)) if scales else 1.0
    if max(scale, 1 / scale) > LARGEST_SCALE:
        wide, other = ("target", "source") if scale > 1 else ("source", "target")
        notes.append(
            f"the {wide} is {max(scale, 1 / scale):,.1f} times as wide as the {other} in half of "
            "the pairs; are both in the same unit?"
        )
    if steps and np.median(steps) > 0:
        notes.append(
            f"coordinates are rounded to {np.median(steps):.3g}, coarse beside the spacing of the "
            "points: float32 does this to map coordinates, and a coarse scale of a file; export "
            "the points again"
        )
    return notes


def coarse_step(points: np.ndarray) -> float:
    """The step of which the coordinates of a cloud (N, 3) along an axis are multiples.

    0 if it is less than `COARSE_STEP` of the point spacing. A cloud may be a grid by intention: one
    with a point for each x and y, in steps of the spacing, is not rounded.
    """
    from scipy.spatial import cKDTree

    distinct = np.unique(points, axis=0).astype(np.float64)
    if len(distinct) < 3:
        return 0.0
    spacing = float(np.median(cKDTree(distinct).query(distinct, k=[2])[0]))
    steps = np.zeros(3)
    for axis in range(3):
        values = np.unique(distinct[:, axis])
        between = np.diff(values)
        # Subtracting an offset in float32 leaves smaller differences between equal coordinates.
        between = between[between > 1e-3 * spacing]
        if 0 < len(between) < len(distinct) / 2:
            steps[axis] = between.min()
    is_grid = steps[:2].min() > spacing / 2 and len(np.unique(distinct[:, :2], axis=0)) == len(
        distinct
    )
    return float(steps.max()) if steps.max() > COARSE_STEP * spacing and not is_grid else 0.0


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
    reasons, low, high, source_extent = check_samples(pa.Table.from_batches([batch]))
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
    origins = given("origin", TRIPLE, _rows(np.zeros((number, 3))))
    if "core" in batch.schema.names:
        for i, core in enumerate(batch.column("core").to_pylist()):
            if core:
                box = np.reshape(core, (2, 2)) - origins[i].as_py()[:2]
                low[i, :2], high[i, :2] = box
    return pa.table(
        {
            "name": given("name", pa.string(), pa.array(names)),
            "num_source": pa.array(sizes["source"], pa.int32()),
            "num_target": pa.array(sizes["target"], pa.int32()),
            "reason": pa.array([reason or None for reason in reasons], pa.string()),
            "checksum": pa.array(checksums, pa.uint32()),
            "place": _rows(places),
            "source_extent": pa.array(source_extent, pa.float32()),
            "low": _rows(low),
            "high": _rows(high),
            "origin": origins,
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
