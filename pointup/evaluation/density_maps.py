"""Pictures for `pointup evaluate lidar --picture`: maps of point density, and a cross-section."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pointup.evaluation.common_extent import Extent
from pointup.io.length_unit import METRE, LengthUnit
from pointup.visualization.surveys import section_picture

LONGEST = 14.0
SHORTEST_PANEL = 1.2


def comparison_picture(
    surveys: Mapping[str, np.ndarray], extent: Extent, unit: LengthUnit = METRE
) -> np.ndarray:
    """`density_picture` of the surveys, and below it a cross-section of their points on the extent.

    The cross-section lies where the heights of the last survey differ most. Returns
    (height, width, 3) uint8.
    """
    maps = density_picture(surveys, extent, unit)
    inside = {name: points[extent.contains(points)] for name, points in surveys.items()}
    sections = section_picture(inside, unit.name, maps.shape[1])
    return np.concatenate([maps, sections])


def density_picture(
    surveys: Mapping[str, np.ndarray], extent: Extent, unit: LengthUnit = METRE
) -> np.ndarray:
    """Maps of the point density of each named survey, (N, 3), on the cells of the extent.

    All maps have the same colour scale, up to the 99th percentile of all cells. Empty cells are
    white, and cells outside the extent grey. Returns (height, width, 3) uint8.
    """
    maps = {name: extent.density(points) for name, points in surveys.items()}
    known = np.concatenate([density[extent.covered] for density in maps.values()])
    highest = max(float(np.percentile(known, 99)), 1.0)
    width, height = (extent.cell * n for n in extent.covered.shape)
    stacked = width > height
    # Panels are arranged along the shorter side of the extent, so that the page is nearly square.
    rows, columns = (len(maps), 1) if stacked else (1, len(maps))
    panel_width = min(LONGEST / columns, LONGEST / rows * width / height)
    panel_height = max(panel_width * height / width, SHORTEST_PANEL)
    size = (max(columns * panel_width, 8.0), rows * (panel_height + 0.8) + 1.2)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for axes, (name, density) in zip(panels, maps.items(), strict=True):
        inside = density[extent.covered]
        points = surveys[name]
        num_inside = int(extent.contains(points).sum())
        outside = "" if num_inside == len(points) else f", {num_inside:,} on the common extent"
        axes.set_title(
            f"{name}: {len(points):,} points{outside}\n"
            f"median {np.median(inside):.3g} points/{unit.name}2, "
            f"{np.mean(inside == 0):.0%} of the cells empty",
            loc="left",
            fontsize=11,
        )
        axes.set_facecolor("0.85")
        shown = np.ma.masked_where(density == 0, density)
        white = np.where(density == 0, 0.0, np.nan)
        bounds = (0.0, width, 0.0, height)
        axes.imshow(white.T, cmap="gray_r", vmin=0, vmax=1, origin="lower", extent=bounds)
        image = axes.imshow(
            shown.T, cmap="viridis", vmin=0, vmax=highest, origin="lower", extent=bounds
        )
        axes.tick_params(labelsize=9)
    if image is not None:
        x, y = extent.origin
        bar = figure.colorbar(image, ax=list(panels), orientation="horizontal", aspect=60)
        bar.set_label(
            f"points/{unit.name}2; axes in {unit.name} from x {x:.1f}, y {y:.1f}", fontsize=10
        )
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
