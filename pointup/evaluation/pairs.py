"""Measures the pairs of a batch: model, baselines, source, resampled truth, true surfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.pair import is_within
from pointup.evaluation.baselines import BASELINES, FITTED, baseline_clouds, fitted_clouds
from pointup.evaluation.cloud_metrics import (
    Clouds,
    Figures,
    Metric,
    clouds_of_pairs,
    measure_clouds,
    metrics_in,
)
from pointup.evaluation.common_extent import Extent, find_ground, whole_extent
from pointup.evaluation.lidar import SurveyReference, mean_distance
from pointup.evaluation.lidar_metrics import FAR, NEW_BEYOND, Scale, band_metrics, lidar_metrics
from pointup.geometry.midpoints import output_sizes
from pointup.geometry.packed import ptr_from_sizes
from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.io.length_unit import LengthUnit
from pointup.model.upsampler import Upsampler
from pointup.upsampling import upsample

if TYPE_CHECKING:
    from pointup.visualization.viewer.scenes import Scene

THRESHOLDS = (0.25, 0.5)
# Metrics of whole surveys only, and metrics that `measure` has already.
_LEFT_OUT = {
    "num_points", "density", "covered", "chamfer", "chamfer_median", "hausdorff",
    "beyond_1_anywhere",
}  # fmt: skip


def baselines_of_pairs(
    batch: Batch, ratio: Tensor, seed: int
) -> tuple[Clouds, list[dict[str, float]]]:
    """`baseline_clouds` and `fitted_clouds` of every source, packed, by row; and the fitted noise.

    They have as many points as the midpoint baseline.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*BASELINES, *FITTED)}
    noise = []
    numbers = output_sizes(batch.ptr, ratio).tolist()
    sources, targets = unpacked(batch.pos, batch.ptr), unpacked(batch.target, batch.target_ptr)
    for name, source, target, number in zip(batch.name, sources, targets, numbers, strict=True):

        def error(cloud: np.ndarray, target: np.ndarray = target) -> float:
            return mean_distance(cloud, target) + mean_distance(target, cloud)

        fitted = fitted_clouds(source, number, error, seed, str(name))
        noise.append({row: share for row, (_, share) in fitted.items()})
        clouds = baseline_clouds(source, number, seed, str(name))
        for row, cloud in (clouds | {row: cloud for row, (cloud, _) in fitted.items()}).items():
            found[row].append(cloud)
    return {row: _packed(clouds, batch.pos.device) for row, clouds in found.items()}, noise


def upsampled_pairs(
    batch: Batch,
    ratio: Tensor,
    upsampler: Upsampler,
    vertical: Sequence[bool],
    originals: bool = True,
    made: list[PointCloud] | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of `pointup upsample` for every source; packed.

    `vertical`: whether z points up in each pair; if so, no new point lies below the ground. Without
    `originals` no measured point is kept. `made` gets the clouds with their attributes.
    """
    device = batch.pos.device
    sources = unpacked(batch.pos, batch.ptr)
    clouds = [
        upsample(
            PointCloud(source),
            float(by),
            model=upsampler,
            originals=originals,
            above_ground=has_heights,
            device=device,
        )
        for source, by, has_heights in zip(sources, ratio.tolist(), vertical, strict=True)
    ]
    if made is not None:
        made += clouds
    return _packed([cloud.positions for cloud in clouds], device)


def figures_of_pairs(
    batch: Batch,
    clouds: Clouds,
    surfaces: Sequence[Surface | None],
    vertical: Sequence[bool],
    unit: LengthUnit,
) -> list[dict[str, Figures]]:
    """For every pair of a batch, the figures of `pair_metrics` and `band_metrics` for each of the
    clouds, by row.

    A pair that is not `vertical` (its z axis does not point up) has no figures of surveys, and its
    distances to the surface are not compared with lengths on the ground. A pair with a core is
    measured there.
    """
    measured = measure_clouds(*_on_cores(batch, clouds))
    split = {row: unpacked(*cloud) for row, cloud in clouds.items()}
    for pair, target in enumerate(unpacked(batch.target, batch.target_ptr)):
        rows, of_pair = measured[pair], {row: cloud[pair] for row, cloud in split.items()}
        parts = []
        if vertical[pair] and rows:
            parts.append(measure_as_surveys(of_pair, target, unit, batch.core[pair]))
        if (surface := surfaces[pair]) is not None:
            parts.append(measure_to_surface(of_pair, surface, unit if vertical[pair] else None))
        for part in parts:
            for row in rows:
                rows[row] |= part.get(row, {})
    return measured


def _on_cores(batch: Batch, clouds: Clouds) -> tuple[Batch, Clouds]:
    """The batch and the clouds without the points around the cores of pairs."""
    if all(core is None for core in batch.core):
        return batch, clouds

    def cut(points: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
        kept = [
            cloud if core is None else cloud[is_within(cloud, core)]
            for cloud, core in zip(unpacked(points, ptr), batch.core, strict=True)
        ]
        return _packed(kept, points.device)

    inside = copy(batch)
    inside.target, inside.target_ptr = cut(batch.target, batch.target_ptr)
    return inside, {row: cut(*cloud) for row, cloud in clouds.items()}


def measure_as_surveys(
    clouds: Mapping[str, np.ndarray],
    target: np.ndarray,
    unit: LengthUnit,
    core: np.ndarray | None = None,
) -> dict[str, Figures]:
    """The figures of `survey_metrics` and `band_metrics` for each cloud (P, 3) of a pair, by row.

    `clouds` has the row "source". With a core (2, 2) they are those of its cells, and so are
    "chamfer" and "hausdorff"; nearest neighbours may lie around it.
    """
    scale = Scale(unit, thresholds=THRESHOLDS)
    names = set(survey_metrics(unit) | band_metrics(scale))
    source, cell = clouds["source"], unit.of_metres(scale.cell)
    whole = extent = whole_extent(np.concatenate([source, target]), cell)
    if core is not None:
        names |= {"chamfer", "hausdorff"}
        shape = np.floor((core[1] - core[0]) / cell + 0.01).clip(1).astype(np.int64)
        extent = Extent(cell, core[0], np.ones(shape, dtype=bool))
    ground = find_ground(target, whole, unit=unit)
    reference = SurveyReference(target, extent, ground, source, scale, everywhere=core is None)
    return {
        row: {name: value for name, value in reference.measure(points).items() if name in names}
        for row, points in clouds.items()
        if extent.contains(points).any()
    }


def survey_metrics(unit: LengthUnit) -> dict[str, Metric]:
    """The metrics of `measure_as_surveys`, in the order to print."""
    scale = Scale(unit, thresholds=THRESHOLDS)
    ground = "the target's lowest points, triangulated"
    metrics = lidar_metrics(scale, ground)
    return {name: metric for name, metric in metrics.items() if name not in _LEFT_OUT}


def pair_metrics(unit: LengthUnit) -> dict[str, Metric]:
    """`METRICS`, with lengths in `unit`, then `survey_metrics`, then `surface_metrics`."""
    return {**metrics_in(unit.name), **survey_metrics(unit), **surface_metrics(unit)}


def unpacked(pos: Tensor, ptr: Tensor) -> list[np.ndarray]:
    """The clouds of a packed tensor, (N_i, 3) float64 each."""
    points = pos.cpu().double().numpy()
    return np.split(points, ptr.tolist()[1:-1]) if len(ptr) > 1 else []


def _packed(clouds: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    points = torch.from_numpy(np.concatenate([np.empty((0, 3)), *clouds]).astype(np.float32))
    ptr = ptr_from_sizes(torch.tensor([len(cloud) for cloud in clouds]))
    return points.to(device), ptr.to(device)


def surface_metrics(unit: LengthUnit) -> dict[str, Metric]:
    """The metrics of `measure_to_surface` besides "p2f", in the order to print."""
    convention = (
        "share of the new points that are farther than this from the true surface; for the source "
        "and the second survey all points"
    )
    return {
        f"off_surface_{far:g}": Metric(
            f"beyond {unit.described(far)} of the true surface", "%", "" if i else convention
        )
        for i, far in enumerate(FAR)
    }


def measure_to_surface(
    clouds: Mapping[str, np.ndarray], surface: Surface, unit: LengthUnit | None
) -> dict[str, Figures]:
    """The figures of `surface_metrics` for each cloud (P, 3) of a pair, by row.

    `clouds` has the row "source". New points are those farther than `NEW_BEYOND` metres from every
    point of it; a cloud without any counts as a whole. With `unit` None, for coordinates that are
    no lengths on the ground, only "p2f" is measured.
    """
    source = cKDTree(clouds["source"])
    measured: dict[str, Figures] = {}
    for row, points in clouds.items():
        if not len(points):
            continue
        distance = surface.distance(points)
        measured[row] = {"p2f": 1e3 * float(distance.mean())}
        if unit is None:
            continue
        is_new = np.asarray(source.query(points)[0]) > unit.of_metres(NEW_BEYOND)
        new = distance[is_new] if is_new.any() else distance
        for far in FAR:
            share = np.mean(new > unit.of_metres(far))
            measured[row][f"off_surface_{far:g}"] = 100 * float(share)
    return measured


TITLES = {
    "source": "source",
    "midpoints": "midpoint baseline",
    "resampled": "resampled ground truth",
    "prediction": "prediction",
    "model": "model",
}
"""Clouds that are shown beside the target, from left to right, and their titles."""


@dataclass(frozen=True, eq=False)
class ShownPair:
    """Clouds (N, 3) of a pair by the names of `TITLES`, and their target.

    Attributes:
        vertical: z points up; otherwise y.
        unit: of the coordinates, such as "m".
        note: one line about the pair.
        notes: a few words about each cloud, and about the target, by name.
        of: name of the target.
        origin: (3,) added to all clouds, so that heights are those of the input file.
    """

    name: str
    clouds: Mapping[str, np.ndarray]
    target: np.ndarray
    vertical: bool
    unit: str = ""
    note: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    of: str = "target"
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))

    def scene(self) -> Scene:
        """For the viewer, coloured by the distance to the target."""
        # No matplotlib in training.
        from pointup.visualization.viewer.scenes import compare_with_reference

        return compare_with_reference(
            self.titled(),
            self.target + self.origin,
            self.unit,
            "z" if self.vertical else "y",
            name=self.name,
            note=self.note,
            of=self.of,
        )

    def picture(self, errors: bool = True) -> np.ndarray:
        """(height, width, 3) uint8; see `columns_picture`."""
        from pointup.visualization.columns import columns_picture

        return columns_picture(
            self.titled(),
            self.target + self.origin,
            of=self.of,
            unit=self.unit,
            vertical=self.vertical,
            title=self.name,
            subtitle=self.note,
            notes={TITLES.get(name, name): note for name, note in self.notes.items()},
            errors=errors,
        )

    def titled(self) -> dict[str, np.ndarray]:
        """The clouds by their titles, from left to right."""
        return {
            title: self.clouds[name] + self.origin
            for name, title in TITLES.items()
            if name in self.clouds
        }


def worst_to_best(scores: Sequence[float]) -> dict[str, int]:
    """Index of the pair with the highest score (the worst), with the median one and the lowest.

    Fewer than three pairs have fewer entries; scores that are not finite are left out.
    """
    order = [int(i) for i in np.argsort(scores)[::-1] if np.isfinite(scores[int(i)])]
    if len(order) < 3:
        return {"worst": order[0], "best": order[-1]} if len(order) == 2 else {"only": order[0]}
    return {"worst": order[0], "median": order[len(order) // 2], "best": order[-1]}


def made_clouds(
    batch: Batch,
    ratio: Tensor,
    upsampler: Upsampler | None,
    vertical: Sequence[bool],
    as_written: bool,
    made: list[PointCloud] | None = None,
) -> Clouds:
    """`clouds_of_pairs`; with `as_written` the model's are the output of `pointup upsample`, and
    `made` gets them with their attributes."""
    clouds = clouds_of_pairs(batch, ratio, None if as_written else upsampler)
    if upsampler is not None and as_written:
        clouds["model"] = upsampled_pairs(batch, ratio, upsampler, vertical, made=made)
    return clouds
