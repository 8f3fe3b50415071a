"""Sorts the points of each cloud along a Morton curve, on CUDA, and bounds tiles of them by boxes.

Consecutive points of the curve lie close together, so that a search can skip a whole tile whose
box is too far away. Morton 1966, A Computer Oriented Geodetic Data Base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointup.geometry.packed import batch_from_ptr

TILE = 32
"""Consecutive points that share a box."""

PLACE_BITS, MOST_CLOUDS = 48, 2**15
"""Bits of a place on the curve, and the number of clouds that the other bits can count."""
FEWER_PLACE_BITS = 32
"""Bits of a place with more clouds than that: coarser, so that more points share a place."""

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
    """Number of the cloud of each point, (N,) int32."""
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
    """Number of the cell, clamped to 0 ... 65535: more would overlap the number of the cloud."""
    # Divided: the inverse of the side overflows for clouds smaller than 2e-34.
    share = offset / side
    return tl.where(share >= 0, tl.minimum(share, 1.0) * 65535, 0.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_points"])
def curve_kernel(
    axes: tl.tensor,
    cloud: tl.tensor,
    boxes: tl.tensor,
    code: tl.tensor,
    num_points: tl.tensor,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Place on the curve, in cells of 1 / 65536 of the longest side of the cloud's box; the upper
    `BITS` of its 48 bits are kept."""
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_point = point < num_points
    number = tl.load(cloud + point, mask=is_point, other=0)
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
    place = place >> (48 - BITS)
    tl.store(code + point, (number.to(tl.int64) << BITS) | place, mask=is_point)


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
    cloud = batch_from_ptr(ptr, num_points).int()
    code = torch.empty(num_points, dtype=torch.int64, device=axes.device)
    bits = PLACE_BITS if len(boxes) <= MOST_CLOUDS else FEWER_PLACE_BITS
    if num_points:
        with torch.cuda.device_of(axes):
            curve_kernel[(triton.cdiv(num_points, BLOCK),)](
                axes, cloud, boxes, code, num_points, BLOCK=BLOCK, BITS=bits, num_warps=4
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
