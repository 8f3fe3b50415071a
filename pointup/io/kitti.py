"""Reads and writes lidar sweeps as raw float32 rows: KITTI (.bin) and nuScenes (.pcd.bin)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.errors import FileError
from pointup.io.cloud import (
    ExtraDimension,
    PointCloud,
    as_positions,
    check_positions,
    os_errors,
)
from pointup.io.fixed_columns import FixedColumnWriter

# Beyond the range of any sensor. Binary data of another kind, read as float32, soon exceeds it.
MAX_COORDINATE = 1e6
# In the unit of the coordinates: metres in the sensor's frame.
MAX_ROUNDING_ERROR = 1e-3


@dataclass(frozen=True)
class SweepHeader:
    """The names of the columns after x, y and z."""

    names: tuple[str, ...] = ("intensity",)


def column_names(path: Path) -> tuple[str, ...]:
    """The columns after x, y and z, by the extension of the file: it has no header."""
    return ("intensity", "ring") if path.name.lower().endswith(".pcd.bin") else ("intensity",)


def read_sweep(path: Path) -> PointCloud:
    """Read little-endian float32 rows of x, y, z, intensity, and ring in `.pcd.bin`.

    The file has no header. It is accepted as a sweep if it consists of whole rows and all
    coordinates are finite and at most 1e6 in magnitude. Raises FileError otherwise.
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
    check_positions(positions, str(path))
    if np.abs(positions).max() > MAX_COORDINATE:
        raise FileError(
            f"{path}: not a KITTI sweep: coordinates up to {np.abs(positions).max():g}; give it "
            "the extension of its format"
        )
    columns = {name: rows[:, 3 + i].astype(np.float32) for i, name in enumerate(names)}
    return PointCloud(positions, columns, SweepHeader(names), path)


class SweepWriter(FixedColumnWriter):
    """Writes x, y, z and intensity, and ring in `.pcd.bin`. Columns without values are 0.

    Raises FileError for coordinates that float32 can't hold to 1e-3, such as map coordinates.
    """

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        self.supported = column_names(path)
        super().__init__(path, like, extra_dimensions)

    def _begin(self) -> None:
        pass

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

    def _end(self) -> None:
        pass
