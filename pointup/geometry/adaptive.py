"""Thinning that keeps points denser in some places than in others."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pointup.geometry.packed import at_least_float32, sizes_from_ptr
from pointup.geometry.thinning import farthest_point_sample

# Picks at which the distance that farthest-point sampling has come down to is measured.
NUM_MEASURED = 48


@torch.no_grad()
def sample_by_spacing(pos: Tensor, ptr: Tensor, num_samples: Tensor, log_spacing: Tensor) -> Tensor:
    """Subset of each cloud, even in units of a spacing that may differ from place to place.

    Farthest-point sampling orders all points; whatever its start, those picked before it has come
    down to some distance are that far apart, in every place. Kept are the points whose distance at
    their pick is largest in units of their spacing. With equal spacings that is
    `farthest_point_sample`.

    Shapes: pos (N, 3), num_samples (B,) int64, log_spacing (N,) natural logarithm of the spacing,
    in any unit -> index (sum(num_samples),) int64 into `pos`, cloud after cloud, distinct.
    Raises ValueError as `farthest_point_sample`.
    """
    if not log_spacing.any():
        return farthest_point_sample(pos, ptr, num_samples)
    sizes = sizes_from_ptr(ptr)
    num_samples = num_samples.to(ptr.device)
    if (num_samples > sizes).any():
        return farthest_point_sample(pos, ptr, num_samples)  # says which cloud is too small
    order = farthest_point_sample(pos, ptr, sizes)
    bounds = ptr.tolist()
    ordered = at_least_float32(pos)[order]
    log_distance = torch.cat(
        [log_pick_distances(ordered[start:stop]) for start, stop in pairwise(bounds)]
    )
    score = log_distance - log_spacing[order]
    # By cloud, and within it by score; both sorts keep the order of equals.
    best = torch.argsort(score, descending=True, stable=True)
    cloud = torch.arange(len(sizes), device=ptr.device).repeat_interleave(sizes)
    best = best[torch.argsort(cloud[best], stable=True)]
    rank = torch.arange(len(best), device=ptr.device) - ptr[:-1].repeat_interleave(sizes)
    return order[best[rank < num_samples.repeat_interleave(sizes)]]


def log_pick_distances(ordered: Tensor) -> Tensor:
    """Logarithm of the distance (N,) of each point to those before it, for points (N, 3) in the
    order of farthest-point sampling: it never rises, and is measured at some of them."""
    num_points = len(ordered)
    if num_points < 2:
        return ordered.new_zeros(num_points)
    last = torch.tensor(num_points - 1.0, device=ordered.device)
    share = torch.linspace(0, 1, NUM_MEASURED // 3, device=ordered.device)
    # Where it falls quickly: at the start, and at the end if there are copies of points.
    measured = torch.cat([last**share, 1 + (last - 1) * share, last + 1 - last**share])
    measured = measured.round().long().unique()
    distance = torch.cdist(ordered[measured], ordered)
    earlier = torch.arange(num_points, device=ordered.device) < measured[:, None]
    distance = distance.masked_fill(~earlier, torch.inf).amin(1)
    distance = distance.clamp(min=1e-6 * float(distance.max().clamp(min=1e-30))).log()
    # Straight between the measured ones, over the logarithm of the number of points.
    at = torch.arange(1, num_points, device=ordered.device)
    right = torch.searchsorted(measured, at).clamp(min=1, max=max(1, len(measured) - 1))
    if len(measured) == 1:
        between = distance.expand(num_points - 1)
    else:
        low, high = measured[right - 1].log(), measured[right].log()
        between = torch.lerp(distance[right - 1], distance[right], (at.log() - low) / (high - low))
    return torch.cat([between[:1], between])
