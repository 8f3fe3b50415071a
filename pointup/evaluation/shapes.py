"""Evaluates shapes by the PU-GCN protocol: CD, HD, P2F of model, midpoints, resampled truth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pointup.errors import DataError
from pointup.evaluation.cloud_metrics import METRICS, Figures, Metric, measure
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.model.upsampler import Upsampler
from pointup.upsampling.in_memory import upsample
from pointup.upsampling.options import pass_ratios

Protocol = Literal["pu-gcn", "half"]

SUMMED = ("cd", "hd", "cd_target_frame")


@dataclass(frozen=True)
class Shape:
    """A shape to evaluate on. Clouds are (N, 3) float64; None is unknown.

    Attributes:
        name: of the file, without its extension.
        truth: the ground truth, a dense cloud.
        source: the sparse cloud to upsample.
        prediction: a cloud upsampled by another program.
        surface: the true surface, in the coordinates of the clouds.
        second: the resampled ground truth, a second sampling of the surface, independent of `truth`
            and of the same size.
        seed: number of the sampling, if the clouds were sampled from the surface.
    """

    name: str
    truth: np.ndarray
    source: np.ndarray | None = None
    prediction: np.ndarray | None = None
    surface: Surface | None = None
    second: np.ndarray | None = None
    seed: int = 0


def shape_metrics(protocol: Protocol) -> dict[str, Metric]:
    """The metrics of `measure_shape` for a protocol, in the order to print."""
    frame = "in units of the target's furthest distance from its mean"
    metrics = {name: METRICS[name] for name in ("cd", "hd", "p2f", "cd_target_frame")}
    metrics["hausdorff"] = Metric(
        "Hausdorff",
        "x1e-3",
        f"largest distance of any point of either cloud to the other; unsquared, {frame}",
    )
    metrics["spacing_cv"] = METRICS["spacing_cv"]
    if protocol == "half":
        for name in SUMMED:
            convention = metrics[name].convention + "; half of the sum (--protocol half)"
            metrics[name] = replace(metrics[name], convention=convention)
    return metrics


def measure_shape(prediction: np.ndarray, shape: Shape, protocol: Protocol) -> Figures:
    """Figures of a predicted cloud (P, 3), by the names of `shape_metrics`.

    With the protocol "pu-gcn" CD and HD are sums of both directions, as in most papers; with "half"
    they are half of it. The figure "p2f" needs the surface of the shape. Raises DataError if all
    points of the truth are in one place, and for an empty prediction.
    """
    centre = shape.truth.mean(axis=0)
    radius = np.linalg.norm(shape.truth - centre, axis=1).max()
    if not radius > 0:
        raise DataError(f"{shape.name}: all points of the truth are in one place; leave it out")
    if not len(prediction):
        raise DataError(f"{shape.name}: the prediction has no points")
    # Normalised before float32: a shape far from the origin would lose its details.
    clouds = [_pack((points - centre) / radius) for points in (prediction, shape.truth)]
    figures = measure(*clouds[0], *clouds[1])[0]
    chosen = {name: figures[name] for name in ("cd", "hd")}
    if shape.surface is not None:
        chosen["p2f"] = 1e3 * float(shape.surface.distance(prediction).mean())
    chosen |= {
        "cd_target_frame": figures["cd_target_frame"],
        "hausdorff": 1e3 * figures["hausdorff"],
        "spacing_cv": figures["spacing_cv"],
    }
    if protocol == "half":
        chosen |= {name: 0.5 * chosen[name] for name in SUMMED}
    return chosen


def evaluate_shape(
    shape: Shape,
    upsampler: Upsampler | None,
    protocol: Protocol = "pu-gcn",
    denoise: bool = False,
) -> dict[str, Figures]:
    """Figures of the clouds of `clouds_of_shape`, by row."""
    return {
        row: measure_shape(points, shape, protocol)
        for row, points in clouds_of_shape(shape, upsampler, denoise).items()
    }


def clouds_of_shape(
    shape: Shape, upsampler: Upsampler | None, denoise: bool = False
) -> dict[str, np.ndarray]:
    """Clouds (N, 3) of the rows "model", "prediction", "midpoints" (no network) and "resampled".

    Rows whose cloud is not available are left out. The ratio is that of the truth to the source.
    The midpoint baseline upsamples in the passes of `pass_ratios`: 16x is 4x twice, as in the
    PU-GCN protocol; a model in those that its `max_pass_ratio` allows. The cloud of the model is
    the output of `pointup upsample`, or with `denoise` of `pointup upsample --denoise`.
    """
    clouds: dict[str, np.ndarray | None] = {"prediction": shape.prediction}
    if shape.source is not None:
        ratio = len(shape.truth) / len(shape.source)
        if ratio < 1:
            raise DataError(
                f"{shape.name}: the input has {len(shape.source)} points, the truth only "
                f"{len(shape.truth)}; are the folders swapped?"
            )
        clouds["midpoints"] = upsample_shape(shape.source, ratio, None)
        if upsampler is not None:
            clouds = {"model": upsample_shape(shape.source, ratio, upsampler, denoise), **clouds}
    clouds["resampled"] = shape.second
    return {row: points for row, points in clouds.items() if points is not None}


def upsample_shape(
    source: np.ndarray, ratio: float, upsampler: Upsampler | None, denoise: bool = False
) -> np.ndarray:
    """Upsample a cloud (N, 3) to `round(ratio * N)` points.

    With a model, as `pointup upsample` does. The points of the source are kept, or replaced with
    `denoise`. Without a model, by `midpoint_upsample` on the whole cloud, in the passes of
    `pass_ratios`.
    """
    if upsampler is not None:
        device = next(upsampler.parameters()).device
        return upsample(source, ratio, model=upsampler, device=device, originals=not denoise)
    centre = source.mean(axis=0)
    pos, ptr = _pack(source - centre)
    for reached in np.cumprod(pass_ratios(ratio)).tolist():
        pos, ptr = midpoint_upsample(pos, ptr, round(len(source) * reached) / len(pos))
    return pos.double().numpy() + centre


def _pack(points: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(points.astype(np.float32)), torch.tensor([0, len(points)])
