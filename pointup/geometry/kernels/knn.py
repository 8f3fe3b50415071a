"""k nearest neighbours within packed clouds on CUDA, over tiles of points along a Morton curve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointup.geometry.packed import batch_from_ptr

# One warp per program and one query per thread: all comparisons are within a thread's registers.
BLOCK_Q = 32
NUM_WARPS = 1
# Tiles whose boxes are compared together.
CHUNK = 256
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def squared_distance(
    x: tl.tensor,
    y: tl.tensor,
    z: tl.tensor,
    other_x: tl.tensor,
    other_y: tl.tensor,
    other_z: tl.tensor,
) -> tl.tensor:
    """Squared distance, rounded as the distance of a box of tiles: never below it."""
    x, y, z = x - other_x, y - other_y, z - other_z
    return tl.fma(z, z, tl.fma(y, y, x * x))


@triton.jit
def gap(
    low: tl.tensor, high: tl.tensor, boxes: tl.tensor, tile: tl.tensor, num_tiles: tl.tensor
) -> tl.tensor:
    """Distance along an axis from the interval [low, high] to those of the tiles; inf past the
    last tile."""
    tile_low = tl.load(boxes + tile, mask=tile < num_tiles, other=float("inf"))
    tile_high = tl.load(boxes + 3 * num_tiles + tile, mask=tile < num_tiles, other=float("inf"))
    return tl.maximum(tl.maximum(tile_low - high, low - tile_high), 0.0)


@triton.jit(do_not_specialize=["num_queries", "num_points", "num_tiles", "k"])
def knn_kernel(
    query_axes: tl.tensor,
    query_cloud: tl.tensor,
    query_order: tl.tensor,
    home: tl.tensor,
    num_queries: tl.tensor,
    axes: tl.tensor,
    order: tl.tensor,
    boxes: tl.tensor,
    ptr: tl.tensor,
    num_points: tl.tensor,
    num_tiles: tl.tensor,
    found_squared: tl.tensor,
    found_index: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    OWN_FIRST: tl.constexpr,
) -> None:
    """One program for `BLOCK_Q` consecutive queries along the curve, of one cloud or several.

    With `OWN_FIRST` the queries are the points, and each is its own first neighbour.

    The program visits the curve in chunks, beginning with the chunk around the queries. Within a
    chunk it searches tiles nearest first, as long as a tile's box is nearer than the farthest of
    the neighbours found so far. The distance of a box is rounded in the same way as those of its
    points and never exceeds them: no neighbour is missed.
    """
    first_row = tl.program_id(0) * BLOCK_Q
    row = first_row + tl.arange(0, BLOCK_Q)
    is_query = row < num_queries
    # Pointers in steps: three times the number of points may exceed 32 bits.
    query_y = query_axes + num_queries
    query_z = query_y + num_queries
    y = axes + num_points
    z = y + num_points
    box_y = boxes + num_tiles
    box_z = box_y + num_tiles
    qx = tl.load(query_axes + row, mask=is_query, other=0.0)
    qy = tl.load(query_y + row, mask=is_query, other=0.0)
    qz = tl.load(query_z + row, mask=is_query, other=0.0)
    cloud_of_row = tl.load(query_cloud + row, mask=is_query, other=-1).to(tl.int32)
    # A query that is not finite is of no cloud: it finds nothing.
    cloud_of_row = tl.where((qx - qx) + (qy - qy) + (qz - qz) == 0, cloud_of_row, -1)

    # Neighbours in no order; places from k on hold -inf, so that they are never replaced.
    infinity = float("inf")
    place = tl.arange(0, K)[:, None]
    squared = tl.where(place < k, infinity, -infinity) + tl.zeros([K, BLOCK_Q], qx.dtype)
    point = tl.full([K, BLOCK_Q], -1, tl.int32)
    last, replaced = tl.max(squared, 0, return_indices=True, return_indices_tie_break_left=False)
    offset = tl.arange(0, TILE)[:, None]

    first_cloud = tl.load(query_cloud + first_row).to(tl.int32)
    last_row = tl.minimum(first_row + BLOCK_Q, num_queries) - 1
    last_cloud = tl.load(query_cloud + last_row).to(tl.int32)
    home_tile = (tl.load(home + tl.program_id(0)) // TILE).to(tl.int32)
    for cloud in range(first_cloud, last_cloud + 1):
        start = tl.load(ptr + cloud).to(tl.int32)
        stop = tl.load(ptr + cloud + 1).to(tl.int32)
        is_here = cloud_of_row == cloud
        low_x = tl.min(tl.where(is_here, qx, infinity), axis=0)
        low_y = tl.min(tl.where(is_here, qy, infinity), axis=0)
        low_z = tl.min(tl.where(is_here, qz, infinity), axis=0)
        high_x = tl.max(tl.where(is_here, qx, -infinity), axis=0)
        high_y = tl.max(tl.where(is_here, qy, -infinity), axis=0)
        high_z = tl.max(tl.where(is_here, qz, -infinity), axis=0)
        first_tile = start // TILE
        stop_tile = tl.cdiv(stop, TILE)
        num_chunks = tl.cdiv(stop_tile - first_tile, CHUNK)
        # Clouds without queries in this block, and empty clouds, are skipped.
        num_chunks = tl.where((start < stop) & (low_x <= high_x), num_chunks, 0)
        home_place = tl.maximum(tl.minimum(home_tile, stop_tile - 1) - first_tile, 0)
        worst = tl.max(tl.where(is_here, last, -infinity), axis=0)
        for turn in range(num_chunks):
            chunk = (home_place // CHUNK + turn) % num_chunks
            tile = first_tile + chunk * CHUNK + tl.arange(0, CHUNK)
            dx = gap(low_x, high_x, boxes, tile, num_tiles)
            dy = gap(low_y, high_y, box_y, tile, num_tiles)
            dz = gap(low_z, high_z, box_z, tile, num_tiles)
            bound = tl.fma(dz, dz, tl.fma(dy, dy, dx * dx))
            bound = tl.where(tile < stop_tile, bound, infinity)
            least_bound = tl.min(bound, axis=0)
            while least_bound < worst:
                chosen = tl.min(tl.where(bound == least_bound, tile, NONE), axis=0)
                bound = tl.where(tile == chosen, infinity, bound)
                # Loaded as (TILE,): loads of (TILE, 1) would spread the pairs across threads.
                key = chosen * TILE + tl.arange(0, TILE)
                is_key = (key >= start) & (key < stop)
                kx = tl.load(axes + key, mask=is_key, other=infinity)
                ky = tl.load(y + key, mask=is_key, other=infinity)
                kz = tl.load(z + key, mask=is_key, other=infinity)
                pairs = squared_distance(
                    qx[None, :], qy[None, :], qz[None, :], kx[:, None], ky[:, None], kz[:, None]
                )
                pairs = tl.where(is_here[None, :], pairs, infinity)
                if OWN_FIRST:
                    # Nearer than other points in the same place. Tiles can be of two clouds.
                    is_own = ((chosen * TILE + offset) == row[None, :]) & is_here[None, :]
                    pairs = tl.where(is_own, -1.0, pairs)

                closest, found = tl.min(
                    pairs, 0, return_indices=True, return_indices_tie_break_left=False
                )
                while tl.max((closest < last).to(tl.int32), axis=0) > 0:
                    is_replaced = (place == replaced[None, :]) & (closest < last)[None, :]
                    squared = tl.where(is_replaced, closest[None, :], squared)
                    point = tl.where(is_replaced, (chosen * TILE + found)[None, :], point)
                    pairs = tl.where(offset == found[None, :], infinity, pairs)
                    closest, found = tl.min(
                        pairs, 0, return_indices=True, return_indices_tie_break_left=False
                    )
                    last, replaced = tl.max(
                        squared, 0, return_indices=True, return_indices_tie_break_left=False
                    )
                worst = tl.max(tl.where(is_here, last, -infinity), axis=0)
                least_bound = tl.min(bound, axis=0)

    squared = tl.where(place < k, squared, infinity)
    own = tl.load(query_order + row, mask=is_query, other=0)
    out = own * k
    for rank in range(k):
        closest, found = tl.min(squared, 0, return_indices=True)
        is_found = place == found[None, :]
        key = tl.max(tl.where(is_found, point, -1), axis=0)
        index = tl.load(order + key, mask=key >= 0, other=-1)
        if OWN_FIRST:
            # A point that is not finite finds no neighbour, not even itself.
            index = tl.where((index < 0) & (rank == 0), own, index)
        tl.store(found_squared + out + rank, tl.maximum(closest, 0.0), mask=is_query)
        tl.store(found_index + out + rank, index, mask=is_query)
        squared = tl.where(is_found, infinity, squared)
        point = tl.where(is_found, -1, point)


def knn_search(
    query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Squared distance (Q, k) and index (Q, k) int64 into `pos` of the k nearest of the cloud.

    Nearest first, padded with inf and -1. Where `query` is `pos`, each point is its own first
    neighbour.
    """
    squared = query.new_empty((len(query), k))
    index = torch.empty((len(query), k), dtype=torch.int64, device=query.device)
    if len(query) == 0:
        return squared, index
    # Kernels read bounds as adjacent in memory.
    query_ptr, ptr = query_ptr.contiguous(), ptr.contiguous()
    axes = pos.T.contiguous()
    boxes = cloud_boxes(axes, ptr)
    if query is pos:
        points = queries = along_curve(axes, ptr, boxes)
        home = torch.arange(0, len(pos), BLOCK_Q, device=pos.device)
    else:
        query_axes = query.T.contiguous()
        query_boxes = cloud_boxes(query_axes, query_ptr)
        # One box around both, so that places on the two curves are comparable.
        boxes[:, :3] = torch.minimum(boxes[:, :3], query_boxes[:, :3])
        boxes[:, 3:] = torch.maximum(boxes[:, 3:], query_boxes[:, 3:])
        points = along_curve(axes, ptr, boxes)
        queries = along_curve(query_axes, query_ptr, boxes)
        home = torch.searchsorted(points.code, queries.code[::BLOCK_Q].contiguous())
    tiles = tile_boxes(points.axes)
    with torch.cuda.device_of(pos):
        knn_kernel[(triton.cdiv(len(query), BLOCK_Q),)](
            queries.axes, queries.cloud, queries.order, home, len(query),
            points.axes, points.order, tiles, ptr, len(pos), tiles.shape[1], squared, index, k,
            K=max(2, triton.next_power_of_2(k)), BLOCK_Q=BLOCK_Q, TILE=TILE, CHUNK=CHUNK,
            OWN_FIRST=query is pos, num_warps=NUM_WARPS,
        )  # fmt: skip
    return squared, index


# Sorts the points of each cloud along a Morton curve, on CUDA, and bounds tiles of them by boxes.
#
# Consecutive points of the curve lie close together, so that a search can skip a whole tile whose
# box is too far away. Morton 1966, A Computer Oriented Geodetic Data Base.

TILE = 32
"""Consecutive points that share a box."""

AXIS_BITS = tl.constexpr(14)
"""Bits of a place on the curve for each axis; the other 21 bits of a code count the clouds."""

BLOCK = 1024
TILES_PER_PROGRAM = 16


@dataclass(frozen=True)
class Curve:
    """Packed clouds, the points of each sorted along the curve."""

    axes: Tensor
    """Coordinates, (3, N)."""
    order: Tensor
    """Index (N,) int64 of each point in the original order."""
    cloud: Tensor
    """Number of the cloud of each point, (N,) int64."""
    code: Tensor
    """Number of the cloud (upper bits), place on its curve (lower bits): (N,) int64, ascending."""


@triton.jit(do_not_specialize=["num_points"])
def cloud_boxes_kernel(
    axes: tl.tensor, ptr: tl.tensor, boxes: tl.tensor, num_points: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program per axis of a cloud: its least and greatest coordinate."""
    cloud, axis = tl.program_id(0), tl.program_id(1)
    start = tl.load(ptr + cloud)
    stop = tl.load(ptr + cloud + 1)
    axes += axis.to(tl.int64) * num_points
    least = tl.full([BLOCK], float("inf"), axes.dtype.element_ty)
    greatest = -least
    for block in range(start, stop, BLOCK):
        point = block + tl.arange(0, BLOCK)
        value = tl.load(axes + point, mask=point < stop, other=float("inf"))
        least = tl.minimum(least, value)
        greatest = tl.maximum(greatest, tl.where(point < stop, value, -float("inf")))
    tl.store(boxes + cloud * 6 + axis, tl.min(least, axis=0))
    tl.store(boxes + cloud * 6 + 3 + axis, tl.max(greatest, axis=0))


@triton.jit
def spread(bits: tl.tensor) -> tl.tensor:
    """16 bits with two zeros inserted between consecutive ones."""
    bits = bits.to(tl.int64)
    bits = (bits | (bits << 32)) & 0x1F00000000FFFF
    bits = (bits | (bits << 16)) & 0x1F0000FF0000FF
    bits = (bits | (bits << 8)) & 0x100F00F00F00F00F
    bits = (bits | (bits << 4)) & 0x10C30C30C30C30C3
    return (bits | (bits << 2)) & 0x1249249249249249


@triton.jit
def cell(offset: tl.tensor, side: tl.tensor) -> tl.tensor:
    """Number of the cell, clamped: more bits would overlap the number of the cloud."""
    # Divided: the inverse of the side overflows for clouds smaller than 2e-34.
    share = offset / side
    return tl.where(share >= 0, tl.minimum(share, 1.0) * (2**AXIS_BITS - 1), 0.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_points"])
def curve_kernel(
    axes: tl.tensor,
    cloud: tl.tensor,
    boxes: tl.tensor,
    code: tl.tensor,
    num_points: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Place on the curve, in cells of 1 / 2**AXIS_BITS of the longest side of the cloud's box."""
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_point = point < num_points
    number = tl.load(cloud + point, mask=is_point, other=0).to(tl.int32)
    box = boxes + number * 6
    low_x = tl.load(box, mask=is_point, other=0.0)
    low_y = tl.load(box + 1, mask=is_point, other=0.0)
    low_z = tl.load(box + 2, mask=is_point, other=0.0)
    side = tl.load(box + 3, mask=is_point, other=0.0) - low_x
    side = tl.maximum(side, tl.load(box + 4, mask=is_point, other=0.0) - low_y)
    side = tl.maximum(side, tl.load(box + 5, mask=is_point, other=0.0) - low_z)
    side = tl.where(side > 0, side, 1.0)
    # Pointers in steps: three times the number of points may exceed 32 bits.
    y = axes + num_points
    z = y + num_points
    place = spread(cell(tl.load(axes + point, mask=is_point, other=0.0) - low_x, side))
    place = place | (spread(cell(tl.load(y + point, mask=is_point, other=0.0) - low_y, side)) << 1)
    place = place | (spread(cell(tl.load(z + point, mask=is_point, other=0.0) - low_z, side)) << 2)
    tl.store(code + point, (number.to(tl.int64) << (3 * AXIS_BITS)) | place, mask=is_point)


@triton.jit(do_not_specialize=["num_points", "num_tiles"])
def tile_boxes_kernel(
    axes: tl.tensor,
    boxes: tl.tensor,
    num_points: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,
) -> None:
    """One program per axis of several tiles."""
    tile = tl.program_id(0) * TILES_PER_PROGRAM + tl.arange(0, TILES_PER_PROGRAM)
    axis = tl.program_id(1).to(tl.int64)
    point = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    value = tl.load(axes + axis * num_points + point, mask=point < num_points, other=float("inf"))
    least = tl.min(value, axis=1)
    greatest = tl.max(tl.where(point < num_points, value, -float("inf")), axis=1)
    tl.store(boxes + axis * num_tiles + tile, least, mask=tile < num_tiles)
    tl.store(boxes + (axis + 3) * num_tiles + tile, greatest, mask=tile < num_tiles)


def cloud_boxes(axes: Tensor, ptr: Tensor) -> Tensor:
    """Least and greatest coordinates of each cloud, (B, 6), from axes (3, N); inf and -inf for an
    empty cloud."""
    boxes = axes.new_empty((len(ptr) - 1, 6))
    if len(boxes):
        with torch.cuda.device_of(axes):
            cloud_boxes_kernel[(len(boxes), 3)](
                axes, ptr, boxes, axes.shape[1], BLOCK=BLOCK, num_warps=4
            )
    return boxes


def along_curve(axes: Tensor, ptr: Tensor, boxes: Tensor) -> Curve:
    """The points of each cloud, from axes (3, N), sorted along the curve through its box
    (`boxes`, (B, 6))."""
    num_points = axes.shape[1]
    cloud = batch_from_ptr(ptr, num_points)
    code = torch.empty(num_points, dtype=torch.int64, device=axes.device)
    if num_points:
        with torch.cuda.device_of(axes):
            curve_kernel[(triton.cdiv(num_points, BLOCK),)](
                axes, cloud, boxes, code, num_points, BLOCK=BLOCK, num_warps=4
            )
    code, order = code.sort(stable=True)
    return Curve(axes.index_select(1, order), order, cloud, code)


def tile_boxes(axes: Tensor) -> Tensor:
    """Least and greatest coordinates of each `TILE` points of axes (3, N): (6, ceil(N / TILE)).

    The box of a tile across the border of two clouds bounds points of both.
    """
    num_tiles = triton.cdiv(axes.shape[1], TILE)
    boxes = axes.new_empty((6, num_tiles))
    if num_tiles:
        with torch.cuda.device_of(axes):
            tile_boxes_kernel[(triton.cdiv(num_tiles, TILES_PER_PROGRAM), 3)](
                axes, boxes, axes.shape[1], num_tiles,
                TILE=TILE, TILES_PER_PROGRAM=TILES_PER_PROGRAM, num_warps=4,
            )  # fmt: skip
    return boxes
