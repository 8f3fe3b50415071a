"""Builds and cuts the triangles of procedural surfaces.

Surfaces are triangle soups: (F, 3, 3) float64, the three corners of each face. The faces of a
closed soup are oriented outwards. The common corners of adjacent faces are bitwise equal, so that
`surface_of` can weld them, and operations on corners and edges treat adjacent faces in the same
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.spatial import ConvexHull, Delaunay

from pointup.geometry.surfaces import Surface
from pointup.synthetic.fields import Field


def weld(triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct corners (V, 3) and faces (F, 3) of a soup; only bitwise equal corners are merged."""
    corners = triangles.reshape(-1, 3)
    order = np.lexsort(corners.T)
    ordered = corners[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(first) - 1
    return ordered[first], number.reshape(-1, 3)


def surface_of(triangles: np.ndarray) -> Surface:
    """The soup as a welded Surface, without faces of zero area."""
    return Surface.from_triangles(*weld(triangles))


def outwards(triangles: np.ndarray) -> np.ndarray:
    """Orient the faces of a closed soup outwards."""
    a, b, c = np.moveaxis(triangles, 1, 0)
    inside_out = np.einsum("ij,ij->", a, np.cross(b, c)) < 0
    return triangles[:, ::-1] if inside_out else triangles


def grid(positions: np.ndarray, wrap_rows: bool = False, wrap_columns: bool = False) -> np.ndarray:
    """Two triangles for each cell of a grid of points (rows, columns, ..., 3)."""
    if wrap_rows:
        positions = np.concatenate([positions, positions[:1]], axis=0)
    if wrap_columns:
        positions = np.concatenate([positions, positions[:, :1]], axis=1)
    a, b = positions[:-1, :-1], positions[:-1, 1:]
    c, d = positions[1:, 1:], positions[1:, :-1]
    return np.stack([a, b, c, a, c, d], axis=-2).reshape(-1, 3, 3)


def circle(num_sides: int) -> np.ndarray:
    """Points (num_sides, 2) of a unit circle, counterclockwise."""
    angle = np.arange(num_sides) * (2 * np.pi / num_sides)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def sphere(max_edge: float) -> np.ndarray:
    """A unit sphere of nearly equal triangles: a refined icosahedron."""
    golden = (1 + 5**0.5) / 2
    corners = np.array(
        [np.roll([0, i, j * golden], k) for k in range(3) for i in (-1, 1) for j in (-1, 1)]
    )
    triangles = outwards(hull(corners))
    triangles = refine(triangles / np.linalg.norm(triangles, axis=2, keepdims=True), max_edge)
    return triangles / np.linalg.norm(triangles, axis=2, keepdims=True)


def hull(points: np.ndarray) -> np.ndarray:
    """The convex hull of points (N, 3)."""
    convex = ConvexHull(points)
    triangles = points[convex.simplices]
    normals = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
    flip = np.einsum("ij,ij->i", normals, convex.equations[:, :3]) < 0
    return np.where(flip[:, None, None], triangles[:, ::-1], triangles)


def curve(points: np.ndarray, num_points: int, closed: bool = False) -> np.ndarray:
    """Points (num_points, D) on a cubic spline through points (P, D)."""
    if closed:
        points = np.concatenate([points, points[:1]])
    places = np.arange(len(points))
    spline = CubicSpline(places, points, bc_type="periodic" if closed else "natural")
    return spline(np.linspace(0, len(points) - 1, num_points, endpoint=not closed))


def sweep(
    centres: np.ndarray, radii: np.ndarray, section: np.ndarray, closed: bool = False
) -> np.ndarray:
    """Sweep a closed cross-section (S, 2) along centres (N, 3), scaled by radii (N,).

    The frame rotates as little as possible along the curve (parallel transport). An open curve gets
    caps at its ends; the end of a closed curve is joined to its beginning.
    """
    if closed:
        tangents = np.roll(centres, -1, axis=0) - np.roll(centres, 1, axis=0)
    else:
        tangents = np.gradient(centres, axis=0)
    tangents = tangents / np.linalg.norm(tangents, axis=1, keepdims=True)
    across = np.empty_like(centres)
    previous = np.eye(3)[np.argmin(np.abs(tangents[0]))]
    for i, tangent in enumerate(tangents):
        previous = previous - tangent * (previous @ tangent)
        previous = previous / np.linalg.norm(previous)
        across[i] = previous
    if closed:
        # The rotation of the frame after one round is distributed evenly along the curve.
        last = across[-1] - tangents[0] * (across[-1] @ tangents[0])
        turned = np.arctan2(np.cross(last, across[0]) @ tangents[0], last @ across[0])
        angle = (np.arange(len(centres)) / len(centres) * turned)[:, None]
        across = np.cos(angle) * across + np.sin(angle) * np.cross(tangents, across)
    upwards = np.cross(tangents, across)
    rings = centres[:, None] + radii[:, None, None] * (
        section[None, :, :1] * across[:, None] + section[None, :, 1:] * upwards[:, None]
    )
    if closed:
        return outwards(grid(rings, wrap_rows=True, wrap_columns=True))
    ends = [np.broadcast_to(rings[i].mean(axis=0), rings[i].shape) for i in (0, -1)]
    return outwards(grid(np.stack([ends[0], *rings, ends[1]]), wrap_columns=True))


def revolve(profile: np.ndarray, num_sides: int) -> np.ndarray:
    """Revolve a profile (P, 2) of radius and height about the z axis."""
    ring = circle(num_sides)
    positions = np.empty((len(profile), num_sides, 3))
    positions[..., :2] = profile[:, None, :1] * ring
    positions[..., 2] = profile[:, None, 1]
    return grid(positions, wrap_columns=True)


def resample_loop(loop: np.ndarray, spacing: float) -> np.ndarray:
    """Points at most `spacing` apart on a closed polygon (P, 2), including its corners."""
    following = np.roll(loop, -1, axis=0)
    counts = np.ceil(np.linalg.norm(following - loop, axis=1) / spacing).astype(int).clip(1)
    edges = zip(loop, following, counts, strict=True)
    return np.concatenate([a + np.arange(n)[:, None] / n * (b - a) for a, b, n in edges])


def inside_loops(points: np.ndarray, loops: Sequence[np.ndarray]) -> np.ndarray:
    """Mask (N,) bool of the points (N, 2) that are inside an odd number of closed polygons."""
    a = np.concatenate(loops)
    b = np.concatenate([np.roll(loop, -1, axis=0) for loop in loops])
    x, y = points[:, :1], points[:, 1:]
    spans = (a[:, 1] > y) != (b[:, 1] > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = a[:, 0] + (y - a[:, 1]) / (b[:, 1] - a[:, 1]) * (b[:, 0] - a[:, 0])
    return np.count_nonzero(spans & (x < crossing), axis=1) % 2 == 1


def extrude(
    loops: Sequence[np.ndarray], heights: np.ndarray, scales: np.ndarray, spacing: float = 0.05
) -> np.ndarray:
    """Extrude the area of the first polygon (P, 2) without the holes of the others.

    `heights` (L,) ascend; at each of them the outline is scaled about the origin by `scales` (L,).
    The corners of the polygons stay sharp.
    """
    loops = [resample_loop(loop, spacing) for loop in loops]
    points = np.concatenate(loops)
    simplices = Delaunay(points).simplices
    flat = points[simplices[inside_loops(points[simplices].mean(axis=1), loops)]]
    e, f = flat[:, 1] - flat[:, 0], flat[:, 2] - flat[:, 0]
    upside_down = e[:, 0] * f[:, 1] - e[:, 1] * f[:, 0] < 0
    flat = np.where(upside_down[:, None, None], flat[:, ::-1], flat)

    def lift(outline: np.ndarray, level: int) -> np.ndarray:
        z = np.full((*outline.shape[:-1], 1), heights[level])
        return np.concatenate([outline * scales[level], z], axis=-1)

    walls = []
    for number, loop in enumerate(loops):
        x, y = loop.T
        counterclockwise = np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y) > 0
        along = loop if counterclockwise == (number == 0) else loop[::-1]
        rings = np.stack([lift(along, level) for level in range(len(heights))])
        walls.append(grid(rings, wrap_columns=True))
    return np.concatenate([lift(flat, -1), lift(flat, 0)[:, ::-1], *walls])


def cells(
    occupied: np.ndarray, edges: Sequence[np.ndarray], wrap_axis: int | None = None
) -> np.ndarray:
    """The boundary of the occupied cells of a rectilinear grid.

    `occupied` is (X, Y, Z) bool; `edges` holds the X + 1, Y + 1 and Z + 1 ascending coordinates.
    Along `wrap_axis` the last cell is adjacent to the first.
    """
    faces = []
    for axis in range(3):
        second, third = (axis + 1) % 3, (axis + 2) % 3
        solid = occupied.transpose(axis, second, third).astype(np.int8)
        border = solid[-1:] if axis == wrap_axis else np.zeros_like(solid[:1])
        layers = [border, solid] if axis == wrap_axis else [border, solid, border]
        step = np.diff(np.concatenate(layers), axis=0)
        i, j, k = np.nonzero(step)
        corners = np.empty((len(i), 4, 3))
        corners[..., axis] = edges[axis][i][:, None]
        corners[..., second] = edges[second][j[:, None] + [0, 1, 1, 0]]
        corners[..., third] = edges[third][k[:, None] + [0, 0, 1, 1]]
        leaving = step[i, j, k] < 0
        corners = np.where(leaving[:, None, None], corners, corners[:, ::-1])
        faces.append(corners[:, [[0, 1, 2], [0, 2, 3]]].reshape(-1, 3, 3))
    return np.concatenate(faces)


def refine(triangles: np.ndarray, max_edge: float) -> np.ndarray:
    """Halve edges until none is longer than `max_edge`, without cracks between adjacent faces."""
    done = []
    while len(triangles):
        edges = np.roll(triangles, -1, axis=1) - triangles
        long = np.square(edges).sum(axis=2) > max_edge**2
        count = long.sum(axis=1)
        done.append(triangles[count == 0])
        # The corners are rotated: edge 0 becomes the only long edge, or edge 2 the only short one.
        first = np.where(count == 1, long.argmax(axis=1), (long.argmin(axis=1) + 1) % 3)
        order = (first[:, None] + np.arange(3)) % 3
        turned = np.take_along_axis(triangles, order[:, :, None], axis=1)
        split = []
        for num_long, pieces in _SPLITS.items():
            a, b, c = np.moveaxis(turned[count == num_long], 1, 0)
            six = np.stack([a, b, c, (a + b) / 2, (b + c) / 2, (c + a) / 2], axis=1)
            split.append(six[:, pieces].reshape(-1, 3, 3))
        triangles = np.concatenate(split)
    return np.concatenate(done) if done else triangles


# The new faces by the number of long edges. Indices 0 to 2 are the corners, 3 to 5 the midpoints of
# edges 0 to 2.
_SPLITS = {
    1: [[0, 3, 2], [3, 1, 2]],
    2: [[3, 1, 4], [0, 3, 4], [0, 4, 2]],
    3: [[0, 3, 5], [3, 1, 4], [5, 4, 2], [3, 4, 5]],
}


def cut(triangles: np.ndarray, gone: Field, max_edge: float) -> np.ndarray:
    """Remove the part of a soup where `gone`, (N, 3) -> (N,) bool, is True, to `max_edge` / 4."""
    kept = []
    for edge in (max_edge, max_edge / 2, max_edge / 4):
        triangles = refine(triangles, edge)
        points, faces = weld(triangles)
        num_gone = gone(points)[faces].sum(axis=1)
        kept.append(triangles[num_gone == 0])
        on_border = (num_gone > 0) & (num_gone < 3)
        triangles, num_gone = triangles[on_border], num_gone[on_border]
    return np.concatenate([*kept, triangles[num_gone == 1]])


def union(parts: Sequence[np.ndarray], max_edge: float) -> np.ndarray:
    """The outer surface of closed soups, to `max_edge` / 4: parts inside others are removed."""
    import igl

    welded = [weld(part) for part in parts]
    boxes = [(points.min(axis=0), points.max(axis=0)) for points, _ in welded]

    def hidden(points: np.ndarray, part: int) -> np.ndarray:
        inside = np.zeros(len(points), dtype=bool)
        for other, (low, high) in enumerate(boxes):
            near = ((points > low) & (points < high)).all(axis=1) & ~inside
            if other != part and near.any():
                inside[near] = igl.fast_winding_number(*welded[other], points[near]) > 0.5
        return inside

    return np.concatenate(
        [cut(part, partial(hidden, part=number), max_edge) for number, part in enumerate(parts)]
    )
