"""Reads a part of a COPC file through its octree: only the nodes that the part touches.

COPC (https://copc.io) is LAZ whose chunks are the nodes of an octree. A record after the points
lists for each node where its chunk is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import laspy
import lazrs
import numpy as np
from laspy import DecompressionSelection
from laspy.copc import Bounds as NodeBounds
from laspy.copc import CopcReader, OctreeNode, load_octree_for_query
from laspy.point.record import PackedPointRecord, ScaleAwarePointRecord

from pointup.io.bounds import Bounds
from pointup.io.las_layout import damaged

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
    group: list[OctreeNode] = []
    for node in sorted(nodes, key=lambda node: int(node.offset)):
        if group and sum(each.point_count for each in group) + node.point_count > chunk_size:
            yield _records_of(path, stream, header, reader, group, selection)
            group = []
        group.append(node)
    if group:
        yield _records_of(path, stream, header, reader, group, selection)


def _records_of(
    path: Path,
    stream: BinaryIO,
    header: laspy.LasHeader,
    reader: CopcReader,
    nodes: list[OctreeNode],
    selection: DecompressionSelection,
) -> ScaleAwarePointRecord:
    chunks = []
    for node in nodes:
        stream.seek(node.offset)
        chunks.append(stream.read(node.byte_size))
        if len(chunks[-1]) < node.byte_size:
            raise damaged(path, "a node of its octree is cut short")
    number = sum(node.point_count for node in nodes)
    raw = np.zeros(number * header.point_format.size, dtype=np.uint8)
    table = [(node.point_count, node.byte_size) for node in nodes]
    lazrs.decompress_points_with_chunk_table(
        b"".join(chunks), reader.laszip_vlr.record_data, raw, table, selection.to_lazrs()
    )
    records = PackedPointRecord.from_buffer(raw, header.point_format)
    return ScaleAwarePointRecord(records.array, header.point_format, header.scales, header.offsets)
