"""What a LAS or LAZ file says of its own layout, held against its length before laspy reads it.

A damaged count would have laspy and lazrs ask for all the memory there is; the process would die,
and nobody would know of which file.
"""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from
from typing import BinaryIO, NamedTuple

import lazrs

from pointup.errors import FileError

SMALLEST_HEADER = 227
CREATION_DATE = 90
VLR_HEAD, EVLR_HEAD = 54, 60
COMPRESSED = 0x80
LASZIP = b"laszip encoded"
VARIABLE_CHUNKS = 2**32 - 1
# By the type of a LASzip item, those of the point formats from 6 on: how many layers it is kept in.
# One that extra bytes are in has a layer for each of them.
LAYERS = {10: 9, 11: 1, 12: 2, 13: 1}
BYTE14 = 14
MOST_POINTS_PER_CHUNK = 100_000_000
POINTS_PER_CHUNK = 10_000_000


def broken(path: Path, reason: str) -> FileError:
    """What to raise for a file that is damaged or no LAS file at all."""
    return FileError(f"{path}: not a whole LAS/LAZ file: {reason}; copy or export it again")


class RawRecord(NamedTuple):
    """A VLR or an EVLR: whose it is, its number, its content."""

    user_id: bytes
    record_id: int
    data: bytes


class Layout(NamedTuple):
    """What laspy doesn't keep as it was: VLRs, EVLRs, and the date of creation in 4 bytes."""

    vlrs: list[RawRecord]
    evlrs: list[RawRecord]
    creation_date: bytes


def read_layout(path: Path, stream: BinaryIO) -> Layout:
    """The VLRs of a file, its EVLRs and its date, byte for byte.

    Leaves the stream at its beginning. Raises FileError when the file is shorter than it says.
    """
    size = path.stat().st_size
    head = stream.read(375)
    if head[:4] != b"LASF" or len(head) < SMALLEST_HEADER:
        raise broken(path, "it doesn't begin with a LAS header")
    minor, header_size, points_start = head[25], *unpack_from("<HI", head, 94)
    num_vlrs, point_format, point_size, num_points = unpack_from("<IBHI", head, 100)
    start_of_evlrs, num_evlrs = 0, 0
    if minor >= 4:
        start_of_evlrs, num_evlrs, num_points = unpack_from("<QIQ", head.ljust(375, b"\0"), 235)
    if points_start > size:
        raise broken(path, f"has {size} bytes, its points begin after {points_start}")
    vlrs = _read_records(path, stream, header_size, points_start, num_vlrs, VLR_HEAD)
    evlrs = _read_records(path, stream, start_of_evlrs, size, num_evlrs, EVLR_HEAD)
    if point_format & COMPRESSED:
        laszip = next((record.data for record in vlrs if record.user_id == LASZIP), b"")
        _check_chunks(path, stream, points_start, size, num_points, laszip)
    elif points_start + num_points * point_size > size:
        end = points_start + num_points * point_size
        raise broken(path, f"has {size} of {end} bytes")
    stream.seek(0)
    return Layout(vlrs, evlrs, head[CREATION_DATE : CREATION_DATE + 4])


def _read_records(
    path: Path, stream: BinaryIO, start: int, end: int, count: int, head_size: int
) -> list[RawRecord]:
    records = []
    for i in range(count):
        if start > end:
            raise broken(path, f"record {i + 1} of {count} before or after the points is missing")
        stream.seek(start)
        head = stream.read(head_size)
        length = unpack_from("<H" if head_size == VLR_HEAD else "<Q", head.ljust(head_size), 20)[0]
        start += head_size + length
        if start > end:
            raise broken(path, f"record {i + 1} of {count} before or after the points is cut short")
        user_id, record_id = head[2:18].partition(b"\0")[0], unpack_from("<H", head, 18)[0]
        records.append(RawRecord(user_id, record_id, stream.read(length)))
    return records


def _check_chunks(
    path: Path, stream: BinaryIO, points_start: int, size: int, num_points: int, laszip: bytes
) -> None:
    if len(laszip) < 34:
        raise broken(path, "the record that describes its compression is missing")
    chunk_size = unpack_from("<I", laszip, 12)[0]
    # lazrs makes room for a whole chunk, however few points there are.
    most = min(MOST_POINTS_PER_CHUNK, max(POINTS_PER_CHUNK, num_points))
    if most < chunk_size < VARIABLE_CHUNKS:
        raise broken(path, f"it gives {chunk_size} points to a chunk")
    stream.seek(points_start)
    table = int.from_bytes(stream.read(8), "little", signed=True)
    if table == -1:
        # Written to a pipe: the place of the table stands at the end.
        stream.seek(size - 8)
        table = int.from_bytes(stream.read(8), "little", signed=True)
    if not points_start < table <= size - 8:
        raise broken(path, "its end is missing")
    stream.seek(table + 4)
    num_chunks = int.from_bytes(stream.read(4), "little")
    if num_chunks > size:
        raise broken(path, f"it counts {num_chunks} chunks in {size} bytes")
    _check_each_chunk(path, stream, points_start, table, laszip)


def _check_each_chunk(
    path: Path, stream: BinaryIO, points_start: int, table: int, laszip: bytes
) -> None:
    """Hold the length of each chunk against the file, and its layers against its length.

    Of point formats from 6 on, a chunk begins with its first point, its number of points, and the
    sizes of its layers; the older ones have none.
    """
    num_items = unpack_from("<H", laszip, 32)[0]
    if len(laszip) < 34 + 6 * num_items:
        raise broken(path, "the record that describes its compression is cut short")
    items = [unpack_from("<HH", laszip, 34 + 6 * i) for i in range(num_items)]
    num_layers = sum(size if kind == BYTE14 else LAYERS.get(kind, 0) for kind, size in items)
    first_layer = sum(size for _, size in items) + 4 + 4 * num_layers
    stream.seek(points_start)
    chunks = lazrs.read_chunk_table(stream, lazrs.LazVlr(laszip))
    start = points_start + 8
    for i, (_, num_bytes) in enumerate(chunks):
        if start + num_bytes > table:
            raise broken(path, f"chunk {i + 1} of {len(chunks)} is cut short")
        if num_layers:
            stream.seek(start + first_layer - 4 * num_layers)
            sizes = stream.read(4 * num_layers).ljust(4 * num_layers, b"\xff")
            if first_layer + sum(unpack_from(f"<{num_layers}I", sizes)) > num_bytes:
                raise broken(path, f"chunk {i + 1} of {len(chunks)} has layers longer than itself")
        start += num_bytes
