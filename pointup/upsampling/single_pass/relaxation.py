"""Relaxation of new points: moves them along the surface until their spacing is even.

Thinning can only select candidates, and candidates cluster near the measured points. Relaxation
moves each new point away from its neighbours, as for blue-noise samples, within the plane fitted to
the neighbours. A quadric fitted to the neighbours then gives the height of the surface above that
plane at the new position (moving least squares, see Alexa et al., "Computing and rendering point
set surfaces", 2003). Where the neighbours fill a volume, as leaves do, points can move in all
directions instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.spatial import cKDTree

from pointup.geometry.neighbors import knn
from pointup.geometry.packed import assume_valid, ptr_from_sizes, to_device
from pointup.geometry.surfaces import (
    Array,
    contiguous,
    library,
    principal_axes,
    rows_at,
    surface_height,
)

NUM_NEIGHBORS = 12
"""Number of neighbours that repel a point and that its surface is fitted to, and whose convex hull,
in the plane, it may not leave."""
NUM_ON_SHEET = 17
"""Number of neighbours that the surface is fitted to where sheets are kept: new points of shapes
are accurate, and their errors average out."""
NUM_ON_SURFACE = 48
"""Number of second-pass candidates that the surface around a point is fitted to."""
# Columns of the neighbours that repel, in lists in which each point itself is first.
_OTHERS = slice(1, NUM_NEIGHBORS + 1)
# Length of the step away from a coincident neighbour, as a share of the radius of repulsion.
_STEP = 0.4
# Number of neighbours whose mean distance is the spacing of a point.
_NUM_SPACING = 6
# Largest moves of a point within its plane, in a volume, and off its plane, in spacings. Neighbours
# in trees lie on no surface.
_MAX_MOVE, _MAX_MOVE_IN_VOLUME, _MAX_HEIGHT = 0.5, 1.0, 0.5
# Residual of the quadric, in spacings, up to which a point moves onto it, and from which it stays
# at its height: the quadric through two sheets lies between them.
_GOOD_FIT, _NO_FIT = 0.15, 0.3
# Share of the largest residual up to which a point moves freely.
_FREE = 0.2
# For `onto_surface`: largest move, as a share of the distance of the furthest neighbour, and weight
# of a fixed point against a free one.
_MAX_LIFT, _WEIGHT_FIXED = 0.3, 8.0
# Distance of a point from the mean of its neighbours, inside a cloud and at its border, as a share
# of the distance of the furthest neighbour.
_INSIDE, _BORDER = 0.2, 0.35
# If the variance across is less than this share of the variance along, as on a wire, points move
# along its line only.
_WIRE = 0.2
# Share of the variance along the normal up to which neighbours lie on a surface, and from which
# they fill a volume. For points drawn evenly from a ball it is 0.17 on average, rarely below 0.09.
_SURFACE, _VOLUME = 0.03, 0.1
# Rows processed at a time: the arrays fit in the cache of the CPU; on a device they take less than
# 2 GB.
_ROWS, _ROWS_ON_DEVICE = 2048, 1 << 18


def relax(
    free: np.ndarray,
    fixed: np.ndarray,
    num_steps: int = 5,
    keeps_sheets: bool = True,
    most_residual: float = 0.0,
    volume_radius: float = 0.0,
    radius: float = 1.0,
    num_wanted: int | None = None,
) -> np.ndarray:
    """Positions (M, 3) float64 of the points `free` (M, 3) after relaxation; with `num_wanted` of
    the first of them.

    Points `fixed` (F, 3) repel others and do not move. A point moves by less than the spacing of
    the points around it. Points on a plane stay on it. A point that coincides with all its
    neighbours does not move, and nothing moves with fewer than four points in all. With
    `keeps_sheets` a point whose neighbours lie on no single surface, such as on two sheets close to
    each other, is not moved off its own, and the surface is fitted to more neighbours. With
    `most_residual` above 0, a point moves less where the surface fits its neighbours badly, and not
    at all from that residual on, in spacings. Points are pushed from others within `radius`, in
    spacings. With `volume_radius` above 0, points whose neighbours fill a volume are pushed in all
    directions from others within that radius, in spacings, and onto no surface.
    """
    if len(free) + len(fixed) < 4:
        return free[:num_wanted]
    start = np.concatenate([free, fixed])
    k = min(NUM_ON_SHEET if keeps_sheets else NUM_NEIGHBORS, len(start) - 1)
    tree = cKDTree(start, balanced_tree=False)
    distance, index = np.empty((2, len(free), k + 1))
    near = np.empty(len(start))
    # In the order of the tree, neighbouring queries read the same leaves. Of fixed points only the
    # spacing is needed.
    order = tree.indices
    is_free = order < len(free)
    rows, others = order[is_free], order[~is_free]
    distance[rows], index[rows] = tree.query(start[rows], k=k + 1)
    near[: len(free)] = distance[:, 1 : _NUM_SPACING + 1].mean(axis=1)
    gap = np.asarray(tree.query(start[others], k=min(k, _NUM_SPACING) + 1)[0])
    near[others] = gap[:, 1:].mean(axis=1)
    index = index.astype(np.int64)
    # The mean over all neighbours, so that a point with a single close neighbour moves away from
    # it.
    spacing = near[index[:, _OTHERS]].mean(axis=1)
    farthest = distance[:, _OTHERS][:, -1]
    movable = np.flatnonzero((spacing > 0) & (farthest > 0))
    wanted = len(free) if num_wanted is None else num_wanted
    options = num_steps, keeps_sheets, most_residual, volume_radius, radius
    num_settled = int(np.searchsorted(movable, wanted))
    return _moved(start, distance, index, spacing, movable, num_settled, options)[:wanted]


@torch.no_grad()
def relax_on_device(
    blocks: Sequence[tuple[np.ndarray, np.ndarray, int]], device: torch.device, *options: float
) -> list[np.ndarray]:
    """`relax` of several blocks at once: of `free`, `fixed` and `num_wanted` of each.

    Each block has more than `NUM_ON_SHEET` points. The `options` are all others of `relax`.
    """
    points = torch.from_numpy(np.concatenate([part for block in blocks for part in block[:2]]))
    sizes = np.array([(wanted, len(free) - wanted, len(fixed)) for free, fixed, wanted in blocks])
    # 0 for points that are wanted, 1 for other free ones, 2 for fixed ones.
    kinds = torch.from_numpy(np.repeat(np.tile(np.arange(3), len(blocks)), sizes.ravel()))
    ptr = to_device(ptr_from_sizes(torch.from_numpy(sizes.sum(axis=1))), device)
    start, kind = to_device(points, device), to_device(kinds, device)
    with assume_valid():
        keeps_sheets = bool(options[1])
        squared, index = knn(start, ptr, 1 + (NUM_ON_SHEET if keeps_sheets else NUM_NEIGHBORS))
    distance, wanted = squared.sqrt(), (kind == 0).nonzero()[:, 0]
    near = distance[:, 1 : _NUM_SPACING + 1].mean(1)
    spacing = near[index[:, _OTHERS]].mean(1)
    kind = kind.masked_fill((spacing <= 0) | (distance[:, _OTHERS][:, -1] <= 0), 2)
    settled, others = ((kind == number).nonzero()[:, 0] for number in (0, 1))
    rows = torch.cat([settled, others])
    now = _moved(start, distance, index, spacing, rows, len(settled), options)
    return np.split(now[wanted].cpu().numpy(), np.cumsum(sizes[:-1, 0]))


def _moved(
    start: Array,
    distance: Array,
    index: Array,
    spacing: Array,
    movable: Array,
    num_settled: int,
    options: Sequence[float],
) -> Array:
    """Positions (N, 3) of points (N, 3) after the rows `movable` of them are relaxed.

    Shapes: `distance` and `index` (Q, K + 1) of the neighbours of the first Q points, themselves
    first, and `spacing` (Q,). The first `num_settled` rows are moved onto the surface at the end.
    """
    xp, (num_steps, keeps_sheets, most_residual, volume_radius, radius) = library(start), options
    distance, index, spacing = distance[movable], index[movable], spacing[movable]
    close, parts = slice(NUM_NEIGHBORS + 1), []
    for rows in _parts(len(movable), _ROWS if xp is np else _ROWS_ON_DEVICE):
        around, gap = rows_at(start, index[rows, close]), distance[rows, close]
        frame, variance = principal_axes(around, gap)
        in_volume = _in_volume(variance) if volume_radius > 0 else xp.zeros_like(spacing[rows])
        off = around[:, 0] - around[:, 1:].mean(axis=1)
        outward = _outward(off, gap[:, -1])
        others = contiguous(index[rows, _OTHERS].T)
        mobility = _mobility(variance, in_volume)
        parts.append((rows, others, contiguous(frame), mobility, outward, in_volume))
    origin, everywhere = start[movable], start + 0.0
    now = origin + 0.0
    for _ in range(int(num_steps)):
        before = contiguous(everywhere.T)
        for rows, others, frame, mobility, outward, in_volume in parts:
            here = movable[rows]
            within = spacing[rows] * (radius + (volume_radius - radius) * in_volume)
            most_move = (_MAX_MOVE + (_MAX_MOVE_IN_VOLUME - _MAX_MOVE) * in_volume) * spacing[rows]
            away = [of_axis[here] - of_axis.take(others) for of_axis in before]
            push = _along_axes(_push(away, within), frame, mobility)
            moved = now[rows] - origin[rows] + _without_outward(push, outward)
            now[rows] = origin[rows] + _limit_length(moved, most_move)
        everywhere[movable] = now
    for rows, _, frame, _, _, in_volume in parts:
        rows = slice(rows.start, min(rows.stop, num_settled))
        count = rows.stop - rows.start
        if count <= 0:
            break
        frame = frame[:count]
        around = (rows_at(start, index[rows]) - now[rows, None]) @ frame
        height, residual = surface_height(around, 1.05 * distance[rows, -1])
        residual /= spacing[rows]
        if keeps_sheets:
            height *= _falling(residual, _GOOD_FIT, _NO_FIT)
        height *= 1.0 - in_volume[:count]
        most = _MAX_HEIGHT * spacing[rows]
        now[rows] += height.clip(-most, most)[:, None] * frame[:, :, 0]
        if most_residual > 0:
            share = _falling(residual, _FREE * most_residual, most_residual)
            now[rows] = origin[rows] + share[:, None] * (now[rows] - origin[rows])
    everywhere[movable] = now
    return everywhere


def onto_surface(points: np.ndarray, free: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Positions (M, 3) float64 of points (M, 3) moved onto the surface fitted to other points.

    The surface is fitted to the points `free` (F, 3) and to the exact points `fixed` (G, 3), which
    have a larger weight. A point moves along the normal of the plane through its nearest points, by
    less than a third of the distance of the furthest of them.
    """
    around = np.concatenate([free, fixed])
    k = min(NUM_ON_SURFACE, len(around))
    if k < 4:
        return points
    weight = np.where(np.arange(len(around)) < len(free), 1.0, _WEIGHT_FIXED)
    distance, index = (np.asarray(found) for found in cKDTree(around).query(points, k=k))
    now, apart = points.copy(), np.flatnonzero(distance[:, -1] > 0)
    for part in _parts(len(apart)):
        rows = apart[part]
        near, reach = rows_at(around, index[rows]), distance[rows, -1]
        frame, _ = principal_axes(near, distance[rows])
        height, _ = surface_height(
            (near - points[rows, None]) @ frame, 1.05 * reach, weight[index[rows]]
        )
        most = _MAX_LIFT * reach
        now[rows] += height.clip(-most, most)[:, None] * frame[:, :, 0]
    return now


def _parts(number: int, size: int = _ROWS) -> list[slice]:
    return [slice(i, min(i + size, number)) for i in range(0, number, size)]


def _falling(values: Array, start: float, stop: float) -> Array:
    """1 up to `start`, 0 from `stop` on, linear in between."""
    return (stop - values.clip(start, stop)) / (stop - start)


def _in_volume(variance: Array) -> Array:
    """Whether points with the variances (Q, 3) fill a volume, (Q,) from 0, on a surface, to 1."""
    return 1.0 - _falling(variance[:, 0] / variance.sum(axis=1), _SURFACE, _VOLUME)


def _mobility(variance: Array, in_volume: Array) -> Array:
    """Share (Q, 3) of a step along each axis that a point makes.

    Along the normal it is that of the volume, 0 on a surface. Along the surface it is 1, but on a
    wire 1 only along the wire.
    """
    mobility = library(variance).ones_like(variance)
    mobility[:, 0] = in_volume
    mobility[:, 1] = (variance[:, 1] / (_WIRE * variance[:, 2])).clip(0.0, 1.0)
    return mobility


def _push(away: list[Array], radius: Array) -> Array:
    """Steps (Q, 3) away from neighbours that are closer than the radius (Q,).

    away: x, y and z (K, Q) from the neighbours to the point. Sums over three adjacent values, or
    over the neighbours of one point, would be slow.
    """
    xp, (x, y, z) = library(radius), away
    gap = xp.sqrt(x * x + y * y + z * z)
    strength = (1.0 - gap / radius).clip(min=0.0)
    # A coincident neighbour has no direction.
    strength /= xp.maximum(gap, 1e-9 * radius)
    return xp.stack([_STEP * radius * (strength * axis).sum(axis=0) for axis in away], axis=1)


def _along_axes(push: Array, frame: Array, mobility: Array) -> Array:
    """Steps (Q, 3) with their components along the axes multiplied by the mobility (Q, 3)."""
    xp = library(push)
    along = mobility * xp.einsum("qi,qij->qj", push, frame)
    return xp.einsum("qj,qij->qi", along, frame)


def _outward(off: Array, radius: Array) -> Array:
    """Direction (Q, 3) out of the cloud for points at its border, of length 0 to 1; 0 inside.

    off: (Q, 3) from the mean of the neighbours, which lie within `radius` (Q,), to the point. Its
    length is a seventh of the radius by chance, and 0.42 of it at a straight border, where the
    result has length 1.
    """
    xp = library(off)
    length = xp.linalg.norm(off, axis=1)
    share = ((length / radius - _INSIDE) / (_BORDER - _INSIDE)).clip(0.0, 1.0)
    return off * (share / xp.maximum(length, 1e-9 * radius))[:, None]


def _without_outward(push: Array, outward: Array) -> Array:
    """Steps (Q, 3) without their outward component, so that the border of a cloud does not grow."""
    length = library(push).einsum("qi,qi->q", push, outward).clip(min=0.0)
    return push - length[:, None] * outward


def _limit_length(moved: Array, most: Array) -> Array:
    """Vectors (Q, 3), shortened to at most `most` (Q,)."""
    xp = library(moved)
    length = xp.linalg.norm(moved, axis=1)
    return moved * (most / xp.maximum(length, most))[:, None]


# Largest share of the variance along the normal in a flat part: a tip or an edge curves beyond the
# plane, and points outside the hull of their neighbours may lie on its surface.
_FLAT = 1e-3
# Widest angle without a neighbour from which on a measured point is at a border: a point beyond the
# line between two others is nearest to one that sees this line at a right angle or more.
_GAP = np.pi / 2


def within_borders(points: np.ndarray, measured: cKDTree) -> np.ndarray:
    """Positions (M, 3) of points (M, 3) of which those beyond a border are moved back to it.

    A point is beyond a border if its nearest points of the tree `measured` lie in a plane, and its
    projection onto the plane is outside of their convex hull there. It moves within the plane to
    the nearest point of the hull. Only points whose nearest measured point is at a border are
    looked at. With fewer than three measured points nothing moves.
    """
    if measured.n < 3 or not len(points):
        return points
    now = points.copy()
    nearest, of_point = np.unique(np.asarray(measured.query(points)[1]), return_inverse=True)
    at_border = np.zeros(len(nearest), dtype=bool)
    for part in _parts(len(nearest)):
        around, _, _ = _in_plane(measured, measured.data[nearest[part]], itself=True)
        at_border[part] = _widest_gap(around) > _GAP
    near_border = np.flatnonzero(at_border[of_point])
    for part in _parts(len(near_border)):
        rows = near_border[part]
        around, axes, is_flat = _in_plane(measured, points[rows], itself=False)
        beyond = np.flatnonzero(is_flat & (_widest_gap(around) > np.pi))
        now[rows[beyond]] += np.einsum("qij,qj->qi", axes[beyond], _to_hull(around[beyond]))
    return now


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
    return gap.max(axis=1)


def _to_hull(around: np.ndarray) -> np.ndarray:
    """Steps (Q, 2) from the origin, outside, to the convex hull of the points (Q, K, 2)."""
    # The edges of the hull are among the lines between all pairs, and none is nearer than they are.
    first, second = np.triu_indices(around.shape[1], 1)
    start, along = around[:, first], around[:, second] - around[:, first]
    length = np.einsum("qei,qei->qe", along, along)
    share = -np.einsum("qei,qei->qe", start, along) / np.maximum(length, np.finfo(float).tiny)
    there = start + share.clip(0.0, 1.0)[..., None] * along
    nearest = np.einsum("qei,qei->qe", there, there).argmin(axis=1)
    return there[np.arange(len(there)), nearest]


# Numbers of measured points around a new one, and of new points around a measured one and a tip.
_NUM_MEASURED, _NUM_NEW, _NUM_AT_TIP = 8, 4, 24
# Distances that may be noise: of a mean, in standard errors, of one point, in deviations.
_BY_CHANCE, _OF_ONE = 1.2, 1.5
# Share of the radius of its surroundings that the end of a narrow tip is off their mean: 0.42 at a
# straight border, 0.49 at the corner of a cube.
_NARROW = 0.5


def towards_measured(
    points: np.ndarray, others: np.ndarray, measured: cKDTree, noise: float
) -> np.ndarray:
    """Positions (M, 3) of new points (M, 3), moved to where smoothing has removed ridges and tips.

    There the `measured` points of a tree lie off all new points, these and the `others` (G, 3),
    farther than by their `noise`, a standard deviation. A point moves by what those around it lie
    off on average, less the share of noise (Tukey's twicing, shrunk as by James and Stein). At a
    tip it moves outwards to a single measured point beyond it, or back to these from beyond all of
    them, but for their noise.
    """
    new = np.concatenate([points, others])
    if measured.n <= _NUM_MEASURED or len(new) < _NUM_AT_TIP:
        return points
    tree = cKDTree(new)
    distance, around = (np.asarray(found) for found in tree.query(measured.data, k=_NUM_NEW))
    weight = 1.0 / np.maximum(distance, 1e-100)
    weight /= weight.sum(axis=1, keepdims=True)
    off = measured.data - np.einsum("fk,fki->fi", weight, new[around])
    distance, index = (np.asarray(part) for part in measured.query(points, k=_NUM_MEASURED))
    # Points closer than the step of the grid are at a distance of 0.
    nothing = np.finfo(float).tiny
    reach = 1.05 * np.maximum(distance[:, -1:], nothing)
    weight = np.square(1.0 - np.square(distance / reach))
    weight /= weight.sum(axis=1, keepdims=True)
    step = np.einsum("qk,qki->qi", weight, off[index])
    error = _BY_CHANCE * noise * np.sqrt(np.square(weight).sum(axis=1))
    length = np.maximum(np.linalg.norm(step, axis=1), nothing)
    moved = points + (1.0 - np.square(error / length)).clip(min=0.0)[:, None] * step
    # At a narrow tip no point lies farther beyond all measured points than these may be off.
    distance, index = (np.asarray(found) for found in tree.query(moved, k=_NUM_AT_TIP))
    off = moved - new[index].mean(axis=1)
    length = np.linalg.norm(off, axis=1)
    ends = np.flatnonzero(length > _NARROW * distance[:, -1])
    outward = off[ends] / length[ends, None]
    near = measured.data[measured.query(moved[ends], k=_NUM_MEASURED)[1]] - moved[ends, None]
    ahead = np.einsum("qki,qi->qk", near, outward).max(axis=1) + _OF_ONE * noise
    moved[ends] += ahead.clip(max=0.0)[:, None] * outward
    rows = np.flatnonzero(around[:, 0] < len(points))
    tip = around[rows, 0]
    beyond = measured.data[rows] - moved[tip]
    is_far = np.linalg.norm(beyond, axis=1) > _OF_ONE * noise
    tip, beyond = tip[is_far], beyond[is_far]
    distance, index = (np.asarray(found) for found in tree.query(moved[tip], k=_NUM_AT_TIP))
    radius = np.maximum(distance[:, -1], nothing)
    outward = _outward(moved[tip] - new[index].mean(axis=1), radius)
    share = np.linalg.norm(outward, axis=1).clip(min=1e-9)
    length = (np.einsum("qi,qi->q", beyond, outward) / share - _OF_ONE * noise).clip(min=0.0)
    # Of several points beyond one, the farthest counts.
    order = np.argsort(length, kind="stable")
    moved[tip[order]] += outward[order] * length[order, None]
    return moved


# Number of the nearest points that a plane is fitted to, among which planes are looked for, which
# have to lie on them, and of which those of a facet lie on one side of another.
_NUM_OF_PLANE, _NUM_AROUND, _NUM_ON_FACETS, _NUM_OF_SIDE = 8, 128, 8, 32
_MOST_FACETS = 3
# Steps from neighbour to neighbour in which an edge is reached from the points of a facet.
_STEPS_TO_FACET = 3
# Distance from a plane, in spacings, up to which a point lies on it.
_ON_PLANE = 0.02
# Cosine of the angle from which on two planes are one.
_PARALLEL = 0.97


def onto_facets(points: np.ndarray, measured: cKDTree) -> np.ndarray:
    """Positions (M, 3) of points (M, 3), of which those where flat facets meet are moved onto them.

    That is where the nearest points of the tree `measured` lie on two or three planes, each of
    which is fitted to points of one facet. A point moves onto the nearest plane. If it is then
    beyond another plane, on whose one side all near points of its facet lie, it moves within its
    own plane to the line where both meet. At edges sharper than about 34 degrees some points stay
    as they are: planes fitted there mix both facets.
    """
    if measured.n < _NUM_OF_SIDE or not len(points):
        return points
    now, data = points.copy(), measured.data
    found = measured.query(data, k=_NUM_OF_PLANE + 1)
    distance, index = (np.asarray(part) for part in found)
    frame, variance = principal_axes(data[index], distance)
    normals, spacing = frame[:, :, 0], distance[:, 1:].mean(axis=1)
    is_flat = variance[:, 0] < 0.1 * _FLAT * variance.sum(axis=1)
    near_facet = is_flat
    for _ in range(_STEPS_TO_FACET):
        near_facet = near_facet[index].any(axis=1)
    at_edge = np.flatnonzero(near_facet & ~is_flat[index].all(axis=1))
    seeds = np.full((measured.n, _MOST_FACETS), -1)
    for part in _parts(len(at_edge)):
        seeds[at_edge[part]] = _seeds(at_edge[part], measured, normals, is_flat, spacing)
    nearest = np.asarray(measured.query(points)[1])
    near_edge = np.flatnonzero(seeds[nearest, 1] >= 0)
    for part in _parts(len(near_edge)):
        rows = near_edge[part]
        index = np.asarray(measured.query(points[rows], k=_NUM_OF_SIDE)[1])
        around = data[index] - points[rows, None]
        width = spacing[index[:, :4]].mean(axis=1)
        seed = seeds[nearest[rows]]
        planes = normals[seed]
        heights = np.einsum("qfi,qfi->qf", data[seed] - points[rows, None], planes)
        heights[seed < 0] = np.inf
        above = np.einsum("qki,qfi->qfk", around, planes) - heights[:, :, None]
        on = np.abs(above) < _ON_PLANE * width[:, None, None]
        several = on[:, :, :_NUM_ON_FACETS].any(axis=1).all(axis=1)
        step = _to_facets(planes, heights, above, on, _ON_PLANE * width)
        moves = several & (np.linalg.norm(step, axis=1) < width)
        now[rows[moves]] += step[moves]
    return now


def _seeds(
    rows: np.ndarray,
    measured: cKDTree,
    normals: np.ndarray,
    is_flat: np.ndarray,
    spacing: np.ndarray,
) -> np.ndarray:
    """Of the surroundings of points in `rows` (Q,): points (Q, 3) on up to three planes, the
    nearest first, -1 without a plane."""
    data, query = measured.data, np.arange(len(rows))
    index = np.asarray(measured.query(data[rows], k=min(_NUM_AROUND, measured.n))[1])
    around, left = data[index] - data[rows, None], is_flat[index]
    tolerance, seeds = _ON_PLANE * spacing[rows], []
    for _ in range(_MOST_FACETS):
        seed = left.argmax(axis=1)
        seeds.append(np.where(left.any(axis=1), index[query, seed], -1))
        along = np.einsum("qki,qi->qk", around, normals[index[query, seed]])
        left &= np.abs(along - along[query, seed, None]) >= tolerance[:, None]
    return np.stack(seeds, axis=1)


def _to_facets(
    planes: np.ndarray,
    heights: np.ndarray,
    above: np.ndarray,
    on: np.ndarray,
    tolerance: np.ndarray,
) -> np.ndarray:
    """Steps (Q, 3) from the origin to the nearest facet and to its border with others.

    Shapes: the normals of `planes` (Q, 3, 3), their `heights` (Q, 3) above the origin, inf without
    a plane; how far the points around are `above` each (Q, 3, K), and which are `on` it.
    """
    query, own = np.arange(len(planes)), np.abs(heights).argmin(axis=1)
    plane = planes[query, own]
    step = heights[query, own, None] * plane
    # At a corner the way to one border may lead beyond another.
    for other in [*range(_MOST_FACETS)] * 2:
        normal, height = planes[:, other], heights[:, other]
        only_own = on[query, own] & ~on[:, other]
        highest = np.where(only_own, above[:, other], -np.inf).max(axis=1)
        lowest = np.where(only_own, above[:, other], np.inf).min(axis=1)
        side = np.where(lowest > -tolerance, 1.0, np.where(highest < tolerance, -1.0, 0.0))
        cosine = np.einsum("qi,qi->q", plane, normal)
        beyond = np.einsum("qi,qi->q", step, normal) - height
        crosses = only_own.any(axis=1) & (side * beyond < 0) & (np.abs(cosine) < _PARALLEL)
        within = (normal - cosine[:, None] * plane) / np.maximum(1 - cosine**2, 1e-6)[:, None]
        step -= np.where(crosses, beyond, 0.0)[:, None] * within
    return step
