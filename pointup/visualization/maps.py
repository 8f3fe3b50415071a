"""Maps of surveys from above: point density, and distance to a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import Colormap

from pointup.visualization.coloring import ERRORS, HEIGHTS, distances
from pointup.visualization.columns import FOOT, GAP, LABEL, SIZE
from pointup.visualization.page import FAINT, Page, labelled, number
from pointup.visualization.rendering import point_spacing
from pointup.visualization.surveys import turned

CELL_SPACINGS, MOST_CELLS = 2.5, 98
MEASURED_POINTS = 200_000
DENSITY_PERCENTILE, ERROR_PERCENTILE = 99, 95


@dataclass(frozen=True)
class _Grid:
    """Square cells over the area of all surveys."""

    low: np.ndarray
    cell: float
    shape: tuple[int, int]

    def place(self, cloud: np.ndarray) -> np.ndarray:
        """Flat index (N,) of the cell of each point (N, 3)."""
        place = np.floor((cloud[:, :2] - self.low) / self.cell).astype(np.int64)
        place = np.clip(place, 0, np.array(self.shape) - 1)
        return place[:, 0] * self.shape[1] + place[:, 1]

    def density(self, cloud: np.ndarray) -> np.ndarray:
        """Points per area (X, Y); NaN in cells without points."""
        count = np.bincount(self.place(cloud), minlength=np.prod(self.shape)).astype(np.float64)
        count[count == 0] = np.nan
        return count.reshape(self.shape) / self.cell**2

    def mean(self, cloud: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Mean of the values of the points in each cell (X, Y); NaN in cells without points."""
        place, size = self.place(cloud), int(np.prod(self.shape))
        count = np.bincount(place, minlength=size)
        total = np.bincount(place, values, minlength=size)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan).reshape(self.shape)


def maps_picture(
    clouds: Mapping[str, np.ndarray], reference: np.ndarray, *, of: str = "reference", unit: str
) -> np.ndarray:
    """Maps below the columns of `columns_picture`, with the same arguments and the same width.

    The upper row shows the point density, the lower row the mean unsquared distance of the points
    of each cell to the reference; in the column of the reference, that of its points to the cloud
    before it. Cells have a side of 2.5 spacings of the first cloud, or more in large areas; cells
    without points are white. The scales end at the 99th percentile of the densities, and at the
    95th percentile of the distances without those of the first cloud. Of more than 200,000 points,
    as many at equal intervals are measured. Returns (height, width, 3) uint8.
    """
    columns = turned({**clouds, of: reference})
    grid = _grid_of(columns)
    (first, *_), (*_, last) = columns, clouds
    densities = {name: grid.density(cloud) for name, cloud in columns.items()}
    errors, means = {}, {}
    for name, cloud in columns.items():
        some = cloud[:: -(-len(cloud) // MEASURED_POINTS) or 1]
        against = columns[last if name == of else of]
        distance = distances(some, against)
        errors[name] = grid.mean(some, distance)
        means[name] = number(float(distance.mean()), unit) if len(some) else "-"
    densest = _percentile(list(densities.values()), DENSITY_PERCENTILE)
    shown = [error for name, error in errors.items() if name != first or len(columns) == 2]
    largest = _percentile(shown, ERROR_PERCENTILE)

    scale = SIZE / (max(grid.shape[0], grid.shape[1]) * grid.cell)
    height = max(8, round(grid.shape[1] * grid.cell * scale))
    page = Page(len(columns) * (SIZE + GAP) + GAP, FOOT + 2 * (height + LABEL))
    for column, name in enumerate(columns):
        left, bottom = GAP + column * (SIZE + GAP), FOOT
        page.paste(left, bottom, _drawn(errors[name] / largest, ERRORS, scale * grid.cell, height))
        other = last if name == of else of
        text = f"distance to {other}, mean {means[name]}"
        page.write(left, bottom + height + 6, text, 18, FAINT)
        bottom += height + LABEL
        page.paste(
            left, bottom, _drawn(densities[name] / densest, HEIGHTS, scale * grid.cell, height)
        )
        middle = number(float(np.nanmedian(densities[name]))) if len(columns[name]) else "0"
        text = f"density, median {middle} points/{unit or 'unit'}²"
        page.write(left, bottom + height + 6, text, 18, FAINT)
    page.scale_bar(GAP, scale, unit, "from above")
    right = page.width - GAP - SIZE
    page.color_bar(right, SIZE, ERRORS, (0, largest), labelled("distance", unit))
    if len(columns) > 2:
        label = f"points/{unit or 'unit'}²"
        page.color_bar(right - SIZE - GAP, SIZE, HEIGHTS, (0, densest), label)
    return page.pixels()


def _grid_of(columns: Mapping[str, np.ndarray]) -> _Grid:
    all_points = np.concatenate([cloud[:, :2] for cloud in columns.values()])
    low, high = all_points.min(axis=0), all_points.max(axis=0)
    first = next(iter(columns.values()))
    longest = max(float((high - low).max()), 1e-9)
    cell = max(CELL_SPACINGS * point_spacing(first), longest / MOST_CELLS)
    across, along = (int(n) for n in np.ceil((high - low) / cell).clip(1))
    return _Grid(low, cell, (across, along))


def _percentile(maps: list[np.ndarray], percent: float) -> float:
    values = np.concatenate([grid[np.isfinite(grid)] for grid in maps])
    return float(np.percentile(values, percent)) if len(values) and values.any() else 1.0


def _drawn(share: np.ndarray, colors: Colormap, side: float, height: int) -> np.ndarray:
    """Picture of a map (X, Y) of values 0 to 1, with cells `side` pixels wide; NaN is white."""
    column = np.minimum((np.arange(SIZE) / side).astype(int), share.shape[0])
    row = np.minimum((np.arange(height)[::-1] / side).astype(int), share.shape[1] - 1)
    padded = np.concatenate([share, np.full((1, share.shape[1]), np.nan)])
    values = padded[column][:, row].T
    rgb = colors(np.clip(np.nan_to_num(values), 0, 1))[..., :3]
    rgb[np.isnan(values)] = 1.0
    return np.round(rgb * 255).astype(np.uint8)
