"""Where the points of a file lie, and what tells files of one survey from others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import laspy
import numpy as np

from pointup.errors import FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import LAS_EXTENSIONS, iter_points, read_points

CRS_OWNER, WKT, GEO_KEYS = "LASF_Projection", 2112, (34735, 34736, 34737)


@dataclass(frozen=True)
class FileExtent:
    """The extent of a file's points on the ground, and what its points are like.

    Attributes:
        path: the file.
        low, high: (2,) float64, of x and y.
        num_points: points in it.
        crs: the records of its coordinate system, as they stand in it; none, if it has none.
        attributes: names and types of its attributes.
        scale: (2,) float64, steps that its coordinates are rounded to; 0 where they are not.
    """

    path: Path
    low: np.ndarray
    high: np.ndarray
    num_points: int
    crs: tuple[bytes, ...]
    attributes: tuple[tuple[str, str, tuple[int, ...]], ...]
    scale: np.ndarray

    @property
    def spacing(self) -> float:
        """Distance between points, were they spread evenly over the extent."""
        sides = self.high - self.low
        # A file may be a line along an axis, or a single point.
        return float(max(np.sqrt(sides.prod() / self.num_points), sides.max() / self.num_points))

    def holds(self, positions: np.ndarray) -> bool:
        """Whether points (N, 3) lie in the extent, to within the rounding of coordinates."""
        margin = np.maximum(self.scale, 1e-9 * np.abs(self.high).max(initial=1.0))
        low, high = positions[:, :2].min(axis=0), positions[:, :2].max(axis=0)
        return bool((low >= self.low - margin).all() and (high <= self.high + margin).all())


def read_extent(path: Path) -> FileExtent:
    """The extent of a file: of LAS and LAZ what the header says, of others that of the points.

    Raises what reading the file does.
    """
    if path.suffix.lower() not in LAS_EXTENSIONS:
        cloud = read_points(path)
        xy = cloud.positions[:, :2]
        return _extent(path, cloud, xy.min(axis=0), xy.max(axis=0), len(cloud))
    first = next(iter_points(path, 2))
    header = first.header
    assert isinstance(header, laspy.LasHeader)
    low, high = np.array(header.mins[:2]), np.array(header.maxs[:2])
    if not (np.isfinite([low, high]).all() and (low <= high).all()):
        raise FileError(
            f"{path}: its header gives x from {low[0]} to {high[0]}, y from {low[1]} to {high[1]}; "
            "repair it, or add --separate"
        )
    return _extent(path, first, low, high, header.point_count, header)


def _extent(
    path: Path,
    first: PointCloud,
    low: np.ndarray,
    high: np.ndarray,
    num_points: int,
    header: laspy.LasHeader | None = None,
) -> FileExtent:
    attributes = tuple(
        sorted((name, v.dtype.str, v.shape[1:]) for name, v in first.attributes.items())
    )
    crs: tuple[bytes, ...] = ()
    scale = np.zeros(2)
    if header is not None:
        scale = np.array(header.scales[:2])
        records = {
            record.record_id: record.record_data_bytes().rstrip(b"\0 \n")
            for record in (*header.vlrs, *(header.evlrs or []))
            if record.user_id == CRS_OWNER
        }
        ids = (WKT,) if WKT in records else GEO_KEYS
        crs = tuple(records[number] for number in ids if number in records)
    return FileExtent(path, low, high, num_points, crs, attributes, scale)
