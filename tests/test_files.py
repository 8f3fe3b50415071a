"""Files of points and meshes: exact round trips, forgiving readers, errors that tell the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pointup.data.clouds import cast_values
from pointup.data.files import (
    ExtraDimension,
    PointCloud,
    copy_points,
    iter_points,
    open_writer,
    read_mesh,
    read_points,
    write_points,
)
from pointup.data.ply import PlyHeader
from pointup.errors import DataError, FileError, PointupError

PARENT = ExtraDimension("parent", "uint32", default="index")
DISTANCE = ExtraDimension("distance", "float32")
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64")
ENCODINGS = ("ascii", "binary_little_endian", "binary_big_endian")
SUFFIXES = (".ply", ".xyz", ".txt", ".csv", ".npz")


def make_cloud(count: int = 30) -> PointCloud:
    """Map coordinates, which floats are too coarse for, and an attribute of every type."""
    rng = np.random.default_rng(0)
    positions = rng.random((count, 3)) * 100 + [4e5, 5.1e6, 100]
    attributes = {f"{name}_values": (rng.normal(size=count) * 50).astype(name) for name in TYPES}
    return PointCloud(positions, attributes)


def assert_same(before: PointCloud, after: PointCloud) -> None:
    assert after.positions.dtype == np.float64
    assert np.array_equal(before.positions, after.positions)
    assert list(before.attributes) == list(after.attributes)
    for name, values in before.attributes.items():
        assert np.array_equal(values, after.attributes[name].astype(values.dtype)), name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trips_are_exact(tmp_path: Path, suffix: str) -> None:
    cloud = make_cloud()
    write_points(tmp_path / f"a{suffix}", cloud)
    assert_same(cloud, read_points(tmp_path / f"a{suffix}"))


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".npy"])
@settings(max_examples=20, deadline=None)
@given(
    positions=arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 5), st.just(3)),
        elements=st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_every_float64_survives(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, positions: np.ndarray
) -> None:
    path = tmp_path_factory.mktemp("floats") / f"a{suffix}"
    write_points(path, PointCloud(positions))
    assert np.array_equal(read_points(path).positions, positions)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ply_keeps_its_encoding_comments_types_and_order(tmp_path: Path, encoding: str) -> None:
    cloud = make_cloud()
    properties = ("int8_values", "x", "y", "z")
    cloud.header = PlyHeader(encoding, ("comment EPSG 25832",), properties)
    write_points(tmp_path / "a.ply", cloud)
    after = read_points(tmp_path / "a.ply")
    assert_same(cloud, after)
    assert [values.dtype.name for values in after.attributes.values()] == list(TYPES)
    assert isinstance(after.header, PlyHeader)
    assert after.header.encoding == encoding
    assert after.header.comments[0] == "comment EPSG 25832"
    assert after.header.properties[:4] == properties
    # Written once more, the file stays the same, to the byte.
    write_points(tmp_path / "b.ply", after)
    assert (tmp_path / "a.ply").read_bytes() == (tmp_path / "b.ply").read_bytes()


def test_ply_has_no_whole_numbers_of_64_bits(tmp_path: Path) -> None:
    path, positions = tmp_path / "a.ply", np.zeros((2, 3))
    write_points(path, PointCloud(positions, {"time": np.array([2**40 + 1, -5])}))
    assert read_points(path).attributes["time"].tolist() == [2**40 + 1, -5]
    with pytest.raises(DataError, match=r"a\.ply: time: whole numbers up to .* don't fit float64"):
        write_points(path, PointCloud(positions, {"time": np.array([2**53 + 1, 0])}))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_trimesh_reads_what_is_written_as_ply(tmp_path: Path, encoding: str) -> None:
    cloud = make_cloud()
    cloud.header = PlyHeader(encoding)
    write_points(tmp_path / "a.ply", cloud)
    assert np.array_equal(trimesh.load(tmp_path / "a.ply").vertices, cloud.positions)


@pytest.mark.parametrize("encoding", ["ascii", "binary_little_endian"])
def test_vertices_of_meshes_are_points(tmp_path: Path, encoding: str) -> None:
    box = trimesh.creation.box()
    path = tmp_path / "a.ply"
    path.write_bytes(
        trimesh.exchange.ply.export_ply(box, encoding="ascii" if encoding == "ascii" else "binary")
    )
    assert np.array_equal(read_points(path).positions, box.vertices)
    box.export(tmp_path / "a.obj")
    assert np.allclose(read_points(tmp_path / "a.obj").positions, box.vertices)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".npy"])
def test_generated_points_follow_the_original_in_every_format(tmp_path: Path, suffix: str) -> None:
    original, path = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    cloud = make_cloud(12)
    write_points(original, cloud)
    cloud = read_points(original)
    generated = cloud.select(slice(0, 2))
    generated.attributes |= {"parent": np.array([5, 6]), "distance": np.array([0.5, 1.5])}
    with open_writer(path, cloud, [PARENT, DISTANCE]) as writer:
        copy_points(original, writer, chunk_size=5)
        writer.write(generated)
    after = read_points(path)
    assert np.array_equal(after.positions, np.concatenate([cloud.positions, generated.positions]))
    *kept, parent, distance = after.attributes.values()
    assert parent.tolist() == [*range(12), 5, 6]
    assert distance.tolist() == [0] * 12 + [0.5, 1.5]
    for before, values in zip(cloud.attributes.values(), kept, strict=True):
        assert np.array_equal(values, np.concatenate([before, before[:2]]))


def test_chunks_of_any_format_are_slices(tmp_path: Path) -> None:
    write_points(tmp_path / "a.ply", make_cloud(10))
    assert [len(chunk) for chunk in iter_points(tmp_path / "a.ply", chunk_size=4)] == [4, 4, 2]
    bare = next(iter_points(tmp_path / "a.ply", attributes=False))
    assert not bare.attributes


def test_npz_keeps_its_key_and_arrays_of_any_width(tmp_path: Path) -> None:
    points, normals = np.random.default_rng(0).random((2, 9, 3))
    np.savez(tmp_path / "a.npz", pos=points, normals=normals, unit=np.array("m"))
    cloud = read_points(tmp_path / "a.npz")
    assert np.array_equal(cloud.attributes["normals"], normals)
    write_points(tmp_path / "b.npz", cloud)
    with np.load(tmp_path / "b.npz") as after:
        assert set(after) == {"pos", "normals"}
        assert np.array_equal(after["pos"], points)


TEXTS: dict[str, tuple[str, dict[str, list[float]]]] = {
    "blanks": ("1 2 3\n4 5 6\n", {}),
    "many blanks": ("  1   2\t3  \r\n\r\n 4 5 6\r\n", {}),
    "no last line end": ("1 2 3\n4 5 6", {}),
    "tabs": ("1\t2\t3\n4\t5\t6\n", {}),
    "names with blanks": ("x\ty\tz\tscan angle\n1\t2\t3\t7\n4\t5\t6\t8\n", {"scan angle": [7, 8]}),
    "commas": ("1,2,3\n4, 5 ,6\n", {}),
    "decimal commas": ("1,0;2,0;3,0\n4,0;5,0;6,0\n", {}),
    "comments": ("# made by hand\n1 2 3 # first\n# between\n4 5 6\n", {}),
    "names": ("x,y,z,i\n1,2,3,7\n4,5,6,8\n", {"i": [7, 8]}),
    "names in any order": ("i;Z;X;Y\n7;3;1;2\n8;6;4;5\n", {"i": [7, 8]}),
    "names as R writes them": ('"","X","Y","Z"\n"1",1,2,3\n"2",4,5,6\n', {"column_1": [1, 2]}),
    "names as CloudCompare writes them": ("//X Y Z I\n1 2 3 7\n4 5 6 8\n", {"I": [7, 8]}),
    "names in a comment": ("# notes\n# x y z i\n1 2 3 7\n4 5 6 8\n", {"i": [7, 8]}),
    "columns without names": ("1 2 3 7 9\n4 5 6 8 10\n", {"column_4": [7, 8], "column_5": [9, 10]}),
    "byte order mark": ("\ufeffx,y,z\n1,2,3\n4,5,6\n", {}),
    "missing attribute": ("x,y,z,h\n1,2,3,nan\n4,5,6,1.5\n", {"h": [np.nan, 1.5]}),
}


@pytest.mark.parametrize("case", TEXTS)
def test_tables_of_text_are_read_as_they_come(tmp_path: Path, case: str) -> None:
    text, attributes = TEXTS[case]
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    cloud = read_points(path)
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == list(attributes)
    for name, values in attributes.items():
        assert np.array_equal(cloud.attributes[name], values, equal_nan=True)


def test_a_column_that_begins_with_whole_numbers_may_end_with_others(tmp_path: Path) -> None:
    rows = [f"{i} 0 0 {2**60 + i}" for i in range(60_000)]
    (tmp_path / "a.xyz").write_text("\n".join([*rows, "0.5 0 0 1"]))
    cloud = read_points(tmp_path / "a.xyz")
    assert cloud.positions[-1, 0] == 0.5
    assert cloud.attributes["column_4"].dtype == np.int64
    assert cloud.attributes["column_4"][1] == 2**60 + 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "i,X,Y,Z\n3,1.5,2,3\n4,4.5,5,6\n"),
        ("a.txt", "# i X Y Z\n3 1.5 2 3\n4 4.5 5 6\n"),
        ("a.txt", "1.5;2;3;3\n4.5;5;6;4\n"),
    ],
)
def test_text_is_written_in_the_manner_it_was_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    write_points(tmp_path / f"b{name}", read_points(tmp_path / name))
    assert (tmp_path / f"b{name}").read_text() == text


BAD_TEXTS = {
    "words": ("once upon a time\n", r"'once upon a time' holds neither numbers nor columns"),
    "a word": ("1 2 3\n4 five 6\n", r"line 2: 'five' is not a number; mend it"),
    "words in a column": ("x y z kind\n1 2 3 tree\n", r"line 2: 'tree' is not a number"),
    "two columns": ("1 2\n3 4\n", r"2 columns in '1 2'; at least x, y and z are needed"),
    "a short line": ("#\n1 2 3\n\n4 5\n", r"line 4 has 2 columns, the lines before it 3"),
    "an empty field": ("1,2,3\n4,,6\n", r"line 2: '' is not a number"),
    "NaN": ("1 2 3\n4 nan 6\n7 8 inf\n", r"2 of 3 have NaN or infinite coordinates; remove them"),
    "a name twice": ("x y z a a\n1 2 3 4 5\n", r"two columns are named 'a'; rename one"),
    "only comments": ("# x y z\n\n", r"no points in it; leave it out"),
    "only names": ("x,y,z\n", r"no points in it; leave it out"),
    "nothing": ("", r"is empty \(0 bytes\)"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_text_is_an_error_that_names_the_line(tmp_path: Path, case: str) -> None:
    text, message = BAD_TEXTS[case]
    path = tmp_path / "field.xyz"
    path.write_text(text)
    with pytest.raises(FileError, match=r"field\.xyz.*" + message) as raised:
        read_points(path)
    assert "\n" not in str(raised.value)


def ply(vertices: str, count: int, properties: str = "float x float y float z") -> bytes:
    words = properties.split()
    lines = [f"property {kind} {name}" for kind, name in zip(words[::2], words[1::2], strict=True)]
    head = ["ply", "format ascii 1.0", f"element vertex {count}", *lines, "end_header"]
    return "\n".join([*head, vertices]).encode()


def npy(array: np.ndarray) -> bytes:
    return (
        b"\x93NUMPY\x01\x00"
        + (54).to_bytes(2, "little")
        + (
            f"{{'descr':'<f8','fortran_order':False,'shape':{array.shape}}}".ljust(53) + "\n"
        ).encode()
        + array.astype("<f8").tobytes()
    )


BAD_BYTES = {
    "cut.ply": (ply("1 2 3\n", 2), "ends after 1 of 2 points; copy it again"),
    "no_points.ply": (ply("", 0), "no points in it"),
    "no_z.ply": (ply("1 2\n", 1, "float x float y"), "must be vertices with x, y, z"),
    "type.ply": (ply("1 2 3\n", 1, "float x float y long z"), "unknown property type 'long'"),
    "word.ply": (ply("1 2 three\n", 1), "could not convert string 'three'"),
    "nan.ply": (ply("1 2 nan\n", 1), "1 of 1 have NaN"),
    "list.ply": (
        ply("1 2 3\n", 1, "float x float y float z").replace(
            b"end_header", b"property list uchar int neighbours\nend_header"
        ),
        "list properties",
    ),
    "no.ply": (b"solid\n", "doesn't begin with 'ply'"),
    "header.ply": (b"ply\nformat ascii 1.0\nelement vertex 2\n", "can't read PLY header line ''"),
    "no.npy": (b"nothing", "not a NumPy file"),
    "cut.npy": (npy(np.zeros((9, 3)))[:-1], "not a NumPy file"),
    "narrow.npy": (npy(np.zeros((9, 2))), r"\(N, 3\) or wider, not float64 \(9, 2\)"),
    "flat.npy": (npy(np.zeros(9)), r"not float64 \(9,\)"),
    "no_points.npy": (npy(np.zeros((0, 3))), "no points in it"),
    "nan.npy": (npy(np.full((2, 3), np.nan)), "2 of 2 have NaN"),
    "no.npz": (b"PK\x03\x04nothing", "not a NumPy file"),
    "no.las": (b"nothing", "doesn't begin with a LAS header"),
    "word.obj": (b"v 1 2 three\n", "isn't three numbers"),
    "no_points.obj": (b"# nothing\n", "no points in it"),
    "cloud.pcd": (b"VERSION .7", r"unknown extension '\.pcd'; known are \.las \.laz \.ply"),
    "cloud": (b"1 2 3", "unknown file without an extension; known are"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_files_are_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    data, message = BAD_BYTES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=rf"{name}: .*{message}") as raised:
        read_points(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_an_npz_without_points_lists_what_it_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", vertices=np.zeros((2, 3)))
    with pytest.raises(FileError, match=r"no array is named positions, pos, .* not vertices"):
        read_points(tmp_path / "a.npz")


def test_missing_files_and_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.las: no such file"):
        read_points(tmp_path / "none.las")
    (tmp_path / "folder.las").mkdir()
    with pytest.raises(FileError, match=r"folder\.las: is a folder"):
        read_points(tmp_path / "folder.las")
    with pytest.raises(FileError, match=r"folder\.las: is a folder"):
        write_points(tmp_path / "folder.las", make_cloud())
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it"):
        write_points(tmp_path / "nowhere" / "a.ply", make_cloud())
    with pytest.raises(FileError, match=r"a\.e57: unknown extension"):
        write_points(tmp_path / "a.e57", make_cloud())


def test_what_the_system_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=r"a\.ply: can't be written: Permission denied"):
        write_points(tmp_path / "a.ply", make_cloud())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(FileError, match=r"a\.ply: can't be written: No space left on device"),
        open_writer(tmp_path / "a.ply", make_cloud()) as writer,
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        writer._stream = full
        writer.write(make_cloud())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".laz", ".las", ".npy", *SUFFIXES])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, suffix: str, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("old")
    with pytest.raises(error), open_writer(path, make_cloud()) as writer:
        writer.write(make_cloud())
        assert path.read_text() == "old"
        raise error
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("suffix", [".laz", ".npy", *SUFFIXES])
def test_bad_clouds_are_not_written(tmp_path: Path, suffix: str) -> None:
    path, cloud = tmp_path / f"a{suffix}", make_cloud(3)
    short = PointCloud(cloud.positions, cloud.attributes | {"int8_values": np.zeros(2)})
    broken = PointCloud(cloud.positions * [1, np.nan, 1], cloud.attributes)
    cases: list[tuple[PointCloud, str]] = [
        (broken, "3 of 3 have NaN"),
        (short, "'int8_values' has 2 values for 3 points"),
        (cloud.select(slice(0, 0)), "no points to write"),
        (PointCloud(np.zeros((3, 2)), cloud.attributes), r"expected \(N, 3\)"),
    ]
    for bad, message in cases:
        with pytest.raises(PointupError, match=message), open_writer(path, cloud) as writer:
            writer.write(bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".npy", *SUFFIXES])
def test_all_points_of_a_table_need_the_same_attributes(tmp_path: Path, suffix: str) -> None:
    cloud = make_cloud(3)
    with (
        pytest.raises(DataError, match="need the same attributes; differing: uint8_values"),
        open_writer(tmp_path / f"a{suffix}", cloud) as writer,
    ):
        attributes = {n: v for n, v in cloud.attributes.items() if n != "uint8_values"}
        writer.write(PointCloud(cloud.positions, attributes))


def test_writing_respects_the_umask_and_writes_over_the_original(tmp_path: Path) -> None:
    path = tmp_path / "a.ply"
    write_points(path, make_cloud(5))
    cloud = read_points(path)
    with open_writer(path, cloud, [PARENT]) as writer:
        copy_points(path, writer)
    assert read_points(path).attributes["parent"].tolist() == [0, 1, 2, 3, 4]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_values_are_rounded_to_integers_but_never_wrapped() -> None:
    uint8 = np.dtype(np.uint8)
    assert cast_values(np.array([1.6, 254.5]), uint8, "a").tolist() == [2, 254]
    for bad in ([-1], [256], [np.nan], [1e300]):
        with pytest.raises(DataError, match=r"a: values .* don't fit uint8"):
            cast_values(np.array(bad), uint8, "a")
    with pytest.raises(DataError, match=r"a: whole numbers up to .* don't fit float64"):
        cast_values(np.array([2**53 + 1]), np.dtype(np.float64), "a")


@pytest.mark.parametrize("suffix", [".off", ".obj", ".stl", ".ply"])
def test_meshes_of_every_format_are_surfaces(tmp_path: Path, suffix: str) -> None:
    trimesh.creation.box(extents=(1, 2, 3)).export(tmp_path / f"a{suffix}")
    surface = read_mesh(tmp_path / f"a{suffix}")
    assert surface.area == pytest.approx(22)


def test_polygons_are_triangulated(tmp_path: Path) -> None:
    (tmp_path / "a.off").write_text("OFF\n4 1 0\n0 0 0\n2 0 0\n2 2 0\n0 2 0\n4 0 1 2 3\n")
    assert read_mesh(tmp_path / "a.off").area == pytest.approx(4)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.off", b"OFF\n3 1 0\n0 0 0\n", "not a readable mesh"),
        ("a.ply", ply("1 2 3\n", 1), "it has points and no faces"),
        ("a.stl", b"solid a\nendsolid a\n", ""),
        ("a.off", b"", "is empty"),
        ("a.gltf", b"{}", r"unknown extension '\.gltf'; known are \.off \.obj \.stl \.ply"),
    ],
)
def test_bad_meshes_are_an_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=rf"{name}: .*{message}"):
        read_mesh(tmp_path / name)
