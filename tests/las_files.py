"""Writes LAS files for tests with laspy."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pyproj

UTM_CORNER = (5e5, 4e6, 0.0)


def las_data(
    points: np.ndarray,
    point_format: int = 6,
    scale: float = 0.001,
    offset: object = UTM_CORNER,
    system: object = None,
    **dimensions: object,
) -> laspy.LasData:
    """A survey of points (N, 3) with these dimensions and this coordinate system."""
    version = "1.4" if point_format > 5 else "1.2"
    header = laspy.LasHeader(version=version, point_format=point_format)
    header.scales, header.offsets = np.full(3, scale), np.asarray(offset, float)
    if system is not None:
        header.add_crs(pyproj.CRS.from_user_input(system))
    las = laspy.LasData(header)
    las.xyz = points
    for name, values in dimensions.items():
        las[name] = values
    return las


def write_las(path: Path, points: np.ndarray, **options: object) -> Path:
    """Write a survey; options as those of `las_data`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    las_data(points, **options).write(path)
    return path
