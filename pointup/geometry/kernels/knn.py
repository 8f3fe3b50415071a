"""k nearest neighbours within packed clouds on CUDA, over tiles of points along a Morton curve."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointup.geometry.kernels.nearest import squared_distance
from pointup.geometry.kernels.order import TILE, along_curve, cloud_boxes, tile_boxes

# One warp per program and one query per thread: all comparisons are within a thread's registers.
BLOCK_Q = 32
NUM_WARPS = 1
# Tiles whose boxes are compared together.
CHUNK = 256
NONE = tl.constexpr(2**31 - 1)


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
    cloud_of_row = tl.load(query_cloud + row, mask=is_query, other=-1)

    # Neighbours in no order; places from k on hold -inf, so that they are never replaced.
    infinity = float("inf")
    place = tl.arange(0, K)[:, None]
    squared = tl.where(place < k, infinity, -infinity) + tl.zeros([K, BLOCK_Q], qx.dtype)
    point = tl.full([K, BLOCK_Q], -1, tl.int32)
    last, replaced = tl.max(squared, 0, return_indices=True, return_indices_tie_break_left=False)
    offset = tl.arange(0, TILE)[:, None]

    first_cloud = tl.load(query_cloud + first_row)
    last_cloud = tl.load(query_cloud + tl.minimum(first_row + BLOCK_Q, num_queries) - 1)
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
    axes = pos.T.contiguous()
    boxes = cloud_boxes(axes, ptr)
    if query is pos:
        points = queries = along_curve(axes, ptr, boxes)
    else:
        query_axes = query.T.contiguous()
        query_boxes = cloud_boxes(query_axes, query_ptr)
        # One box around both, so that places on the two curves are comparable.
        boxes[:, :3] = torch.minimum(boxes[:, :3], query_boxes[:, :3])
        boxes[:, 3:] = torch.maximum(boxes[:, 3:], query_boxes[:, 3:])
        points = along_curve(axes, ptr, boxes)
        queries = along_curve(query_axes, query_ptr, boxes)
    if query is pos:
        home = torch.arange(0, len(pos), BLOCK_Q, device=pos.device)
    else:
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
