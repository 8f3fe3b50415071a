"""Colours of the clouds of a picture, by height or as lit clay."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from scipy.spatial import cKDTree

from pointup.visualization.rendering import CLAY, Camera, point_spacing, render_points

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

    def render(
        self,
        cloud: np.ndarray,
        camera: Camera,
        largest: float = np.inf,
        colors: np.ndarray | None = None,
    ) -> np.ndarray:
        """Picture (height, width, 3) uint8 of a cloud, with balls sized by its spacing.

        largest: limit of the spacing. colors: (N, 3), in place of `self.colors`.
        """
        colors = self.colors(cloud) if colors is None else colors
        radius = (0.5 if self.vertical else 0.65) * min(point_spacing(cloud), largest)
        return render_points(cloud, colors, camera, radius, lit=not self.vertical)


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


def error_colors(
    points: np.ndarray, against: np.ndarray, source: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """Colours (N, 3) uint8 of points by their distance to `against`, scaled by `error_limit`."""
    share = np.clip(distances(points, against) / error_limit(source, target), 0, 1)
    return np.round(ERRORS(share)[:, :3] * 255).astype(np.uint8)
