"""The horizontal extent of a file, and the properties that files of one survey share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import laspy
import numpy as np

from pointup.errors import FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import LAS_EXTENSIONS, read_first, read_points

CRS_OWNER, WKT, GEO_KEYS = "LASF_Projection", 2112, (34735, 34736, 34737)


@dataclass(frozen=True)
class FileExtent:
    """The extent of a file in x and y, its coordinate system and its attributes.

    Attributes:
        path: the file.
        low, high: (2,) float64, the smallest and largest x and y.
        num_points: number of points.
        crs: contents of the records that define the coordinate system; empty if there are none.
        attributes: name, NumPy type and shape of a value for each attribute, sorted by name.
        scale: (2,) float64, the LAS scale of x and y; 0 for other formats.
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
        """Mean point spacing, for points spread uniformly over the extent."""
        sides = self.high - self.low
        # The points of a file may lie on a line along an axis, or all in one place.
        return float(max(np.sqrt(sides.prod() / self.num_points), sides.max() / self.num_points))

    def holds(self, positions: np.ndarray) -> bool:
        """Whether all points (N, 3) lie in the extent, within the rounding of coordinates."""
        margin = np.maximum(self.scale, 1e-9 * np.abs(self.high).max(initial=1.0))
        low, high = positions[:, :2].min(axis=0), positions[:, :2].max(axis=0)
        return bool((low >= self.low - margin).all() and (high <= self.high + margin).all())


def read_extent(path: Path) -> FileExtent:
    """The extent of a file: from the header of LAS and LAZ, from the points of other formats.

    Raises FileError for a header without a valid extent, and the errors of `read_points`.
    """
    if path.suffix.lower() not in LAS_EXTENSIONS:
        cloud = read_points(path)
        xy = cloud.positions[:, :2]
        return _extent(path, cloud, xy.min(axis=0), xy.max(axis=0), len(cloud))
    first = read_first(path, 2)
    header = first.header
    assert isinstance(header, laspy.LasHeader)
    low, high = np.array(header.mins[:2]), np.array(header.maxs[:2])
    if not (np.isfinite([low, high]).all() and (low <= high).all()):
        raise FileError(
            f"{path}: its header gives x from {low[0]} to {high[0]}, y from {low[1]} to {high[1]}; "
            "repair it, or upsample it with --separate and without --bounds"
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
        # Values of one file may not fit the scale of another.
        attributes += tuple(
            (f"{d.name} {d.scales} {d.offsets}", str(d.dtype), ())
            for d in header.point_format.extra_dimensions
            if d.is_scaled
        )
        scale = np.array(header.scales[:2])
        records = {
            record.record_id: record.record_data_bytes().rstrip(b"\0 \n")
            for record in (*header.vlrs, *(header.evlrs or []))
            if record.user_id == CRS_OWNER
        }
        ids = (WKT,) if WKT in records else GEO_KEYS
        crs = tuple(records[number] for number in ids if number in records)
    return FileExtent(path, low, high, num_points, crs, attributes, scale)
