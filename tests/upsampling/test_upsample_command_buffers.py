"""`pointup upsample` on tiles with buffers: points that several files contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
from scipy.spatial import cKDTree
from survey_tiles import made_of, survey, write_tiles
from typed import Result


def test_points_in_the_buffers_of_tiles_count_once_and_are_the_same_in_each_tile(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    las = survey()
    # A file also contains points that are equal in everything.
    las.points.array[:100] = las.points.array[200:300]
    las.write(tmp_path / "whole.laz")
    write_tiles(las, tmp_path / "tiles", buffer=3.0)
    assert command(tmp_path / "whole.laz", "-o", tmp_path / "out.laz").status == 0
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 5,400 new" in result.out
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    found = [made_of(tmp_path / "out" / t.relative_to(tmp_path / "tiles"), t) for t in tiles]
    expected = made_of(tmp_path / "out.laz", tmp_path / "whole.laz")
    assert len(np.concatenate(found)) > 1.2 * len(expected)
    assert np.array_equal(np.unique(np.concatenate(found), axis=0), np.unique(expected, axis=0))
    # Each tile has all new points of its points, those in the buffer included.
    for tile, rows in zip(tiles, found, strict=True):
        before = laspy.read(tile)
        names = before.points.array.dtype.names
        own = np.column_stack([np.asarray(before.points.array[n], np.float64) for n in names])
        parents = cKDTree(own).query(expected[:, -len(names) :], distance_upper_bound=1e-9)[0] == 0
        assert parents.sum() == len(rows)


def test_points_of_buffers_count_once_where_tiles_have_values_of_their_own(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    las = survey()
    las.write(tmp_path / "whole.laz")
    write_tiles(las, tmp_path / "tiles", buffer=3.0)
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    for number, path in enumerate(tiles):
        tile = laspy.read(path)
        tile.user_data = np.full(len(tile.points), number, np.uint8)
        tile.write(path)
    assert command(tmp_path / "whole.laz", "-o", tmp_path / "out.laz").status == 0
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 5,400 new" in result.out
    found = [laspy.read(tmp_path / "out" / path.relative_to(tmp_path / "tiles")) for path in tiles]
    made = [file.xyz[np.asarray(file.synthetic) == 1] for file in found]
    whole = laspy.read(tmp_path / "out.laz")
    expected = whole.xyz[np.asarray(whole.synthetic) == 1]
    assert len(np.concatenate(made)) > 1.2 * len(expected)
    assert np.array_equal(np.unique(np.concatenate(made), axis=0), np.unique(expected, axis=0))
    # New points beside a point of the first file have its values, in every file.
    measured = whole.xyz[np.asarray(whole.synthetic) == 0]
    in_first = cKDTree(laspy.read(tiles[0]).xyz).query(measured)[0] == 0
    for file, points in zip(found, made, strict=True):
        beside = in_first[cKDTree(measured).query(points)[1]]
        given = np.asarray(file.user_data)[np.asarray(file.synthetic) == 1]
        assert np.mean((given == 0) == beside) > 0.99  # Some points are as far from two others.


def test_returns_of_two_pulses_in_one_place_count_once_and_all_are_kept(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    las = survey()
    write_tiles(las, tmp_path / "tiles", buffer=3.0)
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    for number, path in enumerate(tiles):
        tile = laspy.read(path)
        tile.gps_time = np.asarray(tile.gps_time) + number
        tile.write(path)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 5,400 new" in result.out
    for path in tiles:
        # Checks that the points of the tile are unchanged.
        made_of(tmp_path / "out" / path.relative_to(tmp_path / "tiles"), path)
