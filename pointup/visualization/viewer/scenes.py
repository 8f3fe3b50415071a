"""What the viewer shows: scenes of layers, each a cloud with channels to colour it by.

Layers are read from files, with a channel for each attribute that can be shown, or are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.spatial import cKDTree

from pointup.errors import ConfigError
from pointup.io.cloud import LAS_EXTENSIONS, PointCloud, check_extent, plain_name
from pointup.io.files import iter_points
from pointup.io.length_unit import ANGLES, UNKNOWN, agreed_unit, length_unit
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
        label: as shown, "distance to reference".
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
    points: np.ndarray,
    reference: np.ndarray,
    unit: str = "",
    label: str = "distance to reference",
    note: str = "",
) -> Channel:
    """Unsquared distance of each point (N, 3) to the nearest reference point (M, 3), M > 0."""
    distance = np.asarray(cKDTree(reference).query(points, workers=-1)[0], dtype=np.float32)
    return Channel(distance, label=label, unit=unit, colormap="plasma", note=note)


def density_channel(points: np.ndarray, unit: str = "") -> Channel:
    """Points per area on the ground around each point (N, 3), N > 1, with z up.

    Other points in 3 x 3 cells, of about four points each where the density is typical. Too low at
    the border of a survey, where some of the cells are empty.
    """
    side = 2 * point_spacing(points * (1, 1, 0)) or 1.0
    row, column = (np.floor((points - points.min(axis=0)) / side).astype(np.int64) + 1)[:, :2].T
    width = int(column.max()) + 2
    cells, cell, counts = np.unique(row * width + column, return_inverse=True, return_counts=True)
    total = np.zeros(len(cells))
    for step in (-width, 0, width):
        for near in (cells + step - 1, cells + step, cells + step + 1):
            place = np.searchsorted(cells, near).clip(max=len(cells) - 1)
            total += np.where(cells[place] == near, counts[place], 0)
    density = ((total[cell] - 1) / (9 * side**2)).astype(np.float32)
    return Channel(density, label="point density", unit=f"points/{unit or 'unit'}²")


def spacing_channel(points: np.ndarray, unit: str = "") -> Channel:
    """Mean distance of each point (N, 3), N > 1, to its three nearest other points."""
    distance = np.asarray(cKDTree(points).query(points, k=min(4, len(points)), workers=-1)[0])
    mean = distance[:, 1:].mean(axis=1)
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


MAX_POINTS = 2_000_000
"""Points of one layer that are kept by default."""
MAX_REFERENCE_POINTS = 10_000_000
"""Points of a reference that distances are measured to."""
# Attributes that are read, by the names of all formats.
_USED = {
    "classification", "intensity", "red", "green", "blue", "synthetic", "distance_to_measured",
    "return_number", "uncertainty",
}  # fmt: skip
_FLAT = 0.25


def scene_of_files(
    files: Mapping[str, Sequence[Path]],
    reference: str | None = None,
    max_points: int = MAX_POINTS,
    up: str | None = None,
) -> Scene:
    """Read layers by name, each from one or several files, into a scene.

    reference: the name of a layer. All others get the channel `error`: the unsquared distance of
        each point to the nearest reference point. The reference gets its distance to the nearest
        point of the layer before it.
    max_points: a layer with more points is thinned at random to this number.
    up: axis that points upwards, "y" or "z". By default z for LAS and LAZ and for flat clouds.

    The scene has no unit unless that of the files is one length. Raises FileError for a file that
    can't be read, DataError for degrees, and for files in different units that are compared.
    """
    if max_points < 1:
        raise ConfigError(f"--max-points {max_points}: must be at least 1")
    paths = [path for group in files.values() for path in group]
    units = {path: length_unit(path) for path in paths}
    # Heights in another unit are shown as they are; among degrees they would be spikes.
    compared = [found for found in units.values() if reference is not None and found.metres]
    agreed_unit({p: found for p, found in units.items() if found in (ANGLES, *compared)})
    known = {found for found in units.values() if found != UNKNOWN}
    unit = known.pop().name if len(known) == 1 and all(found.metres for found in known) else ""
    is_las = any(path.suffix.lower() in LAS_EXTENSIONS for path in paths)
    layers = {name: read_layer(name, group, max_points, unit) for name, group in files.items()}
    axis = up or ("z" if is_las or _is_flat(layers) else "y")
    for name, layer in layers.items():
        num_shown = len(layer.positions)
        if axis == "z" and num_shown > 1:
            channel = density_channel(layer.positions, unit)
            # A thinned layer has the density of what is shown, scaled to the whole.
            channel.values[:] *= layer.num_points / num_shown
            layers[name] = layer.with_channel("density", channel)
        elif num_shown == layer.num_points > 1:
            layers[name] = layer.with_channel("spacing", spacing_channel(layer.positions, unit))

    def measured_to(name: str) -> np.ndarray:
        layer = layers[name]
        if len(layer.positions) < min(layer.num_points, MAX_REFERENCE_POINTS):
            layer = read_layer(name, files[name], MAX_REFERENCE_POINTS)
        return layer.positions

    if reference is not None:
        layers = _with_errors(layers, reference, measured_to, unit)
    return Scene(", ".join(layers), list(layers.values()), "z" if axis == "z" else "y", unit)


def read_layer(name: str, paths: Sequence[Path], max_points: int, unit: str = "") -> Layer:
    """Read files into one layer; of more points than `max_points`, a random subset is kept.

    The subset depends on the order of the points alone, and memory does not grow with the files.
    """
    rng = np.random.default_rng(0)
    kept: list[tuple[np.ndarray, PointCloud]] = []
    num_points, limit = 0, 1.0
    for path in paths:
        for chunk in iter_points(path):
            num_points += len(chunk)
            chunk.attributes = {
                key: value
                for name, value in chunk.attributes.items()
                if (key := plain_name(name)) in _USED and value.ndim == 1
            }
            # Each point draws a number; those with the smallest numbers stay.
            draw = rng.random(len(chunk))
            stays = draw < limit
            kept.append((draw[stays], chunk.select(stays)))
            if sum(len(draws) for draws, _ in kept) > 2 * max_points:
                kept, limit = _smallest(kept, max_points)
    kept, _ = _smallest(kept, max_points)
    names = set.intersection(*(set(cloud.attributes) for _, cloud in kept))
    positions = np.concatenate([cloud.positions for _, cloud in kept])
    check_extent(positions.min(axis=0), positions.max(axis=0), f"{paths[0]}: all points")
    attributes = {
        key: np.concatenate([cloud.attributes[key] for _, cloud in kept]) for key in names
    }
    return Layer(name, positions, file_channels(attributes, unit), num_points)


def file_channels(attributes: Mapping[str, np.ndarray], unit: str = "") -> dict[str, Channel]:
    """Channels of the attributes (N,) of a file, by the names that the readers give them."""
    channels = {}
    if "classification" in attributes:
        values = _as_bytes(attributes["classification"])
        channels["class"] = Channel(values, "category", "class", categories=CLASS_NAMES)
    if "synthetic" in attributes:
        values = (np.asarray(attributes["synthetic"]) != 0).astype(np.uint8)
        names = {0: "measured", 1: "new"}
        channels["origin"] = Channel(values, "category", "new or measured", categories=names)
    if "distance_to_measured" in attributes:
        values = np.asarray(attributes["distance_to_measured"], dtype=np.float32)
        label = "distance to measured"
        channels["distance"] = Channel(values, label=label, unit=unit, colormap="plasma")
    if "uncertainty" in attributes:
        values = np.asarray(attributes["uncertainty"], dtype=np.float32)
        channels["uncertainty"] = Channel(values, label="uncertainty", unit=unit, colormap="plasma")
    if "intensity" in attributes and np.ptp(attributes["intensity"]):
        values = np.asarray(attributes["intensity"], dtype=np.float32)
        channels["intensity"] = Channel(values, label="intensity", colormap="gray")
    if "return_number" in attributes and np.ptp(attributes["return_number"]):
        values = _as_bytes(attributes["return_number"])
        channels["return"] = Channel(values, "category", "return number")
    if {"red", "green", "blue"} <= attributes.keys():
        colors = np.column_stack([attributes[key] for key in ("red", "green", "blue")])
        if colors.any():
            channels["rgb"] = Channel(_eight_bit(colors), "rgb", "colour of the file")
    return channels


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Integers 0 to 255; 0 for values that are not numbers."""
    return np.clip(np.nan_to_num(values), 0, 255).astype(np.uint8)


def _eight_bit(colors: np.ndarray) -> np.ndarray:
    """Colours (N, 3) of 0 to 1, 255 or 65535 as uint8; 0 for those that are not numbers."""
    colors = np.nan_to_num(colors)
    if colors.dtype.kind == "f" and colors.max() <= 1:
        colors = colors * 255
    elif colors.max() > 255:
        colors = colors / 257
    return np.clip(np.round(colors), 0, 255).astype(np.uint8)


def _smallest(
    kept: list[tuple[np.ndarray, PointCloud]], max_points: int
) -> tuple[list[tuple[np.ndarray, PointCloud]], float]:
    """The points with the `max_points` smallest draws, and the largest draw that may stay."""
    draws = np.concatenate([draw for draw, _ in kept])
    if len(draws) <= max_points:
        return kept, 1.0
    limit = float(np.partition(draws, max_points)[max_points])
    smaller = [(draw < limit, draw, cloud) for draw, cloud in kept]
    return [(draw[stays], cloud.select(stays)) for stays, draw, cloud in smaller], limit


def _is_flat(layers: Mapping[str, Layer]) -> bool:
    extents = np.array([np.ptp(layer.positions, axis=0) for layer in layers.values()])
    return bool(extents[:, 2].max() < _FLAT * extents[:, :2].max())


def _with_errors(
    layers: Mapping[str, Layer], of: str, measured_to: Callable[[str], np.ndarray], unit: str
) -> dict[str, Layer]:
    """The layers with a channel `error`: the distance of each point to the layer `of`, and for that
    layer to the last of the others. `measured_to` gives the points (N, 3) of these two by name."""
    others = [name for name in layers if name != of]
    if of not in layers or not others:
        return dict(layers)
    *_, last = others
    points = {name: measured_to(name) for name in (of, last)}
    notes = {of: "", last: f"to {last}"}
    for name, title in ((of, "the reference"), (last, last)):
        num_points, num_measured = layers[name].num_points, len(points[name])
        if num_measured < num_points:
            notes[name] = f"to {num_measured:,} of {num_points:,} points of {title}"
    found = {}
    for name, layer in layers.items():
        to = last if name == of else of
        channel = error_channel(layer.positions, points[to], unit, f"distance to {of}", notes[to])
        found[name] = layer.with_channel("error", channel)
    return found


def compare_with_reference(
    clouds: Mapping[str, np.ndarray],
    reference: np.ndarray,
    unit: str = "",
    up: Literal["y", "z"] = "z",
    name: str = "",
    note: str = "",
    of: str = "reference",
) -> Scene:
    """A scene of clouds (N, 3) in memory and a reference, named `of`, coloured by error.

    Each cloud gets the unsquared distance to the nearest reference point, and the reference the
    distance to the nearest point of the last cloud that is not empty. Clouds of more than
    `MAX_POINTS` are thinned at random, after the distances are measured.
    """
    shown = {key: cloud for key, cloud in {**clouds, of: reference}.items() if len(cloud)}
    rows = {key: np.arange(len(cloud)) for key, cloud in shown.items()}
    for key, cloud in shown.items():
        if len(cloud) > MAX_POINTS:
            rows[key] = np.random.default_rng(0).choice(len(cloud), MAX_POINTS, replace=False)
    layers = {
        key: Layer(key, np.asarray(cloud, dtype=np.float64)[rows[key]], num_points=len(cloud))
        for key, cloud in shown.items()
    }
    layers = _with_errors(layers, of, shown.__getitem__, unit)
    for key, cloud in shown.items():
        if up == "z" and len(cloud) > 1:
            whole = density_channel(np.asarray(cloud, dtype=np.float64), unit)
            density = replace(whole, values=whole.values[rows[key]])
            layers[key] = layers[key].with_channel("density", density)
    return Scene(name or ", ".join(layers), list(layers.values()), up, unit, note=note)
