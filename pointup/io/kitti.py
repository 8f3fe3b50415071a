"""Sweeps of a spinning lidar as bare float32 rows: KITTI (.bin) and nuScenes (.pcd.bin)."""

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

# Farther than any sensor sees; what is no float32 at all soon has larger ones.
FARTHEST = 1e6
# Of the coordinates' unit, metres in the sensor's frame.
LARGEST_ROUNDING = 1e-3


@dataclass(frozen=True)
class SweepHeader:
    """Names of the columns after x, y and z."""

    names: tuple[str, ...] = ("intensity",)


def names_of(path: Path) -> tuple[str, ...]:
    """Columns after x, y and z, which the file doesn't tell: its name does."""
    return ("intensity", "ring") if path.name.lower().endswith(".pcd.bin") else ("intensity",)


def read_sweep(path: Path) -> PointCloud:
    """Little-endian float32 rows of x, y, z, intensity, and ring in `.pcd.bin`.

    The file has no header: it is taken for a sweep if it consists of whole rows whose coordinates
    are finite and below 1e6. Raises FileError otherwise.
    """
    names = names_of(path)
    width = 3 + len(names)
    with os_errors(path, "read"):
        values = np.fromfile(path, "<f4")
        size = path.stat().st_size
    if size % (4 * width):
        raise FileError(
            f"{path}: not a KITTI sweep: {size} bytes are not rows of {width} float32; name a "
            "file by its own kind"
        )
    rows = values.reshape(-1, width)
    positions = as_positions(rows[:, :3].T)
    check_positions(positions, str(path))
    if np.abs(positions).max() > FARTHEST:
        raise FileError(
            f"{path}: not a KITTI sweep: coordinates up to {np.abs(positions).max():g}; name a "
            "file by its own kind"
        )
    columns = {name: rows[:, 3 + i].astype(np.float32) for i, name in enumerate(names)}
    return PointCloud(positions, columns, SweepHeader(names), path)


class SweepWriter(FixedColumnWriter):
    """Writes x, y, z and intensity (with the name .pcd.bin also ring), 0 where there is none.

    Raises FileError for coordinates that float32 is too coarse for, as of maps.
    """

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        self.held = names_of(path)
        super().__init__(path, like, extra_dimensions)

    def _begin(self) -> None:
        pass

    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        rounding = np.abs(positions.astype(np.float32) - positions).max()
        if not (rounding <= LARGEST_ROUNDING and np.abs(positions).max() <= FARTHEST):
            raise FileError(
                f"{self.path}: coordinates up to {np.abs(positions).max():.10g} don't fit float32; "
                "subtract an offset, or write .ply"
            )
        rows = np.zeros((len(positions), 3 + len(self.held)), "<f4")
        rows[:, :3] = positions
        for i, name in enumerate(self.held, start=3):
            if name in columns:
                rows[:, i] = columns[name]
        self._stream.write(rows.tobytes())

    def _end(self) -> None:
        pass
