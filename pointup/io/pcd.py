"""Reads and writes PCD, the format of the Point Cloud Library: all fields, three encodings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from struct import unpack_from

import numpy as np

from pointup.disk import check_expansion
from pointup.errors import DataError, FileError
from pointup.io.cloud import (
    COLOURS,
    ColumnWriter,
    PointCloud,
    as_positions,
    cast_values,
    storable,
    without_blanks,
)
from pointup.io.pts import SweepHeader
from pointup.io.text_tables import TextHeader, axis_or_name, read_bytes, read_columns, write_rows

KINDS = {"I": "i", "U": "u", "F": "f"}
ENCODINGS = ("ascii", "binary", "binary_compressed")
PACKED = ("rgb", "rgba")
# The library's names of what other formats call nx, ny, nz.
NORMALS = {f"normal_{axis}": f"n{axis}" for axis in "xyz"}
# Real headers are far shorter. The limit stops the search in a file without a DATA line.
MAX_HEADER_SIZE = 65536
MAX_VALUES_PER_FIELD = 1_000_000


@dataclass(frozen=True)
class PcdHeader:
    """The layout of a PCD file.

    `types` holds the NumPy type code of each field and its number of values per point. Fields named
    "_" are padding.
    """

    encoding: str
    names: tuple[str, ...]
    types: tuple[tuple[str, int], ...]
    viewpoint: str = "0 0 0 1 0 0 0"

    def fields(self) -> list[tuple[str, str, int]]:
        """Name, type code and number of values of each field; those of padding get unique names."""
        names = (f"_{i}" if name == "_" else name for i, name in enumerate(self.names))
        return [(name, *kind) for name, kind in zip(names, self.types, strict=True)]


def read_pcd(path: Path) -> PointCloud:
    """Read the points of a PCD file with all fields; a field of several values is (N, count).

    Packed `rgb` and `rgba` become red, green, blue (and alpha), uint8; `normal_x` becomes `nx`.
    """
    text = read_bytes(path)
    header, num_points, start = _read_header(path, text)
    if header.encoding == "ascii":
        columns = _read_ascii(path, text, start, header, num_points)
    else:
        columns = _read_binary(path, text, start, header, num_points)
    columns = {name: values for name, values in columns.items() if not name.startswith("_")}
    for name in PACKED:
        if name in columns and columns[name].shape[1:] == (1,) and columns[name].itemsize == 4:
            columns = _unpack_colours(columns, name)
    columns = {n: v[:, 0] if v.shape[1:] == (1,) else v for n, v in columns.items()}
    if any(columns[axis].ndim > 1 for axis in "xyz"):
        raise FileError(f"{path}: x, y and z must be one number each; export it again")
    positions = as_positions([columns.pop(axis) for axis in "xyz"])
    return PointCloud(positions, columns, header, path)


def _read_header(path: Path, text: bytes) -> tuple[PcdHeader, int, int]:
    entries: dict[str, list[str]] = {}
    start = 0
    for raw in text[:MAX_HEADER_SIZE].splitlines(keepends=True):
        start += len(raw)
        words = raw.decode("latin-1").partition("#")[0].split()
        if words:
            entries[words[0].upper()] = words[1:]
        if words and words[0].upper() == "DATA":
            break
    fields = entries.get("FIELDS", entries.get("COLUMNS", []))
    names = [NORMALS.get(name, axis_or_name(name)) for name in fields]
    encoding = " ".join(entries.get("DATA", [])).lower()
    if not names or encoding not in ENCODINGS:
        raise FileError(f"{path}: not a PCD file: it has no header with FIELDS and DATA")
    entries.setdefault("COUNT", ["1"] * len(names))
    sizes, counts = (_numbers(path, entries, key, len(names)) for key in ("SIZE", "COUNT"))
    kinds = entries.get("TYPE", [])
    types = []
    for kind, size, count in zip(kinds, sizes, counts, strict=False):
        code = f"<{KINDS.get(kind.upper(), '?')}{size}"
        if size not in ((4, 8) if code[1] == "f" else (1, 2, 4, 8)) or code[1] == "?":
            raise FileError(
                f"{path}: unknown field type {kind[:9]} of {size} bytes; export it again"
            )
        if not 1 <= count <= MAX_VALUES_PER_FIELD:
            raise FileError(f"{path}: a field of {count} values; export it again")
        types.append((code, count))
    if len(types) != len(names):
        raise FileError(f"{path}: FIELDS, SIZE, TYPE and COUNT differ in length; export it again")
    header = PcdHeader(encoding, tuple(names), tuple(types), " ".join(entries.get("VIEWPOINT", [])))
    named = [name for name in names if name != "_"]
    if len(set(named)) < len(named) or not set("xyz") <= set(named):
        raise FileError(
            f"{path}: it must have the fields x, y, z, and no field twice; export it again"
        )
    if "POINTS" in entries:
        (num_points,) = _numbers(path, entries, "POINTS", 1)
    else:
        (width,), (height,) = (_numbers(path, entries, key, 1) for key in ("WIDTH", "HEIGHT"))
        num_points = width * height
    return header, num_points, start


def _numbers(path: Path, entries: dict[str, list[str]], key: str, length: int) -> list[int]:
    words = entries.get(key, [])
    if len(words) != length or not all(
        w.isdecimal() and w.isascii() and len(w) < 19 for w in words
    ):
        raise FileError(
            f"{path}: {key} is {' '.join(words)[:40]!r} in its header, not {length} integers; "
            "export it again"
        )
    return [int(word) for word in words]


def _read_ascii(
    path: Path, text: bytes, start: int, header: PcdHeader, num_points: int
) -> dict[str, np.ndarray]:
    # Each value takes at least a digit and a blank.
    num_values = sum(count for _, count in header.types)
    if 2 * num_points * num_values > len(text) - start + 1:
        raise FileError(f"{path}: ends before its {num_points} points; copy it again")
    columns = [f"{name} {i}" for name, _, count in header.fields() for i in range(count)]
    # The names "x 0", "y 0", ... are no axis names, which `read_columns` would treat differently.
    table = read_columns(path, text, start, TextHeader(names=tuple(columns)))
    num_rows = len(next(iter(table.values())))
    if num_rows != num_points:
        raise FileError(f"{path}: has {num_rows} of {num_points} points; copy it again")
    values = {}
    for name, code, count in header.fields():
        parts = [
            cast_values(table[f"{name} {i}"], np.dtype(code), f"{path}: {name}")
            for i in range(count)
        ]
        values[name] = np.column_stack(parts)
    return values


def _read_binary(
    path: Path, text: bytes, start: int, header: PcdHeader, num_points: int
) -> dict[str, np.ndarray]:
    dtype = np.dtype([(name, code, (count,)) for name, code, count in header.fields()])
    size = num_points * dtype.itemsize
    if header.encoding == "binary":
        if start + size > len(text):
            num_held = (len(text) - start) // dtype.itemsize
            raise FileError(f"{path}: ends after {num_held} of {num_points} points; copy it again")
        table = np.frombuffer(text, dtype, num_points, start)
        return {name: np.ascontiguousarray(table[name]) for name in dtype.names or ()}
    body = _decompress(path, text, start, size)
    values, offset = {}, 0
    # Compressed files store one field after another, not one point after another.
    for name, code, count in header.fields():
        array = np.frombuffer(body, code, num_points * count, offset)
        values[name] = array.reshape(num_points, count)
        offset += array.nbytes
    return values


def _decompress(path: Path, text: bytes, start: int, size: int) -> bytes:
    if find_spec("lzf") is None:
        raise FileError(
            f"{path}: compressed PCD needs python-neo-lzf; install it with "
            "`pip install pointup[pcd]`"
        )
    import lzf

    if start + 8 > len(text):
        raise FileError(f"{path}: ends before its points; copy it again")
    packed, unpacked = unpack_from("<II", text, start)
    if start + 8 + packed > len(text) or unpacked < size:
        raise FileError(f"{path}: shorter than its header requires; copy it again")
    check_expansion(path, unpacked)
    try:
        body = lzf.decompress(text[start + 8 : start + 8 + packed], unpacked) if packed else b""
    except ValueError:
        body = None
    if body is None or len(body) != unpacked:
        raise FileError(f"{path}: its compressed points can't be read; copy it again")
    return bytes(body)


def _unpack_colours(columns: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Replace the packed colours `name` by red, green, blue (and alpha)."""
    packed = np.ascontiguousarray(columns[name][:, 0]).view("<u4")
    parts = dict(zip(COLOURS, (16, 8, 0), strict=True)) | ({"alpha": 24} if name == "rgba" else {})
    unpacked: dict[str, np.ndarray] = {}
    for other, values in columns.items():
        if other == name:
            unpacked |= {
                part: (packed >> shift & 255).astype(np.uint8)[:, None]
                for part, shift in parts.items()
            }
        else:
            unpacked[other] = values
    return unpacked


LETTERS = {kind: letter for letter, kind in KINDS.items()}
VIEWPOINT = "0 0 0 1 0 0 0"
# The header reserves space for the number of points, which is known only at the end.
COUNT_DIGITS = 20


class PcdWriter(ColumnWriter):
    """Writes PCD with the layout of the file that `like` was read from; never compressed.

    Coordinates are float32 if they were in the original PCD file or KITTI sweep; otherwise they are
    float64. 8-bit colours are packed, unless the original PCD file has them apart.
    """

    def _lay_out(self, like: PointCloud) -> None:
        super()._lay_out(like)
        before = like.header if isinstance(like.header, PcdHeader) else None
        if before is None:
            self._narrow_colours()
        self._encoding = "ascii" if before and before.encoding == "ascii" else "binary"
        self._viewpoint = (before.viewpoint if before else "") or VIEWPOINT
        self._packed = _packed_field(before, self.columns)
        stored = dict(zip(before.names, before.types, strict=True)) if before else {}
        self._titles = without_blanks(self.columns, self.path)
        for name, dtype in self.columns.items():
            self.columns[name] = storable(dtype).newbyteorder("<")
            if name in "xyz" and (
                stored.get(name, ("",))[0] == "<f4" or isinstance(like.header, SweepHeader)
            ):
                self.columns[name] = np.dtype(np.float32)
            if self._titles[name].startswith(("_", "#")):
                raise DataError(f"{self.path}: PCD can't have a field {name!r}; rename it")

    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        if self._packed:
            name, dtype = self._packed
            parts = {part: columns.pop(part).astype("<u4") for part in _parts(name)}
            value = parts["red"] << 16 | parts["green"] << 8 | parts["blue"]
            value |= parts["alpha"] << 24 if "alpha" in parts else np.uint32(0)
            columns[name] = value.view(dtype)
        columns = {name: columns[name] for name in self._fields()}
        if self._encoding == "ascii":
            write_rows(self._stream, columns, " ")
            return
        types = [(name, values.dtype) for name, values in columns.items()]
        self._stream.write(np.rec.fromarrays(list(columns.values()), types).tobytes())

    def _fields(self) -> dict[str, np.dtype]:
        """The fields in the order of the file; packed colours replace their first component."""
        if not self._packed:
            return self.columns
        fields: dict[str, np.dtype] = {}
        for name, dtype in self.columns.items():
            if name in _parts(self._packed[0]):
                fields[self._packed[0]] = self._packed[1]
            else:
                fields[name] = dtype
        return fields

    def _write_header(self) -> None:
        fields = self._fields()
        named = {own: name for name, own in NORMALS.items()}
        digits = str(self.num_points)
        lines = [
            "# .PCD v0.7 - Point Cloud Data file format",
            # This comment shrinks as the number of points, which is written twice, gets longer.
            "#" + " " * (2 * (COUNT_DIGITS - len(digits))),
            "VERSION 0.7",
            f"FIELDS {' '.join((self._titles | named).get(name, name) for name in fields)}",
            f"SIZE {' '.join(str(dtype.itemsize) for dtype in fields.values())}",
            f"TYPE {' '.join(LETTERS[dtype.kind] for dtype in fields.values())}",
            f"COUNT {' '.join('1' for _ in fields)}",
            f"WIDTH {digits}",
            "HEIGHT 1",
            f"VIEWPOINT {self._viewpoint}",
            f"POINTS {digits}",
            f"DATA {self._encoding}",
        ]
        self._stream.write(("\n".join(lines) + "\n").encode("latin-1"))


def _parts(name: str) -> tuple[str, ...]:
    return (*COLOURS, "alpha") if name == "rgba" else COLOURS


def _packed_field(
    before: PcdHeader | None, columns: dict[str, np.dtype]
) -> tuple[str, np.dtype] | None:
    """Name and type of the original's packed colours if all their components are still uint8; of
    another format, any colours."""
    if before is None and all(columns.get(name) == np.uint8 for name in COLOURS):
        return "rgb", np.dtype("<f4")
    for name, (code, _) in zip(before.names, before.types, strict=True) if before else ():
        if name in PACKED and all(columns.get(part) == np.uint8 for part in _parts(name)):
            # Some packed colours are NaN as a float, and text can't hold their bits.
            return name, np.dtype("<u4" if before and before.encoding == "ascii" else code)
    return None
