"""What the viewer shows: scenes of layers, each a cloud with channels to colour it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy.ndimage import gaussian_filter1d
from scipy.sparse import csr_array
from scipy.spatial import cKDTree

from pointup.visualization.rendering import point_spacing

CLASS_NAMES = {
    0: "never classified", 1: "unclassified", 2: "ground", 3: "low vegetation",
    4: "medium vegetation", 5: "high vegetation", 6: "building", 7: "low noise", 8: "key point",
    9: "water", 10: "rail", 11: "road", 12: "overlap", 13: "wire guard", 14: "wire conductor",
    15: "tower", 16: "wire connector", 17: "bridge", 18: "high noise", 19: "overhead structure",
    20: "ignored ground", 21: "snow", 22: "temporal exclusion",
}  # fmt: skip
"""Names of the classes of the LAS specification, 1.4 R15."""


@dataclass(frozen=True, eq=False)
class Channel:
    """Values to colour the points of a layer by.

    Attributes:
        values: (N,) numbers or categories, or (N, 3) uint8 colours.
        kind: "scalar", "category" (integers 0 to 255) or "rgb".
        label: as shown, "distance to the reference".
        unit: of the values, appended to numbers.
        colormap: name of a matplotlib colour map, for scalars.
        categories: name of each category.
        note: how the values of this layer are to be read, where layers differ.
    """

    values: np.ndarray
    kind: Literal["scalar", "category", "rgb"] = "scalar"
    label: str = ""
    unit: str = ""
    colormap: str = "viridis"
    categories: dict[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, eq=False)
class Layer:
    """A cloud of a scene: its positions (N, 3) float64 and its channels by name.

    num_points: size of the whole cloud, of which `positions` may be a part.
    """

    name: str
    positions: np.ndarray
    channels: dict[str, Channel] = field(default_factory=dict)
    num_points: int = 0

    def with_channel(self, name: str, channel: Channel) -> Layer:
        return replace(self, channels=self.channels | {name: channel})


@dataclass(frozen=True, eq=False)
class Scene:
    """Layers in common coordinates that are shown together.

    Attributes:
        layers: in the order of the panels, such as before, after, reference.
        up: axis that points upwards; "z" for surveys, "y" for shapes.
        unit: of the coordinates, such as "m".
        color: channel that is shown first; by default error, else height.
        mode: arrangement that is shown first: "side" (side by side), "fade", "swipe" or "together".
        note: one line about the scene.
    """

    name: str
    layers: Sequence[Layer]
    up: Literal["y", "z"] = "z"
    unit: str = ""
    color: str = ""
    mode: str = "side"
    note: str = ""


def error_channel(
    points: np.ndarray, reference: np.ndarray, unit: str = "", label: str = "", note: str = ""
) -> Channel:
    """Unsquared distance of each point (N, 3) to the nearest reference point (M, 3), M > 0."""
    distance = np.asarray(cKDTree(reference).query(points, workers=-1)[0], dtype=np.float32)
    return Channel(
        distance,
        label=label or "distance to the reference",
        unit=unit,
        colormap="plasma",
        note=note,
    )


def density_channel(points: np.ndarray, unit: str = "") -> Channel:
    """Points per area on the ground, see `ground_density`; points (N, 3) with N > 1 and z up."""
    density = ground_density(points[:, :2]).astype(np.float32)
    return Channel(density, label="point density", unit=f"points/{unit or 'unit'}²")


def spacing_channel(points: np.ndarray, unit: str = "") -> Channel:
    """Mean distance of each point (N, 3) to its three nearest other points."""
    k = min(4, len(points))
    distance = np.asarray(cKDTree(points).query(points, k=k, workers=-1)[0]).reshape(-1, k)
    mean = distance[:, 1:].mean(axis=1) if k > 1 else np.zeros(len(points))
    return Channel(mean.astype(np.float32), label="point spacing", unit=unit)


def layer_spacing(layer: Layer) -> float:
    """Size of a drawn point: the spacing of the shown points, in the unit of the coordinates."""
    if len(layer.positions) > 200_000:
        # A part of the cloud in full density: on all of it, a spacing of a subset would be scaled
        # as that of a surface, which vegetation is not.
        middle = layer.positions[len(layer.positions) // 2]
        distance = np.abs(layer.positions - middle).max(axis=1)
        near = np.argpartition(distance, 100_000)[:100_000]
        return point_spacing(layer.positions[near])
    return point_spacing(layer.positions)


POINTS_PER_CELL = 4
_REACH = 4
"""Cells that the Gaussian reaches; it has a standard deviation of one cell."""


def ground_density(places: np.ndarray) -> np.ndarray:
    """Points per area around each point (N,), for places (N, 2) on the ground.

    Points are counted in cells that hold four on average over the occupied area. The counts are
    smoothed with a Gaussian of one cell and interpolated at the points. Memory grows with the
    occupied cells, not with the extent: points far from all others change the result nowhere else.
    Near the border of the survey the density is too low, because cells beyond it are empty.
    """
    places = places - places.min(axis=0)
    cell = _cell_size(places)
    cells = np.floor(places / cell).astype(np.int64)
    # From the middle of the cell, -0.5 to 0.5.
    offsets = places / cell - cells - 0.5
    row, column = (_without_gaps(numbers) for numbers in cells.T)
    shape = (int(row.max()) + 1, int(column.max()) + 1)
    counts = csr_array((np.ones(len(places)), (row, column)), shape=shape)
    smooth = _gaussian(shape[0]) @ counts @ _gaussian(shape[1]).T
    smooth.sort_indices()
    # A grid without large gaps is read faster as an array.
    values = smooth.toarray() if shape[0] * shape[1] <= len(places) else smooth
    density = np.zeros(len(places))
    # Bilinear, with the next cell on the side of the point; the grid ends with its outer cells.
    share = np.abs(offsets)
    next_row, next_column = (
        np.clip(numbers + np.where(offset < 0, -1, 1), 0, size - 1)
        for numbers, offset, size in zip((row, column), offsets.T, shape, strict=True)
    )
    for rows, row_share in ((row, 1 - share[:, 0]), (next_row, share[:, 0])):
        for columns, column_share in ((column, 1 - share[:, 1]), (next_column, share[:, 1])):
            density += row_share * column_share * values[rows, columns]
    return density / cell**2


def _cell_size(places: np.ndarray) -> float:
    """Side of a cell that holds `POINTS_PER_CELL` points, on average over the occupied area.

    The occupied area is that of the blocks that hold a point. Blocks begin as large as if points
    filled their bounding box, and shrink as long as much of it is empty.
    """
    extent = places.max(axis=0)
    smallest = max(float(extent.max()) / 1e9, 1e-9)
    cell = max(float(np.sqrt(POINTS_PER_CELL * extent.prod() / len(places))), smallest)
    # Points of a block: scan lines that are some cells apart, and small gaps, belong to the area.
    # Few points make smaller blocks, of which one point far away is not half.
    in_block = float(np.clip(len(places) / 16, POINTS_PER_CELL, 16 * POINTS_PER_CELL))
    cells_along = np.sqrt(in_block / POINTS_PER_CELL)
    while True:
        block = np.floor(places / (cells_along * cell)).astype(np.int64)
        number = block[:, 0] * (int(block[:, 1].max()) + 1) + block[:, 1]
        share = len(np.unique(number)) * in_block / len(places)
        smaller = max(cell * float(np.sqrt(share)), smallest)
        # Blocks at the border are filled in part, so that a full box is left as it is.
        if smaller > 0.9 * cell:
            return cell
        cell = smaller


def _without_gaps(numbers: np.ndarray) -> np.ndarray:
    """Cell numbers (N,) along an axis, with empty stretches as short as the Gaussian allows."""
    used = np.unique(numbers)
    steps = np.minimum(np.diff(used, prepend=used[0]), 2 * _REACH + 2)
    return np.cumsum(steps)[np.searchsorted(used, numbers)]


def _gaussian(size: int) -> csr_array:
    """The matrix (size, size) that smooths along an axis; the border reflects."""
    impulse = np.zeros(2 * _REACH + 1)
    impulse[_REACH] = 1
    weights = gaussian_filter1d(impulse, 1.0, truncate=_REACH, mode="constant")
    rows = np.repeat(np.arange(size), len(weights))
    columns = (rows + np.tile(np.arange(-_REACH, _REACH + 1), size)) % (2 * size)
    columns = np.minimum(columns, 2 * size - 1 - columns)
    return csr_array((np.tile(weights, size), (rows, columns)), shape=(size, size))
