"""Checks the array sizes that NPY and NPZ headers state, before a reader allocates memory.

A damaged or malicious header can make a reader allocate all memory of the machine.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

import numpy as np

from pointup.errors import FileError

# Deflate shrinks constants 1,000-fold and coordinates barely 2-fold.
LARGEST_EXPANSION = 100
# Bytes that are read whatever the expansion.
ALWAYS_READ = 256 * 2**20
# Bytes of an NPY header.
LONGEST_HEADER = 2**20


class ArrayHeader(NamedTuple):
    """Shape and dtype of an array in a file; `start` is the offset of its values in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(stream: BinaryIO) -> ArrayHeader:
    """Read the header of an NPY array. Raises ValueError for anything else."""
    if np.lib.format.read_magic(stream) == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        length = int.from_bytes(stream.read(4), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header states a length of {length} bytes")
        stream.seek(-4, os.SEEK_CUR)
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    if any(size < 0 for size in shape):
        raise ValueError(f"its header states the shape {shape}")
    return ArrayHeader(shape, dtype, stream.tell())


def read_npz_headers(path: Path) -> dict[str, ArrayHeader]:
    """Read the headers of the arrays of an NPZ file, by name; other members are skipped.

    Raises ValueError for a header that states more bytes than its member holds, and the errors of
    `zipfile` for a file that is no archive.
    """
    headers = {}
    with ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as stream:
                header = read_array_header(stream)  # type: ignore[arg-type]
            if not header.dtype.hasobject and header.start + header.num_bytes > member.file_size:
                raise ValueError(f"{member.filename} is cut short")
            headers[member.filename.removesuffix(".npy")] = header
    return headers


def check_expansion(path: Path, num_bytes: int) -> None:
    """Raise FileError where `num_bytes` are too many for coordinates in a file of this size."""
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_READ, LARGEST_EXPANSION * size):
        raise FileError(
            f"{path}: its {size:,} bytes would expand to {num_bytes:,}, too many for measured "
            "points; it is damaged or holds one value throughout: save it without compression"
        )
