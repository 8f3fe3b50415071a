"""Reads and writes E57, the format of terrestrial scanners, with pye57 (an optional dependency)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from pointup.disk import check_expansion, library_errors, os_errors
from pointup.errors import FileError
from pointup.io.cloud import COLOURS, PointCloud, cast_values, warn_once
from pointup.io.pts import FixedColumnWriter

ATTRIBUTES = {
    "intensity": "intensity", "colorRed": "red", "colorGreen": "green", "colorBlue": "blue",
}  # fmt: skip
AXES = {"x": "cartesianX", "y": "cartesianY", "z": "cartesianZ"}
CHUNK_SIZE = 1_000_000
# Of coordinates, intensity and colours in memory.
BYTES_PER_POINT = 48


def check_pye57(path: Path) -> None:
    """Raise FileError unless pye57 is installed."""
    if find_spec("pye57") is None:
        raise FileError(f"{path}: E57 needs pye57; install it with `pip install pointup[e57]`")


def read_e57(path: Path) -> PointCloud:
    """Read the valid points of all scans, each transformed by its pose to the file's coordinates.

    Intensity and colours are kept if all scans have them. Other fields and images are dropped.
    """
    check_pye57(path)
    positions, columns = [], []
    message = "not a whole E57 file: {}"
    with library_errors(path, message), os_errors(path, "read"), _open(path) as file:
        counts = [file.get_header(i).point_count for i in range(file.scan_count)]
        check_expansion(path, BYTES_PER_POINT * sum(counts))
        for i in range(file.scan_count):
            if not counts[i]:
                continue
            scan = file.read_scan(i, intensity=True, colors=True, ignore_missing_fields=True)
            positions.append(np.column_stack([scan[name] for name in AXES.values()]))
            columns.append({ATTRIBUTES[name]: scan[name] for name in ATTRIBUTES if name in scan})
    joined = np.concatenate(positions) if positions else np.empty((0, 3))
    common = [
        name for name in ATTRIBUTES.values() if columns and all(name in scan for scan in columns)
    ]
    if left_out := {name for scan in columns for name in scan} - set(common):
        warn_once(f"{path}: not all scans have {', '.join(sorted(left_out))}; left out")
    attributes = {name: np.concatenate([scan[name] for scan in columns]) for name in common}
    colours = {name: attributes[name] for name in COLOURS if name in common}
    if all(values.max(initial=0) < 256 for values in colours.values()):
        attributes |= {name: values.astype(np.uint8) for name, values in colours.items()}
    return PointCloud(joined, attributes, None, path)


def _open(path: Path) -> Any:
    """The file, with colours of up to 16 bits; pye57 refuses those above 255."""
    import pye57

    class WideColours(pye57.E57):
        def make_buffer(self, field_name: str, capacity: int, *options: bool, **kept: bool) -> Any:
            if not field_name.startswith("color"):
                return super().make_buffer(field_name, capacity, *options, **kept)
            values = np.empty(capacity, np.uint16)
            image = self.image_file, field_name, values, capacity, True, True
            return values, pye57.libe57.SourceDestBuffer(*image)

    return WideColours(str(path))


class E57Writer(FixedColumnWriter):
    """Writes one scan without a pose; keeps all points in memory until the end.

    Colours above 255 are divided by 256: LAS stores 8-bit colours multiplied by 256. Colours from 0
    to 1 that are floats are multiplied by 255.
    """

    supported = ("intensity", *COLOURS)

    def _lay_out(self, like: PointCloud) -> None:
        super()._lay_out(like)
        self._chunks: list[dict[str, np.ndarray]] = []

    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        self._chunks.append(dict(zip(AXES, positions.T, strict=True)) | columns)

    def _end(self) -> None:
        names = [*AXES, *self.columns]
        joined = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in names}
        fields = {field: joined[axis] for axis, field in AXES.items()}
        if "intensity" in joined:
            fields["intensity"] = joined["intensity"].astype(np.float32)
        if set(COLOURS) <= joined.keys():
            highest = max(joined[name].max() for name in COLOURS)
            has_floats = any(joined[name].dtype.kind == "f" for name in COLOURS)
            for field, name in ATTRIBUTES.items():
                if name in COLOURS:
                    scaled = joined[name] // 256 if highest > 255 else joined[name]
                    if has_floats and highest <= 1:
                        scaled = scaled.astype(np.float64) * 255
                    fields[field] = cast_values(scaled, np.dtype(np.uint8), f"{self.path}: {name}")
        message = "can't be written as E57: {}"
        with library_errors(self.path, message), os_errors(self.path, "written"):
            _write_scan(self._part, fields)


def _write_scan(path: Path, fields: dict[str, np.ndarray]) -> None:
    """Write one scan with float64 coordinates; `E57.write_scan_raw` would store float32."""
    import pye57
    from pye57 import libe57

    with pye57.E57(str(path), mode="w") as file:
        image = file.image_file
        scan, point, bounds = (libe57.StructureNode(image) for _ in range(3))
        scan.set("guid", libe57.StringNode(image, f"{{{uuid4()}}}"))
        for name, values in fields.items():
            if values.dtype == np.uint8:
                point.set(name, libe57.IntegerNode(image, 0, 0, 255))
            else:
                precision = libe57.E57_SINGLE if values.dtype == np.float32 else libe57.E57_DOUBLE
                low, high = float(values.min()), float(values.max())
                point.set(name, libe57.FloatNode(image, low, precision, low, high))
        for axis, field in AXES.items():
            bounds.set(f"{axis}Minimum", libe57.FloatNode(image, float(fields[field].min())))
            bounds.set(f"{axis}Maximum", libe57.FloatNode(image, float(fields[field].max())))
        scan.set("cartesianBounds", bounds)
        if "intensity" in fields:
            scan.set("intensityLimits", _limits(image, "intensity", fields))
        if "colorRed" in fields:
            scan.set("colorLimits", _limits(image, "color", fields))
        points = libe57.CompressedVectorNode(image, point, libe57.VectorNode(image, True))
        scan.set("points", points)
        file.data3d.append(scan)
        num_points = len(fields[AXES["x"]])
        arrays, buffers = file.make_buffers(list(fields), min(num_points, CHUNK_SIZE))
        writer = points.writer(buffers)
        for start in range(0, num_points, CHUNK_SIZE):
            size = min(CHUNK_SIZE, num_points - start)
            for name, values in fields.items():
                arrays[name][:size] = values[start : start + size]
            writer.write(size)
        writer.close()


def _limits(image: Any, kind: str, fields: dict[str, np.ndarray]) -> Any:
    """The minimum and maximum by which viewers scale intensity or colours."""
    from pye57 import libe57

    node = libe57.StructureNode(image)
    for name, values in fields.items():
        if name.startswith(kind):
            low, high = (0, 255) if kind == "color" else (values.min(), values.max())
            make = libe57.IntegerNode if kind == "color" else libe57.FloatNode
            node.set(f"{name}Minimum", make(image, low))
            node.set(f"{name}Maximum", make(image, high))
    return node
