"""The uncertainty of new points, measured: distances to the truth, reliability, calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.spatial import cKDTree

from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.upsampling.attributes import UNCERTAINTY

Reliability = dict[str, float | list[float]]
_NUM_AROUND = 8


def measured_uncertainty(
    cloud: PointCloud, target: np.ndarray, surface: Surface | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The uncertainty (M,) of the new points of an upsampled cloud, and their distances (M,) to the
    true surface, or else beyond the `target` (T, 3), see `distances_beyond`.

    New points are those with an uncertainty above 0. A cloud without the attribute has none.
    """
    uncertainty = cloud.attributes.get(UNCERTAINTY, np.zeros(len(cloud), np.float32))
    is_new = uncertainty > 0
    points, source = cloud.positions[is_new], cloud.positions[~is_new]
    if surface is not None:
        return uncertainty[is_new], surface.distance(points)
    return uncertainty[is_new], distances_beyond(points, source, target)


def distances_beyond(points: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Distances (M,) of new points (M, 3) to a target (T, 3), without what the sampling and the
    noise of the target add.

    A measured point of the source (N, 3) is off the target, too, although it is on the surface.
    What nine in ten such points are off is taken from the distance of a new point, both squared, by
    the mean square m of its n = 8 nearest measured points. On a surface that is sampled at random,
    squared distances have an exponential distribution: given m, nine in ten of other points are
    below m n (10^(1/n) - 1).
    """
    tree = cKDTree(target)
    squared = np.square(tree.query(points)[0])
    if len(source) and len(points):
        number = min(_NUM_AROUND, len(source))
        near = cKDTree(source).query(points, k=np.arange(1, number + 1))[1]
        mean = np.square(tree.query(source)[0])[near].mean(axis=1)
        squared -= number * (10 ** (1 / number) - 1) * mean
    beyond: np.ndarray = np.sqrt(squared.clip(min=0))
    return beyond


def reliability(
    measured: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Reliability:
    """How reliable uncertainties are, of the pairs of arrays of `measured_uncertainty`; {} for
    fewer than ten points.

    `within`: per cent of the points that stay within their uncertainty, 90 if it is right;
    `within_by_decile`: of the tenth with the smallest uncertainty to that with the largest;
    `uncertainty_by_decile`, `distance_by_decile`, `distance_90_by_decile`: mean uncertainty, mean
    distance and 90th percentile of the distances of these tenths; `sharpness`: the mean distance of
    the last one divided by that of the first.
    """
    uncertainty, distance = (
        np.concatenate([np.empty(0), *(pair[side] for pair in measured)]) for side in (0, 1)
    )
    if len(uncertainty) < 10:
        return {}
    deciles = np.array_split(np.argsort(uncertainty, kind="stable"), 10)
    means = [float(distance[rows].mean()) for rows in deciles]
    is_within = distance <= uncertainty
    return {
        "within": 100 * float(is_within.mean()),
        "within_by_decile": [100 * float(is_within[rows].mean()) for rows in deciles],
        "uncertainty_by_decile": [float(uncertainty[rows].mean()) for rows in deciles],
        "distance_by_decile": means,
        "distance_90_by_decile": [float(np.quantile(distance[rows], 0.9)) for rows in deciles],
        "sharpness": means[-1] / max(means[0], 1e-9 * means[-1], np.finfo(float).tiny),
    }


def describe_reliability(found: Reliability) -> list[str]:
    """`reliability` in a line; none without figures."""
    if not found:
        return []
    shares = " ".join(f"{share:.0f}" for share in np.asarray(found["within_by_decile"]))
    return [
        f"uncertainty: {found['within']:.1f} % of the new points are within it (should be 90), by "
        f"decile of it {shares}; mean distance of the last decile {found['sharpness']:.3g} times "
        "that of the first"
    ]
