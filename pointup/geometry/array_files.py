"""Sizes of arrays in files, held against the file before they are read.

A damaged or malicious header would have a reader ask for all the memory there is.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

import numpy as np

from pointup.errors import FileError

# Deflate packs constants 1,000 times, coordinates hardly twice. What is small is never refused.
LARGEST_EXPANSION = 100
ALWAYS_READ = 256 * 2**20
LONGEST_HEADER = 2**20


class ArrayHeader(NamedTuple):
    """What an array in a file says of itself; `start` is where its values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(stream: BinaryIO) -> ArrayHeader:
    """The header of an NPY array; ValueError for anything else."""
    if np.lib.format.read_magic(stream) == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        length = int.from_bytes(stream.read(4), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes")
        stream.seek(-4, os.SEEK_CUR)
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    if any(size < 0 for size in shape):
        raise ValueError(f"its header gives a shape of {shape}")
    return ArrayHeader(shape, dtype, stream.tell())


def read_npz_headers(path: Path) -> dict[str, ArrayHeader]:
    """The headers of the arrays of an NPZ file, by name; what is no array is left out.

    Raises ValueError for a header that promises more than the archive holds, and what zipfile does
    for what is no archive.
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
    """FileError when so many bytes can't be honest content of the file."""
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_READ, LARGEST_EXPANSION * size):
        raise FileError(
            f"{path}: its {size:,} bytes would expand to {num_bytes:,}, too many for measured "
            "points; it is damaged, or full of one value: save it again without compression"
        )
