"""Files as other programs write them: what is read, what is left out with a note, what is wrong."""

from __future__ import annotations

import logging
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import survey_files
from plyfile import PlyData, PlyElement

from pointup.errors import DataError, FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import read_points, write_points
from pointup.io.las import read_header
from pointup.io.length_unit import LIKELY_ANGLES, UNKNOWN, agreed_unit, length_unit

POINTS = np.array([[0.5, 1.0, 2.0], [4.0, 5.5, 6.0], [7.0, 8.0, 9.25]])


def ply(rows: str, *, axes: str = "xyz", after_header: str = "") -> bytes:
    properties = "".join(f"property double {axis}\n" for axis in axes)
    head = f"ply\nformat ascii 1.0\nelement vertex 3\n{properties}end_header\n"
    return (head + after_header + rows).encode()


def rows(points: np.ndarray = POINTS, between: str = " ", end: str = "\n") -> str:
    return "".join(between.join(map(str, point)) + end for point in points.tolist())


PCD = "VERSION .7\nFIELDS {}\nSIZE 8 8 8\nTYPE F F F\nWIDTH 3\nHEIGHT 1\nPOINTS 3\nDATA ascii\n"
COMMAS = rows().replace(".", ",")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("capitals.ply", ply(rows(), axes="XYZ")),
        ("capitals.pcd", (PCD.format("X Y Z") + rows()).encode()),
        ("blank_line.ply", ply(rows(), after_header="\n")),
        ("two_lines.ply", ply(rows(between="\n"))),
        ("one_line.ply", ply(rows(end=" "))),
        ("commas.ply", ply(COMMAS)),
        ("commas.xyz", COMMAS.encode()),
        ("commas.txt", ("x y z\n" + COMMAS).encode()),
        ("commas_and_tabs.txt", rows(between="\t").replace(".", ",").encode()),
        ("commas.csv", rows(between=";").replace(".", ",").encode()),
        ("cloudcompare.asc", rows().encode()),
        ("comma_and_blank.csv", rows(between=", ").encode()),
    ],
)
def test_coordinates_are_read_in_every_spelling(tmp_path, name, content, recwarn):
    (tmp_path / name).write_bytes(content)
    assert np.array_equal(read_points(tmp_path / name).positions, POINTS)
    assert not len(recwarn)


@pytest.mark.parametrize(
    ("name", "text", "height"),
    [
        # write.table of R with and without the names of rows, and write.csv.
        ("r.txt", '"X" "Y" "Z" "h"\n' + "".join(f'"{i}" {i} 5 6 {i}.5\n' for i in "123"), 1.5),
        ("r.xyz", '"X" "Y" "Z" "h"\n1 5 6 NA\n2 5 6 2.5\n3 5 6 3.5\n', np.nan),
        ("r.csv", '"X","Y","Z","h"\n1,5,6,NA\n2,5,6,2.5\n3,5,6,3.5\n', np.nan),
    ],
)
def test_tables_of_r_are_read_with_missing_values(name, text, height, tmp_path):
    (tmp_path / name).write_text(text)
    cloud = read_points(tmp_path / name)
    assert cloud.positions.tolist() == [[1, 5, 6], [2, 5, 6], [3, 5, 6]]
    assert cloud.attributes.keys() == {"h"}
    assert np.array_equal(cloud.attributes["h"], [height, 2.5, 3.5], equal_nan=True)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("a.xyzn", ["nx", "ny", "nz"]), ("a.xyzrgb", ["red", "green", "blue"])],
)
def test_files_of_normals_and_colours_are_tables(name, attributes, tmp_path):
    rows = np.hstack([POINTS, np.eye(3)])
    np.savetxt(tmp_path / name, rows, "%.10f")  # As Open3D.
    cloud = read_points(tmp_path / name)
    assert np.array_equal(cloud.positions, POINTS)
    assert np.array_equal(np.stack([cloud.attributes[name] for name in attributes], 1), np.eye(3))
    np.savetxt(tmp_path / name, POINTS)
    assert not read_points(tmp_path / name).attributes
    with pytest.raises(FileError, match="to write; known are"):
        write_points(tmp_path / name, cloud)


def test_ply_without_faces_gets_no_warning_of_faces(tmp_path, caplog):
    table = np.rec.fromarrays(POINTS.T, names="x,y,z")
    faces = PlyElement.describe(np.empty(0, [("vertex_indices", "i4", (3,))]), "face")
    PlyData([PlyElement.describe(table, "vertex"), faces]).write(tmp_path / "a.ply")
    assert np.array_equal(read_points(tmp_path / "a.ply").positions, POINTS)
    assert not caplog.messages


def test_ply_of_more_points_loses_the_rows_and_columns_of_the_original(tmp_path):
    """PCL takes them for the number of points, and aborts."""
    table = np.rec.fromarrays(POINTS.T, names="x,y,z")
    info = ["is_mesh 0", "num_cols 3", "num_rows 1"]
    PlyData([PlyElement.describe(table, "vertex")], obj_info=info).write(tmp_path / "a.ply")
    cloud = read_points(tmp_path / "a.ply")
    write_points(tmp_path / "b.ply", PointCloud.joined([cloud, cloud]))
    assert PlyData.read(tmp_path / "b.ply").obj_info == ["is_mesh 0"]


def test_the_no_data_value_of_rasters_gets_a_warning(tmp_path, caplog):
    """gdal_translate -of XYZ writes it."""
    (tmp_path / "a.xyz").write_text(rows() + "8 8 -9999\n")
    assert len(read_points(tmp_path / "a.xyz")) == 4
    assert caplog.messages == [
        f"{tmp_path / 'a.xyz'}: 1 points have z -9999, which stands for no data; remove them"
    ]


def with_missing(value: float) -> np.ndarray:
    return np.insert(POINTS, 1, [value, 1.0, 1.0], axis=0)


def as_npy(path: Path, points: np.ndarray) -> None:
    np.save(path, points)


def as_text(path: Path, points: np.ndarray) -> None:
    path.write_text(rows(points))


def as_ply(path: Path, points: np.ndarray) -> None:
    table = np.rec.fromarrays(points.T, names="x,y,z")
    PlyData([PlyElement.describe(table, "vertex")]).write(path)


def as_pcd(path: Path, points: np.ndarray) -> None:
    head = PCD.replace(" 3\n", f" {len(points)}\n")
    path.write_text(head.format("x y z") + rows(points))


def as_sweep(path: Path, points: np.ndarray) -> None:
    np.column_stack([points, np.arange(len(points))]).astype("<f4").tofile(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npy", as_npy),
        ("a.xyz", as_text),
        ("a.ply", as_ply),
        ("a.pcd", as_pcd),
        ("a.bin", as_sweep),
    ],
)
def test_points_without_coordinates_are_left_out_and_counted(name, write, value, tmp_path, caplog):
    write(tmp_path / name, with_missing(value))
    with caplog.at_level(logging.WARNING):
        cloud = read_points(tmp_path / name)
    assert np.array_equal(cloud.positions, POINTS)
    assert caplog.messages == [f"{tmp_path / name}: 1 points without coordinates are left out"]


def test_missing_returns_of_a_sweep_at_the_sensor_are_left_out(tmp_path, caplog):
    as_sweep(tmp_path / "a.bin", np.insert(POINTS, 1, np.zeros((2, 3)), axis=0))
    cloud = read_points(tmp_path / "a.bin")
    assert np.array_equal(cloud.positions, POINTS)
    assert cloud.attributes["intensity"].tolist() == [0, 3, 4]
    assert caplog.messages == [f"{tmp_path / 'a.bin'}: 2 points at 0, 0, 0 are left out"]


@pytest.mark.parametrize("text", [False, True])
def test_lists_of_ply_vertices_are_left_out_by_name(text, tmp_path, caplog):
    dtype = [("x", "f8"), ("y", "f8"), ("z", "f8"), ("views", object), ("quality", "i4")]
    table = np.empty(3, dtype)
    for axis, values in zip("xyz", POINTS.T, strict=True):
        table[axis] = values
    table["views"] = [np.arange(k, dtype=np.int32) for k in (0, 2, 3)]
    table["quality"] = [5, 6, 7]
    vertices = PlyElement.describe(table, "vertex", val_types={"views": "i4"})
    PlyData([vertices], text=text).write(tmp_path / "a.ply")
    cloud = read_points(tmp_path / "a.ply")
    assert np.array_equal(cloud.positions, POINTS)
    assert cloud.attributes["quality"].tolist() == [5, 6, 7]
    assert any("list properties of vertices are left out: views" in m for m in caplog.messages)


def write_las(path: Path, xyz: np.ndarray = POINTS, scale: float = 0.001) -> Path:
    return survey_files.write_las(path, xyz, point_format=3, scale=scale, offset=np.zeros(3))


def patched(path: Path, offset: int, format: str, *values: float) -> Path:
    content = bytearray(path.read_bytes())
    struct.pack_into(format, content, offset, *values)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("scale", [0.0, 7e132])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scale_that_nothing_can_have_is_refused(axis, scale, tmp_path):
    path = patched(write_las(tmp_path / "a.las"), 131 + 8 * axis, "<d", scale)
    said = re.escape(f"a.las: its header has a scale of {scale:g} in {'xyz'[axis]},")
    with pytest.raises(FileError, match=said):
        read_points(path)


@pytest.mark.parametrize("scaling", [(0.0, 0.0), (np.nan, 0.0), (1.0, np.inf)])
def test_a_dimension_whose_values_no_scale_gives_is_refused(scaling, tmp_path):
    survey_files.write_scaled(tmp_path / "a.las", "int16", 0.5, np.arange(50))
    at = (tmp_path / "a.las").read_bytes().index(struct.pack("<d", 0.5))
    patched(tmp_path / "a.las", at, "<d", scaling[0])
    path = patched(tmp_path / "a.las", at + 24, "<d", scaling[1])
    with pytest.raises(FileError, match=r"a\.las: its dimension 'value' has a scale of .* export"):
        read_points(path)


def test_records_beyond_the_count_of_the_header_are_noted(tmp_path, caplog):
    path = patched(write_las(tmp_path / "a.las"), 107, "<I", 2)
    assert np.allclose(read_points(path).positions, POINTS[:2])
    assert "counts 2 points, and it has room for 3; those beyond" in caplog.text


@pytest.mark.parametrize("read", [read_points, read_header, length_unit])
def test_a_damaged_number_of_records_ends_at_once_on_every_way_in(read, tmp_path):
    path = patched(write_las(tmp_path / "a.las"), 100, "<I", 2**31)
    with pytest.raises(FileError, match="record 1 of 2147483648"):
        read(path)


def test_a_newer_version_is_named(tmp_path):
    path = patched(write_las(tmp_path / "a.las"), 25, "<B", 5)
    with pytest.raises(FileError, match=r"a\.las: is LAS 1\.5, newer than LAS 1\.4"):
        read_points(path)


@pytest.mark.parametrize(
    ("size", "height", "unit"),
    [
        ((0.001, 0.002), 30.0, LIKELY_ANGLES),
        ((0.9, 0.4), 1500.0, LIKELY_ANGLES),
        ((30.0, 20.0), 30.0, UNKNOWN),  # A scan in metres around its origin.
        ((0.3, 0.3), 25.0, UNKNOWN),  # A mast.
        ((0.0, 0.0), 5.0, UNKNOWN),
    ],
)
def test_degrees_without_a_coordinate_system_are_recognised_and_refused(
    size, height, unit, tmp_path
):
    xyz = np.array([[2.35, 48.85, 30.0], [2.35 + size[0], 48.85 + size[1], 30.0 + height]])
    path = write_las(tmp_path / "a.las", xyz, 1e-6)
    assert length_unit(path) == unit
    if unit is LIKELY_ANGLES:
        with pytest.raises(DataError, match=r"by their range and the heights; .* --force"):
            agreed_unit({path: length_unit(path)})


@pytest.mark.parametrize("suffix", [".las", ".ply", ".xyz", ".npy"])
def test_a_pipe_is_no_input(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    os.mkfifo(path)
    with pytest.raises(FileError, match="is a device or a pipe; name a file"):
        read_points(path)
