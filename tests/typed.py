"""Results and surveys shared by the tests of `pointup upsample`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import laspy
import numpy as np
from las_files import las_data
from laspy.vlrs.vlr import VLR

WKT = VLR("LASF_Projection", 2112, "WKT", b'LOCAL_CS["somewhere"]')


class Result(NamedTuple):
    status: int
    out: str
    err: str


def positions(num_points: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x, y = 10 * rng.random((2, num_points))
    return np.column_stack([x + 5e5, y + 4.1e6, 2 * np.sin(x)]).round(2)


def write_las(path: Path, num_points: int = 300, point_format: int = 7) -> np.ndarray:
    """Write a survey with random attributes, a CRS and an extra dimension."""
    rng = np.random.default_rng(point_format)
    las = las_data(positions(num_points), point_format, scale=0.01)
    las.add_extra_dim(laspy.ExtraBytesParams("height", "int16", scales=[0.1], offsets=[5.0]))
    las.header.vlrs.append(WKT)
    for name, top in (("intensity", 2**16), ("red", 2**16), ("classification", 7)):
        las[name] = rng.integers(0, top, num_points)
    las.gps_time = np.sort(rng.random(num_points))
    las.return_number = rng.integers(1, 6, num_points)
    las.height = rng.integers(0, 100, num_points) / 10
    las.write(path)
    return np.asarray(las.points.array)


def digest(path: Path) -> str:
    """Digest of a file; comparing whole files would make pytest print long differences."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_in(folder: Path) -> list[str]:
    """Names in a folder, without the record and the list of the files that were upsampled."""
    listed = (".upsampled", f"{folder.name}.vpc")
    return sorted(path.name for path in folder.iterdir() if path.name not in listed)


def is_one_line(text: str) -> bool:
    return text.startswith("pointup: error: ") and text.count("\n") == 1


def write_scaled(
    path: Path, kind: str, scale: float, values: np.ndarray, shift: float = 0.0
) -> None:
    """Write a survey, moved by `shift` along x, with raw `values` in a scaled extra dimension."""
    ones = np.ones(len(values), int)
    points = positions(len(values)) + np.array([shift, 0.0, 0.0])
    las = las_data(points, scale=0.01, return_number=ones, number_of_returns=ones)
    las.add_extra_dim(
        laspy.ExtraBytesParams("value", kind, scales=np.array([scale]), offsets=np.array([0.0]))
    )
    las.points.array["value"] = values
    las.write(path)


def write_two_tiles(folder: Path) -> bytearray:
    """Write two surveys side by side, a.las and b.las, and return the bytes of the second."""
    folder.mkdir()
    for name, shift in (("a.las", 0.0), ("b.las", 10.0)):
        write_scaled(folder / name, "uint16", 0.01, np.full(400, 10_000), shift)
    return bytearray((folder / "b.las").read_bytes())
