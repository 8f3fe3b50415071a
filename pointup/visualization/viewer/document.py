"""Writes the viewer: one HTML file with its scripts, its style and the points."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

import pointup
from pointup.disk import check_output_file, os_errors, written_whole
from pointup.errors import FileError
from pointup.geometry.grids import codes_in_cube
from pointup.io.cloud import as_float64
from pointup.terminal import printable
from pointup.visualization.viewer.scenes import Channel, Layer, Scene, layer_spacing, scene_of_files

SCRIPTS = (
    "decode.js", "shaders.js", "cloud.js", "viewpoint.js", "stage.js", "overlay.js", "tools.js",
    "panel.js", "link.js", "main.js",
)  # fmt: skip
"""Scripts of the page, in the order in which they run. Each uses only what is before it."""


def write_viewer(path: str | Path, scenes: Sequence[Scene], title: str = "") -> int:
    """Write scenes into one HTML file that works offline. Returns its size in bytes.

    Raises FileError if the file can't be written or is not named .html or .htm.
    """
    return write_page(Path(path), viewer_html(scenes, title or scenes[0].name))


def write_before_after(
    before: Sequence[Path], after: Sequence[Path], path: Path, up: str | None = None
) -> int:
    """Write a viewer of files before and after upsampling. Returns its size in bytes.

    Surveys open on height, shapes on new and measured points, and on the distance between both
    clouds where no measured point is left, as after denoising. `up` is that of `scene_of_files`.
    Raises the errors of `scene_of_files` and `write_viewer`.
    """
    files, color = {"before": before, "after": after}, "height"
    scene = scene_of_files(files, up=up)
    origin = scene.layers[1].channels.get("origin")
    if scene.up == "y" and origin is not None:
        color = "origin"
        if origin.values.all():
            scene, color = scene_of_files(files, "before", up="y"), "error"
    name = printable(before[0].name) if len(before) == 1 else f"survey of {len(before)} files"
    return write_viewer(path, [replace(scene, name=name, color=color)])


def write_page(path: Path, html: str) -> int:
    """Write an HTML file, all or nothing. Returns its size in bytes.

    Names of files in it may have bytes that are not UTF-8, see `printable`.
    """
    check_viewer_path(path)
    content = printable(html).encode()
    with os_errors(path, "written"), written_whole(path) as part:
        part.write_bytes(content)
    return len(content)


def check_viewer_path(path: Path) -> None:
    """Raise FileError for a path that the viewer can't be written to. Call it before the work."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise FileError(f"{path}: the viewer is an HTML file; name it .html")
    check_output_file(path)


def viewer_html(scenes: Sequence[Scene], title: str) -> str:
    """The page as text; see `write_viewer`."""
    blocks: list[str] = []
    content = {
        "title": title,
        "version": pointup.__version__,
        "colormaps": encode_colormaps(),
        "scenes": [encode_scene(scene, blocks) for scene in scenes],
    }
    # No "<", which could end the script element.
    manifest = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    page = files("pointup.visualization.viewer") / "page"
    licence, three, *own = (
        (page / name).read_text(encoding="utf-8")
        for name in ("vendor/three.LICENSE", "vendor/three.min.js", *SCRIPTS)
    )
    scripts = [f"<script>\n/* three.js, https://threejs.org\n{licence}*/\n{three}</script>"]
    scripts += [f"<script>\n{script}</script>" for script in own]
    data = [f'<script type="application/json" id="manifest">{manifest}</script>']
    data += [
        f'<script type="text/plain" id="block{number}">{text}</script>'
        for number, text in enumerate(blocks)
    ]
    marks = {"DATA": "\n".join(data), "SCRIPTS": "\n".join(scripts)}
    return filled_page(page, "viewer", title, marks)


def filled_page(folder: Traversable, name: str, title: str, content: Mapping[str, str]) -> str:
    """The page `name` of a folder, with its style, its title (text) and its content by mark."""
    style, body = (
        (folder / f"{name}.{ending}").read_text(encoding="utf-8") for ending in ("css", "html")
    )
    for mark, text in content.items():
        body = body.replace(f"<!--{mark}-->", text)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
{body}"""


POSITION_STEPS = 65535
"""Positions are stored in 16 bits within the bounding box of their octree node."""
NUM_BINS = 64

# Without the ends of the colour maps, as in the pictures.
_ENDS = {"viridis": (0.05, 0.98), "plasma": (0.14, 0.98), "gray": (0.1, 1.0)}


def stored(values: np.ndarray, blocks: list[str]) -> dict[str, Any]:
    """Add uint8 or uint16 values (N, ...) to the blocks, compressed, as text that the page decodes,
    and describe the block.

    All low bytes come first, then all high bytes: equal bytes next to each other compress.
    """
    flat = np.ascontiguousarray(values.T if values.ndim == 2 else values[None])
    planes = flat.reshape(-1, 1).view(np.uint8).T
    blocks.append(b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii"))
    return {"block": len(blocks) - 1, "bytes": flat.dtype.itemsize, "width": len(flat)}


def encode_scene(scene: Scene, blocks: list[str]) -> dict[str, Any]:
    """The description of a scene for the page; its points go to `blocks`.

    Coordinates in the description are relative to `origin`, the middle of all layers.
    """
    layers = [replace(each, positions=as_float64(each.positions)) for each in scene.layers]
    scene = replace(scene, layers=layers)
    clouds = [layer.positions for layer in layers if len(layer.positions)]
    corners = np.array([[c.min(axis=0), c.max(axis=0)] for c in clouds]).reshape(-1, 2, 3)
    low = corners[:, 0].min(axis=0) if clouds else np.zeros(3)
    high = corners[:, 1].max(axis=0) if clouds else np.ones(3)
    # A round origin, so that the coordinates that the page prints do not lose digits.
    origin = np.round((low + high) / 2, 2)
    names = list(dict.fromkeys(name for layer in scene.layers for name in layer.channels))
    channels = {name: _describe_channel(name, scene.layers) for name in names}
    up = "xyz".index(scene.up)
    heights = np.concatenate([c[:: max(1, len(c) // 200_000), up] for c in clouds] or [np.zeros(1)])
    ends = np.percentile(heights, [0.2, 99.8]) - origin[up]
    described = {
        "name": scene.name,
        "note": scene.note,
        "up": scene.up,
        "unit": scene.unit,
        "color": scene.color or ("error" if "error" in channels else "height"),
        "mode": scene.mode if len(scene.layers) > 1 else "together",
        "origin": origin.tolist(),
        "low": (low - origin).tolist(),
        "high": (high - origin).tolist(),
        "heights": [float(ends[0]), float(ends[1] + (ends[0] == ends[1]))],
        "channels": channels,
        "layers": [_encode_layer(layer, origin, channels, blocks) for layer in scene.layers],
    }
    return described | {"fingerprint": _fingerprint(described)}


def _fingerprint(scene: dict[str, Any]) -> str:
    """Of a scene, for links to its views: differs with the extent, names and sizes of layers."""
    extents = [scene[key] for key in ("up", "origin", "low", "high")]
    layers = [[layer[key] for key in ("name", "count", "total")] for layer in scene["layers"]]
    return sha256(json.dumps([extents, layers]).encode()).hexdigest()[:16]


def encode_colormaps() -> dict[str, list[int]]:
    """256 colours of each colour map as a flat list of bytes."""
    from matplotlib import colormaps  # Training imports this module, and needs no pictures.

    tables = {}
    for name in ("viridis", "plasma", "turbo", "gray"):
        places = np.linspace(*_ENDS.get(name, (0.0, 1.0)), 256)
        tables[name] = np.round(colormaps[name](places)[:, :3] * 255).astype(int).ravel().tolist()
    return tables


def _describe_channel(name: str, layers: Sequence[Layer]) -> dict[str, Any]:
    """One range for all layers, so that equal values get equal colours."""
    used = [layer.channels[name] for layer in layers if name in layer.channels]
    first = used[0]
    described: dict[str, Any] = {"kind": first.kind, "label": first.label or name}
    if first.kind == "category":
        present = sorted({int(value) for channel in used for value in np.unique(channel.values)})
        known = {value: text for channel in used for value, text in channel.categories.items()}
        described["categories"] = [[value, known.get(value, str(value))] for value in present]
    if first.kind == "scalar":
        values = np.concatenate([channel.values for channel in used])
        values = values[np.isfinite(values)]
        values = values if len(values) else np.zeros(1)
        ends = np.percentile(values, [1, 99]) if name != "error" else [0, np.percentile(values, 97)]
        low, high = float(values.min()), float(values.max())
        if low == high:  # one value, on a scale from 0
            low, high = ends = min(low, 0.0), max(high, float(low == 0))
        described |= {
            "unit": first.unit,
            "colormap": first.colormap,
            "low": low,
            "high": high,
            "shown": [float(ends[0]), float(max(ends[1], ends[0] + (high - low) * 1e-3))],
        }
    return described


def _encode_layer(
    layer: Layer, origin: np.ndarray, channels: dict[str, Any], blocks: list[str]
) -> dict[str, Any]:
    order, ptr = build_octree(layer.positions)
    positions = (layer.positions - origin)[order]
    starts = ptr[:-1]
    low = np.minimum.reduceat(positions, starts) if len(positions) else np.empty((0, 3))
    high = np.maximum.reduceat(positions, starts) if len(positions) else np.empty((0, 3))
    size = np.maximum(high - low, 1e-9)
    node = np.repeat(np.arange(len(starts)), np.diff(ptr))
    steps = np.round((positions - low[node]) / size[node] * POSITION_STEPS).astype(np.uint16)
    columns = {}
    for name, channel in layer.channels.items():
        values, note = channel.values[order], {"note": channel.note} if channel.note else {}
        columns[name] = stored(_quantise(channel, values, channels[name]), blocks) | note
    return {
        "name": layer.name,
        "count": len(positions),
        "total": layer.num_points or len(positions),
        "spacing": layer_spacing(layer) or float(size.max(initial=1.0)) / 100,
        "nodes": [
            [int(count), *(float(f"{x:.9g}") for x in (*node_low, *node_size))]
            for count, node_low, node_size in zip(np.diff(ptr), low, size, strict=True)
        ],
        "positions": stored(steps, blocks),
        "columns": columns,
    }


def _quantise(channel: Channel, values: np.ndarray, described: dict[str, Any]) -> np.ndarray:
    if channel.kind != "scalar":
        return values.astype(np.uint8)
    low, high = described["low"], described["high"]
    steps = np.clip((values - low) / (high - low) * POSITION_STEPS, 1, POSITION_STEPS)
    # The lowest step stands for no value.
    return np.round(np.nan_to_num(steps, nan=0.0)).astype(np.uint16)


BITS = 21
"""Levels of the octree; three times this many bits fit into a 64-bit code."""
NODE_POINTS = 65_536


def build_octree(
    points: np.ndarray, node_points: int = NODE_POINTS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Cut finite points (N, 3) into nodes of at most `node_points`, and sort each for drawing.

    The first points of a node are one for each of its eight octants, then one for each octant of
    these, and so on; within a level the order is random. Drawing the first n points of each node
    is therefore an evenly spaced subset of any size. Points at one place form a node of any size.

    Returns the index (N,) of each point in drawing order, and the rows (C + 1,) at which nodes
    begin.
    """
    if len(points) == 0:
        return np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    code = codes_in_cube(points, BITS)
    order = np.argsort(code, kind="stable")
    code = code[order]
    ptr = _node_starts(code, node_points)
    # In Morton order, a point is the first of its octree cell at each level below the one that it
    # shares with the point before it.
    shared = np.zeros(len(code), dtype=np.int64)
    different = code[1:] ^ code[:-1]
    # Only the highest of adjacent ones stays: float64 would round many ones up to the next bit.
    different &= ~(different >> 1)
    num_bits = np.frexp(different.astype(np.float64))[1]
    shared[1:] = BITS - (num_bits + 2) // 3
    shared[ptr[:-1]] = 0
    node = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    random = np.random.default_rng(seed).random(len(code))
    return order[np.lexsort((random, shared, node))], ptr


def _node_starts(code: np.ndarray, node_points: int) -> np.ndarray:
    """Rows (C + 1,) of sorted codes (N,) at which nodes begin, and N at the end."""
    starts = [len(code)]
    waiting = [(0, len(code), 0, 0)]
    while waiting:
        start, stop, prefix, level = waiting.pop()
        if stop - start <= node_points or level == BITS:
            starts.append(start)
            continue
        step = 1 << (3 * (BITS - level - 1))
        edges = prefix + step * np.arange(1, 8)
        inner = start + np.searchsorted(code[start:stop], edges)
        ends = [start, *inner.tolist(), stop]
        for child in range(8):
            if ends[child] < ends[child + 1]:
                waiting.append((ends[child], ends[child + 1], prefix + child * step, level + 1))
    return np.array(sorted(starts), dtype=np.int64)
