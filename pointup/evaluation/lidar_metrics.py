"""The metrics of surveys: title, unit and convention of each, and the constants behind them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pointup.evaluation.cloud_metrics import Metric
from pointup.io.length_unit import METRE, LengthUnit

THRESHOLDS = (0.1, 0.25, 0.5)
FAR = (0.5, 1.0)
"""Distances in metres to the nearest reference point beyond which new points are counted."""
BANDS = (2.0, 8.0, 16.0, 24.0)
"""Borders in metres of the bands of height above ground."""
LOWEST_REACH = 3
"""Half width in cells of the window for the lowest point: under trees, few pulses reach the
ground, and not in every cell."""
BELOW_GROUND = 0.3
"""A point counts as below ground from this depth in metres on. Less is noise, or roughness that the
triangulation does not resolve."""
OPEN_SKY = 2.0
"""A cell is a gap in the canopy if no point in it is higher than this above ground, in metres."""
NEW_BEYOND = 0.001
"""A point counts as new if it is farther than this from every source point, in metres."""


@dataclass(frozen=True)
class Scale:
    """The unit of the coordinates; in metres the cell size and the thresholds of the F-score."""

    unit: LengthUnit = METRE
    cell: float = 1.0
    thresholds: tuple[float, ...] = THRESHOLDS


METRES = Scale()


def lidar_metrics(
    scale: Scale = METRES, ground: str = "", has_source: bool = True
) -> dict[str, Metric]:
    """The metrics of `SurveyReference.measure`, in the order to print.

    `ground` describes the ground points, if they are the same for all rows. Without a source
    (`has_source`) no point is known to be new, and figures of new points are those of all points.
    """
    new = "new points" if has_source else "points"
    unit, cell = scale.unit.name, scale.unit.described(scale.cell)
    window = 2 * LOWEST_REACH + 1
    metrics = {
        "num_points": Metric("points", "", "points on the common extent", better=""),
        "density": Metric(
            "density", f"points/{unit}2", "points per area of the common extent", better=""
        ),
        "covered": Metric(
            "covered",
            "%",
            f"share of the {cell} cells with reference points that have predicted points; higher "
            "is better",
            better="higher",
        ),
        "chamfer": Metric(
            "Chamfer, mean",
            unit,
            "mean distance of the prediction to the reference + mean distance of the reference to "
            "the prediction; unsquared",
        ),
        "chamfer_median": Metric(
            "Chamfer, median", unit, "the same with the median of each direction"
        ),
        "to_reference": Metric(
            "  to reference, mean",
            unit,
            "distance of each predicted point to the nearest reference point; unsquared",
        ),
        "to_reference_median": Metric("  to reference, median", unit, ""),
        "from_reference": Metric(
            "  from reference, mean",
            unit,
            "distance of each reference point to the nearest predicted point; unsquared",
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
            else f"share of the {new} that are farther than this from every reference point; "
            + (
                f"new are points farther than {scale.unit.described(NEW_BEYOND)} from every source "
                "point, and for the source itself all points"
                if has_source
                else "of all points, because no source is given"
            ),
        )
    metrics |= {
        "farthest_new": Metric(
            "farthest new point",
            unit,
            "largest distance of a new point to the nearest source point, outside the extent, too",
        ),
        "below_ground_points": Metric(
            "points below ground",
            "",
            f"{new} more than {scale.unit.described(BELOW_GROUND)} below the ground",
            better="",
        ),
        "below_ground": Metric(
            "below ground",
            "%",
            f"their share of the {new}" + (f"; ground: {ground}" if ground else ""),
        ),
        "ground_rmse": Metric(
            "ground height RMSE",
            unit,
            f"difference of the lowest points in the {window} x {window} cells around each {cell} "
            "cell with points of both",
        ),
        "canopy_rmse": Metric(
            "canopy height RMSE",
            unit,
            "difference of the highest points of each of those cells",
        ),
        "canopy_bias": Metric(
            "canopy height bias",
            unit,
            "mean of that difference; positive if the prediction is higher",
            better="",
        ),
        "gap_fraction_error": Metric(
            "gap fraction, error",
            "%",
            "difference of the shares of those cells that have no point more than "
            f"{scale.unit.described(OPEN_SKY)} above the ground",
        ),
        "height_overlap": Metric(
            "height profile overlap",
            "%",
            f"intersection of the histograms of heights above ground, bins of {cell}, points below "
            "the ground in the lowest bin; 100 is best",
            better="higher",
        ),
    }
    return metrics


def band_metrics(scale: Scale = METRES) -> dict[str, Metric]:
    """The metrics of `SurveyReference.measure` in bands of height, in the order to print."""
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
