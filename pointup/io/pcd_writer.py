"""Writes PCD, binary or ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pointup.errors import DataError
from pointup.io.cloud import ColumnWriter, ExtraDimension, PointCloud
from pointup.io.kitti import SweepHeader
from pointup.io.pcd import COLOURS, KINDS, PACKED, PcdHeader
from pointup.io.text_writer import write_rows

LETTERS = {kind: letter for letter, kind in KINDS.items()}
VIEWPOINT = "0 0 0 1 0 0 0"
# The header reserves space for the number of points, which is known only at the end.
COUNT_DIGITS = 20


class PcdWriter(ColumnWriter):
    """Writes PCD with the layout of the file that `like` was read from; never compressed.

    Coordinates are float32 if they were in the original PCD file or KITTI sweep; otherwise they are
    float64. Colours that were packed in the original are packed again.
    """

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path, like, extra_dimensions)
        before = like.header if isinstance(like.header, PcdHeader) else None
        self._encoding = "ascii" if before and before.encoding == "ascii" else "binary"
        self._viewpoint = (before.viewpoint if before else "") or VIEWPOINT
        self._packed = _packed_field(before, self.columns)
        stored = dict(zip(before.names, before.types, strict=True)) if before else {}
        for name, dtype in self.columns.items():
            self.columns[name] = _pcd_type(dtype)
            if name in "xyz" and (
                stored.get(name, ("",))[0] == "<f4" or isinstance(like.header, SweepHeader)
            ):
                self.columns[name] = np.dtype(np.float32)  # type: ignore[assignment]
            if not name.isascii() or len(name.split()) != 1 or name.startswith(("_", "#")):
                raise DataError(f"{path}: PCD can't have a field {name!r}; rename it")

    def _begin(self) -> None:
        self._write_header()

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
        table = np.empty(len(columns["x"]), [(n, v.dtype) for n, v in columns.items()])
        for name, values in columns.items():
            table[name] = values
        self._stream.write(table.tobytes())

    def _end(self) -> None:
        self._stream.seek(0)
        self._write_header()

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
        digits = str(self.num_points)
        lines = [
            "# .PCD v0.7 - Point Cloud Data file format",
            # This comment shrinks as the number of points, which is written twice, gets longer.
            "#" + " " * (2 * (COUNT_DIGITS - len(digits))),
            "VERSION 0.7",
            f"FIELDS {' '.join(fields)}",
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
    """Name and type of the original's packed colours if all their components are still uint8."""
    for name, (code, _) in zip(before.names, before.types, strict=True) if before else ():
        if name in PACKED and all(columns.get(part) == np.uint8 for part in _parts(name)):
            # Some packed colours are NaN as a float, and text can't hold their bits.
            return name, np.dtype("<u4" if before and before.encoding == "ascii" else code)
    return None


def _pcd_type(dtype: np.dtype) -> np.dtype:
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if dtype == np.float16 else dtype.newbyteorder("<")
