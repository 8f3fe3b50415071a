"""Reads and writes PTS: a line with the number of points, then a row of numbers for each point.

A row holds x, y, z, intensity, red, green and blue.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pointup.errors import FileError
from pointup.io.cloud import PointCloud, as_positions, check_positions
from pointup.io.fixed_columns import FixedColumnWriter
from pointup.io.text_tables import TextHeader, read_bytes, read_columns, without_comment
from pointup.io.text_writer import write_rows

COUNT_LINE = re.compile(rb"(?m)^[ \t]*([0-9]{1,18})[ \t]*\r?$")
COLOURS = ("red", "green", "blue")
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
    width = next((len(line.split()) for line in _lines(rows)), 3)
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
    check_positions(positions, str(path))
    for name in set(COLOURS) & columns.keys():
        values = columns[name]
        if values.dtype == np.int64 and values.min() >= 0 and values.max() <= 255:
            columns[name] = values.astype(np.uint8)
    return PointCloud(positions, columns, None, path)


def _lines(text: bytes) -> list[str]:
    lines = (without_comment(line.decode("latin-1")) for line in text[:100_000].splitlines())
    return [line for line in lines if line]


class PtsWriter(FixedColumnWriter):
    """Writes the number of points, then rows of x, y, z, and of intensity and colours if present.

    Each number has enough digits to be read back exactly.
    """

    supported = ("intensity", *COLOURS)

    def _begin(self) -> None:
        if not set(COLOURS) <= set(self.columns):
            self.columns = [name for name in self.columns if name not in COLOURS]
        self._write_count()

    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        coordinates = dict(zip("xyz", positions.T, strict=True))
        columns = {k: v.astype("f4") if v.dtype == "f2" else v for k, v in columns.items()}
        write_rows(self._stream, coordinates | columns, " ")

    def _end(self) -> None:
        self._stream.seek(0)
        self._write_count()

    def _write_count(self) -> None:
        self._stream.write(f"{self.num_points:>{COUNT_DIGITS}}\n".encode())
