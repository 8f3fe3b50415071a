"""Reads and writes points as NPY (one array of columns) and NPZ (named arrays)."""

from __future__ import annotations

import math
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from pointup.disk import check_expansion, library_errors, os_errors
from pointup.errors import FileError
from pointup.io.cloud import (
    ColumnWriter,
    PointCloud,
    PointWriter,
    as_positions,
    check_names,
    warn_once,
)

POSITION_KEYS = ("positions", "pos", "points", "xyz")
NPY_HEADER_SIZE = 128
_NOT_WHOLE = "not a whole NumPy file: {}; save it again"
_MOST_COLUMNS = 100  # Of three points; more are the points themselves.


def read_npy(path: Path) -> PointCloud:
    """Read an array (N, 3) or wider; columns after z become attributes `column_4`, `column_5`..."""
    # A damaged shape may overflow, which the mapping refuses.
    with library_errors(path, _NOT_WHOLE), os_errors(path, "read"), np.errstate(over="ignore"):
        with path.open("rb") as stream:
            if stream.read(2) == b"PK":
                raise FileError(f"{path}: holds several arrays; name it .npz")
        # Mapped: a header that states too large an array is refused before memory is allocated.
        array = np.array(np.load(path, "r", allow_pickle=False))
    positions, attributes = _split_array(array, str(path))
    return PointCloud(positions, attributes, None, path)


def read_npz(path: Path) -> PointCloud:
    """Read positions, stored under one of `POSITION_KEYS`, and numeric arrays of the same length.

    Other arrays are not read; a warning names those. The header is the key of the positions.
    """
    with library_errors(path, _NOT_WHOLE), os_errors(path, "read"), ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        headers = {name.removesuffix(".npy"): _read_header(archive, name) for name in members}
        key = next((key for key in POSITION_KEYS if key in headers), None)
        if key is None:
            raise FileError(
                f"{path}: no array is named {', '.join(POSITION_KEYS)}; rename the array of points "
                f"(there are: {', '.join(headers) or 'none'})"
            )
        arrays = {}
        number = headers[key][0][:1]
        selected = {
            name: dtype.itemsize * math.prod(shape)
            for name, (shape, dtype) in headers.items()
            if name == key or (shape[:1] == number and dtype.kind in "biuf")
        }
        check_expansion(path, sum(selected.values()))
        if others := headers.keys() - selected:
            warn_once(
                f"{path}: arrays that have no number for each point are dropped: "
                f"{', '.join(sorted(others))}"
            )
        for name in selected:
            with archive.open(f"{name}.npy") as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    positions, attributes = _split_array(arrays.pop(key), f"{path}: {key}")
    return PointCloud(positions, attributes | arrays, key, path)


def _read_header(archive: ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array, whose values are not read."""
    with archive.open(name) as member:
        is_first = np.lib.format.read_magic(member) == (1, 0)
        formats = np.lib.format
        read = formats.read_array_header_1_0 if is_first else formats.read_array_header_2_0
        shape, _, dtype = read(member)
    if dtype.itemsize * math.prod(shape) > archive.getinfo(name).file_size:
        raise ValueError(f"{name} is cut short")
    return shape, dtype


def _split_array(array: np.ndarray, what: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if array.ndim != 2 or array.shape[1] < 3 or array.dtype.kind not in "iuf":
        raise FileError(
            f"{what}: expected an array of numbers (N, 3) or wider, not {array.dtype} {array.shape}"
        )
    if len(array) == 3 and array.shape[1] > _MOST_COLUMNS:
        raise FileError(f"{what}: is an array {array.shape}; transpose it, a point in each row")
    positions = as_positions(array[:, :3].T)
    columns = range(3, array.shape[1])
    return positions, {f"column_{i + 1}": np.ascontiguousarray(array[:, i]) for i in columns}


class NpyWriter(ColumnWriter):
    """Writes one float64 array: x, y, z and a column per attribute. Attribute names are lost."""

    def _begin(self) -> None:
        self.columns = dict.fromkeys(self.columns, np.dtype(np.float64))
        super()._begin()

    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        self._stream.write(np.column_stack(list(columns.values())).tobytes())

    def _write_header(self) -> None:
        # The header has a fixed length, because the number of points is known only at the end. The
        # format is described in numpy.lib.format.
        shape = (self.num_points, len(self.columns))
        fields = str({"descr": "<f8", "fortran_order": False, "shape": shape}).encode()
        size = NPY_HEADER_SIZE - 10
        head = b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little")
        self._stream.write(head + fields.ljust(size - 1) + b"\n")


class NpzWriter(PointWriter):
    """Writes positions and attributes as named arrays; keeps them in memory until the end."""

    def _lay_out(self, like: PointCloud) -> None:
        self._key = like.header if isinstance(like.header, str) else POSITION_KEYS[0]
        check_names(like.attributes, self.path, (self._key,))
        self._types = {name: values.dtype for name, values in like.attributes.items()}
        self._types |= {added.name: np.dtype(added.dtype) for added in self.extra_dimensions}
        self._chunks: list[dict[str, np.ndarray]] = []

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        self._chunks.append({self._key: positions} | self._cast(attributes, self._types))

    def _end(self) -> None:
        with ZipFile(self._stream, "w") as archive:
            for name in self._chunks[0]:
                array = np.concatenate([chunk[name] for chunk in self._chunks])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
