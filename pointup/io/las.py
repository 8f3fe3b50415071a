"""Reads LAS and LAZ in chunks, and parts of COPC files, after a check of their counts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import unpack_from
from typing import Any, BinaryIO, NamedTuple

import laspy
import lazrs
import numpy as np
from laspy import DecompressionSelection
from laspy.copc import Bounds as NodeBounds
from laspy.copc import CopcReader, OctreeNode, load_octree_for_query
from laspy.point.record import PackedPointRecord, ScaleAwarePointRecord
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR

from pointup.disk import library_errors, os_errors
from pointup.errors import FileError, NoPointsError
from pointup.io.bounds import Bounds
from pointup.io.cloud import LARGEST_COORDINATE, PointCloud, check_positions, warn_once

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
            vlrs, evlrs, creation_date = read_layout(path, stream, num_checked)
            reader = laspy.open(
                stream,
                closefd=False,
                # The parallel decompressor decodes whole LAZ chunks, also for the first points.
                laz_backend=laspy.LazBackend.Lazrs if only_first else None,
                decompression_selection=selection or DecompressionSelection.all(),
            )
            header = reader.header
            _keep_records_raw(header, vlrs, evlrs)
            header.raw_creation_date = creation_date
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
    with _las_errors(path), path.open("rb") as stream:
        # A damaged count would keep laspy reading.
        read_layout(path, stream, num_checked=0)
        with laspy.open(stream, closefd=False) as reader:
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
    return chunks[0] if len(chunks) == 1 else PointCloud.joined(chunks)


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
    for axis, scale in zip("xyz", header.scales.tolist(), strict=True):
        if not 0 < abs(scale) < LARGEST_COORDINATE:
            raise FileError(
                f"{path}: its header has a scale of {scale:g} in {axis}, so that no {axis} is "
                "known; export it again, with a scale such as 0.001"
            )
    for dimension in header.point_format.extra_dimensions:
        if not dimension.is_scaled:
            continue
        scale, offset = dimension.scales, dimension.offsets
        if not (np.isfinite([scale, offset]).all() and scale.all()):
            raise FileError(
                f"{path}: its dimension {dimension.name!r} has a scale of {scale[0]:g} and "
                f"an offset of {offset[0]:g}, so that its values are not known; export it again, "
                "with its scale or without it"
            )


@contextmanager
def _las_errors(path: Path) -> Iterator[None]:
    message = "laspy can't read it ({}); export it again, as LAS 1.4"
    with library_errors(path, message), os_errors(path, "read"):
        try:
            yield
        # lazrs panics on some files. A PanicException is not an Exception, and can't be imported.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise damaged(path, "its compressed points can't be read") from error


# Reads a part of a COPC file through its octree: only the nodes that the part touches.
#
# COPC (https://copc.io) is LAZ whose chunks are the nodes of an octree. A record after the points
# lists for each node where its chunk is.

FIRST_RECORD = 375
"""Where the first record of a LAS 1.4 file begins; in a COPC file it is that of COPC."""


def is_copc(path: Path) -> bool:
    """Whether a file has the record that makes it COPC."""
    with path.open("rb") as stream:
        head = stream.read(FIRST_RECORD + 54)
    return head[FIRST_RECORD + 2 : FIRST_RECORD + 20] == b"copc".ljust(16, b"\0") + b"\1\0"


def iter_nodes(
    path: Path,
    stream: BinaryIO,
    header: laspy.LasHeader,
    bounds: Bounds,
    chunk_size: int,
    selection: DecompressionSelection,
) -> Iterator[ScaleAwarePointRecord]:
    """Yield the records of the nodes that touch `bounds`, in the order of the file.

    A chunk has at most `chunk_size` records, or one node. Raises FileError for a node that is cut
    short.
    """
    stream.seek(0)
    reader = CopcReader(stream, close_fd=False)
    # A point may lie at any height.
    box = NodeBounds(np.array([*bounds.low, -np.inf]), np.array([*bounds.high, np.inf]))
    nodes = load_octree_for_query(stream, reader.copc_info, reader.root_page, query_bounds=box)
    groups: list[list[OctreeNode]] = []
    for node in sorted(nodes, key=lambda node: int(node.offset)):
        if not groups or sum(each.point_count for each in (*groups[-1], node)) > chunk_size:
            groups.append([])
        groups[-1].append(node)
    layout = header.point_format
    for group in groups:
        chunks = []
        for node in group:
            stream.seek(node.offset)
            chunks.append(stream.read(node.byte_size))
            if len(chunks[-1]) < node.byte_size:
                raise damaged(path, "a node of its octree is cut short")
        table = [(node.point_count, node.byte_size) for node in group]
        raw = np.zeros(sum(number for number, _ in table) * layout.size, dtype=np.uint8)
        lazrs.decompress_points_with_chunk_table(
            b"".join(chunks), reader.laszip_vlr.record_data, raw, table, selection.to_lazrs()
        )
        records = PackedPointRecord.from_buffer(raw, layout)
        yield ScaleAwarePointRecord(records.array, layout, header.scales, header.offsets)


# Checks the counts and offsets of a LAS or LAZ file against its size before laspy reads it.
#
# With a damaged count, laspy and lazrs allocate all memory and the process is killed, without a
# message that names the file.

MIN_HEADER_SIZE = 227
CREATION_DATE_OFFSET = 90
VLR_HEADER_SIZE, EVLR_HEADER_SIZE = 54, 60
COMPRESSED = 0x80
VARIABLE_CHUNKS = 2**32 - 1
# Number of compressed layers by the type of a LASzip item, for point formats 6 and above. An item
# of extra bytes (BYTE14) has one layer for each byte.
LAYERS = {10: 9, 11: 1, 12: 2, 13: 1}
BYTE14 = 14
# A chunk may hold as many points as the file, but at least the first limit and at most the second.
LOWER_CHUNK_LIMIT = 10_000_000
UPPER_CHUNK_LIMIT = 100_000_000


def damaged(path: Path, reason: str) -> FileError:
    """The error for a file that is damaged, or that is not a LAS file."""
    return FileError(f"{path}: not a whole LAS/LAZ file: {reason}; copy or export it again")


class RawRecord(NamedTuple):
    """The user ID, the record ID and the content of a VLR or EVLR."""

    user_id: bytes
    record_id: int
    data: bytes


def read_layout(
    path: Path, stream: BinaryIO, num_checked: int | None = None
) -> tuple[list[RawRecord], list[RawRecord], bytes]:
    """Read a file's VLRs, EVLRs and creation date (4 bytes), all of which laspy changes.

    Checks the first `num_checked` LAZ chunks, by default all; with 0 not even their table. Each
    chunk takes a read. Leaves the stream at its beginning. Raises FileError for a file that is not
    LAS or LAZ, or that is shorter than its counts require.
    """
    size = path.stat().st_size
    head = stream.read(375)
    if head[:4] != b"LASF" or len(head) < MIN_HEADER_SIZE:
        raise damaged(path, "it doesn't begin with a LAS header")
    minor, header_size, points_start = head[25], *unpack_from("<HI", head, 94)
    if minor > 4:
        raise FileError(f"{path}: is LAS 1.{minor}, newer than LAS 1.4; export it as that")
    num_vlrs, point_format, point_size, num_points = unpack_from("<IBHI", head, 100)
    start_of_evlrs, num_evlrs = 0, 0
    if minor >= 4:
        legacy_count = num_points
        start_of_evlrs, num_evlrs, num_points = unpack_from("<QIQ", head.ljust(375, b"\0"), 235)
        if legacy_count and not num_points:
            raise damaged(path, f"its header counts {legacy_count} points, and none for LAS 1.4")
    if points_start > size:
        raise damaged(path, f"has {size} bytes, its points begin after {points_start}")
    vlrs = _read_records(path, stream, header_size, points_start, num_vlrs, VLR_HEADER_SIZE)
    evlrs = _read_records(path, stream, start_of_evlrs, size, num_evlrs, EVLR_HEADER_SIZE)
    if point_format & COMPRESSED and num_checked != 0:
        laszip = next((record.data for record in vlrs if record.user_id == LASZIP.encode()), b"")
        _check_chunks(path, stream, points_start, size, num_points, laszip, num_checked)
    elif not point_format & COMPRESSED and points_start + num_points * point_size > size:
        end = points_start + num_points * point_size
        raise damaged(path, f"has {size} of {end} bytes")
    elif not point_format & COMPRESSED and point_size:
        num_held = ((start_of_evlrs or size) - points_start) // point_size
        if num_held > num_points:
            warn_once(
                f"{path}: its header counts {num_points:,} points, and it has room for "
                f"{num_held:,}; those beyond the count are left out"
            )
    stream.seek(0)
    return vlrs, evlrs, head[CREATION_DATE_OFFSET : CREATION_DATE_OFFSET + 4]


def _read_records(
    path: Path, stream: BinaryIO, start: int, end: int, count: int, head_size: int
) -> list[RawRecord]:
    records = []
    for i in range(count):
        if start > end:
            raise damaged(path, f"record {i + 1} of {count} before or after the points is missing")
        stream.seek(start)
        head = stream.read(head_size)
        length_format = "<H" if head_size == VLR_HEADER_SIZE else "<Q"
        length = unpack_from(length_format, head.ljust(head_size), 20)[0]
        start += head_size + length
        if start > end:
            raise damaged(
                path, f"record {i + 1} of {count} before or after the points is cut short"
            )
        user_id, record_id = head[2:18].partition(b"\0")[0], unpack_from("<H", head, 18)[0]
        records.append(RawRecord(user_id, record_id, stream.read(length)))
    return records


def _check_chunks(
    path: Path,
    stream: BinaryIO,
    points_start: int,
    size: int,
    num_points: int,
    laszip: bytes,
    num_checked: int | None,
) -> None:
    """Check the chunks against the file, and the sizes of their layers against the chunk.

    For point formats 6 and above, a chunk begins with its first point, its number of points and the
    sizes of its layers. Chunks of older formats have no layers.
    """
    if len(laszip) < 34:
        raise damaged(path, "the record that describes its compression is missing")
    chunk_size = unpack_from("<I", laszip, 12)[0]
    # lazrs allocates memory for a whole chunk, even if the file has fewer points.
    limit = min(UPPER_CHUNK_LIMIT, max(LOWER_CHUNK_LIMIT, num_points))
    if limit < chunk_size < VARIABLE_CHUNKS:
        raise damaged(path, f"its chunks have {chunk_size} points")
    stream.seek(points_start)
    table = int.from_bytes(stream.read(8), "little", signed=True)
    if table == -1:
        # The file was written to a pipe: the offset of the table is in its last 8 bytes.
        stream.seek(size - 8)
        table = int.from_bytes(stream.read(8), "little", signed=True)
    if not points_start < table <= size - 8:
        raise damaged(path, "its end is missing")
    stream.seek(table + 4)
    num_chunks = int.from_bytes(stream.read(4), "little")
    if num_chunks > size:
        raise damaged(path, f"it counts {num_chunks} chunks in {size} bytes")
    num_items = unpack_from("<H", laszip, 32)[0]
    if len(laszip) < 34 + 6 * num_items:
        raise damaged(path, "the record that describes its compression is cut short")
    items = [unpack_from("<HH", laszip, 34 + 6 * i) for i in range(num_items)]
    num_layers = sum(width if kind == BYTE14 else LAYERS.get(kind, 0) for kind, width in items)
    first_layer = sum(width for _, width in items) + 4 + 4 * num_layers
    stream.seek(points_start)
    chunks = lazrs.read_chunk_table(stream, lazrs.LazVlr(laszip))
    start = points_start + 8
    for i, (_, num_bytes) in enumerate(chunks[:num_checked]):
        if start + num_bytes > table:
            raise damaged(path, f"chunk {i + 1} of {len(chunks)} is cut short")
        if num_layers:
            stream.seek(start + first_layer - 4 * num_layers)
            sizes = stream.read(4 * num_layers).ljust(4 * num_layers, b"\xff")
            if first_layer + sum(unpack_from(f"<{num_layers}I", sizes)) > num_bytes:
                raise damaged(path, f"chunk {i + 1} of {len(chunks)} has layers longer than itself")
        start += num_bytes
