"""Measures the clouds of pairs against the true surface, which simulated pairs have."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.spatial import cKDTree

from pointup.evaluation.cloud_metrics import Figures, Metric
from pointup.evaluation.lidar_metrics import FAR, NEW_BEYOND
from pointup.geometry.surfaces import Surface
from pointup.io.length_unit import UNKNOWN, LengthUnit


def surface_metrics(unit: LengthUnit = UNKNOWN) -> dict[str, Metric]:
    """The metrics of `measure_to_surface` besides "p2f", in the order to print."""
    return {
        f"off_surface_{far:g}": Metric(
            f"beyond {unit.described(far)} of the true surface",
            "%",
            ""
            if i
            else "share of the new points that are farther than this from the true surface; for "
            "the source and the second survey all points",
        )
        for i, far in enumerate(FAR)
    }


def measure_to_surface(
    clouds: Mapping[str, np.ndarray], surface: Surface, unit: LengthUnit | None = UNKNOWN
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
