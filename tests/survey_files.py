"""Survey files for tests, with laspy, and `pointup upsample` on them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import laspy
import numpy as np
import pyproj
from laspy.vlrs.vlr import VLR

from pointup.cli.main import main
from pointup.io.files import read_points
from pointup.model.upsampler import Upsampler

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


WKT = VLR("LASF_Projection", 2112, "WKT", b'LOCAL_CS["somewhere"]')


class Result(NamedTuple):
    status: int
    out: str
    err: str


def positions(num_points: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x, y = 10 * rng.random((2, num_points))
    return np.column_stack([x + 5e5, y + 4.1e6, 2 * np.sin(x)]).round(2)


def write_random_las(path: Path, num_points: int = 300, point_format: int = 7) -> np.ndarray:
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


CORNER = np.array([500_000.0, 4_000_000.0, 10.0])
WIDTH = 40.0


def surface(number: int, seed: int, width: float = 3 * WIDTH) -> np.ndarray:
    xy = np.random.default_rng(seed).random((number, 2)) * [width, WIDTH]
    z = 2 * np.sin(xy[:, 0] / 7) + xy[:, 1] / 20
    return (CORNER + np.column_stack([xy, z])).round(3)


def write_row(folder: Path) -> Path:
    """Write three files side by side in a row, one survey, and return their folder."""
    points = surface(1200, 0)
    folder.mkdir()
    column = ((points[:, 0] - CORNER[0]) // WIDTH).astype(int)
    for i in range(3):
        write_las(folder / f"{i}.las", points[column == i])
    return folder


def write_model(folder: Path) -> Path:
    """Write a small untrained model."""
    from runs import SMALL

    Upsampler(**asdict(SMALL)).save_pretrained(folder)
    return folder


def upsample(model: Path, *words: object) -> int:
    arguments = ("upsample", *words, "--model", model, "--ratio", 2)
    return main([str(word) for word in arguments])


def rows(path: Path) -> set[tuple[float, ...]]:
    return set(map(tuple, read_points(path, attributes=False).positions.tolist()))


SIDE = 40.0


def survey(num_points: int = 2000) -> laspy.LasData:
    """A survey of a square in random order; some of its points coincide."""
    rng = np.random.default_rng(0)
    x, y = (SIDE - 0.1) * rng.random((2, num_points))
    points = np.column_stack([x + 5e5, y + 4e6, 2 * np.sin(x / 3)])
    points[:200] = points[200:400]
    return las_data(
        points, 7, scale=0.01, intensity=rng.permutation(num_points),
        classification=rng.integers(1, 7, num_points), gps_time=rng.random(num_points),
    )  # fmt: skip


def write_tiles(las: laspy.LasData, folder: Path, side: int = 2, buffer: float = 0.0) -> None:
    """Cut a survey into side x side files, those of a column in a folder of their own."""
    x, y = np.asarray(las.x) - 5e5, np.asarray(las.y) - 4e6
    size = SIDE / side
    for column in range(side):
        (folder / str(column)).mkdir(parents=True)
        for row in range(side):
            inside = np.ones(len(las.points), bool)
            for values, number in ((x, column), (y, row)):
                inside &= values >= number * size - buffer
                inside &= values < (number + 1) * size + buffer
            tile = laspy.LasData(las.header)
            # Shuffled, too: the order of coincident points must not matter.
            tile.points = las.points[np.flatnonzero(inside)[::-1]]
            tile.write(folder / str(column) / f"{row}.laz")


def made_of(upsampled: Path, original: Path) -> np.ndarray:
    """The new points of a file as sorted rows of all their attributes.

    Checks that the points of the original are unchanged in the file.
    """
    made, before = laspy.read(upsampled), laspy.read(original)
    size = len(before.points)
    for name in before.points.array.dtype.names:
        assert np.array_equal(made.points.array[name][:size], before.points.array[name]), name
    assert not np.asarray(made.synthetic)[:size].any() and np.asarray(made.synthetic)[size:].all()
    parent = before.points.array[np.asarray(made.parent_index)[size:]]
    columns = [made.points.array[name][size:] for name in before.points.array.dtype.names]
    columns += [made.distance_to_measured[size:]]
    columns += [parent[name] for name in before.points.array.dtype.names]
    return np.column_stack([np.asarray(column, np.float64) for column in columns])


def ordered(rows: list[np.ndarray]) -> np.ndarray:
    joined = np.concatenate(rows)
    return joined[np.lexsort(joined.T)]
