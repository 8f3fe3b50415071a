"""Insertion radii on CUDA: a fixed number of launches for any number of clouds of any size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16 points with their 32 neighbours in one warp: 16 pairs per thread. One warp, because a program
# decides by states that other programs change. Of several warps each may read them by itself, as
# the layouts of some versions of triton have it. Warps that read before and after a change would
# take different branches, and wait at different barriers.
BLOCK = 16
NUM_WARPS = 1
# Most passes of a program over a block of its points per round; it stops when nothing changes.
PASSES = 8
# Rounds without a change, for each level of the hierarchy, after which a program no longer waits
# for others: these may not run at all. Most points of a level wait for those of all coarser levels.
# If all programs advance together, each level takes about 20 passes.
PATIENCE = 32
# Launches in which programs share the points. The first settles all points if its programs run
# concurrently, at about the same speed; the second goes on where they did not. A last launch of a
# single program settles the points that both leave.
LAUNCHES = 2
# Programs per multiprocessor, which run concurrently: 8 warps of 255 registers per thread fit.
PROGRAMS = 8
MOST_PROGRAMS = tl.constexpr(1024)
# Bits of float32, all but the sign, and those of infinity.
MAGNITUDE = tl.constexpr(2**31 - 1)
SIGN = tl.constexpr(-(2**31))
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def scrambled(number: tl.tensor) -> tl.tensor:
    """A bijective hash of int32 numbers, which breaks ties."""
    return number * -1640531535


@triton.jit(do_not_specialize=["num_points", "num_before", "patience"])
def insertion_kernel(
    neighbor: tl.tensor,
    squared: tl.tensor,
    parent: tl.tensor,
    limit: tl.tensor,
    state: tl.tensor,
    left_before: tl.tensor,
    left_after: tl.tensor,
    num_points: tl.tensor,
    num_before: tl.tensor,
    patience: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
) -> None:
    """Each program handles every `num_programs`-th block of points, in rounds.

    The state of a point is the bits of its squared radius, negative once it is settled: one word,
    so that other programs see both or neither. Radii only fall, and an old value read by another
    program only makes it wait: the result does not depend on the order in which programs run.

    Programs end at once if the `num_before` programs of the previous launch left no point
    unsettled, and leave after `patience` rounds without a change. They count the points that they
    leave. A single program changes something in each round, because no point precedes the one with
    the largest radius: it settles all points.
    """
    program = tl.program_id(0)
    before = tl.arange(0, MOST_PROGRAMS)
    num_left = tl.sum(tl.load(left_before + before, mask=before < num_before, other=0), axis=0)
    num_left = tl.where(num_before > 0, num_left, 1)
    num_rounds = tl.where(num_left > 0, patience, 0)
    while num_rounds > 0:
        num_left = num_left * 0
        num_changed = num_left
        for first in range(program * BLOCK, num_points, tl.num_programs(0) * BLOCK):
            point = first + tl.arange(0, BLOCK)
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
                least = tl.load(limit + point, mask=is_point, other=0.0)
                least = least.to(tl.int32, bitcast=True)
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
                    num_now = tl.sum(is_changed.to(tl.int32), axis=0)
                    num_changed += num_now
                    num_passes = tl.where(num_now > 0, num_passes - 1, 0)
                    tl.debug_barrier()
                num_left += tl.sum((own >= 0).to(tl.int32), axis=0)
        num_rounds = tl.where(num_changed > 0, patience, num_rounds - 1)
        num_rounds = tl.where(num_left > 0, num_rounds, 0)
    tl.store(left_after + program, num_left)


def settle(
    neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor, num_levels: int
) -> Tensor:
    """As `thinning.settle`, which states the shapes; `parent` is int32 here.

    `num_levels`: levels of the hierarchy; each is settled after the next coarser one.
    """
    state = limit.masked_fill(parent >= 0, torch.inf).view(torch.int32)
    num_programs = max(1, min(triton.cdiv(len(state), BLOCK), programs_at_once(state.device)))
    grids = [num_programs] * LAUNCHES + [1]
    left = torch.empty(
        (len(grids) + 1, MOST_PROGRAMS.value), dtype=torch.int32, device=state.device
    )
    # The interpreter runs one program after the other.
    patience = PATIENCE * num_levels if state.device.type == "cuda" else 1
    with torch.cuda.device_of(state):
        for launch, grid in enumerate(grids):
            insertion_kernel[(grid,)](
                neighbor, squared, parent, limit, state, left[launch], left[launch + 1],
                len(state), num_programs if launch else 0, patience,
                K=neighbor.shape[1], BLOCK=BLOCK, PASSES=PASSES, num_warps=NUM_WARPS,
            )  # fmt: skip
    return (state & 0x7FFFFFFF).view(torch.float32)


def programs_at_once(device: torch.device) -> int:
    """Number of programs that a device runs concurrently; a few in the interpreter."""
    if device.type != "cuda":
        return 4
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return min(PROGRAMS * count, MOST_PROGRAMS.value)
