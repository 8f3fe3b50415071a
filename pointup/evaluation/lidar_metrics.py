"""The metrics of surveys: title, unit and convention; remarks on what upsampling made worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pointup.evaluation.baselines import BASELINES, FITTED
from pointup.evaluation.cloud_metrics import Metric
from pointup.evaluation.report import Table, numbers
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
GROUND_CELL = 2.0
"""Width in metres of the cells in which the ground is looked for without a window around them."""
SHIFTS = 3
"""Grids are shifted by this many fractions of a cell in x and y: 9 grids. Where the borders of the
cells happen to lie decides which treetop is in which cell."""
MAIN = (
    "num_points", "density", "chamfer", "cd", "p2f",
    *(f"f_score_{threshold:g}" for threshold in THRESHOLDS),
    "beyond_0.5", "beyond_1", "beyond_1_anywhere", "off_surface_0.5", "off_surface_1",
    "below_ground", "ground_rmse_2m", "ground_missed_2m", "canopy_rmse_shifted",
    "canopy_bias_shifted", "height_overlap", "share",
)  # fmt: skip
"""The figures of the first table; the others follow in a second one."""


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
    unit, described = scale.unit.name, scale.unit.described
    cell, large, deepest = map(described, (scale.cell, GROUND_CELL, BELOW_GROUND))
    window = 2 * LOWEST_REACH + 1
    shifted = f"mean over {SHIFTS * SHIFTS} grids, shifted by thirds of a cell"
    apart = (
        f"new are points farther than {described(NEW_BEYOND)} from every source point, and for the "
        "source itself all points"
        if has_source
        else "of all points, because no source is given"
    )
    below = f"; ground: {ground}" if ground else ""
    return {
        "num_points": Metric("points", "", "points on the common extent", ""),
        "density": Metric("density", f"points/{unit}2", "points per area of the common extent", ""),
        "chamfer": Metric("Chamfer, mean", unit,
          "mean distance of the prediction to the reference + mean distance of the reference to "
          "the prediction; unsquared"),
        **{f"f_score_{threshold:g}": Metric(
          f"F-score at {described(threshold)}", "%", "" if i else
          "harmonic mean of precision (share of predicted points within that distance of the "
          "reference) and recall (the reverse); higher is better", "higher")
           for i, threshold in enumerate(scale.thresholds)},
        **{f"beyond_{far:g}": Metric(
          f"beyond {described(far)}", "%", "" if i else
          f"share of the {new} that are farther than this from every reference point; {apart}")
           for i, far in enumerate(FAR)},
        f"beyond_{FAR[-1]:g}_anywhere": Metric(f"beyond {described(FAR[-1])}, anywhere", "%",
          "the same of the new points on and off the common extent; off it, farther than this from "
          "every source point, too"),
        "below_ground": Metric("below ground", "%",
          f"share of the {new} more than {deepest} below the ground{below}"),
        "ground_rmse_2m": Metric(f"ground height RMSE, {large}", unit,
          f"difference of the lowest heights above ground in the {large} cells with reference "
          f"points within {deepest} of the ground; {shifted}"),
        "ground_missed_2m": Metric(f"ground missed, {large}", "%",
          f"share of those cells without a predicted point within {deepest} of the ground; "
          f"{shifted}"),
        "canopy_rmse_shifted": Metric("canopy height RMSE", unit,
          f"difference of the highest points of the {cell} cells with points of both; {shifted}"),
        "canopy_bias_shifted": Metric("canopy height bias", unit,
          f"mean of that difference; positive if the prediction is higher; {shifted}", ""),
        "height_overlap": Metric("height profile overlap", "%",
          f"intersection of the histograms of heights above ground, bins of {cell}, points below "
          "the ground in the lowest bin; 100 is best", "higher"),
        "covered": Metric("covered", "%",
          f"share of the {cell} cells with reference points that have predicted points; higher is "
          "better", "higher"),
        "chamfer_median": Metric("Chamfer, median", unit,
          "the sum of the medians of both distances, not of the means"),
        "to_reference": Metric("  to reference, mean", unit,
          "distance of each predicted point to the nearest reference point; unsquared"),
        "to_reference_median": Metric("  to reference, median", unit, ""),
        "from_reference": Metric("  from reference, mean", unit,
          "distance of each reference point to the nearest predicted point; unsquared"),
        "from_reference_median": Metric("  from reference, median", unit, ""),
        "hausdorff": Metric("Hausdorff", unit,
          "largest distance of any point of either cloud to the other"),
        "farthest_new": Metric("farthest new point", unit,
          "largest distance of a new point to the nearest source point, outside the extent, too"),
        "below_ground_points": Metric("points below ground", "",
          f"number of the {new} more than {deepest} below the ground", ""),
        "ground_rmse": Metric(f"ground height RMSE, {window} x {window}", unit,
          f"difference of the lowest points in the {window} x {window} cells around each {cell} "
          "cell with points of both"),
        "canopy_rmse": Metric("canopy height RMSE, one grid", unit,
          f"difference of the highest points of each of these {cell} cells, in one grid"),
        "canopy_bias": Metric("canopy height bias, one grid", unit,
          "mean of that difference, in one grid", ""),
        "gap_fraction_error": Metric("gap fraction, error", "%",
          "difference of the shares of those cells that have no point more than "
          f"{described(OPEN_SKY)} above the ground"),
    }  # fmt: skip


FITTED_METRICS = {
    "share": Metric(
        "noise, in spacings",
        "",
        "the standard deviation with the lowest Chamfer distance to the reference, as a share of "
        "the distances to the nearest points: 0.5 and 0.6 in the rows jitter and plane",
        better="",
    )
}


def tables_of(
    title: str, metrics: Mapping[str, Metric], rows: Mapping[str, Mapping[str, float]], scale: Scale
) -> list[Table]:
    """The tables of an evaluation: the main figures, those of fitted baselines, details, bands.

    `rows` maps the titles of the columns to their figures.
    """
    main = {name: metric for name, metric in metrics.items() if name in MAIN}
    detail = {name: metric for name, metric in metrics.items() if name not in MAIN}
    fitted = {title: figures for title, figures in rows.items() if "share" in figures}
    others = {title: figures for title, figures in rows.items() if title not in fitted}
    return [
        Table(title, main, others, metrics_down=True),
        Table("noise fitted to the reference", FITTED_METRICS | main, fitted, metrics_down=True),
        Table("in detail", detail, others, metrics_down=True),
        Table("by height above ground", band_metrics(scale), others, metrics_down=True),
    ]


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
        to, back = f"to reference, {title}", f"from reference, {title}"
        metrics[f"to_reference_{name}"] = Metric(to, scale.unit.name, note)
        metrics[f"from_reference_{name}"] = Metric(back, scale.unit.name, "")
    return metrics


def height_bands() -> list[tuple[str, float, float]]:
    """Name, lower and upper border in metres of each band of height above ground."""
    edges = [-np.inf, *BANDS, np.inf]
    return [
        (f"{max(low, 0):g}_{high:g}" if high < np.inf else f"{low:g}_up", low, high)
        for low, high in pairwise(edges)
    ]


LARGER_BY = 0.10
"""A distance is much worse if it exceeds the source's by more than this share."""
SHARE_LARGER_BY, SHARE_POINTS = 0.5, 0.1
"""A figure in percent is much worse if it exceeds the source's by more than this share, and by more
than this number of percentage points."""
SCORE_POINTS = 1.0
"""A score is much worse if it is lower than the source's by more percentage points than this."""
FARTHER_BY = 2.0
"""A figure of new points is much worse if it exceeds this multiple of the midpoint baseline."""


def worse_than_source(
    rows: Mapping[str, Mapping[str, float]], metrics: Mapping[str, Metric], methods: Sequence[str]
) -> list[str]:
    """A sentence for each of `methods` in `rows`: which figures are much worse than the source's.

    Much worse is a distance larger by more than 10 %; a share of points in percent (lower is
    better) larger by more than half and more than 0.1 percentage points; a score (higher is better)
    lower by more than one percentage point. A figure that the source does not have is much worse if
    it is more than twice the midpoint baseline's. The list is empty if `rows` has no source.
    """
    if "source" not in rows:
        return []
    source, midpoints = rows["source"], rows.get("midpoints", {})
    sentences = []
    for method in (name for name in methods if name in rows):
        found = []
        for name, metric in metrics.items():
            value = rows[method].get(name)
            if value is None:
                continue
            if name in source:
                if _much_worse(metric, value, source[name]):
                    found.append(_described(metric, value, source[name]))
            elif metric.better == "lower" and value > FARTHER_BY * midpoints.get(name, np.inf):
                whose = "the midpoint baseline's "
                found.append(_described(metric, value, midpoints[name], whose))
        if found:
            sentences.append(f"{method}, much worse than the source: " + "; ".join(found))
        else:
            sentences.append(f"{method}: no figure is much worse than the source's")
    return sentences


def _much_worse(metric: Metric, value: float, before: float) -> bool:
    if metric.better == "higher":
        return value < before - SCORE_POINTS
    if metric.better != "lower":
        return False
    if metric.unit == "%":
        return value > (1 + SHARE_LARGER_BY) * before and value > before + SHARE_POINTS
    return value > (1 + LARGER_BY) * before


def _described(metric: Metric, value: float, before: float, whose: str = "") -> str:
    now, then = numbers([value, before])
    unit = f" {metric.unit}" if metric.unit else ""
    name = metric.title.strip()
    if metric.unit == "%":
        return f"{name} {now} %, not {then} % ({value - before:+.2g} points)"
    times = value / before if before else 0.0
    change = f" ({times:.3g} times)" if times >= 3 else f" ({times - 1:+.0%})" if times else ""
    return f"{name} {now}{unit}, not {whose}{then}{unit}{change}"


def beside_baselines(rows: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> list[str]:
    """A line for each of `methods` in `rows`: its Chamfer distance as a share of the best
    baseline's and of the midpoint baseline's, computed from the means in `rows`."""
    known = _distances_of_baselines(rows)
    if not known:
        return []
    best = min(known, key=known.__getitem__)
    lines = []
    for method in (name for name in methods if name in rows):
        chamfer = rows[method]["chamfer"]
        line = f"Chamfer of the {method}: {chamfer / known[best]:.1%} of the best baseline's "
        line += f"({best.replace('_', ' ')})"
        if best != "midpoints" and "midpoints" in known:
            line += f", {chamfer / known['midpoints']:.1%} of the midpoint baseline's"
        fitted = {name: rows[name] for name in FITTED if name in rows}
        if fitted:
            best_fit = min(fitted, key=lambda name: fitted[name]["chamfer"])
            share = chamfer / fitted[best_fit]["chamfer"]
            line += f", {share:.1%} of that of the best with noise fitted to the reference "
            line += f"({best_fit.removesuffix('_fitted')}, {fitted[best_fit]['share']:.2g})"
        lines.append(line)
    return lines


def gap_closed(rows: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> list[str]:
    """A line for each of `methods` in `rows`: how much of the gap between the best baseline and the
    second survey, the row "resampled", is closed; negative if the method is worse than that
    baseline. The rows must be means over the same clouds."""
    best = min(_distances_of_baselines(rows).values(), default=0.0)
    second = rows.get("resampled", {}).get("chamfer")
    if second is None or second >= best:
        return []
    return [
        f"the {method} closes {(best - rows[method]['chamfer']) / (best - second):.0%} of the gap "
        "between the best baseline and the resampled ground truth"
        for method in methods
        if method in rows
    ]


def _distances_of_baselines(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Chamfer distances of the baselines; none if one is 0, where the source is the reference."""
    known = {name: rows[name]["chamfer"] for name in ("midpoints", *BASELINES) if name in rows}
    return known if all(known.values()) else {}
