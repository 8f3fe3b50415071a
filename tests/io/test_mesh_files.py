"""Mesh files: triangles of all formats, and one-line errors for what can't be read."""

import numpy as np
import pytest
import trimesh

from pointup.errors import FileError
from pointup.io.files import read_mesh

POINTS_PLY = (
    b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\n"
    b"property float z\nend_header\n1 2 3\n"
)
SQUARE_OFF = b"OFF\n4 1 0\n0 0 0\n2 0 0\n2 2 0\n0 2 0\n4 0 1 2 3"
# A square and a triangle beside it: faces of two sizes, in binary.
MESH_PLY = (
    b"ply\nformat binary_little_endian 1.0\nelement vertex 5\nproperty float x\nproperty float y\n"
    b"property float z\nelement face 2\nproperty list uchar int vertex_indices\nend_header\n"
    + np.array([[0, 0, 0], [2, 0, 0], [2, 2, 0], [0, 2, 0], [3, 0, 0]], "<f4").tobytes()
    + b"\x04" + np.arange(4, dtype="<i4").tobytes()
    + b"\x03" + np.array([1, 4, 2], "<i4").tobytes()
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".off", ".obj", ".stl", ".ply"])
def test_meshes_of_every_format_are_surfaces(tmp_path, suffix):
    trimesh.creation.box(extents=(1, 2, 3)).export(tmp_path / f"a{suffix}")
    surface = read_mesh(tmp_path / f"a{suffix}")
    assert surface.area == pytest.approx(22)


@pytest.mark.parametrize("suffix", [".off", ".obj", ".stl", ".ply"])
def test_faces_that_are_given_twice_get_no_more_points(tmp_path, suffix):
    box = trimesh.creation.box()
    twice = [*box.faces, *box.faces[:4], *box.faces[:4, ::-1]]
    path = tmp_path / f"box{suffix}"
    trimesh.Trimesh(box.vertices, twice, process=False).export(path)
    surface = read_mesh(path)
    assert len(surface.faces) == 12
    assert surface.area == pytest.approx(6)


def test_polygons_are_triangulated(tmp_path):
    (tmp_path / "a.off").write_text("OFF\n4 1 0\n0 0 0\n2 0 0\n2 2 0\n0 2 0\n4 0 1 2 3\n")
    assert read_mesh(tmp_path / "a.off").area == pytest.approx(4)


def test_off_faces_may_have_different_numbers_of_corners(tmp_path):
    # A house of 2 x 2 with a gable of height 1, a triangle and a square beside it.
    corners = "0 0 0\n2 0 0\n2 2 0\n1 3 0\n0 2 0\n4 0 0\n4 2 0\n"
    faces = "5 0 1 2 3 4\n4 1 5 6 2 255 0 0\n3 2 6 3\n"
    (tmp_path / "a.off").write_text(f"OFF\n7 3 0\n{corners}{faces}")
    surface = read_mesh(tmp_path / "a.off")
    assert surface.area == pytest.approx(5 + 4 + 1)
    # All of them face the same way.
    assert (surface.sample(99, np.random.default_rng(0))[1][:, 2] > 0.99).all()


def test_comments_in_off_files_are_no_part_of_the_mesh(tmp_path):
    trimesh.creation.box(extents=(1, 1, 1)).export(tmp_path / "a.off")
    bare = read_mesh(tmp_path / "a.off")
    assert bare.faces.shape == (12, 3) and bare.area == pytest.approx(6)
    _, counts, first, *rest = (tmp_path / "a.off").read_text().splitlines()
    for lines in (
        ["OFF", counts, "# vertices", first, *rest],
        ["OFF", f"{counts} # 8 points", first, *rest],
        ["OFF", counts, f"{first} # 1 2 3", *rest[:7], "", "# faces", *rest[7:], "# end"],
        ["# a box", "OFF # of it", "# counts", counts, first, *rest],
    ):
        (tmp_path / "b.off").write_text("\n".join(lines))
        commented = read_mesh(tmp_path / "b.off")
        assert np.array_equal(commented.faces, bare.faces)
        assert np.array_equal(commented.vertices, bare.vertices)


def test_binary_ply_faces_may_have_different_numbers_of_corners(tmp_path):
    (tmp_path / "a.ply").write_bytes(MESH_PLY)
    assert read_mesh(tmp_path / "a.ply").area == pytest.approx(5)


def test_negative_indices_of_obj_faces_count_from_their_line(tmp_path):
    square = "v 0 0 {z} # comment\nv 1 0 {z}\nv 1 1 {z}\nv 0 1 {z}\nf -4//1 -3//1 -2//1 -1//1 # c\n"
    (tmp_path / "a.obj").write_text("vn 0 0 1\n" + square.format(z=0) + square.format(z=5))
    surface = read_mesh(tmp_path / "a.obj")
    assert surface.area == pytest.approx(2)
    assert set(surface.vertices[:, 2]) == {0, 5}


def test_triangles_of_a_binary_ply_file_are_not_read_one_by_one(tmp_path, monkeypatch):
    trimesh.creation.box(extents=(1, 2, 3)).export(tmp_path / "a.ply")
    monkeypatch.setattr("plyfile.PlyElement._read_bin", None)
    assert read_mesh(tmp_path / "a.ply").area == pytest.approx(22)


@pytest.mark.parametrize(("before", "blank"), [("  ", " "), ("", "\t")])
def test_obj_lines_may_be_indented_and_use_tabs(tmp_path, before, blank):
    lines = ["v 0 0 0", "v 1 0 0", "v 1 1 0", "v 0 1 0", "f 1 2 3 4"]
    text = "".join(f"{before}{line}\n" for line in lines).replace(" ", blank)
    (tmp_path / "a.obj").write_text(text)
    assert read_mesh(tmp_path / "a.obj").area == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.off", b"OFF\n3 1 0\n0 0 0\n", "ends after 0 of 1 faces"),
        ("a.off", SQUARE_OFF[:-3], "ends after 0 of 1 faces"),
        ("a.off", SQUARE_OFF.replace(b"2 2 0", b"2 2"), r"fewer than three coordinates \(2 2\)"),
        ("a.off", SQUARE_OFF[:-1] + b"4", "vertices 0 to 4, but only 0 to 3 exist"),
        ("a.off", b"4 1 0\n", "doesn't begin with OFF"),
        ("a.ply", MESH_PLY[:-1], "early end-of-file"),
        ("a.ply", MESH_PLY.replace(b"face 2", b"face 99999999999"), "99999999999 of face"),
        ("a.obj", b"v 0 0 0\nf -1 -2 -3\n", "a face has a vertex before the first"),
        ("a.ply", POINTS_PLY, "it has points and no faces"),
        ("a.stl", b"solid a\nendsolid a\n", "it has no faces"),
        ("a.off", b"", "is empty"),
        ("a.gltf", b"{}", r"unknown extension '\.gltf'; known are \.off \.obj \.stl \.ply"),
    ],
)
def test_bad_meshes_are_an_error(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=rf"{name}: .*{message}"):
        read_mesh(tmp_path / name)
