"""Reads files into layers of the viewer, with a channel for each attribute that it can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from pointup.errors import ConfigError
from pointup.io.cloud import LAS_EXTENSIONS, PointCloud, plain_name
from pointup.io.files import iter_points
from pointup.io.length_unit import UNKNOWN, common_unit
from pointup.terminal import printable
from pointup.visualization.viewer.document import write_viewer
from pointup.visualization.viewer.layers import (
    CLASS_NAMES,
    Channel,
    Layer,
    Scene,
    density_channel,
    error_channel,
    spacing_channel,
)

MAX_POINTS = 2_000_000
"""Points of one layer that are kept by default."""
MAX_REFERENCE_POINTS = 10_000_000
"""Points of a reference that distances are measured to."""
# Attributes that are read, by the names of all formats.
_USED = {
    "classification", "intensity", "red", "green", "blue", "synthetic", "distance_to_measured",
    "return_number",
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

    Raises FileError for a file that can't be read, DataError for files of different units.
    """
    if max_points < 1:
        raise ConfigError(f"--max-points {max_points}: must be at least 1")
    paths = [path for group in files.values() for path in group]
    found = common_unit(paths)
    unit = "" if found == UNKNOWN else found.name
    is_las = any(path.suffix.lower() in LAS_EXTENSIONS for path in paths)
    layers = {name: read_layer(name, group, max_points, unit) for name, group in files.items()}
    axis = up or ("z" if is_las or _is_flat(layers) else "y")
    for name, layer in layers.items():
        measure = density_channel if axis == "z" else spacing_channel
        if len(layer.positions) > 1:
            # A thinned layer has the density of what is shown, scaled to the whole.
            channel = measure(layer.positions, unit)
            share = layer.num_points / len(layer.positions)
            if axis == "z":
                channel.values[:] *= share
            if axis == "z" or share == 1:
                layers[name] = layer.with_channel("density" if axis == "z" else "spacing", channel)
    if reference is not None:
        layers = _with_errors(layers, reference, files, unit)
    return Scene(
        name=", ".join(layers), layers=list(layers.values()), up="z" if axis == "z" else "y",
        unit=unit,
    )  # fmt: skip


def write_before_after(
    before: Sequence[Path], after: Sequence[Path], path: Path, up: str | None = None
) -> int:
    """Write a viewer of files before and after upsampling. Returns its size in bytes.

    It opens on new and measured points. `up` is that of `scene_of_files`. Raises the errors of
    `scene_of_files` and `write_viewer`.
    """
    scene = scene_of_files({"before": before, "after": after}, up=up)
    has_origin = "origin" in scene.layers[1].channels
    name = printable(before[0].name) if len(before) == 1 else f"survey of {len(before)} files"
    scene = replace(scene, name=name, color="origin" if has_origin else "")
    return write_viewer(path, [scene])


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
        channels["distance"] = Channel(
            values, label="distance to measured", unit=unit, colormap="plasma"
        )
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
    layers: dict[str, Layer], reference: str, files: Mapping[str, Sequence[Path]], unit: str
) -> dict[str, Layer]:
    against = layers[reference]
    if len(against.positions) < min(against.num_points, MAX_REFERENCE_POINTS):
        against = read_layer(reference, files[reference], MAX_REFERENCE_POINTS)
    note = ""
    if len(against.positions) < against.num_points:
        note = f"to {len(against.positions):,} of {against.num_points:,} points of the reference"
    others = [name for name in layers if name != reference]
    measured = {
        name: error_channel(layers[name].positions, against.positions, unit, note=note)
        for name in others
    }
    if others:
        nearest = layers[others[-1]]
        if len(nearest.positions) < nearest.num_points:
            nearest = read_layer(nearest.name, files[nearest.name], MAX_REFERENCE_POINTS)
        note = f"to {nearest.name}"
        if len(nearest.positions) < nearest.num_points:
            note = f"to {len(nearest.positions):,} of {nearest.num_points:,} points of "
            note += nearest.name
        measured[reference] = error_channel(
            layers[reference].positions, nearest.positions, unit, note=note
        )
    return {
        name: layer.with_channel("error", measured[name]) if name in measured else layer
        for name, layer in layers.items()
    }


def compare_with_reference(
    clouds: Mapping[str, np.ndarray],
    reference: np.ndarray,
    unit: str = "",
    up: Literal["y", "z"] = "z",
    name: str = "",
    note: str = "",
    max_points: int = MAX_POINTS,
    of: str = "reference",
) -> Scene:
    """A scene of clouds (N, 3) in memory and a reference, named `of`, coloured by error.

    Each cloud gets the unsquared distance to the nearest reference point, and the reference the
    distance to the nearest point of the last cloud that is not empty. Clouds of more than
    `max_points` are thinned at random, after the distances are measured.
    """
    others = {key: cloud for key, cloud in clouds.items() if len(cloud)}
    all_clouds = {**others, **({of: reference} if len(reference) else {})}
    *_, last = others or {"": reference}
    layers = []
    for key, cloud in all_clouds.items():
        rows = np.arange(len(cloud))
        if len(cloud) > max_points:
            rows = np.random.default_rng(0).choice(len(cloud), max_points, replace=False)
        layer = Layer(key, np.asarray(cloud, dtype=np.float64)[rows], num_points=len(cloud))
        against, hint = (others.get(last), f"to {last}") if key == of else (reference, "")
        if against is not None and len(against):
            layer = layer.with_channel(
                "error",
                error_channel(layer.positions, against, unit, f"distance to the {of}", hint),
            )
        if up == "z" and len(cloud) > 1:
            whole = density_channel(np.asarray(cloud, dtype=np.float64), unit)
            layer = layer.with_channel("density", replace(whole, values=whole.values[rows]))
        layers.append(layer)
    return Scene(name or ", ".join(all_clouds), layers, up, unit, note=note)
