"""The uncertainty of new points, measured: distances to the truth, reliability, calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.spatial import cKDTree

from pointup.datasets.survey_tiles import first_occurrences
from pointup.geometry.surfaces import Surface, eigenvectors
from pointup.io.cloud import PointCloud
from pointup.model.calibration import Calibration
from pointup.upsampling.attributes import UNCERTAINTY

Reliability = dict[str, float | list[float]]
_NUM_AROUND = 8
# Of points on a plane, the variance off it is less than this share of the next one; of points on a
# line, the variance across it of that along it.
_FLAT = 0.1
_BLOCK = 100_000


def measured_uncertainty(
    cloud: PointCloud,
    target: np.ndarray,
    surface: Surface | None = None,
    source: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The uncertainty (M,) of the new points of an upsampled cloud, and their distances (M,) to the
    true surface, or else beyond the `target` (T, 3), see `distances_beyond`.

    New points are those with an uncertainty above 0. A cloud without the attribute has none. The
    others are measured; `source` (N, 3) has the measured points of a cloud of new points only.
    """
    uncertainty = cloud.attributes.get(UNCERTAINTY, np.zeros(len(cloud), np.float32))
    is_new = uncertainty > 0
    points = cloud.positions[is_new]
    if surface is not None:
        return uncertainty[is_new], surface.distance(points)
    if source is None or not is_new.all():
        source = cloud.positions[~is_new]
    return uncertainty[is_new], distances_beyond(points, source, target)


def distances_beyond(points: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Distances (M,) of new points (M, 3) to a target (T, 3), without what the sampling and the
    noise of the target add.

    A measured point of the source (N, 3) is off the target, too, although it is on the surface, and
    the more the farther it is from the others: the target is sparse there as well. Each is left out
    in turn and compared with its 8 nearest others. Nine in ten are less off, squared, than the mean
    square of these times a factor that rises with the distance to the nearest. As much, by the
    measured points around it, is taken from the squared distance of a new point.
    """
    squared = _squared_distances(points, target)
    # A copy of a point says nothing of the gaps around it.
    source = source[first_occurrences(source)]
    number = min(_NUM_AROUND, len(source) - 1)
    if number > 0 and len(points):
        tree, off = cKDTree(source), _squared_distances(source, target)
        gap, near = map(np.asarray, tree.query(source, k=np.arange(1, number + 2)))
        least = max(1e-9 * off.max(), np.finfo(float).tiny)
        # A calibration has four decimals.
        typical = max(float(np.median(gap[:, 1])), np.finfo(float).tiny)
        share = off / off[near[:, 1:]].mean(axis=1).clip(min=least)
        factor = Calibration.fit(gap[:, 1] / typical, share)
        gap, near = map(np.asarray, tree.query(points, k=np.arange(1, number + 1)))
        squared -= factor.within(gap[:, 0] / typical) * off[near].mean(axis=1)
    return np.sqrt(squared.clip(min=0))


def _squared_distances(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Squared distances (M,) of points (M, 3) to a target (T, 3): to the plane of its 8 nearest
    points where these are flat and the point is among them, else to the nearest.

    On flat ground the distance to the nearest is that of the scan lines. Where these are in phase
    with those of the source, measured points are close to them, and those in between are not.
    """
    tree = cKDTree(target)
    blocks = np.array_split(points, 1 + len(points) // _BLOCK)
    return np.concatenate([_of_block(block, target, tree) for block in blocks])


def _of_block(points: np.ndarray, target: np.ndarray, tree: cKDTree) -> np.ndarray:
    """`_squared_distances` of some points, by the tree of the target."""
    nearest = np.arange(1, min(_NUM_AROUND, len(target)) + 1)
    distance, index = map(np.asarray, tree.query(points, k=nearest))
    middle = target[index].mean(axis=1)
    around, away = target[index] - middle[:, None], points - middle
    axes, variance = eigenvectors(around.swapaxes(1, 2) @ around / len(nearest))
    height = np.square((away * axes[:, :, 0]).sum(axis=1))
    # A line of points has no plane; a disc has a squared radius of twice its variance.
    is_plane = (variance[:, :2] < _FLAT * variance[:, 1:]) == (True, False)
    is_among = np.square(away).sum(axis=1) - height <= 2 * variance[:, 1:].sum(axis=1)
    return np.where(is_plane.all(axis=1) & is_among, height, np.square(distance[:, 0]))


def reliability(measured: Sequence[tuple[np.ndarray, np.ndarray]]) -> Reliability:
    """How reliable uncertainties are, of the pairs of arrays of `measured_uncertainty`; {} for
    fewer than ten points.

    `within`: per cent of the points that stay within their uncertainty, 90 if it is right;
    `within_by_decile`: of the tenth with the smallest uncertainty to that with the largest;
    `uncertainty_by_decile`, `distance_by_decile`, `distance_90_by_decile`: mean uncertainty, mean
    distance and 90th percentile of the distances of these tenths; `sharpness`: the mean distance of
    the last one divided by that of the first.
    """
    uncertainty, distance = np.concatenate([np.empty((2, 0)), *measured], axis=1)
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


def describe_reliability(found: Reliability, *, of_surface: bool) -> list[str]:
    """`reliability` in a line; none without figures. `of_surface`: distances are to true surfaces,
    otherwise `distances_beyond` a target."""
    if not found:
        return []
    shares = " ".join(f"{share:.0f}" for share in np.asarray(found["within_by_decile"]))
    beyond = "" if of_surface else ", beyond what measured points around are off,"
    line = f"uncertainty: {found['within']:.1f} % of the new points are within it (should be 90)"
    line += f"{beyond or ','} by decile of it {shares}"
    # On flat ground none of the first decile may be off.
    if np.asarray(found["distance_by_decile"])[0] > 0:
        line += f"; mean distance of the last decile {found['sharpness']:.3g} times that of the "
        line += "first"
    return [line]
