"""Reads and writes PLY points: all vertex properties exactly, in the three encodings.

No library serves here: trimesh writes coordinates as float32 and drops properties that it does not
know; plyfile needs all points in memory to write them, and reads text and faces row by row in
Python.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from pointup.disk import os_errors
from pointup.errors import FileError
from pointup.io.cloud import (
    ColumnWriter,
    PointCloud,
    as_positions,
    cast_values,
    storable,
    warn_once,
    without_blanks,
)
from pointup.io.text_tables import axis_or_name, is_number, write_rows

TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2",
    "int": "i4", "uint": "u4", "float": "f4", "double": "f8",
}  # fmt: skip
OTHER_NAMES = {np.dtype(code).name: code for code in TYPES.values()}
BYTE_ORDERS: dict[str, Literal["=", "<", ">"]] = {
    "ascii": "=",
    "binary_little_endian": "<",
    "binary_big_endian": ">",
}
# The header reserves space for the number of points, which is known only at the end.
COUNT_DIGITS = 20


@dataclass(frozen=True)
class PlyHeader:
    """The layout of a PLY file: its encoding, its comments, its vertex properties in order."""

    encoding: str = "binary_little_endian"
    comments: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()


def read_ply(path: Path) -> PointCloud:
    """Read the vertices of a PLY file with all properties.

    Faces and other elements are dropped with a warning.
    """
    with os_errors(path, "read"), path.open("rb") as stream:
        header, num_points, dtype, has_lists = _read_header(stream, path)
        if has_lists:
            columns = _read_beside_lists(path, dtype)
        elif header.encoding == "ascii":
            columns = _read_ascii(stream, path, num_points, dtype)
        else:
            num_held = (path.stat().st_size - stream.tell()) // dtype.itemsize
            if num_held < num_points:
                raise _truncated(path, num_held, num_points)
            table = np.frombuffer(stream.read(num_points * dtype.itemsize), dtype)
            columns = {
                name: table[name].astype(table[name].dtype.newbyteorder("="))
                for name in header.properties
            }
    positions = as_positions([columns.pop(axis) for axis in "xyz"])
    return PointCloud(positions, columns, header, path)


def _read_header(stream: BinaryIO, path: Path) -> tuple[PlyHeader, int, np.dtype, bool]:
    """The layout, the number and the dtype of the vertices, and whether they have lists."""
    if stream.readline(8).strip() != b"ply":
        raise FileError(f"{path}: not a PLY file: it doesn't begin with 'ply'")
    encoding, comments = "", []
    element, counts, properties, lists = "", dict[str, int](), dict[str, str](), list[str]()
    while True:
        line = stream.readline(65536).decode("latin-1")
        words = line.split()
        match words:
            case ["end_header"]:
                break
            case ["format", kind, *_] if kind in BYTE_ORDERS:
                encoding = kind
            case ["comment" | "obj_info", *_]:
                comments.append(line.strip())
            case ["element", name, count] if count.isascii() and count.isdecimal():
                if len(count) > 18:
                    raise FileError(
                        f"{path}: its header counts {count[:40]} of {name}; export it again"
                    )
                element = name
                counts[name] = int(count)
            case ["property", "list", *_, name] if element == "vertex":
                lists.append(name)
            case ["property", kind, written] if (
                element == "vertex" and (name := axis_or_name(written)) not in properties
            ):
                code = (TYPES | OTHER_NAMES).get(kind)
                if code is None:
                    raise FileError(f"{path}: unknown property type {kind!r}; export it again")
                properties[name] = code
            case ["property", *_] if element not in ("", "vertex"):
                pass
            case [] if line:
                pass
            case _:
                line = line.strip()[:60]
                raise FileError(f"{path}: can't read PLY header line {line!r}; export it again")
    if not encoding or next(iter(counts), "") != "vertex" or not set("xyz") <= properties.keys():
        raise FileError(
            f"{path}: its first element must be vertex, with x, y and z; export it again"
        )
    # Many programs write a list of no faces with points.
    if left_out := [f"{n:,} of {name}" for name, n in counts.items() if n and name != "vertex"]:
        warn_once(
            f"{path}: elements other than vertices are dropped ({', '.join(left_out)}); to sample "
            "the surface of a mesh, see `pointup prepare meshes`"
        )
    if lists:
        warn_once(f"{path}: list properties of vertices are left out: {', '.join(lists)}")
    order = BYTE_ORDERS[encoding]
    dtype = np.dtype([(name, order + code) for name, code in properties.items()])
    header = PlyHeader(encoding, tuple(comments), tuple(properties))
    return header, counts["vertex"], dtype, bool(lists)


def _read_beside_lists(path: Path, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The properties of vertices that also have lists, whose rows differ in length."""
    from plyfile import PlyData, PlyParseError

    try:
        with warnings.catch_warnings():
            # NumPy warns of an empty list.
            warnings.simplefilter("ignore", UserWarning)
            table = PlyData.read(path)["vertex"]
    except PlyParseError as error:
        raise FileError(f"{path}: plyfile can't read it ({error}); export it again") from error
    own = {axis_or_name(name): table[name] for name in table.data.dtype.names}
    return {name: own[name].astype(dtype[name].newbyteorder("=")) for name in dtype.names or ()}


def _read_ascii(
    stream: BinaryIO, path: Path, num_points: int, dtype: np.dtype
) -> dict[str, np.ndarray]:
    names = dtype.names or ()
    # Blanks separate numbers, so that a comma is a decimal mark.
    text = stream.read().replace(b",", b".")
    # Each value takes at least a digit and a blank.
    if 2 * num_points * len(names) > len(text) + 1:
        raise _truncated(path, len(text) // (2 * len(names)), num_points, "at most ")
    number = num_points * len(names)
    try:
        with warnings.catch_warnings():
            # NumPy before 2.3 warns of a word that is no number.
            warnings.simplefilter("error", DeprecationWarning)
            values = np.fromstring(text, sep=" ", count=number)
    except (ValueError, DeprecationWarning):
        words = text.split()[:number]
        for word in words:
            if not is_number(word.decode("latin-1"), " "):
                raise FileError(
                    f"{path}: {word[:40].decode('latin-1')!r} is not a number; correct it"
                ) from None
        raise _truncated(path, len(words) // len(names), num_points) from None
    table = values.reshape(num_points, len(names))
    return {
        name: cast_values(table[:, i], dtype[name], f"{path}: {name}")
        for i, name in enumerate(names)
    }


def _truncated(path: Path, num_held: int, num_points: int, bound: str = "") -> FileError:
    return FileError(f"{path}: ends after {bound}{num_held} of {num_points} points; copy it again")


class PlyWriter(ColumnWriter):
    """Writes vertices with the encoding, comments and properties of the file of `like`.

    Coordinates are always float64, because float32 is too coarse for map coordinates.
    """

    def _lay_out(self, like: PointCloud) -> None:
        super()._lay_out(like)
        self.header = like.header if isinstance(like.header, PlyHeader) else PlyHeader()
        if self.header is not like.header:
            self._narrow_colours()
        order = BYTE_ORDERS[self.header.encoding]
        kept = [name for name in self.header.properties if name in self.columns]
        types = {name: self.columns[name] for name in dict.fromkeys([*kept, *self.columns])}
        # PLY has no 64-bit integers.
        double = np.dtype(np.float64)
        self.columns = {n: double if t.itemsize > 4 else storable(t) for n, t in types.items()}
        self._titles = without_blanks(types, self.path)
        self._dtype = np.dtype(
            [(name, dtype.newbyteorder(order)) for name, dtype in self.columns.items()]
        )

    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        if self.header.encoding == "ascii":
            write_rows(self._stream, columns, " ")
            return
        self._stream.write(np.rec.fromarrays(list(columns.values()), self._dtype).tobytes())

    def _write_header(self) -> None:
        names = {np.dtype(code): name for name, code in TYPES.items()}
        lines = ["ply", f"format {self.header.encoding} 1.0"]
        # With the rows and columns of the original, PCL would read other points than there are.
        dropped = re.compile("comment|obj_info num_(cols|rows) .*")
        lines += [line for line in self.header.comments if not dropped.fullmatch(line)]
        # An empty comment shrinks as the number of points gets longer, because not all readers
        # accept a padded number.
        digits = str(self.num_points)
        lines += ["comment" + " " * (COUNT_DIGITS - len(digits)), f"element vertex {digits}"]
        lines += [f"property {names[t]} {self._titles[name]}" for name, t in self.columns.items()]
        self._stream.write(("\n".join([*lines, "end_header"]) + "\n").encode("latin-1"))
