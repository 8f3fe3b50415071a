"""Insertion radii, in parallel: the distance of each point to earlier farthest-point picks.

Farthest-point sampling picks one point after the other. But a point whose distance to the picks is
the largest within that distance is picked at that distance, independently of picks elsewhere: all
such points can be settled at once (Blelloch et al. 2012, "Greedy sequential maximal independent set
and matching are parallel on average").
"""

from __future__ import annotations

import torch
from torch import Tensor

from pointup.geometry import kernels
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import (
    at_least_float32,
    batch_from_ptr,
    on_host,
    ptr_from_sizes,
    sizes_from_ptr,
    to_device,
)
from pointup.geometry.validity import assume_valid, check_clouds

NUM_NEIGHBORS = 16
"""Neighbours a point, itself among them, that decide when it is picked."""
STRIDE = 4
"""Points of a cloud for each point of its coarser sample."""
SHARE = 4
"""The coarsest sample of a cloud has at most 1 / SHARE of the points that are kept of it."""
# Passes between checks whether all points are settled, on devices without kernels.
_PASSES = 8


@torch.no_grad()
def insertion_radii(pos: Tensor, ptr: Tensor, counts: Tensor) -> Tensor:
    """Distance of each point to the points that farthest-point sampling picks before it.

    Points are compared with their nearest `NUM_NEIGHBORS` only, themselves among them. Larger radii
    come from a sample of one in `STRIDE` points, from a sample of this sample, and so on; `counts`,
    the number of points that the caller keeps of each cloud, determines the coarsest sample. No
    radius exceeds the distance to the last neighbour in the point's coarsest sample; it is infinite
    for the first pick of fewer than `NUM_NEIGHBORS` points. All duplicates of a point but the first
    have the radius 0.

    Shapes: pos (N, 3), ptr (B + 1,), counts (B,) -> (N,) float32. Raises ValueError for
    coordinates that are not finite (naming the cloud).
    """
    check_clouds((pos, ptr))
    if len(pos) == 0:
        return pos.new_zeros(0, dtype=torch.float32)
    pos = at_least_float32(pos)
    row, parent, node_ptr = coarser_samples(ptr, counts)
    # Duplicates would fill the neighbourhood of a point: they form a separate cloud.
    is_copy = copies(pos, ptr)[row]
    cloud = 2 * batch_from_ptr(node_ptr, len(row)) + is_copy
    cloud, order = cloud.sort(stable=True)
    borders = torch.arange(2 * len(node_ptr) - 1, device=pos.device)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=pos.device)
    parent = torch.where(parent < 0, parent, rank[parent.clamp(min=0)])[order]

    with assume_valid():
        squared, index = knn(pos[row[order]], torch.searchsorted(cloud, borders), NUM_NEIGHBORS)
    squared = squared.float()
    # Only pairs of which each point is among the neighbours of the other.
    reach = squared[:, -1].contiguous()
    is_near = squared < torch.minimum(reach[:, None], reach[index.clamp(min=0)])
    is_near &= (index >= 0) & (index != index[:, :1])
    neighbor = torch.where(is_near, index, -1).int()
    if kernels.take(pos, NUM_NEIGHBORS):
        from pointup.geometry.kernels.insertion import settle as settle_there

        squared = settle_there(neighbor, squared, parent.int(), reach)
    else:
        squared = settle(neighbor, squared, parent, reach)
    return squared[rank[: len(pos)]].masked_fill(is_copy[: len(pos)], 0.0).sqrt()


def coarser_samples(ptr: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (M) of a hierarchy of samples: the points, samples of them, samples of those and so on.

    Returns the point of each node, (M,) int64; the node of the same point in the next coarser
    sample, (M,) int64, -1 for none; and the ptr of all clouds of all samples, finest first, which
    is the points themselves.
    """
    sizes, device = sizes_from_ptr(on_host(ptr)), ptr.device
    enough = (on_host(counts) // SHARE).clamp(min=NUM_NEIGHBORS)
    levels, level_ptr = [sizes], ptr
    rows = [torch.arange(int(sizes.sum()), device=device)]
    parents: list[Tensor] = []
    while (levels[-1] > enough).any():
        finer_ptr = level_ptr
        levels.append((levels[-1] + STRIDE - 1) // STRIDE)
        num_nodes = int(levels[-1].sum())
        level_ptr = to_device(ptr_from_sizes(levels[-1]), device)
        cloud = batch_from_ptr(level_ptr, num_nodes)
        place = torch.arange(num_nodes, device=device) - level_ptr[cloud]
        # Any of the points that it stands for: no raster of the input repeats in the sample.
        picked = STRIDE * place + (place * 2654435761 >> 16) % STRIDE
        picked = torch.minimum(finer_ptr[cloud] + picked, finer_ptr[cloud + 1] - 1)
        first = sum(len(row) for row in rows)
        parents.append(torch.full_like(rows[-1], -1))
        parents[-1][picked] = torch.arange(first, first + num_nodes, device=device)
        rows.append(rows[-1][picked])
    parents.append(torch.full_like(rows[-1], -1))
    node_ptr = to_device(ptr_from_sizes(torch.cat(levels)), device)
    return torch.cat(rows), torch.cat(parents), node_ptr


def copies(pos: Tensor, ptr: Tensor) -> Tensor:
    """Whether an earlier point of the cloud has the same coordinates, (N,) bool.

    A duplicate can be missed where different points have the same hash of 64 bits.
    """
    # Adding zero turns negative zero into zero: the same coordinate has the same bits.
    bits = (pos + 0.0).contiguous().view(torch.int64 if pos.dtype == torch.float64 else torch.int32)
    key = batch_from_ptr(ptr, len(pos))
    for axis in bits.long().unbind(1):
        key = (key ^ axis) * -7046029254386353131
        key = key ^ (key >> 29)
    key, order = key.sort(stable=True)
    is_same = (key[1:] == key[:-1]) & (pos[order[1:]] == pos[order[:-1]]).all(1)
    return torch.zeros(len(pos), dtype=torch.bool, device=pos.device).index_copy(
        0, order[1:], is_same
    )


def settle(neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor) -> Tensor:
    """Squared insertion radii (M,) on any device, at most the larger of `limit` (M,) and the
    parent's radius.

    Of two neighbours closer to each other than both radii, the one with the larger radius is picked
    first and lowers the radius of the other to their distance. A point is settled when no neighbour
    precedes it any more and its parent is settled. Its initial radius is the larger of its parent's
    radius and its own limit.

    Shapes: `neighbor` (M, K) int32, symmetric, -1 for none; `squared` (M, K) float32, squared
    distances to them; `parent` (M,), -1 for none; `limit` (M,) float32, squared.
    """
    other, has_parent = neighbor.long().clamp(min=0), parent >= 0
    parent = parent.long().clamp(min=0)
    radius = torch.where(has_parent, torch.inf, limit)
    number = torch.arange(len(radius), device=radius.device, dtype=torch.int32)
    first = number * -1640531535
    goes_first = first[other] > first[:, None]
    is_near = neighbor >= 0
    is_settled = torch.zeros_like(has_parent)
    while True:
        for _ in range(_PASSES):
            theirs, own = radius[other], radius[:, None]
            is_before = (theirs > own) | ((theirs == own) & goes_first)
            is_before &= is_near & (squared < own)
            lowered = squared.masked_fill(~(is_before & is_settled[other]), torch.inf).amin(1)
            must_wait = has_parent & ~is_settled[parent]
            bound = torch.maximum(radius[parent], limit)
            bound = bound.masked_fill(~has_parent | must_wait, torch.inf)
            settles = ~is_settled & ~is_before.any(1) & ~must_wait & (bound >= radius)
            lowered = torch.minimum(radius, torch.minimum(lowered, bound))
            radius = torch.where(is_settled | settles, radius, lowered)
            is_settled = is_settled | settles
        if is_settled.all():
            return radius
