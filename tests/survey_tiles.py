"""A survey in tiles, with and without buffers, shared by tests of `pointup upsample`."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
from las_files import las_data

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
