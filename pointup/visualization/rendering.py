"""Renders point clouds with NumPy: no GPU, no display, deterministic pixels.

Each point is a small ball seen by an orthographic camera. Balls are scattered into a depth buffer,
which is shaded by the depth of surrounding pixels (eye-dome lighting, Boucheny 2009, at several
radii), so that shape is visible without normals. Pictures are rendered at twice their size and
averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from scipy.spatial import cKDTree

BACKGROUND = np.array([1.0, 1.0, 1.0], dtype=np.float32)
MARGIN = 0.04
CLAY = np.array([0.93, 0.86, 0.78], dtype=np.float32)

_SUPERSAMPLING = 2
_EMPTY = np.iinfo(np.int64).max
# Keys are int64: depth in 1/256 of a supersampled pixel in the upper half, the index of the point
# in the lower half, so that one minimum finds the nearest point and breaks ties by index.
_DEPTH_STEPS = 256
_INDEX_BITS = 32
_FARTHEST = 2.0**22


@dataclass(frozen=True)
class Camera:
    """Orthographic camera.

    axes: (3, 3), rows are the directions to the right, up, and towards the viewer.
    centre: (3,), the point in the middle of the picture, in the cloud's coordinates.
    scale: pixels per unit of the cloud.
    width, height: size of the picture in pixels.
    """

    axes: np.ndarray
    centre: np.ndarray
    scale: float
    width: int
    height: int


def view_axes(azimuth: float, elevation: float, up: str = "z") -> np.ndarray:
    """Axes of a camera that looks at the cloud from `azimuth` and `elevation`, in degrees.

    Azimuth 0 and elevation 0 look along the cloud's +y with x to the right (`up="z"`), or along -z
    with x to the right (`up="y"`, as in most mesh files). Elevation 90 looks straight down.
    """
    a, e = np.deg2rad([azimuth, elevation])
    right = np.array([np.cos(a), np.sin(a), 0.0])
    back = np.array([np.sin(a) * np.cos(e), -np.cos(a) * np.cos(e), np.sin(e)])
    axes = np.stack([right, np.cross(back, right), back])
    return axes if up == "z" else axes[:, [0, 2, 1]] * np.array([1.0, 1.0, -1.0])


def fit_camera(points: np.ndarray, axes: np.ndarray, width: int, height: int) -> Camera:
    """Camera that shows all `points` (N, 3), with `MARGIN` of the picture free on each side."""
    if len(points) == 0:
        return Camera(axes, np.zeros(3), 1.0, width, height)
    projected = points @ axes.T
    low, high = projected.min(axis=0), projected.max(axis=0)
    extent = np.maximum((high - low)[:2], 1e-12)
    scale = float(np.min((1 - 2 * MARGIN) * np.array([width, height]) / extent))
    # Any finite scale shows a cloud without extent in the middle.
    scale = scale if np.ptp(projected[:, :2], axis=0).max() > 1e-9 else 1.0
    return Camera(axes, (low + high) / 2 @ axes, scale, width, height)


def point_spacing(points: np.ndarray, max_points: int = 200_000) -> float:
    """Median distance from a point to its third nearest neighbour, 0 for fewer than two points.

    The third, not the first: survey points come in close pairs along a scan line. A larger cloud
    is measured on a regular subset, assuming a surface (spacing ~ 1 / sqrt(density)).
    """
    step = -(-len(points) // max_points)
    subset = points[::step] if step > 1 else points
    if len(subset) < 2:
        return 0.0
    queries = subset[:: -(-len(subset) // 20_000)]
    distance = np.asarray(cKDTree(subset).query(queries, k=min(4, len(subset)))[0])
    return float(np.median(distance[:, -1]) / np.sqrt(max(step, 1)))


def finite(cloud: np.ndarray) -> np.ndarray:
    """The points of a cloud (N, 3) whose coordinates are finite, in float64."""
    cloud = np.asarray(cloud, dtype=np.float64)
    return cloud[np.isfinite(cloud).all(axis=1)]


def estimate_normals(points: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Unit normals (Q, 3) of either sign at the queries (Q, 3): the direction of least variance
    among the 16 nearest points."""
    if len(points) < 3:
        return np.tile(np.array([0.0, 0.0, 1.0]), (len(queries), 1))
    _, index = cKDTree(points).query(queries, k=min(16, len(points)))
    local = points[index]
    local -= local.mean(axis=1, keepdims=True)
    _, vectors = np.linalg.eigh(np.matmul(local.transpose(0, 2, 1), local))
    return vectors[:, :, 0]


def render_points(
    points: np.ndarray,
    colors: np.ndarray,
    camera: Camera,
    radius: float,
    lit: bool = False,
    haze: float = 0.4,
) -> np.ndarray:
    """Draw `points` (N, 3) as balls of `radius` (unit of the cloud) in `colors` (N, 3), 0 to 1.

    lit: add a lamp to the upper left of the viewer, with normals estimated from the points.
    haze: how far the farthest point fades into the background, 0 to 1, which sets off points that
        show through gaps.

    Returns (height, width, 3) uint8.
    """
    ss = _SUPERSAMPLING
    scale = camera.scale * ss
    width, height = camera.width * ss, camera.height * ss
    projected = (points - camera.centre) @ camera.axes.T * scale
    ball = float(np.clip(radius * scale, 0.8 * ss, 0.05 * min(width, height)))

    index, depth = splat(projected, ball, width, height)
    covered = index >= 0
    image = np.broadcast_to(BACKGROUND, (height, width, 3)).copy()
    visible = index[covered]
    shade = _eye_dome_shade(depth, covered, ball)[covered]
    if lit:
        shown, place = np.unique(visible, return_inverse=True)
        shade = shade * _lamp_light(estimate_normals(points, points[shown]) @ camera.axes.T)[place]
    bright = np.clip(colors.astype(np.float32)[visible] * shade[:, None], 0, 1)
    away = -projected[visible, 2]
    low, high = away.min(initial=np.inf), away.max(initial=-np.inf)
    fade = ((away - low) / max(high - low, 1e-9)).astype(np.float32)[:, None] * np.float32(haze)
    image[covered] = bright * (1 - fade) + BACKGROUND * fade
    image = image.reshape(camera.height, ss, camera.width, ss, 3).mean(axis=(1, 3))
    return np.round(image * 255).astype(np.uint8)


def splat(
    projected: np.ndarray, ball: float, width: int, height: int
) -> tuple[np.ndarray, np.ndarray]:
    """Depth buffer of balls: the nearest point of each pixel and the depth of its surface.

    projected: (N, 3) right, up and towards the viewer, in pixels from the middle of the picture.
    ball: radius in pixels.

    Returns index (height, width) int64, -1 for the background, and depth (height, width) float32
    in pixels, undefined there. Points whose centre lies outside the picture are left out.
    """
    pad = int(np.ceil(ball))
    padded_width, padded_height = width + 2 * pad, height + 2 * pad
    # Distant points are dropped and depths clipped before they could overflow an integer.
    column, row = np.floor(projected[:, 0] + width / 2), np.floor(height / 2 - projected[:, 1])
    point = np.flatnonzero((column >= 0) & (column < width) & (row >= 0) & (row < height))
    pixel = ((row[point] + pad) * padded_width + column[point] + pad).astype(np.int64)
    depth = np.round(np.clip(-projected[point, 2], -_FARTHEST, _FARTHEST) * _DEPTH_STEPS)
    key = (depth.astype(np.int64) << _INDEX_BITS) | point

    buffer = np.full(padded_width * padded_height, _EMPTY, dtype=np.int64)
    offsets = np.arange(-pad, pad + 1)
    for dy in offsets:
        for dx in offsets:
            if (height_squared := ball**2 - dx**2 - dy**2) < 0:
                continue
            bulge = int(np.sqrt(height_squared) * _DEPTH_STEPS) << _INDEX_BITS
            np.minimum.at(buffer, pixel + dy * padded_width + dx, key - bulge)
    buffer = buffer.reshape(padded_height, padded_width)[pad : pad + height, pad : pad + width]
    empty = buffer == _EMPTY
    index = np.where(empty, -1, buffer & ((1 << _INDEX_BITS) - 1))
    return index, ((buffer >> _INDEX_BITS) / _DEPTH_STEPS).astype(np.float32)


def _eye_dome_shade(depth: np.ndarray, covered: np.ndarray, ball: float) -> np.ndarray:
    """Brightness, 0 to 1, of each pixel (height, width): dark where pixels around it are nearer."""
    obscured = np.zeros_like(depth)
    for reach, weight in ((2, 0.3), (7, 0.3), (24, 0.4)):
        obscured += weight * _obscurance(depth, covered, reach, 6 * ball + 2 * reach)
    return np.exp(-1.2 * obscured)


def _obscurance(depth: np.ndarray, covered: np.ndarray, reach: int, limit: float) -> np.ndarray:
    """How far pixels at distance `reach` in eight directions are nearer, a quarter of the sum of
    their terms of 0 to 1."""
    total, (height, width) = np.zeros_like(depth), depth.shape
    # Background, and what lies outside the picture, is not nearer.
    around = np.pad(np.where(covered, depth, np.inf), reach, constant_values=np.inf)
    diagonal = max(1, round(reach * 0.7))
    for dy, dx in ((0, reach), (reach, 0), (diagonal, diagonal), (diagonal, -diagonal)):
        for top, left in ((reach + dy, reach + dx), (reach - dy, reach - dx)):
            rise = depth - around[top : top + height, left : left + width]
            near = np.minimum(rise / (3 * reach), 1) * (limit / np.maximum(rise, limit))
            total += np.maximum(near, 0)
    return total / 4


def _lamp_light(normals: np.ndarray) -> np.ndarray:
    """Brightness (N,) of surfaces with `normals` (N, 3) in camera axes, of either sign."""
    normals = np.where(normals[:, 2:] < 0, -normals, normals)
    lamp = np.array([-0.45, 0.65, 0.62])
    lamp /= np.linalg.norm(lamp)
    diffuse = np.clip(normals @ lamp, 0, 1)
    half = lamp + np.array([0.0, 0.0, 1.0])
    gloss = np.clip(normals @ (half / np.linalg.norm(half)), 0, 1) ** 24
    return (0.55 + 0.60 * diffuse + 0.08 * gloss).astype(np.float32)


# Without the ends of the colour maps: shading is invisible on the darkest violet, and the brightest
# yellow on a white page.
HEIGHTS = ListedColormap(colormaps["viridis"](np.linspace(0.05, 0.94, 256)))
ERRORS = ListedColormap(colormaps["plasma"](np.linspace(0.0, 0.92, 256)))


class Paint:
    """One colouring for all clouds of a picture: by height (`vertical`), or as lit clay.

    `known` (N, 3) are the points whose heights set the range of colours.
    """

    def __init__(self, known: np.ndarray, vertical: bool) -> None:
        self.vertical = vertical
        low, high = np.percentile(known[:, 2], [0.5, 99.5]) if len(known) else (0.0, 1.0)
        self.heights = (float(low), float(max(high, low + 1e-6)))

    def colors(self, cloud: np.ndarray) -> np.ndarray:
        """Colours (N, 3), 0 to 1, of the points of a cloud (N, 3)."""
        if not self.vertical:
            return np.broadcast_to(CLAY, cloud.shape)
        low, high = self.heights
        return HEIGHTS(np.clip((cloud[:, 2] - low) / (high - low), 0, 1))[:, :3]

    def render(self, cloud: np.ndarray, camera: Camera, largest: float = np.inf) -> np.ndarray:
        """Picture (height, width, 3) uint8 of a cloud, with balls sized by its spacing.

        largest: limit of the spacing.
        """
        radius = (0.5 if self.vertical else 0.65) * min(point_spacing(cloud), largest)
        return render_points(cloud, self.colors(cloud), camera, radius, lit=not self.vertical)


def distances(query: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Unsquared distance (N,) from each query to its nearest point; 0 where there are no points."""
    if len(points) == 0 or len(query) == 0:
        return np.zeros(len(query))
    return np.asarray(cKDTree(points).query(query)[0])


def error_limit(source: np.ndarray, target: np.ndarray) -> float:
    """End of the colour scale of errors: the larger of the target's spacing and the 95th percentile
    of the distance from the source to the target, so that it does not depend on a prediction."""
    distance = distances(source, target)
    limit = max(point_spacing(target), float(np.percentile(distance, 95)) if len(distance) else 0.0)
    return limit or 1.0
