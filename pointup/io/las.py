"""Reads LAS and LAZ in chunks, as raw records or as clouds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import laspy
import numpy as np
from laspy import DecompressionSelection
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR

from pointup.errors import FileError, NoPointsError
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    PointCloud,
    check_positions,
    os_errors,
)
from pointup.io.copc import is_copc, iter_nodes
from pointup.io.las_layout import RawRecord, damaged, read_layout

COORDINATES = ("X", "Y", "Z")
COPC, LASZIP, EXTRA_BYTES = "copc", "laszip encoded", (b"LASF_Spec", 4)
CHUNK_SIZE = 1_000_000
# x, y and the return fields are compressed together. For point formats 6 and above, this selection
# halves the time.
POSITIONS_ONLY = DecompressionSelection.xy_returns_channel().decompress_z()

# laspy also logs each error that it raises; without a handler, logging would print it.
logging.getLogger("laspy").addHandler(logging.NullHandler())


def _as_utf8(field: Any) -> property:
    """A field of text of `ExtraBytesStruct` that is read in UTF-8, whatever its bytes are in."""

    def read(described: ExtraBytesStruct) -> bytes:
        text: bytes = field.__get__(described)
        try:
            text.decode()
        except UnicodeDecodeError:
            return text.decode("latin-1").encode()
        return text

    return property(read, field.__set__)


# laspy refuses files with names and descriptions of extra dimensions that are not UTF-8. Older
# programs write them in Latin-1. The bytes of the record itself stay as they are.
for _field in ("name", "description"):
    setattr(ExtraBytesStruct, _field, _as_utf8(getattr(ExtraBytesStruct, _field)))


def iter_records(
    path: Path,
    chunk_size: int,
    selection: DecompressionSelection | None = None,
    bounds: Bounds | None = None,
    only_first: bool = False,
) -> Iterator[tuple[laspy.ScaleAwarePointRecord, np.ndarray, laspy.LasHeader]]:
    """Yield the point records of a file in chunks, in the order of the file.

    Yields the raw records, their coordinates (n, 3) float64, and the header, which is the same
    object each time. A COPC file is read as LAZ, and its COPC records are removed from the header.
    The header gets the attribute `raw_creation_date`, the 4 bytes of the file, because laspy
    replaces a date that is not set by today's. For point formats 6 and above, only the fields in
    `selection` are decompressed; the others are zero.

    With `bounds`, only the records inside are yielded, and no empty chunks. Of a COPC file only the
    nodes of its octree that touch the bounds are read, and of these alone the size is checked.
    `only_first` is for callers that read no chunk after the first: they decompress no more points
    than that, and check only the first LAZ chunk.

    Raises FileError for a file that is not LAS or LAZ, is truncated or has no points.
    """
    with os_errors(path, "read"), path.open("rb") as stream:
        with _las_errors(path):
            by_nodes = bounds is not None and is_copc(path)
            num_checked = 0 if by_nodes else 1 if only_first else None
            layout = read_layout(path, stream, num_checked)
            reader = laspy.open(
                stream,
                closefd=False,
                # The parallel decompressor decodes whole LAZ chunks, also for the first points.
                laz_backend=laspy.LazBackend.Lazrs if only_first else None,
                decompression_selection=selection or DecompressionSelection.all(),
            )
            header = reader.header
            _keep_records_raw(header, layout.vlrs, layout.evlrs)
            header.raw_creation_date = layout.creation_date
        _check_header(path, header)
        if bounds is not None and by_nodes:
            with _las_errors(path):
                kept = selection or DecompressionSelection.all()
                for records in iter_nodes(path, stream, header, bounds, chunk_size, kept):
                    yield from _inside(records, header, bounds)
            return
        for start in range(0, header.point_count, chunk_size):
            num_expected = min(chunk_size, header.point_count - start)
            with _las_errors(path):
                records = reader.read_points(num_expected)
            if len(records) < num_expected:
                raise damaged(path, f"it ends after {start + len(records)} of {header.point_count}")
            if bounds is not None:
                yield from _inside(records, header, bounds)
                continue
            with _las_errors(path):
                positions = positions_of(records)
            yield records, positions, header


def _inside(
    records: laspy.ScaleAwarePointRecord, header: laspy.LasHeader, bounds: Bounds
) -> Iterator[tuple[laspy.ScaleAwarePointRecord, np.ndarray, laspy.LasHeader]]:
    positions = positions_of(records)
    inside = bounds.inside(positions)
    if inside.any():
        kept = laspy.ScaleAwarePointRecord(
            records.array[inside], records.point_format, records.scales, records.offsets
        )
        yield kept, positions[inside], header


def positions_of(records: laspy.ScaleAwarePointRecord) -> np.ndarray:
    """The coordinates of raw records, (n, 3) float64."""
    raw = records.array
    positions = np.empty((len(raw), 3))
    for axis, name in enumerate(COORDINATES):
        np.multiply(raw[name], records.scales[axis], out=positions[:, axis])
    positions += records.offsets
    return positions


def attributes_of(records: laspy.ScaleAwarePointRecord) -> dict[str, np.ndarray]:
    """All dimensions of raw records except the coordinates; bit fields are unpacked."""
    names = [name for name in records.point_format.dimension_names if name not in COORDINATES]
    return {name: np.array(records[name]) for name in names}


def iter_las(
    path: Path, chunk_size: int, attributes: bool, bounds: Bounds | None = None
) -> Iterator[PointCloud]:
    """Yield the file, or its points in `bounds`, as clouds, with or without attributes."""
    selection = None if attributes else POSITIONS_ONLY
    for records, positions, header in iter_records(path, chunk_size, selection, bounds):
        check_positions(positions, str(path))
        with _las_errors(path):
            read = attributes_of(records) if attributes else {}
        yield PointCloud(positions, read, header, path)


def read_header(path: Path) -> laspy.LasHeader:
    """The header of a file, which may have no points; its records are those that laspy parses.

    Raises FileError for a file whose header can't be read.
    """
    with os_errors(path, "read"), _las_errors(path), laspy.open(path) as reader:
        return reader.header


def first_of_las(path: Path, number: int) -> PointCloud:
    """The first points of the file, at most `number`, with attributes."""
    records, positions, header = next(iter_records(path, number, only_first=True))
    check_positions(positions, str(path))
    with _las_errors(path):
        return PointCloud(positions, attributes_of(records), header, path)


def read_las(path: Path, attributes: bool) -> PointCloud:
    """Read the whole file as one cloud."""
    chunks = list(iter_las(path, CHUNK_SIZE, attributes))
    if len(chunks) == 1:
        return chunks[0]
    joined = {
        name: np.concatenate([chunk.attributes[name] for chunk in chunks])
        for name in chunks[0].attributes
    }
    positions = np.concatenate([chunk.positions for chunk in chunks])
    return PointCloud(positions, joined, chunks[0].header, path)


def _keep_records_raw(
    header: laspy.LasHeader, vlrs: list[RawRecord], evlrs: list[RawRecord]
) -> None:
    """Replace the VLRs and EVLRs of the header by those of the file, byte for byte.

    laspy parses the records that it knows, and changes some: it appends a null byte to a WKT, drops
    the no-data value of an extra dimension, and keeps only one of several extra-bytes records.
    """
    if len(vlrs) > len(header.vlrs):
        # laspy drops a description of extra bytes that the points don't have.
        vlrs = [raw for raw in vlrs if (raw.user_id, raw.record_id) != EXTRA_BYTES]
    for records, raws in ((header.vlrs, vlrs), (header.evlrs or [], evlrs)):
        for i, (record, raw) in enumerate(zip(records, raws, strict=True)):
            known = record.user_id in (COPC, LASZIP) or record.record_data_bytes() == raw.data
            if not known:
                records[i] = VLR(record.user_id, record.record_id, record.description, raw.data)
        records[:] = [record for record in records if record.user_id != COPC]
    described = header.vlrs.get("ExtraBytesVlr")
    if len(described) > 1:
        _merge_extra_bytes(header, described)


def _merge_extra_bytes(header: laspy.LasHeader, described: list[ExtraBytesVlr]) -> None:
    merged = ExtraBytesVlr()
    merged.parse_record_data(b"".join(record.record_data_bytes() for record in described))
    point_format = laspy.PointFormat(header.point_format.id)
    for dimension in merged.type_of_extra_dims():
        point_format.add_extra_dimension(dimension)
    if point_format.size == header.point_format.size:
        header.vlrs.extract("ExtraBytesVlr")
        header.vlrs.append(merged)
        header.point_format.dimensions[:] = point_format.dimensions


def _check_header(path: Path, header: laspy.LasHeader) -> None:
    if not header.point_count:
        raise NoPointsError(f"{path}: no points in it; leave it out")
    if not (np.isfinite(header.scales).all() and np.isfinite(header.offsets).all()):
        raise damaged(path, "its header has a scale or offset that is not finite")


@contextmanager
def _las_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, FileError, KeyboardInterrupt):
        raise
    # For a damaged file laspy raises struct, index, key, value and memory errors, and its own.
    except Exception as error:
        raise damaged(path, (str(error) or repr(error)).splitlines()[0]) from error
    # lazrs panics on some files. A PanicException is not an Exception, and can't be imported.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise damaged(path, "its compressed points can't be read") from error
