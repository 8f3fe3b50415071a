"""How clouds of one picture are coloured."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap

from pointup.visualization.rendering import CLAY, Camera, point_spacing, render_points

# The ends of the maps are left out: their darkest violet swallows the shading, their brightest
# yellow melts into a white page.
HEIGHTS = ListedColormap(colormaps["viridis"](np.linspace(0.05, 0.94, 256)))
ERRORS = ListedColormap(colormaps["plasma"](np.linspace(0.0, 0.92, 256)))


class Paint:
    """How clouds of one picture are coloured: by height, or as lit clay."""

    def __init__(self, known: np.ndarray, vertical: bool) -> None:
        self.vertical = vertical
        low, high = np.percentile(known[:, 2], [0.5, 99.5]) if len(known) else (0.0, 1.0)
        self.heights = (float(low), float(max(high, low + 1e-6)))

    def colors(self, cloud: np.ndarray) -> np.ndarray:
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
        colors = self.colors(cloud) if colors is None else colors
        radius = (0.5 if self.vertical else 0.65) * min(point_spacing(cloud), largest)
        return render_points(cloud, colors, camera, radius, lit=not self.vertical)
