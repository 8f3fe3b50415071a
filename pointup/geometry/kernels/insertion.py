"""Insertion radii on CUDA: a fixed number of launches for any number of clouds of any size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 64 points with their 16 neighbours in 8 warps: 4 pairs a thread.
BLOCK = 64
NUM_WARPS = 8
# Passes of a program over its points in one launch, as long as they change something.
PASSES = 8
# Surfaces and surveys are settled after 30 to 60 passes; a launch whose points are all settled ends
# after one load. What isn't settled in the end counts as 0.
LAUNCHES = 64
# Bits of float32, all but the sign, and those of infinity.
MAGNITUDE = tl.constexpr(2**31 - 1)
SIGN = tl.constexpr(-(2**31))
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def scrambled(number: tl.tensor) -> tl.tensor:
    """A bijective hash of int32 numbers, which breaks ties."""
    return number * -1640531535


@triton.jit(do_not_specialize=["num_points"])
def insertion_kernel(
    neighbor: tl.tensor,
    squared: tl.tensor,
    parent: tl.tensor,
    limit: tl.tensor,
    state: tl.tensor,
    num_points: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
) -> None:
    """One program for `BLOCK` points.

    The state of a point is the bits of its squared radius, negative once it is settled: one word,
    so that other programs see both or neither. Radii only fall, and an old value read by another
    program only makes it wait: the result does not depend on the order in which programs run.
    """
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_point = point < num_points
    own = tl.load(state + point, mask=is_point, other=-1)
    num_passes = tl.where(tl.max(own, axis=0) >= 0, PASSES, 0)
    if num_passes > 0:
        place = point.to(tl.int64)[:, None] * K + tl.arange(0, K)[None, :]
        other = tl.load(neighbor + place, mask=is_point[:, None], other=-1)
        is_near = other >= 0
        between = tl.load(squared + place, mask=is_near, other=float("inf"))
        between = between.to(tl.int32, bitcast=True)
        coarse = tl.load(parent + point, mask=is_point, other=-1)
        least = tl.load(limit + point, mask=is_point, other=0.0).to(tl.int32, bitcast=True)
        goes_first = scrambled(other) > scrambled(point)[:, None]
        while num_passes > 0:
            found = tl.load(
                state + other, mask=is_near & (own >= 0)[:, None], other=0, volatile=True
            )
            radius = found & MAGNITUDE
            is_before = (radius > own[:, None]) | ((radius == own[:, None]) & goes_first)
            is_before = is_before & is_near & (between < own[:, None])
            lowered = tl.min(tl.where(is_before & (found < 0), between, INFINITY), axis=1)
            bound = tl.load(state + coarse, mask=coarse >= 0, other=-1, volatile=True)
            waits = (bound >= 0) | (tl.max(is_before.to(tl.int32), axis=1) > 0)
            bound = tl.where(bound >= 0, INFINITY, tl.maximum(bound & MAGNITUDE, least))
            settles = (waits == 0) & (bound >= own)
            new = tl.where(settles, own | SIGN, tl.minimum(own, tl.minimum(lowered, bound)))
            new = tl.where(own < 0, own, new)
            is_changed = is_point & (new != own)
            tl.store(state + point, new, mask=is_changed)
            own = new
            num_changed = tl.sum(is_changed.to(tl.int32), axis=0)
            num_passes = tl.where(num_changed > 0, num_passes - 1, 0)
            tl.debug_barrier()


def settle(neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor) -> Tensor:
    """What `insertion.settle` returns, which describes the shapes; `parent` is int32 too."""
    state = torch.where(parent < 0, limit, torch.inf).view(torch.int32)
    grid = (triton.cdiv(len(state), BLOCK),)
    with torch.cuda.device_of(state):
        for _ in range(LAUNCHES):
            insertion_kernel[grid](
                neighbor, squared, parent, limit, state, len(state),
                K=neighbor.shape[1], BLOCK=BLOCK, PASSES=PASSES, num_warps=NUM_WARPS,
            )  # fmt: skip
    return torch.where(state < 0, state & 0x7FFFFFFF, 0).view(torch.float32)
