"""The viewer's file: what it holds, decoded here as the page decodes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from base64 import b64decode
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import survey_files
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from viewer_files import scenes_of

from pointup.errors import ConfigError, DataError, FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points
from pointup.visualization import viewer
from pointup.visualization.viewer.document import (
    BITS,
    build_octree,
    write_before_after,
    write_viewer,
)
from pointup.visualization.viewer.scenes import (
    Channel,
    Layer,
    Scene,
    compare_with_reference,
    density_channel,
    read_layer,
    scene_of_files,
)


class Page:
    """The scenes and the blocks of a written page."""

    def __init__(self, path: Path) -> None:
        self.text, self.scenes = path.read_text(encoding="utf-8"), scenes_of(path)

    def block(self, described: dict[str, int]) -> np.ndarray:
        """Values (N, width) of a block."""
        found = re.search(rf'id="block{described["block"]}">(.*?)</script>', self.text)
        assert found
        planes = np.frombuffer(zlib.decompress(b64decode(found[1])), np.uint8)
        planes = planes.reshape(described["bytes"], described["width"], -1).astype(np.int64)
        return (planes * 256 ** np.arange(described["bytes"])[:, None, None]).sum(axis=0).T

    def positions(self, scene: int = 0, layer: int = 0) -> np.ndarray:
        described = self.scenes[scene]
        nodes = np.array(described["layers"][layer]["nodes"])
        node = np.repeat(np.arange(len(nodes)), nodes[:, 0].astype(int))
        steps = self.block(described["layers"][layer]["positions"]) / 65535
        return nodes[node, 1:4] + steps * nodes[node, 4:] + described["origin"]


def landscape(num_points: int, seed: int = 0) -> np.ndarray:
    x, y = np.random.default_rng(seed).random((2, num_points)) * 200
    return np.column_stack([x + 500_000, y + 4_100_000, 9 * np.sin(x / 20) + y / 30])


def test_positions_come_back_within_a_millimetre_of_large_coordinates(tmp_path):
    points = landscape(80_000)
    write_viewer(tmp_path / "a.html", [Scene("a", [Layer("a", points)], unit="m")])
    shown = Page(tmp_path / "a.html").positions()
    # 80,000 points do not fit into one node, and the next smaller ones are 100 m wide.
    assert np.abs(shown - points[build_octree(points)[0]]).max() < 100 / 65535 / 2 + 2e-6


def test_values_stay_with_their_points(tmp_path):
    points = landscape(3000)
    height = Channel(points[:, 2].astype(np.float32), label="height")
    kind = Channel((points[:, 2] > 5).astype(np.uint8), "category", categories={1: "high"})
    color = Channel(np.clip((points - points.min(axis=0)), 0, 255).astype(np.uint8), "rgb")
    layer = Layer("a", points, {"h": height, "kind": kind, "color": color})
    write_viewer(tmp_path / "a.html", [Scene("a", [layer])])
    page = Page(tmp_path / "a.html")
    scene = page.scenes[0]
    columns, channel = scene["layers"][0]["columns"], scene["channels"]["h"]
    rows = cKDTree(points).query(page.positions())[1]
    share = page.block(columns["h"])[:, 0] / 65535
    values = channel["low"] + share * (channel["high"] - channel["low"])
    np.testing.assert_allclose(values, points[rows, 2], atol=1e-3)
    assert (page.block(columns["kind"])[:, 0] == (points[rows, 2] > 5)).all()
    assert (page.block(columns["color"]) == color.values[rows]).all()
    assert scene["channels"]["kind"]["categories"] == [[0, "0"], [1, "high"]]


@given(st.integers(1, 3000), st.integers(1, 700), st.integers(0, 2**31))
def test_an_octree_holds_each_point_once_in_nodes_of_limited_size(num_points, node_points, seed):
    rng = np.random.default_rng(seed)
    # Rounded, so that many points coincide or share coordinates.
    points = np.round(rng.normal(size=(num_points, 3)), 2)
    order, ptr = build_octree(points, node_points)
    assert sorted(order.tolist()) == list(range(num_points))
    assert ptr[0] == 0 and ptr[-1] == num_points and (np.diff(ptr) > 0).all()
    for start, stop in pairwise(ptr):
        inside = points[order[start:stop]]
        assert len(inside) <= node_points or len(np.unique(inside, axis=0)) < len(inside)


@given(st.integers(1, 2000), st.integers(20, 3000), st.integers(0, 2**31))
def test_the_first_points_of_a_node_are_one_for_each_of_its_octants(num_points, node_points, seed):
    points = np.random.default_rng(seed).random((num_points, 3))
    points[0], points[-1] = 0, 1  # The corners of the cube that is cut.
    order, ptr = build_octree(points, node_points, seed)
    cells = (points * (2**BITS - 1)).astype(np.int64)[order]
    for start, stop in pairwise(ptr):
        inside = cells[start:stop]
        # Octants of the smallest cell that holds the node.
        level = 0
        while len(octants := np.unique(inside >> (BITS - level), axis=0)) == 1 and level < BITS:
            level += 1
        first = inside[: len(octants)] >> (BITS - level)
        assert len(np.unique(first, axis=0)) == len(octants)


def test_points_on_both_sides_of_a_corner_of_eight_octants_have_an_exact_level():
    # The codes of the two in the middle differ in 60 ones, which float64 rounds up to 61 bits.
    places = [0, 2 ** (BITS - 2) - 1, 2 ** (BITS - 2), 2**BITS - 1]
    points = np.repeat(np.array(places, dtype=np.float64)[:, None], 3, axis=1)
    for seed in range(8):
        assert sorted(build_octree(points, seed=seed)[0][:2].tolist()) == [0, 3]


@pytest.mark.parametrize("number", [64, 256, 1024])
def test_the_first_points_of_a_node_are_evenly_spaced(number):
    points = np.random.default_rng(0).random((20_000, 3)) * [1, 1, 0.001]
    first = points[build_octree(points)[0][:number]]
    random = points[np.random.default_rng(1).permutation(len(points))[:number]]
    # The distance from any point to the nearest shown one: no large holes.
    holes = [np.percentile(cKDTree(some).query(points)[0], 99) for some in (first, random)]
    assert holes[0] < 0.85 * holes[1]


def test_a_layer_is_a_random_subset_of_all_files_of_the_size_asked_for(tmp_path):
    paths = []
    for part in range(3):
        points = landscape(5000, seed=part) + np.array([200 * part, 0, 0])
        paths.append(tmp_path / f"{part}.xyz")
        write_points(paths[-1], PointCloud(points))
    layer = read_layer("all", paths, 900)
    assert (len(layer.positions), layer.num_points) == (900, 15_000)
    tiles = np.histogram(layer.positions[:, 0] - 500_000, [0, 200, 400, 600])[0]
    assert tiles.min() > 230, "a third of 900 each, within five standard deviations"
    assert len(read_layer("all", paths, 15_000).positions) == 15_000


def test_attributes_are_known_by_the_names_of_other_programs(tmp_path):
    points = landscape(200)
    attributes = {
        "scalar_Classification": (np.arange(200) % 3).astype(np.float32),
        "Intensity": np.arange(200, dtype=np.float32),
        **{color: np.linspace(0, 1, 200) for color in ("Red", "Green", "Blue")},
    }
    attributes["scalar_Classification"][7] = attributes["Red"][8] = np.nan
    write_points(tmp_path / "a.ply", PointCloud(points, attributes))
    channels = read_layer("a", [tmp_path / "a.ply"], 1000).channels
    assert {"class", "intensity", "rgb"} <= channels.keys()
    assert channels["class"].values[:8].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    # One value that is not a number changes no other.
    assert channels["rgb"].values[100].tolist() == [128, 128, 128]
    assert channels["rgb"].values[8].tolist()[0] == 0


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1e4])
def test_clouds_of_any_size_keep_their_form(size, tmp_path):
    points = np.random.default_rng(0).random((3000, 3)) * size
    write_viewer(tmp_path / "a.html", [Scene("a", [Layer("a", points)], up="y")])
    shown = Page(tmp_path / "a.html").positions()
    assert np.abs(shown - points[build_octree(points)[0]]).max() < 1e-4 * size


def test_errors_are_distances_to_all_points_of_the_reference(tmp_path):
    before, reference = landscape(500), landscape(4000, seed=1)
    for name, points in (("before", before), ("reference", reference)):
        write_points(tmp_path / f"{name}.xyz", PointCloud(points))
    files = {name: [tmp_path / f"{name}.xyz"] for name in ("before", "reference")}
    scene = scene_of_files(files, "reference", max_points=600)
    shown = scene.layers[0]
    expected = np.linalg.norm(shown.positions[:, None] - reference[None], axis=2).min(axis=1)
    # Although 600 points of the reference are shown.
    assert len(scene.layers[1].positions) == 600
    np.testing.assert_allclose(shown.channels["error"].values, expected, atol=1e-4)


def test_a_scene_has_the_unit_of_its_files_and_none_where_they_have_several(tmp_path):
    points = landscape(300)
    files = {
        name: [survey_files.write_las(tmp_path / f"{name}.las", points, system=system)]
        for name, system in (("m", 32618), ("ft", 2994), ("mixed", "EPSG:2994+5703"))
    }
    units = {name: scene_of_files({name: paths}).unit for name, paths in files.items()}
    assert units == {"m": "m", "ft": "ft", "mixed": ""}
    assert scene_of_files(files).unit == ""
    with pytest.raises(DataError, match=r"ft\.las: is in ft, .*m\.las in m"):
        scene_of_files(files, "m")
    degrees = survey_files.write_las(tmp_path / "deg.las", points, system=4326)
    with pytest.raises(DataError, match=r"deg\.las: its coordinates are in degrees"):
        scene_of_files({"a": [degrees]})


def test_a_scene_in_memory_has_both_directions_of_the_error():
    source, reference = landscape(300), landscape(900, seed=1)
    scene = compare_with_reference({"source": source, "none": np.empty((0, 3))}, reference, "m")
    assert [layer.name for layer in scene.layers] == ["source", "reference"]
    back = np.linalg.norm(reference[:, None] - source[None], axis=2).min(axis=1)
    np.testing.assert_allclose(scene.layers[1].channels["error"].values, back, atol=1e-4)


def test_density_is_the_number_of_points_per_area():
    x, y = np.random.default_rng(0).random((2, 40_000)) * 100
    thinned = np.column_stack([x, y, x])[(x < 50) | (np.arange(40_000) % 4 == 0)]
    density = density_channel(thinned).values
    for side, expected in ((thinned[:, 0] < 45, 4.0), (thinned[:, 0] > 55, 1.0)):
        assert np.median(density[side]) == pytest.approx(expected, rel=0.1)
    # At the border three of nine cells are empty; those at the other border are not near.
    border = (thinned[:, 0] < 45) & (thinned[:, 1] < 0.5)
    assert np.median(density[border]) == pytest.approx(4 * 6 / 9, rel=0.1)


@pytest.mark.parametrize("num_points", [300, 40_000])
@pytest.mark.parametrize("away", [[500, 0], [500, 300], [20_000, 9000], [1e7, -1e7]])
def test_a_point_far_away_leaves_the_density_of_the_others(num_points, away):
    # A transect with 4 points/m2.
    length = num_points / 40
    points = np.random.default_rng(0).random((num_points, 3)) * [length, 10, 1]
    alone = density_channel(points).values
    density = density_channel(np.vstack([points, [*away, 0]])).values[:-1]
    inside = (np.abs(points[:, :2] - [length / 2, 5]) < [length / 2 - 2, 3]).all(axis=1)
    assert np.median(density[inside]) == pytest.approx(np.median(alone[inside]), rel=0.06)
    assert np.median(density[inside]) == pytest.approx(4, rel=0.1)


def test_tiles_far_from_each_other_have_their_own_density():
    random = np.random.default_rng(0)
    tiles = [
        random.random((size, 3)) * 100 + [20_000 * i, 7000 * i, 0]
        for i, size in enumerate((10_000, 40_000))
    ]
    density = np.split(density_channel(np.vstack(tiles)).values, [10_000])
    assert [np.median(part) for part in density] == pytest.approx([1, 4], rel=0.1)


def test_the_page_names_no_address_that_a_browser_would_fetch(tmp_path):
    write_viewer(tmp_path / "a.html", [Scene("<b>&</script>", [Layer("</script>", landscape(9))])])
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert not re.search(
        r"""(src|href)\s*=\s*["']|@import|url\(|import\s*\(""", text.split("WebGL")[0]
    )
    assert "Permission is hereby granted" in text, "the licence of three.js"
    assert scenes_of(tmp_path / "a.html")[0]["layers"][0]["name"] == "</script>"


def test_an_empty_layer_and_a_single_point_can_be_shown(tmp_path):
    layers = [Layer("none", np.empty((0, 3))), Layer("one", np.ones((1, 3)))]
    write_viewer(tmp_path / "a.html", [Scene("a", layers)])
    np.testing.assert_allclose(Page(tmp_path / "a.html").positions(layer=1), [[1, 1, 1]], atol=1e-6)


@pytest.mark.parametrize(("value", "ends"), [(0, [0, 1]), (0.1, [0, 0.1]), (-2, [-2, 0])])
def test_the_range_of_equal_values_begins_or_ends_at_0(value, ends, tmp_path):
    layer = Layer("a", landscape(9) * (1, 1, 0), {"same": Channel(np.full(9, float(value)))})
    write_viewer(tmp_path / "a.html", [Scene("a", [layer])])
    (scene,) = scenes_of(tmp_path / "a.html")
    assert scene["heights"] == [0, 1] and scene["channels"]["same"]["shown"] == ends


@pytest.mark.parametrize("kind", ["float16", "int8", "tensor", "list"])
def test_positions_of_any_type_are_shown(kind, tmp_path):
    points = np.array([[-60.0, 1.5, 2.0], [90.0, 8.0, 0.5], [3.0, -4.0, 5.0]])
    given: Any = {"tensor": torch.from_numpy(points), "list": points.tolist()}.get(kind)
    given = points.astype(kind) if given is None else given
    pages = []
    for positions in (given, np.asarray(given).astype(np.float64)):
        write_viewer(tmp_path / "v.html", [Scene("s", [Layer("l", positions)])])
        pages.append((tmp_path / "v.html").read_text())
    assert pages[0] == pages[1]


def test_a_wrong_file_name_is_refused_before_work(tmp_path):
    scene = Scene("a", [Layer("a", landscape(5))])
    with pytest.raises(FileError, match=r"a\.png: the viewer is an HTML file; name it \.html"):
        write_viewer(tmp_path / "a.png", [scene])
    with pytest.raises(FileError, match="there is no folder"):
        write_viewer(tmp_path / "none" / "a.html", [scene])
    with pytest.raises(ConfigError, match="--max-points 0"):
        scene_of_files({}, max_points=0)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_numbers_in_the_page_are_told_apart_within_their_span():
    values = [[1650.1, 0.8], [1650.9, 0.8], [165.12, 0.8], [12_010.4, 20], [-431.25, 3]]
    values += [[3.14159, 10], [0, 5], [1650, 0], [150_000, 150_000]]
    script = "globalThis.document = { getElementById: () => ({ textContent: '{}' }) };"
    script += (Path(viewer.__file__).parent / "page" / "decode.js").read_text()
    script += f"; console.log(JSON.stringify({values}.map(([v, span]) => format(v, 'm', span))))"
    script += f"; console.log(JSON.stringify({values}.map(([v]) => format(v))))"
    ran = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    of_a_span, alone = map(json.loads, ran.stdout.splitlines())
    expected = ["1650.1", "1650.9", "165.12", "12,010.4", "-431.25", "3.14", "0", "1650", "150,000"]
    assert of_a_span == [f"{number} m" for number in expected]
    assert alone == ["1650", "1651", "165", "12,010", "-431", "3.14", "0", "1650", "150,000"]


@pytest.mark.parametrize(
    ("up", "synthetic", "color"),
    [("z", [0, 1], "height"), ("y", [0, 1], "origin"), ("y", [1, 1], "error")],
)
def test_a_page_of_before_and_after_opens_on_what_it_is_about(up, synthetic, color, tmp_path):
    before, after = tmp_path / "before.ply", tmp_path / "after.ply"
    points = np.array([[0.0, 0, 0], [1, 1, 1]])
    write_points(before, PointCloud(points))
    made = {"synthetic": np.array(synthetic, dtype=np.uint8)}
    write_points(after, PointCloud(points + np.array([0, 0, 0.25]), made))
    write_before_after([before], [after], tmp_path / "page.html", up)
    (scene,) = Page(tmp_path / "page.html").scenes
    assert scene["color"] == color
    if color == "error":
        assert scene["channels"]["error"]["label"] == "distance to before"
        assert scene["channels"]["error"]["high"] == pytest.approx(0.25)


def test_a_file_whose_name_is_not_utf8_can_be_shown(tmp_path):
    before, after = tmp_path / "caf\udce9.npy", tmp_path / "after.npy"
    points = np.random.default_rng(0).random((50, 3))
    try:
        np.save(before, points)
    except OSError:
        pytest.skip("the file system has names in UTF-8 only")
    np.save(after, points)
    write_before_after([before], [after], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>caf\\xe9.npy</title>" in html and '"name": "caf\\\\xe9.npy"' in html
