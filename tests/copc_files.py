"""Writes COPC files for tests: LAZ whose chunks are the nodes of an octree (https://copc.io).

pointup itself does not write COPC. The format is LAS 1.4 with the point formats 6 to 8, a record
of 160 bytes as the first one, and after the points a record that lists the nodes.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import laspy
import lazrs
import numpy as np

Key = tuple[int, int, int, int]


def write_copc(path: Path, points: np.ndarray, scale: float = 0.001, node_points: int = 500) -> int:
    """Write points (N, 3) in point format 6; returns the number of nodes.

    A node holds up to `node_points` points spread over its cell, and its eight children the rest.
    """
    low = np.floor(points.min(axis=0))
    half = float((points.max(axis=0) - low).max()) / 2 + scale
    header = laspy.LasHeader(point_format=6, version="1.4")
    header.scales, header.offsets = [scale] * 3, low
    records = laspy.ScaleAwarePointRecord.zeros(len(points), header=header)
    records.x, records.y, records.z = points.T
    records["return_number"][:] = records["number_of_returns"][:] = 1
    records["intensity"][:] = np.arange(len(points)) % 65_536
    nodes = _octree((points - low) / (2 * half), node_points)

    vlr = lazrs.LazVlr.new_for_compression(6, 0, use_variable_size_chunks=True)
    laszip = bytes(vlr.record_data())
    records_start = 375
    points_start = records_start + 54 + 160 + 54 + len(laszip)
    body = io.BytesIO()
    body.write(bytes(points_start))
    compressor = lazrs.LasZipCompressor(body, vlr)
    compressor.reserve_offset_to_chunk_table()
    raw = records.array.view(np.uint8).reshape(len(points), -1)
    starts = []
    for rows in nodes.values():
        if starts:
            compressor.finish_current_chunk()
        starts.append(body.tell())
        compressor.compress_many(raw[rows].reshape(-1))
    compressor.done()
    end_of_points = int.from_bytes(body.getbuffer()[points_start : points_start + 8], "little")
    sizes = np.diff([*starts, end_of_points]).tolist()
    entries = [
        (*key, start, size, len(rows))
        for (key, rows), start, size in zip(nodes.items(), starts, sizes, strict=True)
    ]
    hierarchy = b"".join(struct.pack("<iiiiQii", *entry) for entry in entries)
    start_of_evlrs = body.seek(0, io.SEEK_END)
    body.write(struct.pack("<H16sHQ32s", 0, b"copc", 1000, len(hierarchy), b""))
    hierarchy_start = body.tell()
    body.write(hierarchy)

    info = struct.pack("<3ddd", *(low + half), half, half / 64)
    info += struct.pack("<QQdd", hierarchy_start, len(hierarchy), 0.0, 0.0)
    body.seek(0)
    body.write(_head(records, header, points_start, start_of_evlrs))
    body.write(struct.pack("<H16sHH32s", 0, b"copc", 1, 160, b"") + info.ljust(160, b"\0"))
    body.write(struct.pack("<H16sHH32s", 0, b"laszip encoded", 22204, len(laszip), b"") + laszip)
    path.write_bytes(body.getvalue())
    return len(nodes)


def _octree(unit: np.ndarray, node_points: int) -> dict[Key, np.ndarray]:
    """Rows of the points in each node, from points (N, 3) in the unit cube."""
    nodes: dict[Key, np.ndarray] = {}
    waiting = [((0, 0, 0, 0), np.random.default_rng(0).permutation(len(unit)))]
    while waiting:
        (level, *cell), rows = waiting.pop(0)
        nodes[level, cell[0], cell[1], cell[2]] = rows[:node_points]
        rest = rows[node_points:]
        children = np.floor(unit[rest] * 2 ** (level + 1)).astype(int)
        codes, which = np.unique(children, axis=0, return_inverse=True)
        for number, child in enumerate(codes.tolist()):
            waiting.append(((level + 1, *child), rest[which.reshape(-1) == number]))
    return nodes


def _head(
    records: laspy.ScaleAwarePointRecord,
    header: laspy.LasHeader,
    points_start: int,
    start_of_evlrs: int,
) -> bytes:
    """The 375 bytes at the beginning of a LAS 1.4 file."""
    head = bytearray(375)
    head[:4] = b"LASF"
    struct.pack_into("<BB", head, 24, 1, 4)
    struct.pack_into("<HIIBH", head, 94, 375, points_start, 2, 6 | 0x80, 30)
    struct.pack_into("<3d3d", head, 131, *header.scales, *header.offsets)
    extremes = [f(v) for v in (records.x, records.y, records.z) for f in (np.max, np.min)]
    struct.pack_into("<6d", head, 179, *map(float, extremes))
    struct.pack_into("<QIQQ", head, 235, start_of_evlrs, 1, len(records), len(records))
    return bytes(head)
