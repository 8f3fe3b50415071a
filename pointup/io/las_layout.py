"""Checks the counts and offsets of a LAS or LAZ file against its size before laspy reads it.

With a damaged count, laspy and lazrs allocate all memory and the process is killed, without a
message that names the file.
"""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from
from typing import BinaryIO, NamedTuple

import lazrs

from pointup.errors import FileError

MIN_HEADER_SIZE = 227
CREATION_DATE_OFFSET = 90
VLR_HEADER_SIZE, EVLR_HEADER_SIZE = 54, 60
COMPRESSED = 0x80
LASZIP = b"laszip encoded"
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


class Layout(NamedTuple):
    """The parts of a file that laspy changes: VLRs, EVLRs and the creation date (4 bytes)."""

    vlrs: list[RawRecord]
    evlrs: list[RawRecord]
    creation_date: bytes


def read_layout(path: Path, stream: BinaryIO, num_checked: int | None = None) -> Layout:
    """Read the VLRs, the EVLRs and the creation date of a file, byte for byte.

    Checks the first `num_checked` LAZ chunks, by default all; with 0 not even their table. Each
    chunk takes a read. Leaves the stream at its beginning. Raises FileError for a file that is not
    LAS or LAZ, or that is shorter than its counts require.
    """
    size = path.stat().st_size
    head = stream.read(375)
    if head[:4] != b"LASF" or len(head) < MIN_HEADER_SIZE:
        raise damaged(path, "it doesn't begin with a LAS header")
    minor, header_size, points_start = head[25], *unpack_from("<HI", head, 94)
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
        laszip = next((record.data for record in vlrs if record.user_id == LASZIP), b"")
        _check_chunks(path, stream, points_start, size, num_points, laszip, num_checked)
    elif not point_format & COMPRESSED and points_start + num_points * point_size > size:
        end = points_start + num_points * point_size
        raise damaged(path, f"has {size} of {end} bytes")
    stream.seek(0)
    return Layout(vlrs, evlrs, head[CREATION_DATE_OFFSET : CREATION_DATE_OFFSET + 4])


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
    _check_each_chunk(path, stream, points_start, table, laszip, num_checked)


def _check_each_chunk(
    path: Path,
    stream: BinaryIO,
    points_start: int,
    table: int,
    laszip: bytes,
    num_checked: int | None,
) -> None:
    """Check the sizes of chunks against the file, and the sizes of their layers against the chunk.

    For point formats 6 and above, a chunk begins with its first point, its number of points and the
    sizes of its layers. Chunks of older formats have no layers.
    """
    num_items = unpack_from("<H", laszip, 32)[0]
    if len(laszip) < 34 + 6 * num_items:
        raise damaged(path, "the record that describes its compression is cut short")
    items = [unpack_from("<HH", laszip, 34 + 6 * i) for i in range(num_items)]
    num_layers = sum(size if kind == BYTE14 else LAYERS.get(kind, 0) for kind, size in items)
    first_layer = sum(size for _, size in items) + 4 + 4 * num_layers
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
