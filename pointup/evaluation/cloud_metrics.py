"""Metrics of clouds and of pairs, for the validation in training and for `pointup evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from pointup.evaluation.baselines import BASELINES, FITTED
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.packed import sizes_from_ptr
from pointup.metrics import cloud_metrics
from pointup.model.upsampler import Upsampler

Figures = dict[str, float]
Clouds = dict[str, tuple[Tensor, Tensor]]
"""Packed points and ptr by row."""

ROWS = ("model", "midpoints", *BASELINES, *FITTED, "source", "resampled")
"""The clouds that are measured against the target, in the order to print."""


@dataclass(frozen=True)
class Metric:
    """Description of a metric: title, unit ("" for none), and convention in one line.

    `better` says whether lower or higher figures are better; "" if neither.
    """

    title: str
    unit: str
    convention: str
    better: Literal["lower", "higher", ""] = "lower"


_NORMALISED = "per-cloud normalisation by mean and furthest distance"
METRICS = {
    "chamfer": Metric("Chamfer", "data unit",
      "mean distance of the prediction to the target + mean distance of the target to the "
      "prediction; unsquared, coordinates as given"),
    "hausdorff": Metric("Hausdorff", "data unit",
      "largest distance of any point of either cloud to the other; unsquared, coordinates as "
      "given"),
    "cd": Metric("CD", "x1e-3",
      "mean squared distance of the prediction to the target + that of the target to the "
      f"prediction; {_NORMALISED}"),
    "hd": Metric("HD", "x1e-3",
      "largest squared distance of the prediction to the target + that of the target to the "
      f"prediction; {_NORMALISED}"),
    "cd_target_frame": Metric("CD target frame", "x1e-3",
      "CD in the target's frame: both clouds normalised by the target's mean and furthest "
      "distance"),
    "p2f": Metric("P2F", "x1e-3",
      "mean distance of the prediction to the true surface; unsquared, coordinates as given"),
    "spacing_cv": Metric("Spacing CV", "",
      "coefficient of variation of the distance of each predicted point to its nearest other "
      "point; 0 for a grid, 0.52 for random points on a surface"),
}  # fmt: skip
"""The metrics of `measure`, and "p2f", in the order to print. Lower is better for all of them."""


def metrics_in(unit: str) -> dict[str, Metric]:
    """`METRICS` with lengths in the unit of this name; in "data unit" if it is empty."""
    return {
        name: replace(metric, unit=unit) if unit and metric.unit == "data unit" else metric
        for name, metric in METRICS.items()
    }


@torch.no_grad()
def measure(pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor) -> list[Figures]:
    """The figures of `METRICS`, without "p2f", for every predicted cloud, in their order.

    "cd" and "hd" follow the PU-GCN protocol (Qian et al. 2021). These and "cd_target_frame" are
    multiplied by 1e3, as in published tables. A pair with an empty prediction or target has no
    figures ({}).

    Shapes: `pos` (P, 3), `ptr` (B+1,), `target` (T, 3), `target_ptr` (B+1,).
    Raises ValueError for coordinates that are not finite.
    """
    metrics = cloud_metrics(pos, ptr, target, target_ptr)
    columns = {
        "chamfer": metrics["chamfer"],
        "hausdorff": metrics["hausdorff"],
        "cd": 1e3 * metrics["chamfer_per_cloud_normalised_squared"],
        "hd": 1e3 * metrics["hausdorff_per_cloud_normalised_squared"],
        "cd_target_frame": 1e3 * metrics["chamfer_target_normalised_squared"],
        "spacing_cv": metrics["spacing_cv"],
    }
    figures = torch.stack(list(columns.values()), dim=1).tolist()
    measurable = (sizes_from_ptr(ptr) > 0) & (sizes_from_ptr(target_ptr) > 0)
    return [
        dict(zip(columns, values, strict=True)) if has_points else {}
        for values, has_points in zip(figures, measurable.tolist(), strict=True)
    ]


@torch.no_grad()
def clouds_of_pairs(batch: Batch, ratio: Tensor, upsampler: Upsampler | None = None) -> Clouds:
    """Clouds of the pairs of a batch, made by `collate`: packed points and ptr by row.

    `ratio`: (B,) ratios of the model and the midpoint baseline. Pairs with a second sampling of the
    surface have a row "resampled". The baselines for surveys take longer and are not included.
    """
    clouds = {
        "midpoints": midpoint_upsample(batch.pos, batch.ptr, ratio),
        "source": (batch.pos, batch.ptr),
    }
    if upsampler is not None:
        output = upsampler(batch.pos, batch.ptr, ratio)
        clouds["model"] = (output.pos, output.ptr)
    if "resample" in batch:
        clouds["resampled"] = (batch.resample, batch.resample_ptr)
    return clouds


def measure_clouds(batch: Batch, clouds: Clouds) -> list[dict[str, Figures]]:
    """For every pair of a batch, the figures of `measure` for each of the clouds, by row."""
    rows = {
        row: measure(*clouds[row], batch.target, batch.target_ptr) for row in ROWS if row in clouds
    }
    return [
        {row: figures[pair] for row, figures in rows.items() if figures[pair]}
        for pair in range(batch.num_graphs)
    ]


def mean_rows(measured: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """For every row of any cloud, the mean of each figure over the clouds that have it."""
    rows = dict.fromkeys(row for figures in measured for row in figures)
    return {row: mean_figures([one[row] for one in measured if row in one]) for row in rows}


def mean_figures(figures: Sequence[Figures]) -> Figures:
    """The mean of every figure over the items that have it, in float64."""
    names = dict.fromkeys(name for one in figures for name in one)
    return {name: float(np.mean([one[name] for one in figures if name in one])) for name in names}


def share_of_midpoints(rows: Mapping[str, Figures], figure: str = "chamfer") -> float | None:
    """A figure of the model, such as Chamfer distance, divided by that of the midpoint baseline.

    None if either is missing, or if that of the baseline is 0.
    """
    model, midpoints = (rows.get(row, {}).get(figure) for row in ("model", "midpoints"))
    return None if model is None or not midpoints else model / midpoints
