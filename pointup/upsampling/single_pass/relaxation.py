"""New points moved along the surface they lie on until they are evenly spread.

Thinning can only choose among candidates, and those gather near the measured points. Here every
new point is pushed off by the points around it, as in the relaxation of blue-noise samples, within
the plane fitted to its neighbours; a quadric fitted to them then says how high above that plane the
surface is where it has come to (moving least squares, as of Alexa et al., "Computing and rendering
point set surfaces", 2003).
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

NUM_NEIGHBORS = 12
"""Points around one that push it and tell where the surface is."""
NUM_ON_SURFACE = 48
"""Points of a draft around one that tell where the surface is."""
# Share of the spacing that a coincident neighbour pushes by in one step.
_STEP = 0.4
# Neighbours that make a point's spacing, the mean distance to them.
_NUM_SPACING = 6
# Fall of the weights of a fit towards the last neighbour, e to the minus this.
_PLANE_FALL, _QUADRIC_FALL = 4.0, 5.0
# Against fits that the neighbours don't determine, in units of the furthest one. Hardly any on the
# height, which would hold a point where it is; the others don't depend on where x and y point.
_RIDGE = (1e-9, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3)
# Most that a point moves, within its plane and off it, in spacings. Neighbours in trees
# lie on no surface.
_MAX_MOVE, _MAX_HEIGHT = 0.5, 0.5
# Of points that are brought to the surface, in units of the furthest neighbour; and how much more
# than others exact points count.
_MAX_LIFT, _WEIGHT_FIXED = 0.3, 8.0
# How far off the mean of its neighbours a point is inside of a cloud and at its border; 1 is the
# distance of the furthest of them.
_INSIDE, _BORDER = 0.2, 0.35
# Where neighbours vary less than this across than along, as on a wire, points are held to its line.
_WIRE = 0.2
# Rows worked on at once, which keeps what they need in the processor's cache.
_ROWS = 2048


def relax(free: np.ndarray, fixed: np.ndarray, num_steps: int = 5) -> np.ndarray:
    """Positions (M, 3) float64 of the points `free` (M, 3) once they are spread evenly.

    Points `fixed` (F, 3) push others and stay where they are. A point moves by less than the
    spacing of the points around it; points on a plane stay on it. Fewer than four points in all, or
    points that coincide with all their neighbours, stay.
    """
    if len(free) + len(fixed) < 4:
        return free
    start = np.concatenate([free, fixed])
    k = min(NUM_NEIGHBORS, len(start) - 1)
    distance, index = (np.asarray(found) for found in cKDTree(start).query(start, k=k + 1))
    near = distance[:, 1 : _NUM_SPACING + 1].mean(axis=1)
    distance, index = distance[: len(free)], index[: len(free)]
    # That of all neighbours: a point that has just one close neighbour is to leave it.
    spacing = near[index[:, 1:]].mean(axis=1)
    movable = (spacing > 0) & (distance[:, -1] > 0)
    frame, mobility, outward = (
        np.zeros((len(free), 3, 3)),
        np.zeros((len(free), 3)),
        np.zeros_like(free),
    )
    for rows in _parts(movable):
        around = start[index[rows]]
        frame[rows], mobility[rows] = _frames(around, distance[rows])
        outward[rows] = _outward(start[rows] - around[:, 1:].mean(axis=1), distance[rows, -1])
    now = start.copy()
    for _ in range(num_steps):
        before = now.copy()
        for rows in _parts(movable):
            away = before[rows, None] - before[index[rows, 1:]]
            moved = before[rows] - start[rows]
            push = _across(_push(away, spacing[rows]), frame[rows], mobility[rows])
            moved += _held_back(push, outward[rows])
            now[rows] = start[rows] + _shortened(moved, _MAX_MOVE * spacing[rows])
    for rows in _parts(movable):
        around = (start[index[rows]] - now[rows, None]) @ frame[rows]
        height = _height(around, 1.05 * distance[rows, -1])
        most = _MAX_HEIGHT * spacing[rows]
        now[rows] += height.clip(-most, most)[:, None] * frame[rows, :, 0]
    return now[: len(free)]


def onto_surface(points: np.ndarray, free: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Positions (M, 3) float64 of points (M, 3) on the surface that others around them lie on.

    These are many, `free` (F, 3), and some that are exact, `fixed` (G, 3), which count more. A
    point moves along the normal of the plane fitted to the nearest of them, by less than a third of
    their distance.
    """
    around = np.concatenate([free, fixed])
    k = min(NUM_ON_SURFACE, len(around))
    if k < 4:
        return points
    weight = np.where(np.arange(len(around)) < len(free), 1.0, _WEIGHT_FIXED)
    distance, index = (np.asarray(found) for found in cKDTree(around).query(points, k=k))
    now = points.copy()
    for rows in _parts(distance[:, -1] > 0):
        near, reach = around[index[rows]], distance[rows, -1]
        frame, _ = _frames(near, distance[rows])
        height = _height((near - points[rows, None]) @ frame, 1.05 * reach, weight[index[rows]])
        most = _MAX_LIFT * reach
        now[rows] += height.clip(-most, most)[:, None] * frame[:, :, 0]
    return now


def _parts(mask: np.ndarray) -> list[np.ndarray]:
    rows = np.flatnonzero(mask)
    return [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)]


def _frames(around: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Axes (Q, 3, 3) of points (Q, K, 3) that are `distance` (Q, K) away: normal, narrow and long.

    And the share (Q, 3) of a push along each that is followed: nothing along the normal, all along
    the surface, and along a wire only what goes along it.
    """
    weight = np.exp(-_PLANE_FALL * np.square(distance / distance[:, -1:]))
    mean = np.einsum("qk,qki->qi", weight, around) / weight.sum(axis=1, keepdims=True)
    away = around - mean[:, None]
    covariance = (away * weight[..., None]).transpose(0, 2, 1) @ away
    variance, frame = np.linalg.eigh(covariance)
    mobility = np.ones_like(variance)
    mobility[:, 0] = 0.0
    mobility[:, 1] = (variance[:, 1] / (_WIRE * variance[:, 2])).clip(0.0, 1.0)
    return frame, mobility


def _push(away: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Steps (Q, 3) off neighbours that are closer than the spacing.

    away: (Q, K, 3) from the neighbours to the point.
    """
    gap = np.sqrt(np.einsum("qki,qki->qk", away, away))
    strength = (1.0 - gap / spacing[:, None]).clip(min=0.0)
    # A coincident neighbour has no direction to push to.
    strength /= np.maximum(gap, 1e-9 * spacing[:, None])
    return (_STEP * spacing)[:, None] * np.einsum("qk,qki->qi", strength, away)


def _across(push: np.ndarray, frame: np.ndarray, mobility: np.ndarray) -> np.ndarray:
    """The part of pushes (Q, 3) that the axes let through."""
    along = mobility * np.einsum("qi,qij->qj", push, frame)
    return np.einsum("qj,qij->qi", along, frame)


def _outward(off: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """The way out of the cloud (Q, 3) at its border, 0 inside.

    off: (Q, 3) from the mean of a point's neighbours, which lie within `radius` (Q,), to the point:
    by chance a seventh of the radius, at a straight border 0.42 of it, which gives a length of 1.
    """
    length = np.linalg.norm(off, axis=1)
    share = ((length / radius - _INSIDE) / (_BORDER - _INSIDE)).clip(0.0, 1.0)
    return off * (share / np.maximum(length, 1e-9 * radius))[:, None]


def _held_back(push: np.ndarray, outward: np.ndarray) -> np.ndarray:
    """Pushes (Q, 3) that don't drive the border of a cloud outwards."""
    length = np.einsum("qi,qi->q", push, outward).clip(min=0.0)
    return push - length[:, None] * outward


def _shortened(moved: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Vectors (Q, 3) that are at most so long."""
    length = np.linalg.norm(moved, axis=1)
    return moved * (most / np.maximum(length, most))[:, None]


def _height(around: np.ndarray, scale: np.ndarray, factor: np.ndarray | float = 1.0) -> np.ndarray:
    """Height (Q,) of the surface at the origin, from points `around` (Q, K, 3) that lie on it.

    That of z = a + bx + cy + dxx + exy + fyy, fitted to the points by weighted least squares. Their
    first coordinate is the height. scale: (Q,), about the distance of the furthest of them.
    factor: (Q, K), by how much each counts more.
    """
    z, y, x = np.moveaxis(around / scale[:, None, None], 2, 0)
    weight = factor * np.exp(-_QUADRIC_FALL * (x * x + y * y + z * z))
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=2)
    weighted = (terms * weight[..., None]).transpose(0, 2, 1)
    fitted = np.linalg.solve(weighted @ terms + np.diag(_RIDGE), weighted @ z[..., None])
    return scale * fitted[:, 0, 0]
