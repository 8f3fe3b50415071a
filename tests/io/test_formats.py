"""Each format is compared with an independent reader or writer, if one is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pytest
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st
from survey_files import digest

from pointup.errors import DataError, FileError
from pointup.io.cloud import COLOURS, ExtraDimension, PointCloud
from pointup.io.files import check_writable, copy_points, open_writer, read_points, write_points
from pointup.io.ply import PlyHeader

READERS = "an independent reader of the extra `readers` is not installed"


def scanned(count: int = 50) -> PointCloud:
    """A cloud in the frame of a scanner: float32 metres, with intensity and colours."""
    rng = np.random.default_rng(0)
    positions = (rng.normal(size=(count, 3)) * 20).astype(np.float32).astype(np.float64)
    colours = {name: rng.integers(0, 256, count, np.uint8) for name in COLOURS}
    return PointCloud(positions, {"intensity": rng.random(count, np.float32)} | colours)


def assert_holds(cloud: PointCloud, positions: np.ndarray, **attributes: np.ndarray) -> None:
    assert np.array_equal(cloud.positions, positions)
    assert list(cloud.attributes) == list(attributes)
    for name, values in attributes.items():
        assert np.array_equal(cloud.attributes[name].astype(values.dtype), values), name


def read_by_pypcd4(path: Path) -> dict[str, np.ndarray]:
    pypcd4 = pytest.importorskip("pypcd4", reason=READERS)
    cloud = pypcd4.PointCloud.from_path(path)
    assert cloud.metadata.points == cloud.metadata.width == len(cloud.pc_data)
    columns = {name: cloud.pc_data[name] for name in cloud.fields}
    return columns | dict(zip(COLOURS, cloud.decode_rgb(columns.pop("rgb")).T, strict=True))


def read_by_plyfile(path: Path) -> dict[str, np.ndarray]:
    plyfile = pytest.importorskip("plyfile", reason=READERS)
    vertices = plyfile.PlyData.read(path)["vertex"]
    return {p.name: np.asarray(vertices[p.name]) for p in vertices.properties}


def read_by_pye57(path: Path) -> dict[str, np.ndarray]:
    pye57 = pytest.importorskip("pye57", reason=READERS)
    with pye57.E57(str(path)) as file:
        assert file.scan_count == 1
        scan = file.read_scan_raw(0)
    names = {"colorRed": "red", "colorGreen": "green", "colorBlue": "blue"}
    names |= {f"cartesian{axis.upper()}": axis for axis in "xyz"}
    return {names.get(name, name): values for name, values in scan.items()}


def read_by_numpy(path: Path) -> dict[str, np.ndarray]:
    rows = np.fromfile(path, "<f4").reshape(-1, 4)
    return dict(zip(("x", "y", "z", "intensity"), rows.T, strict=True))


def read_as_pts(path: Path) -> dict[str, np.ndarray]:
    """Reads a count, then that many rows, as simple C readers do."""
    lines = path.read_text().splitlines()
    assert int(lines[0]) == len(lines) - 1
    rows = np.array([[float(word) for word in line.split(" ")] for line in lines[1:]])
    names = ("x", "y", "z", "intensity", "red", "green", "blue")
    return dict(zip(names, rows.T, strict=True))


def read_by_loadtxt(path: Path) -> dict[str, np.ndarray]:
    names = path.read_text().splitlines()[0].removeprefix("# ").split()
    return dict(zip(names, np.loadtxt(path).T, strict=True))


OTHERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".ply": read_by_plyfile,
    ".pcd": read_by_pypcd4,
    ".e57": read_by_pye57,
    ".bin": read_by_numpy,
    ".pts": read_as_pts,
    ".xyz": read_by_loadtxt,
}


@pytest.mark.parametrize("suffix", OTHERS)
def test_other_programs_read_what_is_written(tmp_path, suffix):
    cloud, path = scanned(), tmp_path / f"a{suffix}"
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    write_points(path, cloud)
    read = OTHERS[suffix](path)
    expected = dict(zip("xyz", cloud.positions.T, strict=True)) | cloud.attributes
    assert set("xyz") <= read.keys() <= expected.keys()
    for name, values in read.items():
        assert np.array_equal(values.astype(expected[name].dtype), expected[name]), name


@pytest.mark.parametrize("suffix", [".ply", ".pcd", ".pts"])
@pytest.mark.parametrize("factor", [1, 256])
def test_colours_of_las_have_8_bits_in_other_formats(tmp_path, suffix, factor):
    cloud = scanned()
    before = {name: cloud.attributes[name] for name in COLOURS}
    cloud.attributes |= {name: before[name].astype(np.uint16) * factor for name in COLOURS}
    write_points(tmp_path / "a.las", cloud)
    las = laspy.read(tmp_path / "a.las")
    for name in COLOURS:  # Many programs write colours of 8 bits as they are.
        las[name] = before[name].astype(np.uint16) * factor
    las.write(tmp_path / "a.las")
    write_points(tmp_path / f"a{suffix}", read_points(tmp_path / "a.las"))
    read = OTHERS[suffix](tmp_path / f"a{suffix}")
    for name in COLOURS:
        assert read[name].dtype == (float if suffix == ".pts" else np.uint8)
        assert np.array_equal(read[name], before[name])


def test_dark_colours_that_follow_bright_ones_stay_dark(tmp_path):
    cloud = scanned(2)
    cloud.attributes |= {name: np.array([60_000, 200], np.uint16) for name in COLOURS}
    with open_writer(tmp_path / "a.ply", cloud) as writer:
        for point in (0, 1):
            writer.write(cloud.select(slice(point, point + 1)))
    assert read_by_plyfile(tmp_path / "a.ply")["red"].tolist() == [234, 0]


@pytest.mark.parametrize("suffix", [".pcd", ".e57", ".pts", ".ply"])
def test_scanner_clouds_are_read_back_unchanged(tmp_path, suffix):
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    cloud = scanned()
    write_points(tmp_path / f"a{suffix}", cloud)
    after = read_points(tmp_path / f"a{suffix}")
    assert_holds(after, cloud.positions, **cloud.attributes)
    assert after.attributes["red"].dtype == np.uint8


@pytest.mark.parametrize("suffix", [".pcd", ".e57", ".pts", ".bin"])
def test_generated_points_follow_the_original(tmp_path, suffix):
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    original, path = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    write_points(original, scanned(12))
    cloud = read_points(original)
    generated = cloud.select(np.array([7, 3]))
    generated.attributes["parent"] = np.array([7, 3])
    with open_writer(path, cloud, [ExtraDimension("parent", "u4", default="index")]) as writer:
        copy_points(original, writer, chunk_size=5)
        writer.write(generated)
    after = read_points(path)
    rows = [*range(12), 7, 3]
    expected = {name: values[rows] for name, values in cloud.attributes.items()}
    if suffix == ".pcd":
        expected["parent"] = np.array(rows)
    assert_holds(after, cloud.positions[rows], **expected)


PTS: dict[str, tuple[str, list[str]]] = {
    "with a count": ("2\n1 2 3\n4 5 6\n", []),
    "without a count": ("1 2 3\n4 5 6\n", []),
    "blanks around the count": ("   2  \r\n1 2 3\r\n4 5 6\r\n", []),
    "two scans": ("1\n1 2 3\n1\n4 5 6\n", []),
    "intensity": ("2\n1 2 3 -5\n4 5 6 7\n", ["intensity"]),
    "colours": ("2\n1 2 3 7 8 9\n4 5 6 1 2 255\n", ["red", "green", "blue"]),
    "all": ("2\n1 2 3 0 7 8 9\n4 5 6 0 1 2 3\n", ["intensity", "red", "green", "blue"]),
    "five columns": ("2\n1 2 3 0 7\n4 5 6 0 1\n", ["column_4", "column_5"]),
}


@pytest.mark.parametrize("case", PTS)
def test_common_variants_of_pts_are_read(tmp_path, case):
    text, names = PTS[case]
    (tmp_path / "a.pts").write_text(text, newline="")
    cloud = read_points(tmp_path / "a.pts")
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == names


def test_sweeps_have_intensity_and_nuscenes_sweeps_also_the_ring(tmp_path):
    rows = np.random.default_rng(0).random((9, 5)).astype("<f4")
    rows.tofile(tmp_path / "a.pcd.bin")
    cloud = read_points(tmp_path / "a.pcd.bin")
    assert_holds(cloud, rows[:, :3], intensity=rows[:, 3], ring=rows[:, 4])
    write_points(tmp_path / "b.pcd.bin", cloud)
    assert digest(tmp_path / "b.pcd.bin") == digest(tmp_path / "a.pcd.bin")
    write_points(tmp_path / "b.bin", cloud)
    assert np.array_equal(np.fromfile(tmp_path / "b.bin", "<f4").reshape(9, 4), rows[:, :4])
    for far in (5e4, 5.1e6):
        with pytest.raises(FileError, match=r"don't fit float32; subtract an offset, or write"):
            write_points(tmp_path / "c.bin", PointCloud(cloud.positions + far))


def test_attributes_that_a_format_cannot_store_are_reported_once(tmp_path, caplog):
    cloud, path = scanned(5), tmp_path / "a.pts"
    write_points(path, cloud)
    for _ in range(2):
        with open_writer(path, cloud, [ExtraDimension("parent", "u4", default="index")]) as writer:
            copy_points(path, writer)
    (record,) = caplog.records
    assert "a.pts: .pts files can't store parent; left out" in record.getMessage()
    assert_holds(read_points(path), cloud.positions, **cloud.attributes)


@pytest.mark.parametrize("suffix", [".pts", ".e57"])
def test_intensity_and_colours_are_kept_whatever_other_programs_call_them(tmp_path, suffix, caplog):
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    cloud = scanned(5)
    names = {"intensity": "Intensity", "red": "scalar_Red", "green": "Green", "blue": "BLUE"}
    named = {names[name]: values for name, values in cloud.attributes.items()}
    write_points(tmp_path / f"a{suffix}", PointCloud(cloud.positions, named))
    assert not caplog.records
    assert_holds(read_points(tmp_path / f"a{suffix}"), cloud.positions, **cloud.attributes)


@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_dropped_faces_are_reported(tmp_path, suffix, caplog):
    trimesh.creation.box().export(tmp_path / f"a{suffix}")
    assert len(read_points(tmp_path / f"a{suffix}")) == 8
    (record,) = caplog.records
    assert "12" in record.getMessage() and "`pointup prepare meshes`" in record.getMessage()


def test_dropped_colours_of_obj_vertices_are_reported(tmp_path, caplog):
    (tmp_path / "a.obj").write_text("v 1 2 3 0.5 0.5 0.5\nv 4 5 6 1 0 0 # red\n")
    assert read_points(tmp_path / "a.obj").positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    (record,) = caplog.records
    assert "colours of its vertices are dropped; save it as PLY" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("//X Y Z I\n1 2 3 7\n// between\n4 5 6 8 // last\n", ["I"]),
        ("// made by hand\n1,2,3\n4,5,6 # end\n", []),
        ("//X,Y,Z,Return Number\n1,2,3,1\n4,5,6,2\n", ["Return Number"]),
    ],
)
def test_text_may_have_comments_of_two_slashes(tmp_path, text, names):
    (tmp_path / "a.txt").write_text(text)
    cloud = read_points(tmp_path / "a.txt")
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == names
    write_points(tmp_path / "b.txt", cloud)
    if names:
        assert (tmp_path / "b.txt").read_text().splitlines()[0] == text.splitlines()[0]


def test_arrays_of_an_npz_that_are_no_columns_of_numbers_are_dropped_with_a_warning(
    tmp_path, caplog
):
    others = {"kinds": np.array([{}, 3]), "longer": np.zeros(9), "i": np.arange(2)}
    np.savez_compressed(tmp_path / "a.npz", positions=np.ones((2, 3)), **others)
    assert list(read_points(tmp_path / "a.npz").attributes) == ["i"]
    assert "no number for each point are dropped: kinds, longer" in caplog.text


def test_a_symbolic_link_is_followed_and_kept(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "b.ply", tmp_path / "a.ply"
    link.symlink_to(target)
    write_points(link, scanned(3))
    assert link.is_symlink() and not target.is_symlink()
    assert len(read_points(target)) == 3
    assert [path.name for path in target.parent.iterdir()] == ["b.ply"]
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(FileError, match="a symbolic link that leads nowhere"):
        write_points(link, scanned(3))


@pytest.mark.parametrize("encoding", ["ascii", "binary_big_endian"])
def test_plyfile_reads_every_encoding(tmp_path, encoding):
    cloud = scanned()
    cloud.header = PlyHeader(encoding)
    write_points(tmp_path / "a.ply", cloud)
    assert np.array_equal(read_by_plyfile(tmp_path / "a.ply")["x"], cloud.positions[:, 0])


def test_an_e57_without_scans_is_refused(tmp_path):
    """Scanners also write files of pictures only."""
    pye57 = pytest.importorskip("pye57", reason=READERS)
    pye57.E57(str(tmp_path / "a.e57"), mode="w").close()
    with pytest.raises(FileError, match=r"a\.e57: no points in it; leave it out"):
        read_points(tmp_path / "a.e57")


def test_scans_of_an_e57_are_merged_by_their_poses(tmp_path):
    pye57 = pytest.importorskip("pye57", reason=READERS)
    points = np.random.default_rng(0).random((20, 3))
    scan = {f"cartesian{axis}": points[:, i].copy() for i, axis in enumerate("XYZ")}
    invalid = np.zeros(20, np.int8)
    invalid[:5] = 1
    with pye57.E57(str(tmp_path / "a.e57"), mode="w") as file:
        file.write_scan_raw(scan | {"cartesianInvalidState": invalid})
        turned = np.array([np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
        file.write_scan_raw(scan, rotation=turned, translation=np.array([100.0, 200.0, 300.0]))
    cloud = read_points(tmp_path / "a.e57")
    # The writer of pye57 has single precision.
    assert np.allclose(cloud.positions[:15], points[5:], atol=1e-6)
    moved = points[:, [1, 0, 2]] * [-1, 1, 1] + np.array([100, 200, 300])
    assert np.allclose(cloud.positions[15:], moved, atol=1e-6)


def test_colours_of_an_e57_may_have_16_bits(tmp_path):
    pye57 = pytest.importorskip("pye57", reason=READERS)
    libe57 = pye57.libe57
    cloud = scanned(5)
    fields = {f"cartesian{axis}": cloud.positions[:, i].copy() for i, axis in enumerate("XYZ")}
    wide = {name: cloud.attributes[name].astype(np.uint16) * 257 for name in COLOURS}
    fields |= {f"color{name.title()}": values for name, values in wide.items()}
    with pye57.E57(str(tmp_path / "a.e57"), mode="w") as file:
        image = file.image_file
        scan, point = libe57.StructureNode(image), libe57.StructureNode(image)
        scan.set("guid", libe57.StringNode(image, "{a}"))
        buffers = libe57.VectorSourceDestBuffer()
        for name, values in fields.items():
            is_colour = values.dtype == np.uint16
            double = libe57.E57_DOUBLE, -1e9, 1e9
            node = libe57.IntegerNode if is_colour else libe57.FloatNode
            point.set(name, node(image, 0, *((0, 65535) if is_colour else double)))
            buffers.append(libe57.SourceDestBuffer(image, name, values, len(values), True, True))
        points = libe57.CompressedVectorNode(image, point, libe57.VectorNode(image, True))
        scan.set("points", points)
        file.data3d.append(scan)
        writer = points.writer(buffers)
        writer.write(5)
        writer.close()
    assert_holds(read_points(tmp_path / "a.e57"), cloud.positions, **wide)


def test_e57_keeps_map_coordinates_exactly(tmp_path):
    pytest.importorskip("pye57", reason=READERS)
    positions = np.random.default_rng(0).random((7, 3)) * 1000 + [4e5, 5.1e6, 100]
    write_points(tmp_path / "a.e57", PointCloud(positions))
    assert_holds(read_points(tmp_path / "a.e57"), positions)


def test_e57_without_pye57_is_refused_with_the_name_of_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("pointup.io.e57.find_spec", lambda name: None)
    (tmp_path / "a.e57").write_bytes(b"ASTM-E57")
    for refused in (
        lambda: read_points(tmp_path / "a.e57"),
        lambda: write_points(tmp_path / "b.e57", scanned()),
        lambda: check_writable(tmp_path / "b.e57"),
    ):
        with pytest.raises(FileError, match=r"E57 needs pye57; .* `pip install pointup\[e57\]`"):
            refused()


def test_colours_of_16_bits_become_8_in_e57(tmp_path):
    pytest.importorskip("pye57", reason=READERS)
    cloud = scanned(3)
    for name in COLOURS:
        cloud.attributes[name] = np.array([0, 256, 65535], np.uint16)
    write_points(tmp_path / "a.e57", cloud)
    assert read_points(tmp_path / "a.e57").attributes["green"].tolist() == [0, 1, 255]


@pytest.mark.parametrize(
    ("values", "written"),
    [
        (np.array([0, 0.2, 1], np.float32), [0, 51, 255]),
        (np.array([0, 0.2, 0.6], np.float16), [0, 51, 153]),
        (np.array([0.0, 51, 255]), [0, 51, 255]),
        (np.array([0.0, 256, 65535]), [0, 1, 255]),
        (np.array([0, 1, 1], np.uint8), [0, 1, 1]),
    ],
)
def test_e57_gets_colours_of_0_to_255_whatever_the_range_of_the_input(
    values, written, tmp_path, monkeypatch
):
    fields: dict[str, np.ndarray] = {}

    def write_scan(path: Path, columns: dict[str, np.ndarray]) -> None:
        fields.update(columns)
        path.touch()

    monkeypatch.setattr("pointup.io.e57.find_spec", lambda name: "pye57")
    monkeypatch.setattr("pointup.io.e57._write_scan", write_scan)
    colours = {"red": values, "green": values[::-1], "blue": values}
    write_points(tmp_path / "a.e57", PointCloud(np.zeros((3, 3)), colours))
    assert fields["colorRed"].tolist() == fields["colorBlue"].tolist() == written
    assert fields["colorGreen"].tolist() == written[::-1] and fields["colorRed"].dtype == np.uint8


@pytest.mark.parametrize("encoding", ["ASCII", "BINARY", "BINARY_COMPRESSED"])
def test_pcd_of_another_program_is_read(tmp_path, encoding):
    pypcd4 = pytest.importorskip("pypcd4", reason=READERS)
    rng = np.random.default_rng(1)
    count = 300
    # Few different values: what gets no smaller is written uncompressed.
    colours = rng.integers(0, 256, (8, 3)).astype(np.uint8)[rng.integers(0, 8, count)]
    packed = pypcd4.PointCloud.encode_rgb(colours)
    if encoding == "ASCII":
        # pypcd4 writes 10 decimals, which lose small floats.
        packed = np.zeros(count, np.float32)
    xyz = rng.integers(0, 40, (3, count)).astype(np.float32) / 8
    points = [*xyz, packed, np.arange(count)]
    other = pypcd4.PointCloud.from_points(
        points, ("x", "y", "z", "rgb", "label"), (np.float32,) * 4 + (np.uint16,)
    )
    other.save(tmp_path / "a.pcd", getattr(pypcd4.Encoding, encoding))
    assert f"DATA {encoding.lower()}\n".encode() in (tmp_path / "a.pcd").read_bytes()
    colours = pypcd4.PointCloud.decode_rgb(packed).T
    expected = dict(zip(("red", "green", "blue"), colours, strict=True)) | {
        "label": np.arange(count)
    }
    cloud = read_points(tmp_path / "a.pcd")
    positions = np.column_stack(points[:3])
    if encoding == "ASCII":
        assert np.allclose(cloud.positions, positions, atol=1e-9)
        positions = cloud.positions
    assert_holds(cloud, positions, **expected)
    # pypcd4 finds its own fields in a file that is written again.
    write_points(tmp_path / "b.pcd", cloud)
    again = read_points(tmp_path / "b.pcd")
    assert_holds(again, positions, **expected)
    back = pypcd4.PointCloud.from_path(tmp_path / "b.pcd")
    assert set(back.fields) == {"x", "y", "z", "rgb", "label"}
    if encoding != "ASCII":
        assert np.array_equal(back.pc_data["rgb"].view("u4"), packed.view("u4"))
        assert back.pc_data["x"].dtype == np.float32


def test_normals_have_the_name_of_each_format(tmp_path):
    cloud = scanned()
    cloud.attributes = {f"n{axis}": cloud.positions[:, i] for i, axis in enumerate("xyz")}
    write_points(tmp_path / "a.ply", cloud)
    write_points(tmp_path / "b.pcd", read_points(tmp_path / "a.ply"))
    write_points(tmp_path / "c.ply", read_points(tmp_path / "b.pcd"))
    assert b"FIELDS x y z normal_x normal_y normal_z" in (tmp_path / "b.pcd").read_bytes()
    assert_holds(read_points(tmp_path / "c.ply"), cloud.positions, **cloud.attributes)


ORGANISED = """# .PCD v.5
VERSION .5
FIELDS x y z _ normal
SIZE 4 4 4 1 4
TYPE F F F U F
COUNT 1 1 1 4 3
WIDTH 2
HEIGHT 2
VIEWPOINT 1 2 3 1 0 0 0
POINTS 4
DATA ascii
1 2 3 0 0 0 0 .1 .2 .3
nan nan nan 0 0 0 0 nan nan nan
4 5 6 0 0 0 0 .4 .5 .6
7 8 9 0 0 0 0 .7 .8 .9
"""


@pytest.mark.parametrize("text", ["F\n4.808e+06", "U\n4880121", "F\n6.8385e-39"])
def test_packed_colours_in_text_are_unpacked(tmp_path, text):
    kind, value = text.split("\n")
    (tmp_path / "a.pcd").write_text(
        f"FIELDS x y z rgb\nSIZE 4 4 4 4\nTYPE F F F {kind}\nCOUNT 1 1 1 1\nWIDTH 1\nHEIGHT 1\n"
        f"POINTS 1\nDATA ascii\n1 2 3 {value}\n"
    )
    bits = int(np.float32(value).view("u4")) if kind == "F" else int(value)
    cloud = read_points(tmp_path / "a.pcd")
    colours = [int(cloud.attributes[name][0]) for name in ("red", "green", "blue")]
    assert colours == [bits >> 16 & 255, bits >> 8 & 255, bits & 255]
    write_points(tmp_path / "b.pcd", cloud)
    assert read_points(tmp_path / "b.pcd").attributes == cloud.attributes


def test_missing_returns_of_an_organised_pcd_are_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "a.pcd"
    path.write_text(ORGANISED)
    cloud = read_points(path)
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert list(cloud.attributes) == ["normal"]
    assert np.allclose(cloud.attributes["normal"][2], [0.7, 0.8, 0.9])
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: 1 points without coordinates are left out"
    ]
    write_points(tmp_path / "b.pcd", cloud)
    assert "VIEWPOINT 1 2 3 1 0 0 0" in (tmp_path / "b.pcd").read_text("latin-1")


@settings(max_examples=50)
@given(st.binary(max_size=200), st.sampled_from(["ascii", "binary", "binary_compressed"]))
def test_any_bytes_after_a_pcd_header_are_read_or_refused(tmp_path_factory, body, encoding):
    path = tmp_path_factory.mktemp("pcd") / "a.pcd"
    head = ORGANISED.partition("DATA")[0] + f"DATA {encoding}\n"
    path.write_bytes(head.encode() + body)
    try:
        assert len(read_points(path)) <= 4
    except FileError as error:
        assert "a.pcd: " in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("suffix", [".las", ".laz", ".ply", ".pcd", ".npy"])
def test_words_are_refused_where_a_format_stores_numbers_only(tmp_path, suffix):
    cloud = PointCloud(np.eye(3), {"label": np.array(["oak", "ash", "oak"])})
    with pytest.raises(DataError, match="label is of type <U3; give an array of numbers"):
        write_points(tmp_path / f"trees{suffix}", cloud)


@pytest.mark.parametrize("suffix", [".ply", ".pcd"])
def test_names_with_blanks_get_underscores_if_they_stay_distinct(tmp_path, suffix, caplog):
    values, path = np.arange(3.0), tmp_path / f"a{suffix}"
    cloud = PointCloud(np.eye(3), {"Return Number": values, "Scalar field": values + 1})
    write_points(path, cloud)
    read = read_points(path).attributes
    assert np.array_equal(read["Return_Number"], values)
    assert np.array_equal(read["Scalar_field"], values + 1)
    assert "underscores for their blanks: Return_Number, Scalar_field" in caplog.text
    cloud.attributes["Return_Number"] = values
    with pytest.raises(DataError, match="'Return Number'; rename it"):
        write_points(path, cloud)
