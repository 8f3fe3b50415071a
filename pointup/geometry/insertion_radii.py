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

NUM_NEIGHBORS = 32
"""Neighbours a point, itself among them, that decide when it is picked."""
STRIDE = 2
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
    is_copy = copies(pos, ptr)
    cloud = 2 * batch_from_ptr(node_ptr, len(row)) + is_copy[row]
    cloud, order = cloud.sort(stable=True)
    borders = torch.arange(2 * len(node_ptr) - 1, device=pos.device)
    rank = torch.empty_like(order)
    rank.index_copy_(0, order, torch.arange(len(order), device=pos.device))
    parent = torch.where(parent < 0, parent, rank[parent])[order]

    with assume_valid():
        squared, index = knn(pos[row[order]], torch.searchsorted(cloud, borders), NUM_NEIGHBORS)
    squared = squared.float()
    # Only pairs of which each point is among the neighbours of the other.
    reach = squared[:, -1].contiguous()
    is_far = squared >= torch.minimum(reach[:, None], reach[index])
    neighbor = index.int().masked_fill_(is_far, -1)
    neighbor[:, 0] = -1  # the point itself
    if kernels.take(pos, NUM_NEIGHBORS):
        from pointup.geometry.kernels.insertion import settle as settle_there

        num_levels = (len(node_ptr) - 1) // (len(ptr) - 1)
        squared = settle_there(neighbor, squared, parent.int(), reach, num_levels)
    else:
        squared = settle(neighbor, squared, parent, reach)
    return squared[rank[: len(pos)]].masked_fill(is_copy, 0.0).sqrt()


def coarser_samples(ptr: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (M) of a hierarchy of samples: the points, samples of them, samples of those and so on.

    Returns the point of each node, (M,) int64; the node of the same point in the next coarser
    sample, (M,) int64, -1 for none; and the ptr of all clouds of all samples, finest first: the
    points themselves.
    """
    sizes, device = [sizes_from_ptr(on_host(ptr))], ptr.device
    enough = (on_host(counts) // SHARE).clamp(min=NUM_NEIGHBORS)
    while (sizes[-1] > enough).any():
        sizes.append((sizes[-1] + STRIDE - 1) // STRIDE)
    bounds = ptr_from_sizes(torch.cat(sizes))
    node_ptr = to_device(bounds, device)
    num_points, num_nodes = int(sizes[0].sum()), int(bounds[-1])
    rows = [torch.arange(num_points, device=device)]
    parent = torch.full((num_nodes,), -1, device=device)
    if len(sizes) > 1:
        # Of each node of a sample, where its segment begins, and that of the next finer one.
        first = torch.stack([bounds[len(sizes[0]) : -1], bounds[: -1 - len(sizes[0])]])
        last = first[1] + torch.cat(sizes[:-1]) - 1
        of_level = ptr_from_sizes(torch.stack([of_clouds.sum() for of_clouds in sizes]))
        begins = of_level[:-2].repeat_interleave(len(sizes[0]))
        table = to_device(torch.stack([*first, last, begins]), device)
        segment = batch_from_ptr(node_ptr, num_nodes)[num_points:] - len(sizes[0])
        start, finer_start, finer_last, finer_begins = table.index_select(1, segment).unbind()
        node = torch.arange(num_points, num_nodes, device=device)
        place = node - start
        # Any of the points that it stands for: no raster of the input repeats in the sample.
        finer = finer_start + STRIDE * place + (place * 2654435761 >> 16) % STRIDE
        finer = torch.minimum(finer, finer_last)
        parent = parent.index_copy_(0, finer, node)
        for picked in (finer - finer_begins).split(sizes_from_ptr(of_level)[1:].tolist()):
            rows.append(rows[-1][picked])
    return torch.cat(rows), parent, node_ptr


def copies(pos: Tensor, ptr: Tensor) -> Tensor:
    """Whether an earlier point of the cloud has the same coordinates, (N,) bool.

    A duplicate can be missed where different points have the same hash of 64 bits.
    """
    # Adding zero turns negative zero into zero: the same coordinate has the same bits.
    bits = (pos + 0.0).contiguous().view(torch.int64 if pos.dtype == torch.float64 else torch.int32)
    key = batch_from_ptr(ptr, len(pos))
    for axis in bits.long().unbind(1):
        key = (key * -7046029254386353131) ^ axis
    key, order = key.sort(stable=True)
    place = pos[order]
    is_same = (key[1:] == key[:-1]) & (place[1:] == place[:-1]).all(1)
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
