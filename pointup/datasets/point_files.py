"""Reads points from Arrow files by their byte positions, without a memory map.

A read beyond the end of a memory-mapped file, or of a damaged disk, kills the process. These reads
raise an OSError instead, which concerns one sample. They also touch exactly the bytes of a sample:
one request per cloud to a network file system.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_OPEN = 64
"""Files that a process keeps open; a dataset may have more files than a process may open."""


class PointFiles:
    """The files that hold the points of a dataset, opened when they are first read.

    Safe to use after a fork and to send to another process; not safe for several threads.
    """

    # Of the class, because the module's names are gone when the interpreter ends.
    _close = staticmethod(os.close)

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, at: int, num_points: int) -> np.ndarray:
        """The points (num_points, 3) float32 at byte `at` of a file, as a writable array.

        Raises OSError if the file can't be read or ends before the last point.
        """
        points = np.empty((num_points, 3), np.float32)
        left = points.data.cast("B") if num_points else memoryview(b"")
        descriptor = self._descriptor(file)
        while len(left):
            number = _read_into(descriptor, left, at)
            if not number:
                size = os.fstat(descriptor).st_size
                raise OSError(f"{self.paths[file]} has only {size:,} bytes")
            left, at = left[number:], at + number
        return points

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem()[1])

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self.paths[file], os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return self._open[file]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()


def _read_into(descriptor: int, buffer: memoryview, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], at)
    # Windows: every process has its own position in the file, because it opens the file itself.
    os.lseek(descriptor, at, os.SEEK_SET)
    data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)
