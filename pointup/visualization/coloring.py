"""Colours of the clouds of a picture, by height or as lit clay."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap

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
