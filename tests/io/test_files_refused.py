"""Bad point and mesh files raise one-line errors, and failed writes leave no file behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_files import PARENT, SUFFIXES, make_cloud
from test_formats import ORGANISED, scanned

from pointup.errors import ConfigError, DataError, FileError, PointupError
from pointup.io.cloud import PointCloud, cast_values
from pointup.io.files import (
    check_readable,
    check_writable,
    copy_points,
    iter_points,
    open_writer,
    read_points,
    write_points,
)

BAD_TEXTS = {
    "words": (
        "once upon a time\n",
        r"'once upon a time' holds neither numbers nor the column names",
    ),
    "a word": ("1 2 3\n4 five 6\n", r"line 2: 'five' is not a number; correct it"),
    "words below numbers": ("x y z kind\n1 2 3 4\n1 2 3 tree\n", r"line 3: 'tree' is not a number"),
    "another number of points": (
        "3\n1 2 3\n4 5 6\n",
        "above its rows counts 3 points, but it has 2",
    ),
    "a number of thousands of digits": ("9" * 5000 + "\n1 2 3\n", "counts 99999999999999999999 p"),
    "only a number of points": ("3\n", r"no points in it; leave it out"),
    "a word for a coordinate": ("x y z\n1 2 three\n", r"line 2: 'three' is not a number"),
    "two columns": ("1 2\n3 4\n", r"2 columns in '1 2'; at least x, y and z are needed"),
    "a raster": ("NCOLS 2\nnrows 1\nxllcorner 0\n1 2\n", r"z are needed: it is a raster; give the"),
    "a short line": ("#\n1 2 3\n\n4 5\n", r"line 4 has 2 columns, the lines before it 3"),
    "an empty field in the last column": ("x,y,z,i\n1,2,3,4\n4,5,6,\n", r"line 3: '' is not a n"),
    "empty fields in a named last column": ("x,y,z,i\n1,2,3,\n", r"line 2: '' is not a number"),
    "two empty fields at the ends": ("x,y,z\n1,2,3,,\n", r"line 2 has 5 columns, .* it 3"),
    "a word before the ends": ("x,y,z,\n1,2,3,\n4,b,6,\n", r"line 3: 'b' is not a number"),
    "an empty field": ("1,2,3\n4,,6\n", r"line 2: '' is not a number"),
    "NaN": ("4 nan 6\n7 8 inf\n", r"2 of 2 have NaN or infinite coordinates; remove them"),
    "numbers of points": ("1 2 3 4\n2 4 5 6\n3 7 8 9\n", r"counts 1, 2, .* as number,y,x,z"),
    "numbers with gaps": (
        "1000001 2.5 3 4\n1000002 4 5 6\n1000010 7 8 9\n",
        r"counts 1000001, 1000002, .* number",
    ),
    "a name twice": ("x y z a a\n1 2 3 4 5\n", r"two columns are named 'a'; rename one"),
    "only comments": ("# x y z\n\n", r"no points in it; leave it out"),
    "only names": ("x,y,z\n", r"no points in it; leave it out"),
    "nothing": ("", r"is empty \(0 bytes\)"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_text_raises_an_error_that_names_the_line(tmp_path, case):
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
    "cut.ply": (ply("1 2 3\n", 2), "ends after at most 1 of 2 points; copy it again"),
    "no_points.ply": (ply("", 0), "no points in it"),
    "no_z.ply": (ply("1 2\n", 1, "float x float y"), "must be vertex, with x, y and z"),
    "type.ply": (ply("1 2 3\n", 1, "float x float y long z"), "unknown property type 'long'"),
    "word.ply": (ply("1 2 three\n", 1), "'three' is not a number; correct it"),
    "nan.ply": (ply("1 2 nan\n", 1), "1 of 1 have NaN"),
    "no.ply": (b"solid\n", "doesn't begin with 'ply'"),
    "header.ply": (b"ply\nformat ascii 1.0\nelement vertex 2\n", "can't read PLY header line ''"),
    "no.npy": (b"nothing", "not a whole NumPy file"),
    "cut.npy": (npy(np.zeros((9, 3)))[:-1], "not a whole NumPy file"),
    "narrow.npy": (npy(np.zeros((9, 2))), r"\(N, 3\) or wider, not float64 \(9, 2\)"),
    "turned.npy": (npy(np.zeros((3, 300))), r"an array \(3, 300\); transpose it"),
    "flat.npy": (npy(np.zeros(9)), r"not float64 \(9,\)"),
    "no_points.npy": (npy(np.zeros((0, 3))), "no points in it"),
    "nan.npy": (npy(np.full((2, 3), np.nan)), "2 of 2 have NaN"),
    "no.npz": (b"PK\x03\x04nothing", "not a whole NumPy file"),
    "no.las": (b"nothing", "doesn't begin with a LAS header"),
    "word.obj": (b"v 1 2 three\n", "isn't three numbers"),
    "no_points.obj": (b"# nothing\n", "no points in it"),
    "cloud.rcp": (b"VERSION .7", r"unknown extension '\.rcp'; known are \.las \.laz \.ply"),
    "cloud": (b"1 2 3", "unknown file without an extension; known are"),
    "short.pts": (b"3\n1 2 3\n4 5 6\n", "ends after 2 of 3 points; copy it again"),
    "long.pts": (b"1\n1 2 3\n4 5 6\n", "has 2 points, more than the 1 of its counts"),
    "word.pts": (b"2\n1 2 3\n4 five 6\n", "line 3: 'five' is not a number"),
    "empty.pts": (b"0\n", "no points in it"),
    "rows.bin": (b"x" * 31, "not a KITTI sweep: 31 bytes are not rows of 4 float32"),
    "rows.pcd.bin": (b"\0" * 16, "16 bytes are not rows of 5 float32"),
    "weights.bin": (np.full(8, 1e20, "<f4").tobytes(), "coordinates up to 1e[+]20"),
    "nan.bin": (np.full(8, np.nan, "<f4").tobytes(), "2 of 2 have NaN"),
    "no.pcd": (b"nothing", "not a PCD file"),
    "cut.pcd": (ORGANISED[:-30].encode(), "ends before its 4 points"),
    "absurd.pcd": (ORGANISED.replace("POINTS 4", "POINTS 9999999999").encode(), "ends before its"),
    "digits.pcd": (ORGANISED.replace("POINTS 4", "POINTS " + "9" * 99).encode(), "POINTS is '999"),
    "field.pcd": (ORGANISED.replace("SIZE 4", "SIZE 3").encode(), "unknown field type F of 3"),
    "axes.pcd": (ORGANISED.replace("x y z", "x y w").encode(), "it must have the fields x, y, z"),
    "no.e57": (b"nothing", "E57"),
    "a.off": (b"OFF", "is a mesh, and points are needed: sample its surface .* `pointup prepare"),
    "a.glb": (b"glTF", "is a mesh, and points are needed"),
    "count.ply": (
        b"ply\nformat ascii 1.0\nelement vertex " + b"9" * 30 + b"\n",
        "its header counts 999",
    ),
    "many.ply": (
        b"ply\nformat binary_little_endian 1.0\nelement vertex 999999999999999\n"
        b"property float x\nproperty float y\nproperty float z\nend_header\n123",
        "ends after 0 of 999999999999999 points",
    ),
    "superscript.ply": (b"ply\nformat ascii 1.0\nelement vertex \xb2\n", "can't read PLY header"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_files_raise_a_one_line_error(tmp_path, name):
    data, message = BAD_BYTES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=rf"{name}: .*{message}") as raised:
        read_points(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_an_npz_without_points_lists_its_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", vertices=np.zeros((2, 3)))
    with pytest.raises(FileError, match=r"no array is named positions, .*\(there are: vertices\)"):
        read_points(tmp_path / "a.npz")


def test_missing_files_and_folders_are_errors(tmp_path):
    with pytest.raises(FileError, match=r"none\.las: no such file"):
        read_points(tmp_path / "none.las")
    (tmp_path / "folder.las").mkdir()
    with pytest.raises(FileError, match=r"folder\.las: is a folder"):
        read_points(tmp_path / "folder.las")
    with pytest.raises(FileError, match=r"folder\.las: is a folder"):
        write_points(tmp_path / "folder.las", make_cloud())
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it"):
        write_points(tmp_path / "nowhere" / "a.ply", make_cloud())
    with pytest.raises(FileError, match=r"a\.rcp: unknown extension"):
        write_points(tmp_path / "a.rcp", make_cloud())


def test_an_operating_system_error_names_the_file(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=r"a\.ply: can't be written: Permission denied"):
        write_points(tmp_path / "a.ply", make_cloud())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path):
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
def test_an_interrupted_writer_leaves_only_the_old_file(tmp_path, suffix, error, capfd):
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
def test_bad_clouds_are_not_written(tmp_path, suffix):
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


@pytest.mark.parametrize("suffix", [".las", ".laz", ".npy", *SUFFIXES])
@pytest.mark.parametrize("name", ["x", "Z", "positions"])
def test_an_attribute_never_replaces_the_coordinates(tmp_path, suffix, name):
    path, cloud = tmp_path / f"a{suffix}", make_cloud(3)
    cloud.attributes = {name: np.full(3, 7.0)}
    if name.lower() in ("positions" if suffix == ".npz" else "xyz"):
        with pytest.raises(DataError, match=f"'{name}' is the name of coordinates; rename"):
            write_points(path, cloud)
        assert not path.exists()
    else:
        write_points(path, cloud)
        np.testing.assert_allclose(read_points(path).positions, cloud.positions, atol=1e-3)


@pytest.mark.parametrize("suffix", [".las", ".ply", ".npy"])
@pytest.mark.parametrize("kind", ["float16", "int8", "tensor", "list"])
def test_points_of_any_type_are_written_as_float64(tmp_path, suffix, kind):
    points = np.array([[-60.0, 1.5, 2.0], [90.0, 8.0, 0.5], [3.0, -4.0, 5.0]])
    expected: np.ndarray = points if kind in ("tensor", "list") else points.astype(kind)
    given: Any = {
        "tensor": torch.from_numpy(points).requires_grad_(),
        "list": points.tolist(),
    }.get(kind, expected)
    for cloud in (given, PointCloud(given, {"kind": np.arange(3.0)})):
        write_points(tmp_path / f"a{suffix}", cloud)
        made = read_points(tmp_path / f"a{suffix}").positions
        np.testing.assert_allclose(made, expected.astype(np.float64), atol=1e-6)


def test_masked_points_and_attributes_that_are_no_numbers_are_not_written(tmp_path):
    points = make_cloud(3).positions
    with pytest.raises(FileError, match="points: 1 of 3 are masked; leave them out"):
        write_points(tmp_path / "a.ply", np.ma.masked_equal(points, points[0, 0]))
    for values in (np.zeros(3, complex), np.zeros(3, [("u", "f4")])):
        with pytest.raises(DataError, match=r"kind is of type .*; give an array of numbers"):
            write_points(tmp_path / "a.ply", PointCloud(points, {"kind": values}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".las", ".ply"])
def test_a_chunk_has_at_least_one_point(tmp_path, suffix):
    write_points(tmp_path / f"a{suffix}", make_cloud(3).positions)
    with pytest.raises(ConfigError, match="chunk_size -1: must be at least 1"):
        list(iter_points(tmp_path / f"a{suffix}", chunk_size=-1))


@pytest.mark.parametrize("suffix", [".npy", *SUFFIXES])
def test_all_points_of_a_table_need_the_same_attributes(tmp_path, suffix):
    cloud = make_cloud(3)
    with (
        pytest.raises(DataError, match="need the same attributes; differing: uint8_values"),
        open_writer(tmp_path / f"a{suffix}", cloud) as writer,
    ):
        attributes = {n: v for n, v in cloud.attributes.items() if n != "uint8_values"}
        writer.write(PointCloud(cloud.positions, attributes))


def test_writing_replaces_the_original_and_respects_the_umask(tmp_path):
    path = tmp_path / "a.ply"
    write_points(path, make_cloud(5))
    cloud = read_points(path)
    with open_writer(path, cloud, [PARENT]) as writer:
        copy_points(path, writer)
    assert read_points(path).attributes["parent"].tolist() == [0, 1, 2, 3, 4]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("suffix", [".ply", ".xyz", ".npy"])
def test_coordinates_that_stand_for_no_data_are_refused_by_what_commands_read_with(
    tmp_path, suffix
):
    positions = np.zeros((5, 3))
    positions[[1, 2], 2] = -3.4e38
    write_points(path := tmp_path / f"a{suffix}", PointCloud(positions))
    with pytest.raises(FileError, match=r"points: 2 of 3 .* 1e12 or more, such as -3\.4e\+38; rem"):
        next(iter_points(path, chunk_size=3))
    positions[[1, 2], 2] = 0.99e12
    write_points(path, PointCloud(positions))
    assert sum(map(len, iter_points(path, chunk_size=3))) == 5


def test_values_are_rounded_to_integers_but_never_wrapped():
    uint8 = np.dtype(np.uint8)
    assert cast_values(np.array([1.6, 254.5]), uint8, "a").tolist() == [2, 254]
    for bad in ([-1], [256], [np.nan], [1e300]):
        with pytest.raises(DataError, match=r"a: values .* don't fit uint8"):
            cast_values(np.array(bad), uint8, "a")
    with pytest.raises(DataError, match=r"a: integers up to .* don't fit float64"):
        cast_values(np.array([2**53 + 1]), np.dtype(np.float64), "a")


def test_paths_that_cannot_be_written_are_refused_before_any_work(tmp_path):
    (tmp_path / "link.laz").symlink_to(tmp_path / "b.copc.laz")
    for name, message in (
        ("a.rcp", r"unknown extension '\.rcp' to write"),
        (
            "a.copc.laz",
            r"can't be written; name it .laz, and convert that.* --writers.copc.forward=all",
        ),
        ("link.laz", "COPC files can't be written"),
    ):
        for refuse in (check_writable, lambda path: write_points(path, scanned())):
            with pytest.raises(FileError, match=message):
                refuse(tmp_path / name)
    for name in ("a.laz", "b.pcd", "c.bin"):
        check_writable(tmp_path / name)
    with pytest.raises(FileError, match="no such file"):
        check_readable(tmp_path / "b.pcd")
