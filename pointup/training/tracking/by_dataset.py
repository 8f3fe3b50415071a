"""What is recorded of each dataset of a run that trains on several, beside the totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pointup.evaluation.report import aligned
from pointup.training.distributed.reduction import StepTotals
from pointup.training.tracking.tensorboard import TAGS, training_tag, validation_tag

Figures = dict[str, dict[str, Any]]
"""Figures by label of the dataset."""


def training_figures(labels: Sequence[str], totals: StepTotals, seen: Sequence[int]) -> Figures:
    """Loss and clouds of a step, and the clouds of the run so far, of each dataset.

    The loss of a dataset without a cloud in the step is NaN.
    """
    numbers = zip(totals.loss_by_dataset, totals.clouds_by_dataset, seen, strict=True)
    return {
        label: {"loss": loss, "num_clouds": clouds, "seen_clouds": so_far}
        for label, (loss, clouds, so_far) in zip(labels, numbers, strict=True)
    }


def validation_figures(
    by_dataset: Mapping[str, tuple[Mapping[str, Mapping[str, float]], Sequence[float]]],
) -> Figures:
    """The metrics of each dataset, with the mean share of the midpoint baseline's distance."""
    return {
        label: {
            "num_clouds": len(shares),
            "share_of_midpoints": float(np.mean(shares)) if shares else None,
            "validation": rows,
        }
        for label, (rows, shares) in by_dataset.items()
    }


def training_curves(figures: Figures) -> dict[str, dict[str, float]]:
    """Points of the curves of each dataset at a step; none for the loss of no cloud."""
    return {
        label: {training_tag(name): value for name, value in values.items() if math.isfinite(value)}
        for label, values in figures.items()
    }


def validation_curves(figures: Figures) -> dict[str, dict[str, float]]:
    """Points of the curves of each dataset at an evaluation; none without a measured cloud."""
    curves = {}
    for label, values in figures.items():
        model = values["validation"].get("model", {})
        curves[label] = {validation_tag(metric): value for metric, value in model.items()}
        if values["share_of_midpoints"] is not None:
            curves[label][TAGS["share_of_midpoints"]] = values["share_of_midpoints"]
    return curves


def validation_table(figures: Figures) -> str:
    """A line for each dataset: clouds, Chamfer distance, share of the midpoint baseline's."""
    lines = [["dataset", "clouds", "Chamfer", "of the midpoint baseline's"]]
    for label, values in figures.items():
        chamfer = values["validation"].get("model", {}).get("chamfer")
        share = values["share_of_midpoints"]
        lines.append(
            [
                label,
                f"{values['num_clouds']:,}",
                "-" if chamfer is None else f"{chamfer:.4g}",
                "-" if share is None else f"{share:.1%}",
            ]
        )
    return "\n".join(aligned(lines, "<>>>"))
