"""A predicted survey against a reference survey of the same ground, in metres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from scipy import ndimage

from pointup.errors import DataError
from pointup.evaluation.measures import Figures, Metric
from pointup.geometry.neighbors import nearest

THRESHOLDS = (0.1, 0.25, 0.5)
# Cells without points that still belong to a survey when points surround them: shadows, water.
LARGEST_HOLE = 3
# In cells to each side of one: under trees few pulses reach the ground, and not in every cell.
GROUND_REACH = 3
# A grid this large means that a stray point or another coordinate system is among the points.
MOST_CELLS = 200_000_000


@dataclass(frozen=True)
class Extent:
    """The ground that all surveys cover, as square cells with sides of `cell`.

    Attributes:
        cell: length of a side.
        origin: (2,) lower corner of the first cell.
        covered: (X, Y) bool, the cells that belong to the extent.
    """

    cell: float
    origin: np.ndarray
    covered: np.ndarray

    @property
    def area(self) -> float:
        return float(self.covered.sum()) * self.cell**2

    def place(self, positions: np.ndarray) -> np.ndarray:
        """Flat number of the cell of each of (N, 3) positions, (N,) int64; -1 outside."""
        xy = np.floor((positions[:, :2] - self.origin) / self.cell)
        inside = ((xy >= 0) & (xy < self.covered.shape)).all(axis=1)
        xy = np.where(inside[:, None], xy, 0).astype(np.int64)
        inside &= self.covered[xy[:, 0], xy[:, 1]]
        return np.where(inside, xy[:, 0] * self.covered.shape[1] + xy[:, 1], -1)

    def contains(self, positions: np.ndarray) -> np.ndarray:
        """Which of (N, 3) positions lie on it, (N,) bool."""
        return self.place(positions) >= 0

    def density(self, positions: np.ndarray) -> np.ndarray:
        """Points per area of each cell, (X, Y) float64; NaN outside the extent."""
        place = self.place(positions)
        count = np.bincount(place[place >= 0], minlength=self.covered.size)
        density = count.reshape(self.covered.shape) / self.cell**2
        return np.where(self.covered, density, np.nan)


def common_extent(surveys: Mapping[str, np.ndarray], cell: float = 1.0) -> Extent:
    """The cells that every one of the named surveys, (N, 3) each, covers.

    A survey covers the cells with a point, and holes among them of up to three cells: a gap in one
    survey stays within the extent where it is small, and is left out where it is large. Raises
    DataError when nothing is covered by all.
    """
    low = np.max([points[:, :2].min(axis=0) for points in surveys.values()], axis=0)
    high = np.min([points[:, :2].max(axis=0) for points in surveys.values()], axis=0)
    if (high < low).any():
        raise DataError(f"the surveys don't overlap: {_ranges(surveys)}")
    # Whole cells only, from the lower corner on, or the density would be that of empty ground.
    shape = np.maximum(np.floor((high - low) / cell + 0.01), 1)
    if shape.prod() > MOST_CELLS:
        raise DataError(
            f"{shape.prod():.2g} cells of {cell:g} in common; are the coordinates in metres, "
            f"without stray points? {_ranges(surveys)}"
        )
    width, height = (int(n) for n in shape)
    everywhere = Extent(cell, low, np.ones((width, height), dtype=bool))
    covered = reduce(
        np.logical_and, [_without_holes(everywhere, points) for points in surveys.values()]
    )
    if not covered.any():
        raise DataError(f"the surveys have no ground in common: {_ranges(surveys)}")
    return Extent(cell, low, covered)


def lidar_metrics(cell: float = 1.0, thresholds: Sequence[float] = THRESHOLDS) -> dict[str, Metric]:
    """What `measure_survey` gives, in the order to print."""
    window = 2 * GROUND_REACH + 1
    metrics = {
        "num_points": Metric("points", "", "those on the common ground"),
        "density": Metric("density", "points/m2", "points by the area of the common ground"),
        "covered": Metric(
            "covered",
            "%",
            f"of the {cell:g} m cells with reference points, those with predicted points; higher "
            "is better",
        ),
        "chamfer": Metric(
            "Chamfer, mean",
            "m",
            "mean distance of the prediction to the reference + mean distance of the reference to "
            "the prediction; plain",
        ),
        "chamfer_median": Metric(
            "Chamfer, median", "m", "the same with the median of each direction"
        ),
        "to_reference": Metric(
            "  to reference, mean",
            "m",
            "distance of each predicted point to the nearest reference point; plain",
        ),
        "to_reference_median": Metric("  to reference, median", "m", ""),
        "from_reference": Metric(
            "  from reference, mean",
            "m",
            "distance of each reference point to the nearest predicted point; plain",
        ),
        "from_reference_median": Metric("  from reference, median", "m", ""),
    }
    for threshold in thresholds:
        metrics[f"f_score_{threshold:g}"] = Metric(
            f"F-score at {threshold:g} m",
            "%",
            "harmonic mean of precision (share of predicted points within that distance of the "
            "reference) and recall (the reverse); higher is better"
            if threshold == thresholds[0]
            else "",
        )
    metrics |= {
        "height_overlap": Metric(
            "height profile overlap",
            "%",
            f"share that the histograms of heights above ground, bins of {cell:g} m, have in "
            "common; 100 is best; ground: as below, of the reference",
        ),
        "canopy_rmse": Metric(
            "canopy height RMSE",
            "m",
            f"difference of the highest points of each {cell:g} m cell, over the cells with "
            "points of both",
        ),
        "ground_rmse": Metric(
            "ground height RMSE",
            "m",
            f"difference of the lowest points of the {window} x {window} cells about each of those "
            "cells",
        ),
    }
    return metrics


def measure_survey(
    prediction: np.ndarray,
    reference: np.ndarray,
    extent: Extent,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Figures:
    """Figures of a predicted survey (P, 3) against a reference (R, 3), metres, float64.

    Only points on the extent are measured; their nearest neighbours may lie beyond it, so that its
    border costs nothing. Names and conventions are those of `lidar_metrics`; a share comes in
    percent. Raises DataError when a survey has no points on the extent.
    """
    clouds = {"prediction": prediction, "reference": reference}
    on_extent = {name: points[extent.contains(points)] for name, points in clouds.items()}
    for name, points in on_extent.items():
        if not len(points):
            raise DataError(f"the {name} has no points on the common ground")
    forward = _distances(on_extent["prediction"], reference)
    backward = _distances(on_extent["reference"], prediction)
    figures = {
        "num_points": float(len(on_extent["prediction"])),
        "density": len(on_extent["prediction"]) / extent.area,
        "to_reference": float(forward.mean()),
        "to_reference_median": float(np.median(forward)),
        "from_reference": float(backward.mean()),
        "from_reference_median": float(np.median(backward)),
    }
    figures["chamfer"] = figures["to_reference"] + figures["from_reference"]
    figures["chamfer_median"] = figures["to_reference_median"] + figures["from_reference_median"]
    for threshold in thresholds:
        precision, recall = np.mean(forward <= threshold), np.mean(backward <= threshold)
        figures[f"f_score_{threshold:g}"] = 100 * harmonic_mean(float(precision), float(recall))
    return figures | height_figures(on_extent["prediction"], on_extent["reference"], extent)


def height_figures(prediction: np.ndarray, reference: np.ndarray, extent: Extent) -> Figures:
    """What the grid of the extent shows of heights and coverage, of points that lie on it.

    Ground is the lowest point within `GROUND_REACH` cells; heights above ground are those above
    the reference's.
    """
    low, high = height_grids(prediction, extent)
    reference_low, reference_high = height_grids(reference, extent)
    known, both = np.isfinite(reference_low), np.isfinite(reference_low) & np.isfinite(low)
    low, ground = (_lowest_around(grid) for grid in (low, reference_low))
    shares = []
    for points in (prediction, reference):
        above = points[:, 2] - _filled(ground).reshape(-1)[extent.place(points)]
        layer, count = np.unique(np.floor(above / extent.cell), return_counts=True)
        shares.append(dict(zip(layer.tolist(), (count / len(points)).tolist(), strict=True)))
    predicted, true = shares
    return {
        "covered": 100 * float(both.sum() / known.sum()),
        "height_overlap": 100 * sum(min(share, true.get(z, 0.0)) for z, share in predicted.items()),
        "canopy_rmse": _rmse(high[both] - reference_high[both]),
        "ground_rmse": _rmse(low[both] - ground[both]),
    }


def height_grids(positions: np.ndarray, extent: Extent) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest point of each cell, (X, Y) both; NaN where there is none."""
    place = extent.place(positions)
    order = np.lexsort((positions[:, 2], place))
    order = order[np.searchsorted(place[order], 0) :]
    cells, first, count = np.unique(place[order], return_index=True, return_counts=True)
    grids = np.full((2, extent.covered.size), np.nan)
    grids[0, cells] = positions[order[first], 2]
    grids[1, cells] = positions[order[first + count - 1], 2]
    low, high = grids.reshape(2, *extent.covered.shape)
    return low, high


def harmonic_mean(precision: float, recall: float) -> float:
    """The F-score of a precision and a recall; 0 where both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _distances(query: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Plain distance (Q,) of each query to the nearest of the points."""
    centre = points.mean(axis=0)
    packed = [
        (torch.from_numpy(cloud - centre), torch.tensor([0, len(cloud)]))
        for cloud in (query, points)
    ]
    return nearest(*packed[0], *packed[1])[0].sqrt().numpy()


def _without_holes(extent: Extent, positions: np.ndarray) -> np.ndarray:
    occupied = np.zeros(extent.covered.size, dtype=bool)
    place = extent.place(positions)
    occupied[place[place >= 0]] = True
    occupied = np.pad(occupied.reshape(extent.covered.shape), LARGEST_HOLE)
    block = np.ones((LARGEST_HOLE + 1, LARGEST_HOLE + 1), dtype=bool)
    closed = ndimage.binary_closing(occupied, block)
    inner = slice(LARGEST_HOLE, -LARGEST_HOLE)
    return closed[inner, inner]


def _lowest_around(grid: np.ndarray) -> np.ndarray:
    lowest = ndimage.minimum_filter(
        np.where(np.isnan(grid), np.inf, grid), 2 * GROUND_REACH + 1, mode="nearest"
    )
    return np.where(np.isinf(lowest), np.nan, lowest)


def _filled(grid: np.ndarray) -> np.ndarray:
    """The grid with every NaN replaced by the nearest value."""
    index = ndimage.distance_transform_edt(
        np.isnan(grid), return_distances=False, return_indices=True
    )
    return grid[tuple(index)]


def _rmse(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference)))) if len(difference) else float("nan")


def _ranges(surveys: Mapping[str, np.ndarray]) -> str:
    parts = []
    for name, points in surveys.items():
        (x0, y0), (x1, y1) = points[:, :2].min(axis=0), points[:, :2].max(axis=0)
        parts.append(f"{name} x {x0:.0f} to {x1:.0f}, y {y0:.0f} to {y1:.0f}")
    return "; ".join(parts)
