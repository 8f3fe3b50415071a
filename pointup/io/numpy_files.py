"""Reads and writes points as NPY (one array of columns) and NPZ (named arrays)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from pointup.disk import os_errors
from pointup.errors import DataError, FileError
from pointup.geometry.array_files import check_expansion, read_array_header, read_npz_headers
from pointup.io.cloud import (
    ColumnWriter,
    ExtraDimension,
    PointCloud,
    PointWriter,
    as_positions,
    cast_values,
    check_positions,
)

POSITION_KEYS = ("positions", "pos", "points", "xyz")
NPY_HEADER_SIZE = 128


@dataclass(frozen=True)
class NpzHeader:
    """The key of the positions in an NPZ file."""

    key: str = "positions"


def read_npy(path: Path) -> PointCloud:
    """Read an array (N, 3) or wider; columns after z become attributes `column_4`, `column_5`..."""
    with _numpy_errors(path), path.open("rb") as stream:
        if stream.read(2) == b"PK":
            raise FileError(f"{path}: holds several arrays; name it .npz")
        stream.seek(0)
        header = read_array_header(stream)
        if header.start + header.num_bytes > path.stat().st_size:
            raise ValueError("it is cut short")
        stream.seek(0)
        array = np.load(stream, allow_pickle=False)
    positions, attributes = _split_array(array, str(path))
    return PointCloud(positions, attributes, None, path)


def read_npz(path: Path) -> PointCloud:
    """Read positions, stored under one of `POSITION_KEYS`, and numeric arrays of the same length.

    Other arrays are not read. Raises FileError for arrays that would expand to far more than the
    size of the file.
    """
    with _numpy_errors(path):
        headers = read_npz_headers(path)
        key = next((key for key in POSITION_KEYS if key in headers), None)
        if key is None:
            raise FileError(
                f"{path}: no array is named {', '.join(POSITION_KEYS)}; rename the array of points "
                f"(there are: {', '.join(headers) or 'none'})"
            )
        selected = {
            name: header
            for name, header in headers.items()
            if name == key
            or (header.shape[:1] == headers[key].shape[:1] and header.dtype.kind in "biuf")
        }
        check_expansion(path, sum(header.num_bytes for header in selected.values()))
        with np.load(path, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in selected}
    positions, attributes = _split_array(arrays.pop(key), f"{path}: {key}")
    return PointCloud(positions, attributes | arrays, NpzHeader(key), path)


@contextmanager
def _numpy_errors(path: Path) -> Iterator[None]:
    with os_errors(path, "read"):
        try:
            yield
        except (OSError, FileError):
            raise
        # NumPy has no error class of its own: zip, zlib, tokenizer and memory errors occur.
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else "it is cut short"
            raise FileError(
                f"{path}: not a whole NumPy file: {reason[:99]}; save it again"
            ) from error


def _split_array(array: np.ndarray, what: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if array.ndim != 2 or array.shape[1] < 3 or array.dtype.kind not in "iuf":
        raise FileError(
            f"{what}: expected an array of numbers (N, 3) or wider, not {array.dtype} {array.shape}"
        )
    positions = as_positions(array[:, :3].T)
    check_positions(positions, what)
    columns = range(3, array.shape[1])
    return positions, {f"column_{i + 1}": np.ascontiguousarray(array[:, i]) for i in columns}


class NpyWriter(ColumnWriter):
    """Writes one float64 array: x, y, z and a column per attribute. Attribute names are lost."""

    def _begin(self) -> None:
        self.columns = dict.fromkeys(self.columns, np.dtype(np.float64))
        self._write_header()

    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        self._stream.write(np.column_stack(list(columns.values())).tobytes())

    def _end(self) -> None:
        self._stream.seek(0)
        self._write_header()

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

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path, extra_dimensions)
        self.header = like.header if isinstance(like.header, NpzHeader) else NpzHeader()
        self._types = {name: values.dtype for name, values in like.attributes.items()}
        self._types |= {added.name: np.dtype(added.dtype) for added in extra_dimensions}
        self._chunks: list[dict[str, np.ndarray]] = []

    def _begin(self) -> None:
        pass

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        if attributes.keys() != self._types.keys():
            names = ", ".join(sorted(attributes.keys() ^ self._types.keys()))
            raise DataError(f"{self.path}: all points need the same attributes; differing: {names}")
        chunk = {
            name: cast_values(attributes[name], dtype, f"{self.path}: {name}")
            for name, dtype in self._types.items()
        }
        self._chunks.append({self.header.key: positions} | chunk)

    def _end(self) -> None:
        with ZipFile(self._stream, "w") as archive:
            for name in self._chunks[0]:
                array = np.concatenate([chunk[name] for chunk in self._chunks])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
