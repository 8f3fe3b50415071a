"""Nearest neighbour between packed clouds on CUDA: compares all pairs of a cloud in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointup.geometry.packed import batch_from_ptr

# 64 x 32 pairs at a time in 4 warps: 16 per thread, of one point and 16 queries. Compiled for sm_90
# this takes 8.7 instructions per pair; twice the points take 8 instructions, but spill registers.
BLOCK_Q = 64
BLOCK_K = 32
NUM_WARPS = 4
# Registers per thread: few enough for three programs per multiprocessor, enough for float32.
MAX_REGISTERS = 168
# Pairs above which sorting the points to compare fewer pairs is expected to pay: a few ms of work.
SMALL = 10**10
NONE = tl.constexpr(2**31 - 1)
# Points after which the kernel notes which queries found a nearer point among them.
GROUP = 512


@triton.jit
def squared_distance(
    x: tl.tensor,
    y: tl.tensor,
    z: tl.tensor,
    other_x: tl.tensor,
    other_y: tl.tensor,
    other_z: tl.tensor,
) -> tl.tensor:
    """Squared distance with the same rounding at each call: results can be compared by equality."""
    x, y, z = x - other_x, y - other_y, z - other_z
    return tl.fma(z, z, tl.fma(y, y, x * x))


# One compiled kernel per dtype, for all sizes and alignments of a row of coordinates.
@triton.jit(
    do_not_specialize=["num_queries"],
    do_not_specialize_on_alignment=[
        "query_x", "query_y", "query_z", "query_cloud", "x", "y", "z", "cloud_start", "cloud_stop",
    ],
)  # fmt: skip
def nearest_kernel(
    query_x: tl.tensor,
    query_y: tl.tensor,
    query_z: tl.tensor,
    query_cloud: tl.tensor,
    num_queries: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    z: tl.tensor,
    cloud_start: tl.tensor,
    cloud_stop: tl.tensor,
    index: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One program for `BLOCK_Q` consecutive queries, of one cloud or several.

    The inner loop only keeps the least distance of each query and column of pairs. The group of
    points that holds it is noted once per group; the point is identified there at the end.
    """
    first_row = tl.program_id(0) * BLOCK_Q
    row = first_row + tl.arange(0, BLOCK_Q)
    is_query = row < num_queries
    qx = tl.load(query_x + row, mask=is_query, other=0.0)
    qy = tl.load(query_y + row, mask=is_query, other=0.0)
    qz = tl.load(query_z + row, mask=is_query, other=0.0)
    cloud_of_row = tl.load(query_cloud + row, mask=is_query, other=-1)
    column = tl.arange(0, BLOCK_K)[None, :]
    found = tl.full([BLOCK_Q], -1, tl.int32)

    first_cloud = tl.load(query_cloud + first_row)
    last_cloud = tl.load(query_cloud + tl.minimum(first_row + BLOCK_Q, num_queries) - 1)
    for cloud in range(first_cloud, last_cloud + 1):
        start = tl.load(cloud_start + cloud).to(tl.int32)
        stop = tl.load(cloud_stop + cloud).to(tl.int32)
        best = tl.full([BLOCK_Q, BLOCK_K], float("inf"), qx.dtype)
        best_group = tl.zeros([BLOCK_Q, BLOCK_K], tl.int32) + start
        # A point at infinity is never the nearest: the pairs need no mask.
        kx = tl.load(x + start + column, mask=start + column < stop, other=float("inf"))
        ky = tl.load(y + start + column, mask=start + column < stop, other=float("inf"))
        kz = tl.load(z + start + column, mask=start + column < stop, other=float("inf"))
        for group in range(start, stop, GROUP):
            least = tl.full([BLOCK_Q, BLOCK_K], float("inf"), qx.dtype)
            for tile in range(group, tl.minimum(group + GROUP, stop), BLOCK_K):
                # Loaded a tile ahead, because memory latency exceeds the work on a tile.
                key = tile + BLOCK_K + column
                next_x = tl.load(x + key, mask=key < stop, other=float("inf"))
                next_y = tl.load(y + key, mask=key < stop, other=float("inf"))
                next_z = tl.load(z + key, mask=key < stop, other=float("inf"))
                pairs = squared_distance(qx[:, None], qy[:, None], qz[:, None], kx, ky, kz)
                least = tl.minimum(least, pairs)
                kx, ky, kz = next_x, next_y, next_z
            is_closer = least < best
            best = tl.where(is_closer, least, best)
            best_group = tl.where(is_closer, group, best_group)

        closest = tl.min(best, axis=1)
        is_closest = best == closest[:, None]
        first = tl.min(tl.where(is_closest, best_group + column, NONE), axis=1)
        key = first[:, None] + tl.arange(0, GROUP // BLOCK_K)[None, :] * BLOCK_K
        is_key = key < stop
        kx = tl.load(x + key, mask=is_key, other=0.0)
        ky = tl.load(y + key, mask=is_key, other=0.0)
        kz = tl.load(z + key, mask=is_key, other=0.0)
        pairs = squared_distance(qx[:, None], qy[:, None], qz[:, None], kx, ky, kz)
        is_closest = is_key & (pairs == closest[:, None])
        choice = tl.min(tl.where(is_closest, key, NONE), axis=1)
        # Where all distances are NaN, any point: the caller's distance is then NaN too.
        choice = tl.where(choice == NONE, tl.where(start < stop, start, -1), choice)
        found = tl.where(cloud_of_row == cloud, choice, found)
    tl.store(index + row, found.to(tl.int64), mask=is_query)


def is_small(query: Tensor, pos: Tensor, ptr: Tensor) -> bool:
    """Whether to compare all pairs, estimated for clouds of equal sizes, without a device sync."""
    return len(query) * len(pos) <= SMALL * max(1, len(ptr) - 1)


def nearest_index(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> Tensor:
    """Index (Q,) int64 into `pos` (N, 3) of the nearest point of the same cloud; -1 for none."""
    index = torch.empty(len(query), dtype=torch.int64, device=query.device)
    if len(query) == 0:
        return index
    axes = pos.T.contiguous()
    query_axes = axes if query is pos else query.T.contiguous()
    query_cloud = batch_from_ptr(query_ptr, len(query)).int()
    # Triton's AMD backend has no `maxnreg`.
    is_limited = pos.dtype == torch.float32 and torch.version.hip is None
    limit = {"maxnreg": MAX_REGISTERS} if is_limited else {}
    with torch.cuda.device_of(pos):
        nearest_kernel[(triton.cdiv(len(query), BLOCK_Q),)](
            *query_axes, query_cloud, len(query), *axes, ptr[:-1], ptr[1:], index,
            BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K, GROUP=GROUP, num_warps=NUM_WARPS, **limit,
        )  # fmt: skip
    return index
