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
# Widest angle without a neighbour from which on a measured point is at a border: a point beyond the
# line between two others is nearest to one that sees this line at a right angle or more.
_GAP = np.pi / 2
_ROWS = 2048  # processed at a time, so that the arrays fit in the cache of the CPU


def within_borders(
    points: np.ndarray, parent: np.ndarray, sources: np.ndarray, measured: np.ndarray
) -> np.ndarray:
    """Positions (M, 3) of points (M, 3) of which those beyond a border are moved back to it.

    A point is beyond a border if its nearest points of `measured` (F, 3) lie in a plane, and its
    projection onto the plane is outside of their convex hull there. It moves within the plane to
    the nearest point of the hull. Only points near a border are looked at: `parent` (M,) is the row
    of each point's parent in `sources` (P, 3), which are in `measured`. With fewer than three
    measured points nothing moves.
    """
    if len(measured) < 3 or not len(points):
        return points
    tree, now = cKDTree(measured), points.copy()
    at_border = np.zeros(len(sources), dtype=bool)
    for rows in _parts(len(sources)):
        around, _, _ = _in_plane(tree, sources[rows], itself=True)
        at_border[rows] = _widest_gap(around) > _GAP
    near_border = np.flatnonzero(at_border[parent])
    for part in _parts(len(near_border)):
        rows = near_border[part]
        around, axes, is_flat = _in_plane(tree, points[rows], itself=False)
        beyond = np.flatnonzero(is_flat & (_widest_gap(around) > np.pi))
        now[rows[beyond]] += np.einsum("qij,qj->qi", axes[beyond], _to_hull(around[beyond]))
    return now


def _parts(number: int) -> list[np.ndarray]:
    return np.split(np.arange(number), range(_ROWS, number, _ROWS)) if number else []


def _in_plane(
    tree: cKDTree, points: np.ndarray, itself: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places (Q, K, 2) of the measured points around points (Q, 3) in the plane fitted to them, its
    axes (Q, 3, 2), and whether they lie in it, (Q,). With `itself` the nearest is left out."""
    k = min(NUM_NEIGHBORS + itself, tree.n)
    distance, index = (np.asarray(found)[:, itself:] for found in tree.query(points, k=k))
    around = tree.data[index]
    frame, variance = principal_axes(around, distance)
    axes = frame[:, :, 1:]
    is_flat = variance[:, 0] < _FLAT * variance.sum(axis=1)
    return (around - points[:, None]) @ axes, axes, is_flat


def _widest_gap(around: np.ndarray) -> np.ndarray:
    """Widest angle (Q,) around the origin without a point of (Q, K, 2). Above pi, the origin is
    outside of their convex hull."""
    angle = np.sort(np.arctan2(around[..., 1], around[..., 0]), axis=1)
    gap = np.diff(angle, axis=1, append=angle[:, :1] + 2 * np.pi)
    widest: np.ndarray = gap.max(axis=1)
    return widest


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
