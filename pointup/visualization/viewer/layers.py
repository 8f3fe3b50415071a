"""What the viewer shows: scenes of layers, each a cloud with channels to colour it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy.spatial import cKDTree

from pointup.visualization.rendering import point_spacing
from pointup.visualization.viewer.density import ground_density

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
