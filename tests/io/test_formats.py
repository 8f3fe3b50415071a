"""Each format is compared with an independent reader or writer, if one is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh
from typed import digest

from pointup.errors import FileError
from pointup.io.files import (
    ExtraDimension,
    PointCloud,
    copy_points,
    open_writer,
    read_points,
    write_points,
)
from pointup.io.ply import PlyHeader

READERS = "an independent reader of the extra `readers` is not installed"


def scanned(count: int = 50) -> PointCloud:
    """A cloud in the frame of a scanner: float32 metres, with intensity and colours."""
    rng = np.random.default_rng(0)
    positions = (rng.normal(size=(count, 3)) * 20).astype(np.float32).astype(np.float64)
    colours = {name: rng.integers(0, 256, count, np.uint8) for name in ("red", "green", "blue")}
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
    return {name: cloud.pc_data[name] for name in cloud.fields}


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
def test_other_programs_read_what_is_written(tmp_path: Path, suffix: str) -> None:
    cloud, path = scanned(), tmp_path / f"a{suffix}"
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    write_points(path, cloud)
    read = OTHERS[suffix](path)
    expected = dict(zip("xyz", cloud.positions.T, strict=True)) | cloud.attributes
    assert set("xyz") <= read.keys() <= expected.keys()
    for name, values in read.items():
        assert np.array_equal(values.astype(expected[name].dtype), expected[name]), name


@pytest.mark.parametrize("suffix", [".pcd", ".e57", ".pts", ".ply"])
def test_scanner_clouds_are_read_back_unchanged(tmp_path: Path, suffix: str) -> None:
    if suffix == ".e57":
        pytest.importorskip("pye57", reason=READERS)
    cloud = scanned()
    write_points(tmp_path / f"a{suffix}", cloud)
    after = read_points(tmp_path / f"a{suffix}")
    assert_holds(after, cloud.positions, **cloud.attributes)
    assert after.attributes["red"].dtype == np.uint8


@pytest.mark.parametrize("suffix", [".pcd", ".e57", ".pts", ".bin"])
def test_generated_points_follow_the_original(tmp_path: Path, suffix: str) -> None:
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
def test_common_variants_of_pts_are_read(tmp_path: Path, case: str) -> None:
    text, names = PTS[case]
    (tmp_path / "a.pts").write_text(text, newline="")
    cloud = read_points(tmp_path / "a.pts")
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == names


def test_sweeps_have_intensity_and_nuscenes_sweeps_also_the_ring(tmp_path: Path) -> None:
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


def test_attributes_that_a_format_cannot_store_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cloud, path = scanned(5), tmp_path / "a.pts"
    write_points(path, cloud)
    for _ in range(2):
        with open_writer(path, cloud, [ExtraDimension("parent", "u4", default="index")]) as writer:
            copy_points(path, writer)
    (record,) = caplog.records
    assert "a.pts: .pts files can't store parent; left out" in record.getMessage()
    assert_holds(read_points(path), cloud.positions, **cloud.attributes)


@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_dropped_faces_are_reported(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    trimesh.creation.box().export(tmp_path / f"a{suffix}")
    assert len(read_points(tmp_path / f"a{suffix}")) == 8
    (record,) = caplog.records
    assert "12" in record.getMessage() and "`pointup prepare meshes`" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("//X Y Z I\n1 2 3 7\n// between\n4 5 6 8 // last\n", ["I"]),
        ("// made by hand\n1,2,3\n4,5,6 # end\n", []),
        ("//X,Y,Z,Return Number\n1,2,3,1\n4,5,6,2\n", ["Return Number"]),
    ],
)
def test_text_may_have_comments_of_two_slashes(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "a.txt").write_text(text)
    cloud = read_points(tmp_path / "a.txt")
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == names
    write_points(tmp_path / "b.txt", cloud)
    if names:
        assert (tmp_path / "b.txt").read_text().splitlines()[0] == text.splitlines()[0]


def test_arrays_of_an_npz_that_are_no_columns_of_numbers_are_not_read(tmp_path: Path) -> None:
    others = {"kinds": np.array([{}, 3]), "longer": np.zeros(9), "i": np.arange(2)}
    np.savez_compressed(tmp_path / "a.npz", positions=np.ones((2, 3)), **others)
    assert list(read_points(tmp_path / "a.npz").attributes) == ["i"]


def test_a_symbolic_link_is_followed_and_kept(tmp_path: Path) -> None:
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


def test_plyfile_reads_ascii_too(tmp_path: Path) -> None:
    cloud = scanned()
    cloud.header = PlyHeader("ascii")
    write_points(tmp_path / "a.ply", cloud)
    assert np.array_equal(read_by_plyfile(tmp_path / "a.ply")["x"], cloud.positions[:, 0])
