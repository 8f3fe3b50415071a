"""Measures a predicted survey against a reference survey, in memory or from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy import ndimage
from scipy.spatial import cKDTree

from pointup.datasets.block_pairs import thin
from pointup.datasets.flight_passes import GPS_TIME, POINT_SOURCE_ID, passes_of, table_of
from pointup.datasets.survey_tiles import first_occurrences
from pointup.errors import DataError, FileError
from pointup.evaluation.baselines import baseline_clouds, fitted_clouds
from pointup.evaluation.cloud_metrics import Figures, mean_figures
from pointup.evaluation.common_extent import Extent, TriangulatedGround, height_grids
from pointup.evaluation.lidar_metrics import (
    BELOW_GROUND,
    FAR,
    GROUND_CELL,
    LOWEST_REACH,
    METRES,
    NEW_BEYOND,
    OPEN_SKY,
    SHIFTS,
    Scale,
    height_bands,
)
from pointup.geometry.grids import box_of, in_box
from pointup.geometry.neighbors import nearest
from pointup.io.cloud import (
    CLASSIFICATION,
    NUMBER_OF_RETURNS,
    PointCloud,
    attribute,
    is_noise,
    is_synthetic,
)
from pointup.io.files import iter_points
from pointup.io.virtual_clouds import files_of
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.upsampling import upsample

_SMALLEST_BAND = 0.005


class SurveyReference:
    """A reference survey (R, 3) and its common extent with the surveys to measure.

    `ground` is the ground of the reference, `source` (N, 3) the survey before upsampling, if known.
    Coordinates, the cells of the extent and all figures are in the unit of `scale`. Distances of
    predicted points are those on the extent, or all with `everywhere`. Raises DataError if the
    reference has no points on the extent.
    """

    def __init__(
        self,
        points: np.ndarray,
        extent: Extent,
        ground: TriangulatedGround,
        source: np.ndarray | None = None,
        scale: Scale = METRES,
        everywhere: bool = False,
    ) -> None:
        self.everywhere = everywhere
        self.points, self.extent, self.ground, self.scale = points, extent, ground, scale
        self.inside = _on(extent, points, "reference")
        self._above = ground.above(self.inside)
        low, self._high = height_grids(self.inside, extent)
        self._has_points, self._low = np.isfinite(low), _lowest_around(low)
        self._source = None if source is None else cKDTree(source)
        cells = np.argwhere(extent.covered)
        middles = extent.origin + (cells + 0.5) * extent.cell
        self._open_below = np.full(extent.covered.shape, np.nan)
        self._open_below[tuple(cells.T)] = ground.height(middles) + scale.unit.of_metres(OPEN_SKY)

    def figures(self) -> Figures:
        """Figures of the reference itself: number of points, density and gap fraction."""
        return {
            "num_points": float(len(self.inside)),
            "density": len(self.inside) / self.extent.area,
            "gap_fraction": 100 * float(np.mean(self._is_gap(self._high)[self._has_points])),
        }

    def chamfer(self, prediction: np.ndarray) -> float:
        """The figure "chamfer" of a predicted survey (P, 3)."""
        inside = prediction if self.everywhere else _on(self.extent, prediction, "prediction")
        return mean_distance(inside, self.points) + mean_distance(self.inside, prediction)

    def measure_fitted(self, source: np.ndarray, num_points: int, seed: int) -> dict[str, Figures]:
        """The figures of `fitted_clouds` of a source (N, 3), and their noise, by row."""
        fitted = fitted_clouds(source, max(num_points, len(source)), self.chamfer, seed)
        return {row: self.measure(made) | {"share": share} for row, (made, share) in fitted.items()}

    def measure(self, prediction: np.ndarray) -> Figures:
        """Figures of a predicted survey (P, 3) float64, by the names of `lidar_metrics` and
        `band_metrics`.

        Nearest neighbours of points on the extent may lie outside of it, so that its border adds no
        error. "farthest_new" includes points outside the extent; it needs a source and new points.
        Shares are in percent. A band has figures if it contains at least 0.5 % of the reference's
        points and any predicted point. Raises DataError if the prediction has no points on the
        extent.
        """
        on_extent = _on(self.extent, prediction, "prediction")
        inside = prediction if self.everywhere else on_extent
        above = self.ground.above(inside)
        forward = _distances(inside, self.points)
        backward = _distances(self.inside, prediction)
        figures = {
            "num_points": float(len(inside)),
            "density": len(inside) / self.extent.area,
            "to_reference": float(forward.mean()),
            "to_reference_median": float(np.median(forward)),
            "from_reference": float(backward.mean()),
            "from_reference_median": float(np.median(backward)),
            "hausdorff": float(max(forward.max(), backward.max())),
        }
        figures["chamfer"] = figures["to_reference"] + figures["from_reference"]
        figures["chamfer_median"] = (
            figures["to_reference_median"] + figures["from_reference_median"]
        )
        unit = self.scale.unit
        for threshold in self.scale.thresholds:
            limit = unit.of_metres(threshold)
            precision, recall = (float(np.mean(way <= limit)) for way in (forward, backward))
            score = 2 * precision * recall / (precision + recall or 1.0)
            figures[f"f_score_{threshold:g}"] = 100 * score
        figures |= self._of_new_points(prediction, above, forward)
        figures |= self._of_bands(above, forward, backward)
        if self.everywhere:
            above = above[self.extent.contains(prediction)]
        figures |= self._of_heights(on_extent, above)
        return figures | self._of_shifted_grids(on_extent, above)

    def _of_bands(self, above: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> Figures:
        """Mean distances of the points in each band of height above ground."""
        ways = {"to": (above, forward), "from": (self._above, backward)}
        figures = {}
        for name, low, high in height_bands():
            low, high = self.scale.unit.of_metres(low), self.scale.unit.of_metres(high)
            in_band = {way: (low <= height) & (height < high) for way, (height, _) in ways.items()}
            if in_band["from"].mean() < _SMALLEST_BAND or not in_band["to"].any():
                continue
            for way, (_, distance) in ways.items():
                figures[f"{way}_reference_{name}"] = float(distance[in_band[way]].mean())
        return figures

    def _of_new_points(
        self, prediction: np.ndarray, above: np.ndarray, to_reference: np.ndarray
    ) -> Figures:
        figures, is_new = {}, np.ones(len(above), dtype=bool)
        if self._source is not None:
            away = np.asarray(self._source.query(prediction)[0])
            limit = self.scale.unit.of_metres(NEW_BEYOND)
            if (away > limit).any():
                figures["farthest_new"] = float(away.max())
                is_new = away > limit
                if not self.everywhere:
                    is_inside = self.extent.contains(prediction)
                    outside = np.flatnonzero(is_new & ~is_inside)
                    is_new = is_new[is_inside]
                    off = np.minimum(away[outside], _distances(prediction[outside], self.points))
                    everything = np.concatenate([to_reference[is_new], off])
                    share = np.mean(everything > self.scale.unit.of_metres(FAR[-1]))
                    figures[f"beyond_{FAR[-1]:g}_anywhere"] = 100 * float(share)
        if not is_new.any():
            return figures
        for far in FAR:
            limit = self.scale.unit.of_metres(far)
            figures[f"beyond_{far:g}"] = 100 * float(np.mean(to_reference[is_new] > limit))
        deepest = -self.scale.unit.of_metres(BELOW_GROUND)
        below = above[is_new] < deepest
        figures["below_ground_points"] = float(below.sum())
        figures["below_ground"] = 100 * float(below.mean())
        return figures

    def _of_heights(self, inside: np.ndarray, above: np.ndarray) -> Figures:
        """Figures of heights and coverage, computed on the grid of the extent."""
        low, high = height_grids(inside, self.extent)
        both = self._has_points & np.isfinite(low)
        shares = []
        for heights in (above, self._above):
            # Points below the ground, by roughness, count in the lowest layer.
            layers = np.maximum(np.floor(heights / self.extent.cell), 0)
            layer, count = np.unique(layers, return_counts=True)
            shares.append(dict(zip(layer.tolist(), (count / len(heights)).tolist(), strict=True)))
        predicted, true = shares
        figures = {
            "covered": 100 * float(both.sum() / self._has_points.sum()),
            "height_overlap": 100
            * sum(min(share, true.get(z, 0.0)) for z, share in predicted.items()),
        }
        if both.any():
            gaps = [np.mean(self._is_gap(grid)[both]) for grid in (high, self._high)]
            figures |= {
                "canopy_rmse": _rmse(high[both] - self._high[both]),
                "canopy_bias": float(np.mean(high[both] - self._high[both])),
                "ground_rmse": _rmse(_lowest_around(low)[both] - self._low[both]),
                "gap_fraction_error": 100 * float(abs(gaps[0] - gaps[1])),
            }
        return figures

    def _of_shifted_grids(self, inside: np.ndarray, above: np.ndarray) -> Figures:
        """Figures of the highest and lowest points of cells, means over shifted grids."""
        unit = self.scale.unit
        is_low, is_ground = (
            np.abs(heights) <= unit.of_metres(BELOW_GROUND) for heights in (above, self._above)
        )
        found: list[Figures] = []
        for shift in np.ndindex(SHIFTS, SHIFTS):
            figures: Figures = {}
            grid = ShiftedGrid(self.extent, self.extent.cell, shift)
            rise = grid.highest(inside, inside[:, 2]) - grid.highest(self.inside, self.inside[:, 2])
            if (rise := rise[np.isfinite(rise)]).size:
                figures["canopy_rmse_shifted"] = _rmse(rise)
                figures["canopy_bias_shifted"] = float(rise.mean())
            grid = ShiftedGrid(self.extent, unit.of_metres(GROUND_CELL), shift)
            seen = np.isfinite(grid.highest(self.inside[is_ground], self._above[is_ground]))
            if seen.any():
                error = grid.highest(self.inside, -self._above) - grid.highest(inside, -above)
                if (error := error[seen & np.isfinite(error)]).size:
                    figures["ground_rmse_2m"] = _rmse(error)
                missed = np.isnan(grid.highest(inside[is_low], above[is_low]))[seen]
                figures["ground_missed_2m"] = 100 * float(missed.mean())
            found.append(figures)
        return mean_figures(found)

    def _is_gap(self, high: np.ndarray) -> np.ndarray:
        """Mask (X, Y) of cells whose highest point `high` is at most `OPEN_SKY` above ground."""
        return high <= self._open_below


class ShiftedGrid:
    """Square cells over an extent, moved back by `shift` (2,) fractions, in `SHIFTS`, of a cell."""

    def __init__(self, extent: Extent, cell: float, shift: tuple[int, ...]) -> None:
        self._cell, self._corner = cell, extent.origin - np.array(shift) / SHIFTS * cell
        width = np.array(extent.covered.shape) * extent.cell
        self._shape = np.floor((width + extent.origin - self._corner) / cell).astype(np.int64) + 1

    def highest(self, points: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """The largest of the heights (N,) of points (N, 3) of each cell; NaN without points."""
        x, y = np.floor((points[:, :2] - self._corner) / self._cell).astype(np.int64).T
        highest = np.full(self._shape.prod(), -np.inf)
        np.maximum.at(highest, x * self._shape[1] + y, heights)
        return np.where(np.isfinite(highest), highest, np.nan)


def _on(extent: Extent, points: np.ndarray, name: str) -> np.ndarray:
    inside = points[extent.contains(points)]
    if not len(inside):
        raise DataError(f"the {name} has no points on the common extent")
    return inside


def _distances(query: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Unsquared distance (Q,) of each query (Q, 3) to the nearest of the points (P, 3)."""
    centre = points.mean(axis=0)
    packed = [
        (torch.from_numpy(cloud - centre), torch.tensor([0, len(cloud)]))
        for cloud in (query, points)
    ]
    return nearest(*packed[0], *packed[1])[0].sqrt().numpy()


def mean_distance(query: np.ndarray, points: np.ndarray) -> float:
    """Mean unsquared distance of points (Q, 3) to the nearest of the points (P, 3)."""
    return float(_distances(query, points).mean())


def _lowest_around(grid: np.ndarray) -> np.ndarray:
    known = np.where(np.isnan(grid), np.inf, grid)
    lowest = ndimage.minimum_filter(known, 2 * LOWEST_REACH + 1, mode="nearest")
    return np.where(np.isinf(lowest), np.nan, lowest)


def _rmse(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference))))


def upsampled_surveys(
    source: PointCloud,
    ratio: float,
    density: float | None = None,
    upsampler: Upsampler | None = None,
    seed: int = 0,
    ground_density: float | None = None,
    made: dict[str, PointCloud] | None = None,
) -> dict[str, np.ndarray]:
    """The surveys (M, 3) float64 that methods make of a source, by the names of the methods.

    They are "model", if there is one, "midpoints" and those of `baseline_clouds`. The model and the
    midpoints are what `pointup upsample` writes with the ratio or, if one is given, the target
    density in points per square unit; the midpoints without the points that continue the ground
    below crowns (`ground_density`). The other baselines have as many points as the model, without
    a model as the midpoints. `made` gets the cloud of the model, with its attributes. Raises
    DataError, which names the file, for a source that can't be upsampled.
    """
    surveys = {}
    if upsampler is not None:
        cloud = _as_written(source, ratio, density, upsampler, ground_density)
        surveys["model"] = cloud.positions
        if made is not None:
            made["model"] = cloud
    midpoints = _as_written(source, ratio, density, _midpoint_model(upsampler), 0.0)
    surveys["midpoints"] = midpoints.positions
    like = surveys.get("model", surveys["midpoints"])
    num_points = max(len(like), len(source.positions))
    return surveys | baseline_clouds(source.positions, num_points, seed)


def _midpoint_model(upsampler: Upsampler | None) -> Upsampler:
    """A model whose output is the midpoint baseline, in the same passes as those of `upsampler`.

    An untrained model has zero offsets, so that its output is the thinned midpoints. Exponent 0
    ignores its predicted density.
    """
    config = upsampler.config if upsampler else ModelConfig()
    # The largest ratio of a pass also limits how many points one becomes at a density.
    return Upsampler(density_exponent=0.0, max_pass_ratio=config.max_pass_ratio)


def _as_written(
    source: PointCloud,
    ratio: float,
    density: float | None,
    upsampler: Upsampler,
    ground_density: float | None,
) -> PointCloud:
    """What `pointup upsample` makes of a survey."""
    try:
        # A density replaces the ratio, by which the survey was thinned.
        by_ratio = ratio if density is None else None
        return upsample(
            source,
            by_ratio,
            density=density,
            model=upsampler,
            above_ground=True,
            ground_density=ground_density,
        )
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from None


MARGIN = 64.0
"""Width of the strip around a reference in which its source is upsampled, in mean point spacings of
the source. New points depend on measured points within about 20 local spacings."""
FEWEST_POINTS = 2
"""Fewest points of a source."""
ATTRIBUTES: dict[str, type[np.generic]] = {CLASSIFICATION: np.uint8, NUMBER_OF_RETURNS: np.uint8}
"""The attributes on which the places of new points depend."""
OF_PASSES: dict[str, type[np.generic]] = {GPS_TIME: np.float64, POINT_SOURCE_ID: np.int64}
"""The attributes that tell flight passes apart."""


def read_survey(
    path: Path,
    notes: list[str],
    synthetic: Literal["note", "drop", "keep"] = "note",
    kept_attributes: Mapping[str, type[np.generic]] = ATTRIBUTES,
) -> PointCloud:
    """Read a survey file, or those of a virtual point cloud, without noise (classes 7 and 18) and
    withheld points; `notes` get lines on what was left out, and on synthetic points.

    Points with the synthetic flag are no measurements. "note": they are kept, and a note says so.
    "drop": they are left out, as noise is. "keep": nothing is said, because the survey is the
    output of an upsampling. Raises FileError if the file can't be read, DataError if no point is
    left.
    """
    positions: list[np.ndarray] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in kept_attributes}
    num_points = num_noise = num_synthetic = 0
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name a virtual point cloud (.vpc) of its files")
    files = files_of(path)
    for cloud in chain.from_iterable(map(iter_points, files)):
        noise = is_noise(cloud)
        made = is_synthetic(cloud) & ~noise
        num_noise += int(noise.sum())
        num_synthetic += int(made.sum())
        counts = ~(noise | made) if synthetic == "drop" else ~noise
        for name, of_chunks in values.items():
            if (found := attribute(cloud, name)) is not None:
                of_chunks.append(found[counts].astype(kept_attributes[name]))
        positions.append(cloud.positions[counts])
        num_points += len(cloud)
    kept = np.concatenate(positions)
    if not len(kept):
        kinds = "noise, withheld or synthetic" if synthetic == "drop" else "noise or withheld"
        raise DataError(f"{path}: all {num_points:,} points are {kinds}")
    if num_noise:
        notes.append(f"{path}: {num_noise:,} points left out: noise (classes 7 and 18) or withheld")
    if num_synthetic and synthetic != "keep":
        consequence = "left out" if synthetic == "drop" else "but count as measured here"
        notes.append(
            f"{path}: {num_synthetic:,} points have the synthetic flag: they are not measured, "
            f"{consequence}"
        )
    # Files of one list may differ in their attributes.
    attributes = {
        name: np.concatenate(chunks)
        for name, chunks in values.items()
        if sum(map(len, chunks)) == len(kept)
    }
    survey = PointCloud(kept, attributes, path=path)
    # Tiles with a buffer hold the same points.
    if len(files) > 1 and not (is_first := first_occurrences(kept)).all():
        notes.append(f"{path}: {(~is_first).sum():,} points left out: where another one is")
        survey = survey.select(is_first)
    return survey


def split_passes(
    path: Path, seed: int, notes: list[str]
) -> tuple[PointCloud, PointCloud, PointCloud | None]:
    """Split a survey into a flight pass, the others, and a second pass; `notes` get a list of them.

    The first is the sparsest pass on half of the ground or more. The second is the next one,
    thinned to the density of the first and left out of the others, if another one of these covers
    half of the ground; else None.
    Raises DataError for a survey without two passes.
    """
    survey = read_survey(path, notes, "drop", ATTRIBUTES | OF_PASSES)
    found = passes_of(survey)
    label, passes = found.label, found.passes
    used = [number for number, each in enumerate(passes) if not each.left_out]
    half = found.area / 2
    first, *others = sorted(used, key=lambda n: (passes[n].area < half, passes[n].density))
    names = [name for name in ATTRIBUTES if name in survey.attributes]
    survey = replace(survey, attributes={name: survey.attributes[name] for name in names})
    notes += [*table_of(passes, found.area), f"source: pass {first + 1}"]
    second = None
    if len(others) > 1 and passes[others[1]].area >= half:
        share = min(1.0, passes[first].density / passes[others[0]].density)
        rows = np.flatnonzero(label == others[0])
        generator = np.random.default_rng(seed)
        chosen = generator.choice(rows, max(1, round(share * len(rows))), replace=False)
        second = survey.select(np.sort(chosen))
        notes[-1] += (
            f"; resampled: pass {others[0] + 1}, thinned to its density; reference: the others"
        )
        others = others[1:]
    return survey.select(label == first), survey.select(np.isin(label, others)), second


def thin_survey(
    survey: PointCloud, ratio: float, pattern: str, seed: int
) -> tuple[PointCloud, PointCloud]:
    """Split a survey into source and reference: the points thinned by `pattern`, and the others.

    The reference has `ratio` times as many points as the source. Neither has points at the position
    of another one, as in tiles with a buffer: a copy would put a point on both sides. Raises
    DataError for too few points.
    """
    survey = survey.select(first_occurrences(survey.positions))
    num_points = len(survey.positions)
    num_source = round(num_points / (ratio + 1))
    if num_source < FEWEST_POINTS:
        raise DataError(
            f"{survey.path}: {num_points:,} points thinned for a ratio of {ratio:g} leave "
            f"{num_source} for the source, which needs at least {FEWEST_POINTS}: give a smaller "
            "ratio or a survey with more points"
        )
    generator = np.random.default_rng(seed)
    is_source = np.zeros(num_points, dtype=bool)
    is_source[thin(survey.positions, ratio + 1, pattern, generator)] = True
    return survey.select(is_source), survey.select(~is_source)


def near_reference(source: PointCloud, reference: np.ndarray) -> PointCloud:
    """The points of a source within `MARGIN` of the bounding rectangle of a reference (R, 3).

    The rest of a larger source is too far away for the distances of new points there. It only
    decides which of several equal candidates are selected. The source itself, if it has no points
    beyond.
    """
    xy = source.positions[:, :2]
    sides = np.ptp(xy, axis=0)
    spacing = max(np.sqrt(sides.prod() / len(xy)), sides.max() / len(xy))
    low, high = box_of(reference[:, :2])
    margin = MARGIN * spacing
    near = in_box(xy, low - margin, high + margin)
    return source if near.all() else source.select(near)
