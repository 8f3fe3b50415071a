"""Reads and writes PTS, rows of numbers in text, and KITTI sweeps, rows of float32 (`.bin`).

PTS: a line with the number of points, then x, y, z, intensity, red, green and blue of each.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from pathlib import Path

import numpy as np

from pointup.disk import os_errors
from pointup.errors import DataError, FileError
from pointup.io.cloud import (
    COLOURS,
    PointCloud,
    PointWriter,
    as_positions,
    flatten_attributes,
    plain_name,
    storable,
    warn_once,
)
from pointup.io.text_tables import TextHeader, read_bytes, read_columns, without_comment, write_rows


class FixedColumnWriter(PointWriter):
    """Writer of a format that has the columns `supported` and no others.

    A warning names the attributes of `like` that are left out.
    """

    supported: tuple[str, ...] = ()

    def _lay_out(self, like: PointCloud) -> None:
        flat = flatten_attributes(like.attributes)
        names = [*flat, *(added.name for added in self.extra_dimensions)]
        # By their plain names; the first of two wins.
        self._given = {plain_name(name): name for name in reversed(names)}
        self.columns = [name for name in self.supported if name in self._given]
        kept = [self._given[name] for name in self.columns]
        if left_out := [name for name in dict.fromkeys(names) if name not in kept]:
            warn_once(
                f"{self.path}: {self.path.suffix} files can't store {', '.join(left_out)}; left "
                "out (LAS, PLY, PCD and CSV store them)"
            )

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        flat = flatten_attributes(attributes)
        given = {name: self._given[name] for name in self.columns}
        for name in given.values():
            if name not in flat:
                raise DataError(f"{self.path}: all points need the same attributes; no {name}")
        self._append_columns(positions, {name: flat[given[name]] for name in given})

    @abstractmethod
    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        """Write points (N, 3) float64 and `columns` (N,), in the order of `supported`."""


COUNT_LINE = re.compile(rb"(?m)^[ \t]*([0-9]{1,18})[ \t]*\r?$")
# Names of the columns after x, y and z, by the number of columns.
NAMES = {3: (), 4: ("intensity",), 6: COLOURS, 7: ("intensity", *COLOURS)}
# The first line reserves space for the number of points, which is known only at the end.
COUNT_DIGITS = 20


def read_pts(path: Path) -> PointCloud:
    """Read the points of all scans. Each scan begins with a line that holds its point count.

    A file without counts is also accepted. With other than 3, 4, 6 or 7 columns, the columns after
    z are named `column_4`, `column_5`, ... Integer colours from 0 to 255 are uint8. Raises
    FileError if the counts and the number of rows differ.
    """
    text = read_bytes(path)
    counts = [int(count) for count in COUNT_LINE.findall(text)]
    # Count lines become empty lines, so that the line numbers in messages are those of the file.
    rows = COUNT_LINE.sub(b"", text)
    lines = (without_comment(line.decode("latin-1")) for line in rows[:100_000].splitlines())
    width = next((len(line.split()) for line in lines if line), 3)
    if width < 3:
        raise FileError(f"{path}: {width} columns; at least x, y and z are needed")
    names = NAMES.get(width, tuple(f"column_{i}" for i in range(4, width + 1)))
    columns = read_columns(path, rows, 0, TextHeader(names=("x", "y", "z", *names)))
    positions = as_positions([columns.pop(axis) for axis in "xyz"])
    if counts and len(positions) < sum(counts):
        raise FileError(
            f"{path}: ends after {len(positions)} of {sum(counts)} points; copy it again"
        )
    if counts and len(positions) > sum(counts):
        raise FileError(
            f"{path}: has {len(positions)} points, more than the {sum(counts)} of its counts; "
            "correct the first line"
        )
    for name in set(COLOURS) & columns.keys():
        values = columns[name]
        if values.dtype == np.int64 and values.min() >= 0 and values.max() <= 255:
            columns[name] = values.astype(np.uint8)
    return PointCloud(positions, columns, None, path)


class PtsWriter(FixedColumnWriter):
    """Writes the number of points, then rows of x, y, z, and of intensity and colours if present.

    Each number has enough digits to be read back exactly. 16-bit colours, as of LAS, get 8 bits:
    CloudCompare takes the lower byte of larger ones.
    """

    supported = ("intensity", *COLOURS)

    def _begin(self) -> None:
        if not set(COLOURS) <= set(self.columns):
            self.columns = [name for name in self.columns if name not in COLOURS]
        super()._begin()

    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        coordinates = dict(zip("xyz", positions.T, strict=True))
        columns = {k: v.astype(storable(v.dtype)) for k, v in columns.items()}
        wide = {k: v for k, v in columns.items() if k in COLOURS and v.dtype == np.uint16}
        columns |= self._in_8_bits(wide)
        write_rows(self._stream, coordinates | columns, " ")

    def _write_header(self) -> None:
        self._stream.write(f"{self.num_points:>{COUNT_DIGITS}}\n".encode())


# Beyond the range of any sensor. Binary data of another kind, read as float32, soon exceeds it.
MAX_COORDINATE = 1e6
# In the unit of the coordinates: metres in the sensor's frame.
MAX_ROUNDING_ERROR = 1e-3


class SweepHeader:
    """Marks a cloud as a sweep, which has no header."""


def column_names(path: Path) -> tuple[str, ...]:
    """The columns after x, y and z, by the extension of the file: it has no header."""
    return ("intensity", "ring") if path.name.lower().endswith(".pcd.bin") else ("intensity",)


def read_sweep(path: Path) -> PointCloud:
    """Read little-endian float32 rows of x, y, z, intensity, and ring in `.pcd.bin`.

    The file has no header. It is accepted as a sweep if it consists of whole rows and all
    coordinates are at most 1e6 in magnitude. Raises FileError otherwise. Points at 0, 0, 0 are left
    out, with a note.
    """
    names = column_names(path)
    width = 3 + len(names)
    with os_errors(path, "read"):
        values = np.fromfile(path, "<f4")
        size = path.stat().st_size
    if size % (4 * width):
        raise FileError(
            f"{path}: not a KITTI sweep: {size} bytes are not rows of {width} float32; give it the "
            "extension of its format"
        )
    rows = values.reshape(-1, width)
    positions = as_positions(rows[:, :3].T)
    farthest = np.abs(positions[np.isfinite(positions)]).max(initial=0.0)
    if farthest > MAX_COORDINATE:
        raise FileError(
            f"{path}: not a KITTI sweep: coordinates up to {farthest:g}; give it the extension of "
            "its format"
        )
    # Scanners write a pulse without a return as a point at the sensor.
    is_return = positions.any(axis=1)
    if not is_return.all() and is_return.any():
        warn_once(f"{path}: {np.count_nonzero(~is_return):,} points at 0, 0, 0 are left out")
        positions, rows = positions[is_return], rows[is_return]
    columns = {name: rows[:, 3 + i].astype(np.float32) for i, name in enumerate(names)}
    return PointCloud(positions, columns, SweepHeader(), path)


class SweepWriter(FixedColumnWriter):
    """Writes x, y, z and intensity, and ring in `.pcd.bin`. Columns without values are 0.

    Raises FileError for coordinates that float32 can't hold to 1e-3, such as map coordinates.
    """

    def _lay_out(self, like: PointCloud) -> None:
        self.supported = column_names(self.path)
        super()._lay_out(like)

    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        rounding = np.abs(positions.astype(np.float32) - positions).max()
        if not (rounding <= MAX_ROUNDING_ERROR and np.abs(positions).max() <= MAX_COORDINATE):
            raise FileError(
                f"{self.path}: coordinates up to {np.abs(positions).max():.10g} don't fit float32; "
                "subtract an offset, or write .ply"
            )
        rows = np.zeros((len(positions), 3 + len(self.supported)), "<f4")
        rows[:, :3] = positions
        for i, name in enumerate(self.supported, start=3):
            if name in columns:
                rows[:, i] = columns[name]
        self._stream.write(rows.tobytes())
