"""Virtual point clouds: read as QGIS and pdal_wrench write them, written as these read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import laspy
import numpy as np
import pyproj
import pytest
from survey_files import digest, is_one_line, write_las, write_row

from pointup.cli.input_files import find_inputs
from pointup.errors import FileError
from pointup.evaluation.lidar import read_survey
from pointup.io.files import point_extensions
from pointup.io.virtual_clouds import files_of, write_virtual_cloud


def item(**assets: object) -> dict[str, Any]:
    """An item with what a reader of file names needs."""
    return {"type": "Feature", "stac_version": "1.0.0", "properties": {}, "assets": assets}


def write_list(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"type": "FeatureCollection", "features": items}))
    return path


def read_by_other_rules(path: Path) -> list[dict[str, Any]]:
    """What pdal_wrench takes from a list: it skips items that miss any of these."""
    content, found = json.loads(path.read_text()), []
    assert content["type"] == "FeatureCollection"
    for feature in content["features"]:
        assert feature["type"] == "Feature" and feature["stac_version"] == "1.0.0"
        properties = feature["properties"]
        first = next(iter(feature["assets"].values()))["href"]
        assert first.startswith("./")
        assert all(
            set(entry) == {"name", "size", "type"}
            and entry["type"] in ("floating", "unsigned", "signed")
            for entry in properties["pc:schemas"]
        )
        assert len(properties["proj:bbox"]) == len(feature["bbox"]) == 6
        assert {"id", "geometry", "links", "stac_extensions"} <= feature.keys()
        assert {"datetime", "pc:type", "pc:encoding", "proj:geometry"} <= properties.keys()
        found.append(
            {
                "path": (path.parent / first).resolve(),
                "count": properties["pc:count"],
                "bbox": properties["proj:bbox"],
                "crs": properties["proj:wkt2"],
                "degrees": feature["bbox"],
                "schema": {e["name"]: (e["type"], e["size"]) for e in properties["pc:schemas"]},
            }
        )
    return found


@pytest.mark.parametrize("system", [32632, 2992])
def test_a_list_tells_what_the_files_hold(system, tmp_path):
    rng = np.random.default_rng(0)
    files = []
    for number, name in enumerate(("a.laz", "sub/b.las")):
        points = np.array([5e5 + 50 * number, 4e6, 10]) + rng.random((30 + number, 3)) * 40
        files.append(write_las(tmp_path / "out" / name, points, point_format=7, system=system))
    empty = write_las(
        tmp_path / "out" / "empty.las", np.zeros((0, 3)), point_format=7, system=system
    )
    listed = tmp_path / "out" / "out.vpc"
    assert write_virtual_cloud(listed, [*files, empty]) == 2
    to_degrees = pyproj.Transformer.from_crs(system, 4326, always_xy=True)
    for found, path in zip(read_by_other_rules(listed), files, strict=True):
        las = laspy.read(path)
        assert found["path"] == path and found["count"] == len(las.points)
        assert found["bbox"] == [*las.xyz.min(axis=0), *las.xyz.max(axis=0)]
        assert pyproj.CRS(found["crs"]).equals(pyproj.CRS(system))
        low, high = np.reshape(found["degrees"], (2, 3))
        x, y = to_degrees.transform(las.x, las.y)
        degrees = np.column_stack([x, y, las.z])
        assert (low <= degrees.min(axis=0)).all() and (degrees.max(axis=0) <= high).all()
        assert np.allclose(low, degrees.min(axis=0), atol=1e-5)
        assert len(found["schema"]) == len(list(las.point_format.dimensions))
        expected = {"X": ("floating", 8), "Intensity": ("unsigned", 2), "Red": ("unsigned", 2)}
        expected |= {"GpsTime": ("floating", 8), "NumberOfReturns": ("unsigned", 1)}
        assert expected.items() <= found["schema"].items()
    assert files_of(listed) == files


def test_a_list_of_files_without_a_known_system_keeps_their_coordinates(tmp_path):
    path = write_las(tmp_path / "a.las", np.arange(9.0).reshape(3, 3) * 500, offset=np.zeros(3))
    write_virtual_cloud(tmp_path / "a.vpc", [path])
    (found,) = read_by_other_rules(tmp_path / "a.vpc")
    assert found["crs"] == "" and found["degrees"] == found["bbox"]


def test_names_are_relative_to_the_list_or_whole_and_overviews_are_no_data(tmp_path):
    (tmp_path / "tiles").mkdir()
    for name in ("a.laz", "with space.laz", "c.laz", "d.laz", "tiles/e.laz"):
        (tmp_path / name).touch()
    (tmp_path / "lists").mkdir()
    overview = {"href": "./overview.copc.laz", "roles": ["overview"]}
    listed = write_list(
        tmp_path / "lists" / "survey.VPC",
        item(overview=overview, data={"href": "../a.laz", "roles": ["data"]}),
        item(pointcloud={"href": (tmp_path / "with space.laz").as_uri()}),
        item(thumbnail={"href": "a.png"}, data={"href": str(tmp_path / "c.laz")}),
        item(data={"href": "./../d.laz"}),
        item(data={"href": "../a.laz"}),
        item(data={"href": "./..\\tiles\\e.laz"}),  # pdal_wrench on Windows
    )
    # Editors on Windows begin files so.
    listed.write_bytes(b"\xef\xbb\xbf" + listed.read_bytes())
    names = ["a.laz", "with space.laz", "c.laz", "d.laz", "tiles/e.laz"]
    assert find_inputs([listed], point_extensions) == [tmp_path / name for name in names]
    # In a folder the tiles themselves are found.
    assert listed not in find_inputs([tmp_path], point_extensions)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "isn't a virtual point cloud"),
        ("[1", "isn't a virtual point cloud"),
        ('{"features": [{"assets": {}}]}', "isn't a virtual point cloud"),
        ('{"features": []}', "lists no files"),
        (
            json.dumps({"features": [item(data={"href": "./b.laz"})]}),
            "1 of its 1 files are missing",
        ),
        (
            json.dumps({"features": [item(data={"href": "https://x.org/a.copc.laz"})]}),
            "on a server, such as https://x.org/a.copc.laz; download",
        ),
    ],
)
def test_a_list_that_names_no_local_files_is_refused(content, message, tmp_path):
    (tmp_path / "a.vpc").write_text(content)
    with pytest.raises(FileError, match=message) as raised:
        files_of(tmp_path / "a.vpc")
    assert str(raised.value).startswith(str(tmp_path / "a.vpc")) and "\n" not in str(raised.value)


def test_a_list_is_upsampled_as_the_folder_of_its_files_and_lists_the_output(tmp_path, command):
    tiles = write_row(tmp_path / "tiles")
    listed = tmp_path / "lists" / "row.vpc"
    listed.parent.mkdir()
    write_virtual_cloud(listed, sorted(tiles.iterdir()))
    assert command(tiles, "-o", tmp_path / "one", "--ratio", "2").status == 0
    result = command(listed, "-o", tmp_path / "two", "--ratio", "2")
    assert result.status == 0 and f"{tmp_path / 'two'}/two.vpc: a virtual point cloud" in result.out
    refused = command(tiles, "-o", tmp_path / "dense.vpc", "--ratio", "2")
    assert refused.status == 1 and "dense.vpc: has the name of a file" in refused.err
    written = files_of(tmp_path / "two" / "two.vpc")
    assert [path.name for path in written] == ["0.las", "1.las", "2.las"]
    for path in written:
        assert digest(path) == digest(tmp_path / "one" / path.name)
    shutil.rmtree(tiles)
    result = command(listed, "-o", tmp_path / "two")
    assert result.status == 1 and is_one_line(result.err) and "3 of its 3 files" in result.err


def test_the_files_of_a_list_are_one_survey_to_evaluate(tmp_path):
    files = sorted(write_row(tmp_path / "tiles").iterdir())
    write_virtual_cloud(tmp_path / "row.vpc", files)
    survey = read_survey(tmp_path / "row.vpc", [])
    assert np.array_equal(survey.positions, np.concatenate([laspy.read(p).xyz for p in files]))
    assert len(survey.attributes["classification"]) == 1200
    with pytest.raises(FileError, match=r"is a folder; name a virtual point cloud \(\.vpc\)"):
        read_survey(tmp_path / "tiles", [])
