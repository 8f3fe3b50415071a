"""The figures of surveys: what each is called, its unit and its convention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pointup.evaluation.cloud_metrics import Metric
from pointup.io.length_unit import METRE, LengthUnit

THRESHOLDS = (0.1, 0.25, 0.5)
FAR = (0.5, 1.0)
"""Metres from any reference point beyond which new points are counted."""
BANDS = (2.0, 8.0, 16.0, 24.0)
"""Borders in metres of the bands of height above ground."""
LOWEST_REACH = 3
"""In cells to each side of one: under trees few pulses reach the ground, and not in every cell."""
BELOW_GROUND = 0.3
"""Metres that a point may lie below the ground without being counted: noise, and roughness that
the triangulation doesn't see."""
OPEN_SKY = 2.0
"""Metres above ground that no point of a gap in the canopy is above."""
NEW_BEYOND = 0.001
"""Metres from every source point beyond which a point counts as new."""


@dataclass(frozen=True)
class Scale:
    """The lengths, in metres, that figures are computed with, and the unit of the coordinates."""

    unit: LengthUnit = METRE
    cell: float = 1.0
    thresholds: tuple[float, ...] = THRESHOLDS


METRES = Scale()


def lidar_metrics(scale: Scale = METRES, ground: str = "") -> dict[str, Metric]:
    """What `SurveyReference.measure` gives, in the order to print.

    `ground` says in words what the ground is, where there is one for all.
    """
    unit, cell = scale.unit.name, scale.unit.described(scale.cell)
    window = 2 * LOWEST_REACH + 1
    metrics = {
        "num_points": Metric("points", "", "those on the common ground", better=""),
        "density": Metric(
            "density", f"points/{unit}2", "points by the area of the common ground", better=""
        ),
        "covered": Metric(
            "covered",
            "%",
            f"of the {cell} cells with reference points, those with predicted points; higher "
            "is better",
            better="higher",
        ),
        "chamfer": Metric(
            "Chamfer, mean",
            unit,
            "mean distance of the prediction to the reference + mean distance of the reference to "
            "the prediction; plain",
        ),
        "chamfer_median": Metric(
            "Chamfer, median", unit, "the same with the median of each direction"
        ),
        "to_reference": Metric(
            "  to reference, mean",
            unit,
            "distance of each predicted point to the nearest reference point; plain",
        ),
        "to_reference_median": Metric("  to reference, median", unit, ""),
        "from_reference": Metric(
            "  from reference, mean",
            unit,
            "distance of each reference point to the nearest predicted point; plain",
        ),
        "from_reference_median": Metric("  from reference, median", unit, ""),
        "hausdorff": Metric(
            "Hausdorff", unit, "largest distance of any point of either cloud to the other"
        ),
    }
    for i, threshold in enumerate(scale.thresholds):
        metrics[f"f_score_{threshold:g}"] = Metric(
            f"F-score at {scale.unit.described(threshold)}",
            "%",
            ""
            if i
            else "harmonic mean of precision (share of predicted points within that distance of "
            "the reference) and recall (the reverse); higher is better",
            better="higher",
        )
    for i, far in enumerate(FAR):
        metrics[f"beyond_{far:g}"] = Metric(
            f"beyond {scale.unit.described(far)}",
            "%",
            ""
            if i
            else "of the new points, those farther than this from every reference point; new are "
            f"points farther than {scale.unit.described(NEW_BEYOND)} from every source point, for "
            "the source itself all",
        )
    metrics |= {
        "farthest_new": Metric(
            "farthest new point",
            unit,
            "largest distance of a new point, wherever it lies, to the nearest source point",
        ),
        "below_ground_points": Metric(
            "points below ground",
            "",
            f"new points more than {scale.unit.described(BELOW_GROUND)} below the ground",
            better="",
        ),
        "below_ground": Metric(
            "below ground",
            "%",
            "their share of the new points" + (f"; ground: {ground}" if ground else ""),
        ),
        "ground_rmse": Metric(
            "ground height RMSE",
            unit,
            f"difference of the lowest points of the {window} x {window} cells about each {cell} "
            "cell with points of both",
        ),
        "canopy_rmse": Metric(
            "canopy height RMSE",
            unit,
            "difference of the highest points of each of those cells",
        ),
        "gap_fraction_error": Metric(
            "gap fraction, error",
            "%",
            "difference of the shares of those cells without a point more than "
            f"{scale.unit.described(OPEN_SKY)} above the ground",
        ),
        "height_overlap": Metric(
            "height profile overlap",
            "%",
            f"share that the histograms of heights above ground, bins of {cell}, have in "
            "common, what lies below the ground in the lowest; 100 is best",
            better="higher",
        ),
    }
    return metrics


def band_metrics(scale: Scale = METRES) -> dict[str, Metric]:
    """What `SurveyReference.measure` gives of bands of height, in the order to print."""
    metrics = {}
    for i, (name, low, high) in enumerate(height_bands()):
        if low == -np.inf:
            title = f"below {scale.unit.described(high)}"
        elif high == np.inf:
            title = f"above {scale.unit.described(low)}"
        else:
            title = f"{low:g} to {scale.unit.described(high)}"
        note = "" if i else "mean distance of the points in this band of height above the ground"
        for direction in ("to", "from"):
            metrics[f"{direction}_reference_{name}"] = Metric(
                f"{direction} reference, {title}", scale.unit.name, note
            )
            note = ""
    return metrics


def height_bands() -> list[tuple[str, float, float]]:
    """Name, lower and upper border in metres of each band of height above ground."""
    edges = [-np.inf, *BANDS, np.inf]
    return [
        (f"{max(low, 0):g}_{high:g}" if high < np.inf else f"{low:g}_up", low, high)
        for low, high in pairwise(edges)
    ]
