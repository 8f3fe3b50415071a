"""The extents of files, and which files form a survey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import laspy
import numpy as np
import pytest
from sheets import UTM, sheet
from survey_files import WKT, write_las

from pointup.errors import FileError
from pointup.io.cloud import PointCloud
from pointup.io.extents import MAX_GAP, FileExtent, find_surveys, read_extent
from pointup.io.files import write_points


def extent(
    x: tuple[float, float], y: tuple[float, float], name: str = "a/t.las", **known: object
) -> FileExtent:
    low, high = np.array([x[0], y[0]]), np.array([x[1], y[1]])
    values = {"num_points": 10_000, "crs": (), "attributes": (), "scale": np.zeros(2)} | known
    return FileExtent(Path(name), low, high, **values)  # type: ignore[arg-type]


def groups(*extents: FileExtent) -> list[list[int]]:
    return find_surveys(extents).groups


def test_adjacent_tiles_are_one_survey_and_gaps_separate_surveys():
    # The mean point spacing is 1.
    tiles = [
        extent((100 * i, 100 * i + 99.5), (100 * j, 100 * j + 99)) for i in (0, 1) for j in (0, 1)
    ]
    assert groups(*tiles) == [[0, 1, 2, 3]]
    beyond = 199.5 + MAX_GAP
    assert groups(*tiles, extent((beyond - 0.1, 300), (0, 100))) == [[0, 1, 2, 3, 4]]
    assert groups(*tiles, extent((beyond + 0.1, 310), (0, 100))) == [[0, 1, 2, 3], [4]]
    # A common corner, a common strip, and a small tile beside a large one.
    assert groups(extent((0, 100), (0, 100)), extent((100, 200), (101, 200))) == [[0, 1]]
    assert groups(extent((0, 100), (0, 100)), extent((80, 180), (0, 100))) == [[0, 1]]
    assert groups(extent((0, 900), (0, 900)), extent((900, 950), (400, 450))) == [[0, 1]]
    # Tiles at the edge of a survey, with points only in the overlap with other tiles.
    assert groups(extent((0, 120), (0, 120)), extent((90, 118), (-20, 110))) == [[0, 1]]
    assert groups(extent((0, 120), (0, 120)), extent((110, 119), (112, 120))) == [[0, 1]]
    # Files are joined through other files.
    row = [extent((100 * i, 100 * i + 100), (0, 100)) for i in (0, 2, 1, 5, 6)]
    assert groups(*row) == [[0, 1, 2], [3, 4]]


def test_files_on_top_of_each_other_are_separate_surveys():
    shapes = [extent((-1, 1), (-0.5 * i, 0.5 * i)) for i in (1, 2, 3)]
    assert groups(*shapes) == [[0], [1], [2]]
    # Shapes are not always in the centre of their extent.
    lamps = [extent((low, low + 1), (-0.1, 0.2), "lamp.ply") for low in (-0.3, -0.7)]
    assert groups(*lamps) == [[0], [1]]
    beside = [extent((low, low + 1), (-0.1, 0.2), "tile.ply") for low in (0, 1, 1.9)]
    assert groups(*beside) == [[0, 1, 2]]
    # Each survey of a place has its own folder.
    years = [
        extent((i, i + 100), (0, 100), f"{year}/t{i}.las") for year in (21, 22) for i in (0, 100)
    ]
    assert groups(*years) == [[0, 1], [2, 3]] and find_surveys(years).by_folder
    together = [replace(extent, path=Path(f"all/{i}.las")) for i, extent in enumerate(years)]
    assert find_surveys(together).stacked == [0, 1, 2, 3]
    # Files on top of each other in one folder leave tiles of other folders joined.
    others = [extent((i, i + 100), (0, 100), f"{i}/t.las") for i in (200, 300)]
    found = find_surveys([*together[::2], *others])
    assert found.groups == [[0], [1], [2, 3]] and found.stacked == [0, 1] and not found.by_folder


def test_adjacent_files_that_differ_are_not_joined_and_the_difference_is_reported():
    one = extent((0, 100), (0, 100))
    for name, value, difference in (
        ("crs", (b"feet",), "coordinate system"),
        ("attributes", (("red", "<u2", ()),), "attributes"),
    ):
        found = find_surveys([one, extent((100, 200), (0, 100), **{name: value})])
        assert found.groups == [[0], [1]]
        assert found.unlike == (0, 1) and found.difference == difference


def test_adjacent_files_of_different_formats_are_not_joined():
    names = ("a.las", "b.LAZ", "c.xyz", "d.csv", "e.obj", "f.ply", "g.ply")
    row = [extent((100 * i, 100 * i + 100), (0, 100), name) for i, name in enumerate(names)]
    found = find_surveys(row)
    assert found.groups == [[0, 1], [2, 3], [4], [5, 6]] and found.unlike is None


@pytest.mark.parametrize("suffix", [".laz", ".ply"])
def test_the_extent_equals_that_of_the_points(suffix, tmp_path):
    points = np.round(sheet(500), 2) + UTM
    write_points(tmp_path / f"in{suffix}", PointCloud(points, {"weight": np.ones(500)}))
    read = read_extent(tmp_path / f"in{suffix}")
    assert np.allclose(
        [read.low, read.high], [points[:, :2].min(0), points[:, :2].max(0)], atol=1e-4
    )
    assert read.num_points == 500 and ("weight", "<f8", ()) in read.attributes
    assert read.holds(points)
    assert not read.holds(points + np.array([1.0, 0.0, 0.0]))
    with pytest.raises(FileError, match="no such file"):
        read_extent(tmp_path / "missing.las")


def test_the_coordinate_system_is_that_of_the_file(tmp_path):
    def written(name: str, *records: laspy.VLR) -> FileExtent:
        las = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
        las.xyz = np.round(sheet(20), 2)
        las.header.vlrs.extend(records)
        las.write(tmp_path / name)
        return read_extent(tmp_path / name)

    padded = laspy.VLR("LASF_Projection", 2112, "", WKT.record_data + b"\0\0")
    other = laspy.VLR("LASF_Projection", 2112, "", b'LOCAL_CS["elsewhere"]')
    assert written("a.las", WKT).crs == written("b.las", padded).crs != ()
    assert written("c.las", other).crs != written("a.las", WKT).crs
    assert written("d.las").crs == ()


def test_the_spacing_of_a_line_is_measured_along_it():
    assert extent((0, 100), (5, 5), num_points=100).spacing == 1.0
    assert extent((3, 3), (5, 5), num_points=1).spacing == 0.0


def test_overlapping_files_of_one_survey_are_of_one_grid_up_to_whole_steps_and_signs():
    def rescaled(scale: float, offset: float) -> tuple[int, int] | None:
        known = [
            {"scale": np.full(2, 0.1), "offset": np.array([5e5, 4e6])},
            {"scale": np.full(2, scale), "offset": np.array([5e5 + offset, 4e6])},
        ]
        sides = ((0, 100), (90, 200))
        return find_surveys(
            [extent(x, (0, 100), **k) for x, k in zip(sides, known, strict=True)]
        ).rescaled

    assert rescaled(0.1, 0.0) is None and rescaled(0.1, 90.3) is None
    assert rescaled(0.1, 0.03) == rescaled(0.01, 0.0) == (0, 1)


def test_a_file_of_negative_scale_has_the_extent_and_grid_of_the_positive_one(tmp_path):
    path = write_las(tmp_path / "a.las", UTM + sheet(100), scale=0.1, offset=(5e5, 4e6, 0))
    positive, las = read_extent(path), laspy.read(path)
    las.points.scales = las.header.scales = -las.header.scales
    for axis in "XYZ":
        las.points.array[axis] *= -1
    las.write(path)
    # laspy takes the least whole number for the least coordinate.
    content = bytearray(path.read_bytes())
    extremes = np.frombuffer(content, "<f8", 6, offset=179).reshape(3, 2)
    extremes[:] = extremes[:, ::-1].copy()
    path.write_bytes(content)
    negative = read_extent(path)
    for name in ("low", "high", "scale", "offset"):
        assert getattr(negative, name) == pytest.approx(getattr(positive, name), abs=1e-9)
