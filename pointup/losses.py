"""Losses between packed clouds: one value per cloud, independent of the rest of the batch.

All take `pos` (N, 3) with `ptr` (B + 1,), most also a `target` (M, 3) with `target_ptr` (B + 1,),
and return (B,) float32 (float64 for float64 points), under autocast too. They are differentiable
in `pos` and `target`, with finite gradients at distance zero. Where either cloud of a pair is
empty, the value is 0 without gradient. Coordinates that are not finite raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pointup.geometry.neighbors import knn, nearest, nearest_both, nearest_point
from pointup.geometry.packed import (
    at_least_float32,
    batch_from_ptr,
    has_empty,
    safe_sqrt,
    segment_mean,
    segment_rank,
    segment_sum,
    sizes_from_ptr,
)


def chamfer_distance(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor, squared: bool = False
) -> Tensor:
    """Chamfer distance: mean distance from `pos` to `target` plus mean distance back.

    Convention: distances are unsquared, in the unit of the data, or, with `squared`, squared before
    the means. The sum of both directions is not halved. Fan et al. 2017, A Point Set Generation
    Network.
    """
    to_target, to_pos = directed_chamfer_distances(pos, ptr, target, target_ptr, squared)
    return to_target + to_pos


def directed_chamfer_distances(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor, squared: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean distance from `pos` to the nearest of `target`, and from `target` to the nearest of
    `pos`: the two terms of `chamfer_distance`, each (B,)."""
    found = nearest_both(pos, ptr, target, target_ptr)
    to_target, to_pos = (matched(distance) for distance, _ in found)
    if not squared:
        to_target, to_pos = safe_sqrt(to_target), safe_sqrt(to_pos)
    return segment_mean(to_target, ptr), segment_mean(to_pos, target_ptr)


def density_aware_chamfer_distance(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor, alpha: float, trim: float = 0.0
) -> Tensor:
    """Chamfer distance whose terms saturate and are shared by points with the same neighbour.

    Let d be the unsquared distance of a point to its nearest neighbour y, n_y the number of points
    with this neighbour, and r the number of points per point of the other cloud, at least 1. Each
    direction is the mean of 1 - r / n_y exp(-alpha d); the result is half the sum of both. It lies
    between 0, for equal clouds, and 1. Wu et al. 2021, Density-aware Chamfer Distance as a
    Comprehensive Metric for Point Cloud Completion; unsquared distances as in the paper, r as in
    its code (`non_reg`).

    `alpha` is per unit of the data. `trim`, in [0, 1), is the share of the target's points, those
    farthest from `pos`, left out of the direction from the target: objects that only one of two
    surveys contains. Raises ValueError for another `trim`.
    """
    if not 0 <= trim < 1:
        raise ValueError(f"trim must lie in [0, 1), got {trim}")
    squared, index = nearest(target, target_ptr, pos, ptr)
    sizes = sizes_from_ptr(target_ptr)
    num_kept = (sizes - (trim * sizes).floor())[batch_from_ptr(target_ptr, len(target))]
    kept = segment_rank(squared.detach(), target_ptr) < num_kept
    from_target = _density_aware(squared, index, target_ptr, ptr, len(pos), kept, alpha)
    squared, index = nearest(pos, ptr, target, target_ptr)
    kept = torch.ones_like(index, dtype=torch.bool)
    to_target = _density_aware(squared, index, ptr, target_ptr, len(target), kept, alpha)
    return 0.5 * (from_target + to_target)


def _density_aware(
    squared: Tensor,
    index: Tensor,
    ptr: Tensor,
    other_ptr: Tensor,
    num_others: int,
    kept: Tensor,
    alpha: float,
) -> Tensor:
    """One direction, from the kept points to their neighbours `index`."""
    kept = kept & (index >= 0)
    num_kept, num_other = segment_sum(kept.long(), ptr), sizes_from_ptr(other_ptr)
    neighbor = index.clamp(min=0)
    num_sharing = torch.zeros(num_others + 1, dtype=torch.int64, device=index.device)
    num_sharing.index_add_(0, neighbor, kept.long())
    # A quotient of integers would have the default dtype of torch.
    crowding = (num_kept.to(squared.dtype) / num_other.clamp(min=1)).clamp(min=1)
    crowding = crowding[batch_from_ptr(ptr, len(squared))]
    closeness = torch.exp(-alpha * safe_sqrt(matched(squared)))
    # Only points that are left out have a `num_sharing` of 0.
    terms = 1 - crowding / num_sharing[neighbor].clamp(min=1) * closeness
    return segment_sum(terms.masked_fill(~kept, 0.0), ptr) / num_kept.clamp(min=1)


def repulsion_loss(pos: Tensor, ptr: Tensor, k: int, radius: Tensor | float) -> Tensor:
    """Mean over points and their k nearest neighbours of max(0, radius - distance).

    In the unit of the data; a missing neighbour counts as 0. `radius`: a number, or (B,). Exact
    duplicates have no gradient, because no direction separates them. Yu et al. 2018, PU-Net, use a
    weighted distance; the hinge is never negative and is 0 from the radius on.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    _, index = knn(pos, ptr, k + 1)
    index, pos = index[:, 1:], at_least_float32(pos)
    found = index >= 0
    neighbor = pos[index.clamp(min=0)]
    distance = safe_sqrt((pos[:, None] - neighbor).square().sum(2))
    limit = torch.as_tensor(radius, dtype=pos.dtype, device=pos.device).expand(len(ptr) - 1)
    intrusion = (limit[batch_from_ptr(ptr, len(pos)), None] - distance).relu()
    return segment_mean(intrusion.masked_fill(~found, 0.0).mean(1), ptr)


def point_to_plane_distance(
    pos: Tensor,
    ptr: Tensor,
    target: Tensor,
    target_ptr: Tensor,
    target_normals: Tensor,
    index: Tensor | None = None,
) -> Tensor:
    """Mean over `pos` of the distance to the tangent plane at the nearest target point.

    |(p - q) . n| with q the target point nearest to p and n its unit normal, of either sign;
    unsquared, in the unit of the data. `target_normals`: (M, 3). Chen and Medioni 1992.
    `index`: (N,) the result of `nearest_point`, where it is known.
    """
    if index is None:
        index = nearest_point(pos, ptr, target, target_ptr)
    if len(target) == 0:
        return segment_mean(0.0 * at_least_float32(pos).sum(1), ptr)
    offset = at_least_float32(pos) - at_least_float32(target)[index]
    height = (offset * at_least_float32(target_normals)[index]).sum(1).abs()
    if has_empty(target_ptr):
        height = height.masked_fill(index < 0, 0.0)
    return segment_mean(height, ptr)


def matched(squared: Tensor) -> Tensor:
    """The squared distances, with 0 for points whose other cloud is empty."""
    return squared.masked_fill(squared == torch.inf, 0.0)
