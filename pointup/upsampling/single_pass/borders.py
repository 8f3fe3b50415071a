"""Keeps new points within the borders of flat parts: a sheet ends where its measured points end."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from pointup.geometry.fitted_surfaces import principal_axes

NUM_NEIGHBORS = 12
"""Number of points whose convex hull, in the plane, a new point may not leave."""
# Largest share of the variance along the normal in a flat part: a tip or an edge curves beyond the
# plane, and points outside the hull of their neighbours may lie on its surface.
_FLAT = 1e-3
_ROWS = 2048  # processed at a time, so that the arrays fit in the cache of the CPU


def within_borders(points: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Positions (M, 3) of points (M, 3) of which those beyond a border are moved back to it.

    A point is beyond a border if its nearest points of `measured` (F, 3) lie in a plane, and its
    projection onto the plane is outside of their convex hull there. It moves within the plane to
    the nearest point of the hull. With fewer than three measured points nothing moves.
    """
    k = min(NUM_NEIGHBORS, len(measured))
    if k < 3 or not len(points):
        return points
    distance, index = (np.asarray(found) for found in cKDTree(measured).query(points, k=k))
    now = points.copy()
    for rows in np.split(np.arange(len(points)), range(_ROWS, len(points), _ROWS)):
        around = measured[index[rows]]
        frame, variance = principal_axes(around, distance[rows])
        is_flat = variance[:, 0] < _FLAT * variance.sum(axis=1)
        in_plane = frame[:, :, 1:]
        around = (around - points[rows, None]) @ in_plane
        beyond = np.flatnonzero(is_flat & _is_outside(around))
        step = _to_hull(around[beyond])
        now[rows[beyond]] += np.einsum("qij,qj->qi", in_plane[beyond], step)
    return now


def _is_outside(around: np.ndarray) -> np.ndarray:
    """Whether the origin is outside the convex hull of the points (Q, K, 2): all lie in less than
    half of the directions around it."""
    angle = np.sort(np.arctan2(around[..., 1], around[..., 0]), axis=1)
    gap = np.diff(angle, axis=1, append=angle[:, :1] + 2 * np.pi)
    is_outside: np.ndarray = gap.max(axis=1) > np.pi
    return is_outside


def _to_hull(around: np.ndarray) -> np.ndarray:
    """Steps (Q, 2) from the origin, outside, to the convex hull of the points (Q, K, 2)."""
    # The edges of the hull are among the lines between all pairs, and none is nearer than they are.
    first, second = np.triu_indices(around.shape[1], 1)
    start, along = around[:, first], around[:, second] - around[:, first]
    length = np.einsum("qei,qei->qe", along, along)
    share = -np.einsum("qei,qei->qe", start, along) / np.maximum(length, np.finfo(float).tiny)
    there = start + share.clip(0.0, 1.0)[..., None] * along
    nearest = np.einsum("qei,qei->qe", there, there).argmin(axis=1)
    step: np.ndarray = there[np.arange(len(there)), nearest]
    return step
