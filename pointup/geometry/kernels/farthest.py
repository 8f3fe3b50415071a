"""Farthest-point sampling on CUDA: one program per cloud, all picks in one launch.

A small cloud is held in the program's registers. A large one is cut into tiles along a Morton
curve, and each pick updates only the tiles whose distances it can lower: QuickFPS (Han et al.
2023), with boxes in place of its tree.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointup.geometry.kernels.knn import along_curve, cloud_boxes
from pointup.geometry.kernels.nearest import squared_distance
from pointup.geometry.packed import at_least_float32, ptr_from_sizes, to_device

# Points of the largest cloud held in registers, 16 per thread.
MAX_IN_REGISTERS = 8192
# Points per tile, doubled until no cloud has more than MAX_TILES.
TILE = 64
MAX_TILES = 2048
# Points of active tiles that a program updates at a time.
BLOCK = 1024
# Few warps: a pick is a chain of short steps, and each warp repeats most of their instructions.
NUM_WARPS = 8
NONE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_points"])
def farthest_kernel(
    axes: tl.tensor,
    ptr: tl.tensor,
    out_ptr: tl.tensor,
    index: tl.tensor,
    num_points: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per cloud of up to `BLOCK` points."""
    cloud = tl.program_id(0)
    start = tl.load(ptr + cloud)
    size = tl.load(ptr + cloud + 1) - start
    out = tl.load(out_ptr + cloud)
    # Pointers in steps: three times the number of points may exceed 32 bits.
    x_axis = axes + start
    y_axis = x_axis + num_points
    z_axis = y_axis + num_points
    point = tl.arange(0, BLOCK)
    x = tl.load(x_axis + point, mask=point < size, other=0.0)
    y = tl.load(y_axis + point, mask=point < size, other=0.0)
    z = tl.load(z_axis + point, mask=point < size, other=0.0)
    # Squared distance to the picked points; -1 for picked points and padding.
    distance = tl.where(point < size, float("inf"), -1.0).to(x.dtype)
    pick = tl.program_id(0) * 0
    for step in range((tl.load(out_ptr + cloud + 1) - out).to(tl.int32)):
        tl.store(index + out + step, start + pick)
        squared = squared_distance(
            x, y, z, tl.load(x_axis + pick), tl.load(y_axis + pick), tl.load(z_axis + pick)
        )
        distance = tl.where(point == pick, -1.0, tl.minimum(distance, squared))
        # The first of equals, so that duplicates follow in the order of their indices.
        pick = tl.argmax(distance, axis=0)


@triton.jit(do_not_specialize=["num_points"])
def farthest_tiles_kernel(
    axes: tl.tensor,
    sorted_axes: tl.tensor,
    order: tl.tensor,
    ptr: tl.tensor,
    tile_ptr: tl.tensor,
    out_ptr: tl.tensor,
    index: tl.tensor,
    distance: tl.tensor,
    tile_distance: tl.tensor,
    tile_point: tl.tensor,
    active_tile: tl.tensor,
    num_points: tl.tensor,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One program per cloud of up to `NUM_TILES` tiles, of which it updates `GROUP` at a time.

    The distance and the index of each tile's farthest point are in global memory. A barrier
    separates writes from reads by other threads.
    """
    cloud = tl.program_id(0)
    start = tl.load(ptr + cloud)
    size = (tl.load(ptr + cloud + 1) - start).to(tl.int32)
    out = tl.load(out_ptr + cloud)
    count = (tl.load(out_ptr + cloud + 1) - out).to(tl.int32)
    num_tiles = tl.cdiv(size, TILE)
    first_tile = tl.load(tile_ptr + cloud)
    tile_distance += first_tile
    tile_point += first_tile
    active_tile += first_tile
    order += start
    distance += start
    x_axis = axes + start
    y_axis = x_axis + num_points
    z_axis = y_axis + num_points
    sorted_x = sorted_axes + start
    sorted_y = sorted_x + num_points
    sorted_z = sorted_y + num_points
    tile = tl.arange(0, NUM_TILES)
    slot = tl.arange(0, GROUP)
    offset = tl.arange(0, TILE)[None, :]
    infinity = float("inf")

    # The box of each tile: computed once, one tile per thread.
    low_x = tl.full([NUM_TILES], infinity, axes.dtype.element_ty)
    low_y, low_z = low_x, low_x
    high_x, high_y, high_z = -low_x, -low_x, -low_x
    for i in range(TILE):
        place = tile * TILE + i
        x = tl.load(sorted_x + place, mask=place < size, other=infinity)
        y = tl.load(sorted_y + place, mask=place < size, other=infinity)
        z = tl.load(sorted_z + place, mask=place < size, other=infinity)
        low_x = tl.minimum(low_x, x)
        low_y = tl.minimum(low_y, y)
        low_z = tl.minimum(low_z, z)
        high_x = tl.maximum(high_x, tl.where(place < size, x, -infinity))
        high_y = tl.maximum(high_y, tl.where(place < size, y, -infinity))
        high_z = tl.maximum(high_z, tl.where(place < size, z, -infinity))
    farthest = tl.where(tile < num_tiles, infinity, -1.0).to(low_x.dtype)

    pick = tl.program_id(0) * 0
    pick_tile = pick
    for step in range(count):
        tl.store(index + out + step, start + pick)
        px = tl.load(x_axis + pick)
        py = tl.load(y_axis + pick)
        pz = tl.load(z_axis + pick)
        dx = tl.maximum(tl.maximum(low_x - px, px - high_x), 0.0)
        dy = tl.maximum(tl.maximum(low_y - py, py - high_y), 0.0)
        dz = tl.maximum(tl.maximum(low_z - pz, pz - high_z), 0.0)
        # Rounded in the same way as the distances of the tile's points: never above them.
        bound = tl.fma(dz, dz, tl.fma(dy, dy, dx * dx))
        is_active = (tile < num_tiles) & ((bound < farthest) | (tile == pick_tile))
        rank = tl.cumsum(is_active.to(tl.int32), axis=0)
        num_active = tl.max(rank, axis=0)
        tl.store(active_tile + rank - 1, tile, mask=is_active)
        tl.debug_barrier()
        for group in range(0, num_active, GROUP):
            is_slot = group + slot < num_active
            number = tl.load(active_tile + group + slot, mask=is_slot, other=0)
            place = number[:, None] * TILE + offset
            is_point = is_slot[:, None] & (place < size)
            x = tl.load(sorted_x + place, mask=is_point, other=0.0)
            y = tl.load(sorted_y + place, mask=is_point, other=0.0)
            z = tl.load(sorted_z + place, mask=is_point, other=0.0)
            point = (tl.load(order + place, mask=is_point, other=0) - start).to(tl.int32)
            nearest = tl.load(distance + place, mask=is_point, other=-1.0)
            nearest = tl.minimum(nearest, squared_distance(x, y, z, px, py, pz))
            nearest = tl.where(is_point & (point != pick), nearest, -1.0)
            tl.store(distance + place, nearest, mask=is_point)
            most = tl.max(nearest, axis=1)
            # The first of equals, so that duplicates follow in the order of their indices.
            is_most = is_point & (nearest == most[:, None])
            first = tl.min(tl.where(is_most, point, NONE), axis=1)
            tl.store(tile_distance + number, most, mask=is_slot)
            tl.store(tile_point + number, first, mask=is_slot)
        tl.debug_barrier()
        farthest = tl.load(tile_distance + tile, mask=tile < num_tiles, other=-1.0)
        point = tl.load(tile_point + tile, mask=tile < num_tiles, other=NONE)
        most = tl.max(farthest, axis=0)
        pick = tl.min(tl.where(farthest == most, point, NONE), axis=0)
        pick_tile = tl.min(tl.where((farthest == most) & (point == pick), tile, NONE), axis=0)


def farthest_points(pos: Tensor, ptr: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
    """Index (sum(counts),) int64 into `pos` of farthest points of each cloud, in order of picking.

    The first pick of a cloud is its first point; all picks are distinct. `bounds` are the values
    of `ptr`; no count exceeds the size of its cloud.
    """
    index = torch.empty(sum(counts), dtype=torch.int64, device=pos.device)
    if len(index) == 0:
        return index
    pos = at_least_float32(pos)
    out_ptr = to_device(ptr_from_sizes(torch.tensor(counts)), pos.device)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    largest = max(sizes)
    if largest <= MAX_IN_REGISTERS:
        block = max(64, triton.next_power_of_2(largest))
        with torch.cuda.device_of(pos):
            farthest_kernel[(len(counts),)](
                pos.T.contiguous(), ptr, out_ptr, index, len(pos),
                BLOCK=block, num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip
        return index

    tile = TILE
    while triton.cdiv(largest, tile) > MAX_TILES:
        tile *= 2
    num_tiles = [triton.cdiv(size, tile) for size in sizes]
    tile_ptr = to_device(ptr_from_sizes(torch.tensor(num_tiles)), pos.device)
    axes = pos.T.contiguous()
    curve = along_curve(axes, ptr, cloud_boxes(axes, ptr))
    distance = torch.full_like(pos[:, 0], torch.inf)
    tile_distance = pos.new_empty(sum(num_tiles))
    tile_point, active = torch.empty((2, sum(num_tiles)), dtype=torch.int32, device=pos.device)
    with torch.cuda.device_of(pos):
        farthest_tiles_kernel[(len(counts),)](
            axes, curve.axes, curve.order, ptr, tile_ptr, out_ptr, index,
            distance, tile_distance, tile_point, active, len(pos),
            TILE=tile, NUM_TILES=triton.next_power_of_2(max(num_tiles)),
            GROUP=max(1, BLOCK // tile), num_warps=NUM_WARPS,
        )  # fmt: skip
    return index
