"""Metrics of predicted clouds: one value per cloud, without gradients.

Functions take packed clouds, as the losses do, and return (B,) float32, or float64 for float64
points; 0 where either cloud of a pair is empty. Values are not scaled: tables in papers list them
times 1e3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pointup.geometry.neighbors import knn, nearest_both
from pointup.geometry.packed import (
    at_least_float32,
    batch_from_ptr,
    segment_max,
    segment_mean,
    widest_float,
)
from pointup.losses import matched

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface


@torch.no_grad()
def cloud_metrics(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor
) -> dict[str, Tensor]:
    """All metrics that need only prediction and target, by name, each (B,).

    Unsquared, in the unit of the data: `prediction_to_target_mean`, `target_to_prediction_mean`,
    `chamfer` (sum of both), `hausdorff`. Squared: `chamfer_squared`, and
    `chamfer_target_normalised_squared`, the CD in the target's frame (both clouds normalised by the
    target's mean and its farthest distance from it). Both metrics of `protocol_metrics`. Without
    unit: `spacing_cv` of the prediction.
    """
    to_target, to_pos = _squared_distances(pos, ptr, target, target_ptr)
    forward, backward = to_target.sqrt(), to_pos.sqrt()
    forward_mean, backward_mean = segment_mean(forward, ptr), segment_mean(backward, target_ptr)
    chamfer_squared = segment_mean(to_target, ptr) + segment_mean(to_pos, target_ptr)
    _, target_scale = _centred(target, target_ptr)
    return {
        "prediction_to_target_mean": forward_mean,
        "target_to_prediction_mean": backward_mean,
        "chamfer": forward_mean + backward_mean,
        "hausdorff": torch.maximum(segment_max(forward, ptr), segment_max(backward, target_ptr)),
        "chamfer_squared": chamfer_squared,
        # Applying one similarity transform to both clouds does not change the neighbours.
        "chamfer_target_normalised_squared": chamfer_squared / target_scale.square(),
        **protocol_metrics(pos, ptr, target, target_ptr),
        "spacing_cv": spacing_cv(pos, ptr),
    }


@torch.no_grad()
def protocol_metrics(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor
) -> dict[str, Tensor]:
    """Chamfer and Hausdorff distance of the PU-GCN protocol, as in its evaluation scripts.

    Each cloud is first normalised by its own mean and farthest distance (per-cloud normalisation).
    `chamfer_per_cloud_normalised_squared`: mean of squared distances, sum of both directions.
    `hausdorff_per_cloud_normalised_squared`: largest squared distance, sum (not maximum) of both
    directions. Qian et al. 2021, PU-GCN; tables list them times 1e3.
    """
    to_target, to_pos = _squared_distances(
        normalised_per_cloud(pos, ptr), ptr, normalised_per_cloud(target, target_ptr), target_ptr
    )
    return {
        "chamfer_per_cloud_normalised_squared": segment_mean(to_target, ptr)
        + segment_mean(to_pos, target_ptr),
        "hausdorff_per_cloud_normalised_squared": segment_max(to_target, ptr)
        + segment_max(to_pos, target_ptr),
    }


@torch.no_grad()
def hausdorff_distance(pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor) -> Tensor:
    """Symmetric Hausdorff distance: the largest unsquared distance of a point of either cloud to
    the other cloud, in the unit of the data."""
    to_target, to_pos = _squared_distances(pos, ptr, target, target_ptr)
    return torch.maximum(segment_max(to_target, ptr), segment_max(to_pos, target_ptr)).sqrt()


@torch.no_grad()
def f_score(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor, threshold: Tensor | float
) -> Tensor:
    """F-score: harmonic mean of precision and recall at the distance `threshold`.

    Precision is the share of `pos` within `threshold` of `target`, recall the share of `target`
    within `threshold` of `pos`. `threshold`: a number or (B,), unsquared. Between 0 and 1, higher
    is better. Knapitsch et al. 2017, Tanks and Temples.
    """
    (to_target, _), (to_pos, _) = nearest_both(pos, ptr, target, target_ptr)
    limit = torch.as_tensor(threshold, dtype=to_target.dtype, device=pos.device)
    limit = limit.expand(len(ptr) - 1)

    def share_within(squared: Tensor, bounds: Tensor) -> Tensor:
        within = squared.sqrt() <= limit[batch_from_ptr(bounds, len(squared))]
        return segment_mean(within.to(squared.dtype), bounds)

    precision, recall = share_within(to_target, ptr), share_within(to_pos, target_ptr)
    both = precision + recall
    return torch.where(both > 0, 2 * precision * recall / both.clamp(min=1e-30), 0.0)


@torch.no_grad()
def spacing_cv(pos: Tensor, ptr: Tensor) -> Tensor:
    """Spacing CV: coefficient of variation of nearest-neighbour distances.

    Standard deviation over mean, without unit; lower is more even: 0 for a regular grid, 0.52 for
    independent points on a surface. It responds to uneven spacing, neither to gaps nor to equally
    close pairs. 0 for fewer than two distinct points. Gunzburger and Burkardt 2004, Uniformity
    Measures for Point Samples in Hypercubes.
    """
    squared, index = knn(pos, ptr, 2)
    distance = squared[:, 1].sqrt().masked_fill(index[:, 1] < 0, 0.0).to(widest_float(pos.device))
    mean = segment_mean(distance, ptr)
    variance = segment_mean((distance - mean[batch_from_ptr(ptr, len(pos))]).square(), ptr)
    return (variance.sqrt() / torch.where(mean > 0, mean, 1.0)).to(squared.dtype)


def point_to_surface_distance(points: Tensor, surface: Surface) -> Tensor:
    """Exact unsquared distance of each point (N, 3) to the true surface, (N,) float64 on the CPU.

    Points and distances are in the coordinates and unit of the surface. The mean is P2F
    (point-to-face) as in papers, before their factor of 1e3.
    """
    return torch.from_numpy(surface.distance(points.detach().cpu().double().numpy()))


@torch.no_grad()
def normalised_per_cloud(pos: Tensor, ptr: Tensor) -> Tensor:
    """Per-cloud normalisation: centre each cloud on its mean, scale its farthest distance to 1.

    (N, 3) -> (N, 3). A cloud without extent is only centred.
    """
    centred, furthest = _centred(pos, ptr)
    return centred / furthest[batch_from_ptr(ptr, len(pos)), None]


def _centred(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Each cloud relative to its mean, and its farthest distance from it (B,), 1 in place of 0."""
    pos = at_least_float32(pos)
    centred = pos - segment_mean(pos, ptr)[batch_from_ptr(ptr, len(pos))]
    furthest = segment_max(torch.linalg.vector_norm(centred, dim=1), ptr)
    return centred, torch.where(furthest > 0, furthest, 1.0)


def _squared_distances(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared distances of points to the other cloud, (N,) and (M,); 0 where that is empty."""
    (to_target, _), (to_pos, _) = nearest_both(pos, ptr, target, target_ptr)
    return matched(to_target), matched(to_pos)
