"""The training objective: one loss per cloud, from a batch and the model's output for it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from pointup.errors import ConfigError, NonFiniteError
from pointup.geometry.neighbors import nearest, nearest_point, squared_distance
from pointup.geometry.packed import (
    assume_valid,
    batch_from_ptr,
    has_empty,
    on_host,
    safe_sqrt,
    segment_counts,
    segment_mean,
    sizes_from_ptr,
    to_device,
)
from pointup.losses import (
    density_aware_chamfer_distance,
    matched,
    point_to_plane_distance,
    repulsion_loss,
)
from pointup.model.upsampler import UpsamplerOutput

LARGEST_GAP = 2.0
"""Upper bound of the distances in the coverage term, in spacings of the target. Without it, holes
that no candidate can reach would dominate the loss."""

FARTHEST = 3.0
"""Upper bound of the distances in the term of outliers, in spacings of the target."""

Weight = float | tuple[float, float]
"""Weight of a term: a number, or the weights at the start and at the end of the run, linear in the
completed share of the run in between."""


def weight_at(weight: Weight, share_done: float) -> float:
    """The weight after `share_done` of the run, from 0 to 1."""
    if not isinstance(weight, tuple):
        return weight
    start, end = weight
    return start + share_done * (end - start)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Options of the loss. Distances are in units of the target's spacing, which is estimated from
    the source, so that clouds of any scale have the same weight; `error` and `density` weight log
    likelihoods. A weight with two numbers changes linearly from the first, at the start of the run,
    to the second at its end."""

    chamfer: Literal["unsquared", "squared", "density-aware"] = "unsquared"
    """Chamfer distance between output and target; density-aware is for two separate surveys."""
    unit: Literal["local", "cloud"] = "local"
    """Unit of the Chamfer distance, unsquared or squared, and of the predicted errors: the spacing
    of the target at each place, so that a sparse corner of a survey doesn't dominate its dense
    rest, or its mean over the cloud, so that a centimetre counts the same everywhere. All other
    distances are in units of the mean."""
    density_alpha: float = 1.0
    """Steepness of the density-aware distance, per spacing of the target."""
    trim: float = 0.0
    """Share of the target, its farthest points, that the density-aware distance ignores."""
    point_to_plane: Weight = 0.5
    """Weight of the distance of all candidates to the target's tangent planes, given normals."""
    output_to_plane: Weight = 0.0
    """Weight of the same distance, of the output points only. Thinning keeps candidates that are
    far from others and from measured points, and these are the hardest."""
    coverage: Weight = 0.0
    """Weight of the fourth power of the distance from the target to the nearest candidate, at most
    two spacings."""
    outliers: Weight = 0.0
    """Weight of the fourth power of the distance from an output point to the nearest target point,
    at most three spacings. Points between two sheets count most."""
    error: Weight = 0.2
    """Weight of the negative log likelihood of the distances from output points to the target under
    the predicted errors, for a model with `predict_error`."""
    density: Weight = 1.0
    """Weight of the negative log likelihood of the target's points under the predicted density."""
    repulsion: Weight = 0.0
    """Weight of the repulsion between output points closer than the target's spacing."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("chamfer", "unit"):
                choices = get_args(get_type_hints(LossConfig)[name])
                if value not in choices:
                    raise ConfigError(f"--loss.{name} is {value!r}; give one of {choices}")
            if name in ("chamfer", "unit", "trim"):
                continue
            for weight in value if isinstance(value, tuple) else (value,):
                if not 0 <= weight < math.inf:
                    raise ConfigError(
                        f"--loss.{name.replace('_', '-')} is {weight}; it must be at least 0, and "
                        "finite"
                    )
        if not 0 <= self.trim < 1:
            raise ConfigError(f"--loss.trim is {self.trim}; it must lie in [0, 1)")


def training_ratio(batch: Batch, ratio: float | None, max_ratio: float) -> Tensor:
    """Upsampling ratio (B,) float64 of each cloud: `ratio`, or that of its pair.

    The ratio of a pair is clamped to [1, `max_ratio`]; it is 1 if the source is empty.
    """
    sizes = sizes_from_ptr(on_host(batch.ptr))
    if ratio is not None:
        ratios = torch.full(sizes.shape, ratio, dtype=torch.float64, device="cpu")
    else:
        own = sizes_from_ptr(on_host(batch.target_ptr)).double() / sizes.clamp(min=1)
        ratios = torch.where(sizes > 0, own.clamp(1.0, max_ratio), 1.0)
    return to_device(ratios, batch.ptr.device)


def target_spacing(gaps: Tensor, ptr: Tensor, ratio: Tensor) -> Tensor:
    """Spacing (N,) of the target around each source point, estimated from the source.

    The mean distance to the four nearest neighbours, the model's `gaps` (N,), but at least a fifth
    of the cloud's mean, divided by the square root of the ratio (B,), as for points on a surface.
    It is 1 in a cloud without extent.
    """
    batch = batch_from_ptr(ptr, len(gaps))
    distance = torch.maximum(gaps, 0.2 * segment_mean(gaps, ptr)[batch])
    shrinking = to_device(on_host(ratio).sqrt().float(), gaps.device)
    spacing = distance / shrinking[batch]
    return spacing.masked_fill(spacing <= 0, 1.0)


def losses_of_model(
    model: nn.Module,
    batch: Batch,
    ratio: float | None,
    max_ratio: float,
    config: LossConfig,
    share_done: float = 0.0,
) -> Tensor:
    """Loss (B,) of each cloud of a batch; (0,) for an empty batch, with a graph to the weights.

    `share_done`, the completed share of the run, sets the weights that change.

    It is NaN for every cloud if the model's output is not finite, because the weights have
    diverged. Raises NonFiniteError if coordinates of the batch are not finite.
    """
    ratios = training_ratio(batch, ratio, max_ratio)
    try:
        with assume_valid():
            output = model(batch.pos, batch.ptr, ratios)
            spacing = target_spacing(output.gaps, batch.ptr, ratios)
            return cloud_losses(output, batch, spacing, config, share_done)
    except NonFiniteError:
        if not batch.pos.isfinite().all():
            raise
        sum_of_weights = torch.stack([weights.sum() for weights in model.parameters()]).sum()
        return math.nan * sum_of_weights.expand(len(ratios))


def cloud_losses(
    output: UpsamplerOutput,
    batch: Batch,
    spacing: Tensor,
    config: LossConfig,
    share_done: float = 0.0,
) -> Tensor:
    """Loss (B,) of each cloud after `share_done` of the run, in units of the target's spacing: (N,)
    `spacing` at the source points.

    `LossConfig.unit` says which terms are in units of the local spacing; all others are in those of
    its mean. Distances to an empty target, or from one to an empty source, are 0, without gradient.
    The loss of an empty batch is (0,), with a graph to the weights.
    """
    pos, ptr, target, target_ptr = output.pos, output.ptr, batch.target, batch.target_ptr
    mean_spacing = segment_mean(spacing, batch.ptr)
    if has_empty(batch.ptr):
        mean_spacing = mean_spacing.masked_fill(mean_spacing <= 0, 1.0)
    if config.unit == "cloud":
        spacing = mean_spacing[batch_from_ptr(batch.ptr, len(spacing))]
    plane_weight = weight_at(config.point_to_plane, share_done)
    of_candidates = None
    if plane_weight > 0 and "target_normals" in batch:
        of_candidates = nearest_point(output.candidates, output.candidates_ptr, target, target_ptr)
    if config.chamfer == "density-aware":
        loss = density_aware_chamfer_distance(
            pos / mean_spacing[batch_from_ptr(ptr, len(pos)), None],
            ptr,
            target / mean_spacing[batch_from_ptr(target_ptr, len(target)), None],
            target_ptr,
            alpha=config.density_alpha,
            trim=config.trim,
        )
        squared = None
    else:
        is_unsquared = config.chamfer == "unsquared"
        loss, squared = chamfer_loss(output, batch, spacing, of_candidates, is_unsquared)
    to_plane = (
        (plane_weight, output.candidates, output.candidates_ptr, of_candidates),
        (weight_at(config.output_to_plane, share_done), pos, ptr, None),
    )
    for weight, points, points_ptr, known in to_plane:
        if weight > 0 and "target_normals" in batch:
            plane = point_to_plane_distance(
                points, points_ptr, target, target_ptr, batch.target_normals, known
            )
            loss = loss + weight * plane / mean_spacing
    if (weight := weight_at(config.error, share_done)) > 0 and output.log_error is not None:
        if squared is None:
            squared = nearest(pos, ptr, target, target_ptr)[0]
        loss = loss + weight * error_loss(output, output.log_error, squared.detach(), spacing)
    if (weight := weight_at(config.coverage, share_done)) > 0:
        gap, _ = nearest(target, target_ptr, output.candidates, output.candidates_ptr)
        gap = matched(gap) / mean_spacing[batch_from_ptr(target_ptr, len(target))].square()
        covered = gap.clamp(max=LARGEST_GAP**2).square()
        loss = loss + weight * segment_mean(covered, target_ptr)
    if (weight := weight_at(config.outliers, share_done)) > 0:
        if squared is None:
            squared = nearest(pos, ptr, target, target_ptr)[0]
        off = matched(squared) / mean_spacing[batch_from_ptr(ptr, len(pos))].square()
        loss = loss + weight * segment_mean(off.clamp(max=FARTHEST**2).square(), ptr)
    if (weight := weight_at(config.density, share_done)) > 0:
        loss = loss + weight * density_loss(output, batch)
    if (weight := weight_at(config.repulsion, share_done)) > 0:
        repulsion = repulsion_loss(pos, ptr, k=4, radius=mean_spacing)
        loss = loss + weight * repulsion / mean_spacing
    return loss


def chamfer_loss(
    output: UpsamplerOutput,
    batch: Batch,
    spacing: Tensor,
    of_candidates: Tensor | None,
    is_unsquared: bool,
) -> tuple[Tensor, Tensor]:
    """Chamfer distance (B,) in units of `spacing`, and the squared distances (M,) of the output.

    `of_candidates` are the `nearest_point` of all candidates, if they are known.
    """
    pos, ptr, target, target_ptr = output.pos, output.ptr, batch.target, batch.target_ptr
    if of_candidates is None or output.picked is None:
        squared, _ = nearest(pos, ptr, target, target_ptr)
    else:
        # The output is some of the candidates.
        squared = squared_distance(pos, target, target_ptr, of_candidates[output.picked])
    to_output, index = nearest(target, target_ptr, pos, ptr)
    to_target = squared
    if has_empty(batch.ptr) or has_empty(target_ptr):
        to_target, to_output = matched(to_target), matched(to_output)
    unit = spacing[output.parent]
    # Where all sources are empty, no point has a unit, and all distances are 0.
    unit_of_target = unit[index] if len(unit) else torch.ones_like(to_output)
    if is_unsquared:
        distance = safe_sqrt(torch.cat([to_target, to_output]))
        to_target, to_output = distance.split([len(pos), len(target)])
    else:
        unit, unit_of_target = unit.square(), unit_of_target.square()
    to_target, to_output = to_target / unit, to_output / unit_of_target
    return segment_mean(to_target, ptr) + segment_mean(to_output, target_ptr), squared


def error_loss(
    output: UpsamplerOutput, log_error: Tensor, squared: Tensor, spacing: Tensor
) -> Tensor:
    """Negative log likelihood (B,) of the distances from the output to the target.

    Each distance, in spacings of the target, has an exponential distribution whose mean is the
    predicted error. The `squared` distances (M,) are constants here: this term moves no point.
    """
    distance = matched(squared).sqrt() / spacing[output.parent]
    missed = log_error + distance * torch.exp(-log_error)
    return segment_mean(missed, output.ptr)


def density_loss(output: UpsamplerOutput, batch: Batch) -> Tensor:
    """Loss (B,) of the predicted shares and quotas of the source points, against the target.

    Each target point is counted for its nearest source point. The loss is the Kullback-Leibler
    divergence of the predicted distribution from the counted one, shares and quotas together,
    without the entropy of the counts, which no weight can change. So equal shares of a target
    twice as dense have the same loss.
    """
    with torch.no_grad():
        index = nearest_point(batch.target, batch.target_ptr, batch.pos, batch.ptr)
        log_sizes = segment_counts(batch.ptr).log()[batch_from_ptr(batch.target_ptr, len(index))]
    if not len(batch.pos):
        return segment_mean(0.0 * batch.target.sum(1), batch.target_ptr)
    log_share = (output.log_shares + output.log_quotas)[index]
    missed = -2 * log_sizes - log_share
    if has_empty(batch.ptr):
        missed = missed.masked_fill(index < 0, 0.0)
    return segment_mean(missed, batch.target_ptr)
