"""Point files: exact round trips, and the variants of text that the readers accept."""

from __future__ import annotations

import numpy as np
import pytest
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from survey_files import digest

from pointup.errors import DataError
from pointup.io.cloud import ExtraDimension, PointCloud
from pointup.io.files import copy_points, iter_points, open_writer, read_points, write_points
from pointup.io.ply import PlyHeader

PARENT = ExtraDimension("parent", "uint32", default="index")
DISTANCE = ExtraDimension("distance", "float32")
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64")
ENCODINGS = ("ascii", "binary_little_endian", "binary_big_endian")
SUFFIXES = (".ply", ".xyz", ".txt", ".csv", ".npz")


def make_cloud(count: int = 30) -> PointCloud:
    """Map coordinates, which float32 can't hold, and an attribute of every type."""
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
def test_round_trips_are_exact(tmp_path, suffix):
    cloud = make_cloud()
    write_points(tmp_path / f"a{suffix}", cloud)
    assert_same(cloud, read_points(tmp_path / f"a{suffix}"))


def test_points_without_attributes_are_written_from_an_array(tmp_path):
    points = make_cloud().positions
    write_points(tmp_path / "a.ply", points)
    assert np.array_equal(read_points(tmp_path / "a.ply").positions, points)
    with pytest.raises(DataError, match=r"b\.ply: height is of type list; give an array of num"):
        write_points(tmp_path / "b.ply", PointCloud(points, {"height": [0.0] * 30}))


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".npy"])
@settings(max_examples=20, deadline=None)
@given(
    positions=arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 5), st.just(3)),
        elements=st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_every_finite_float64_is_read_back_exactly(tmp_path_factory, suffix, positions):
    path = tmp_path_factory.mktemp("floats") / f"a{suffix}"
    write_points(path, PointCloud(positions))
    assert np.array_equal(read_points(path).positions, positions)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ply_keeps_its_encoding_comments_types_and_order(tmp_path, encoding):
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
    # A second copy of the file is identical to the byte.
    write_points(tmp_path / "b.ply", after)
    assert digest(tmp_path / "a.ply") == digest(tmp_path / "b.ply")


def test_ply_stores_64_bit_integers_as_float64_or_refuses_them(tmp_path):
    path, positions = tmp_path / "a.ply", np.zeros((2, 3))
    write_points(path, PointCloud(positions, {"time": np.array([2**40 + 1, -5])}))
    assert read_points(path).attributes["time"].tolist() == [2**40 + 1, -5]
    with pytest.raises(DataError, match=r"a\.ply: time: integers up to .* don't fit float64"):
        write_points(path, PointCloud(positions, {"time": np.array([2**53 + 1, 0])}))


@pytest.mark.parametrize("encoding", ["ascii", "binary_little_endian"])
def test_vertices_of_a_mesh_file_are_read_as_points(tmp_path, encoding):
    box = trimesh.creation.box()
    path = tmp_path / "a.ply"
    path.write_bytes(
        trimesh.exchange.ply.export_ply(box, encoding="ascii" if encoding == "ascii" else "binary")
    )
    assert np.array_equal(read_points(path).positions, box.vertices)
    box.export(tmp_path / "a.obj")
    assert np.allclose(read_points(tmp_path / "a.obj").positions, box.vertices)
    indented = (tmp_path / "a.obj").read_text().replace("v ", "  v ")
    (tmp_path / "a.obj").write_text(indented)
    assert np.allclose(read_points(tmp_path / "a.obj").positions, box.vertices)


def test_columns_that_are_added_to_a_table_without_names_have_names(tmp_path):
    (tmp_path / "a.xyz").write_text("0 0 0 7\n1 2 3 8\n")
    cloud = read_points(tmp_path / "a.xyz")
    write_points(tmp_path / "same.xyz", cloud)
    assert (tmp_path / "same.xyz").read_text()[0] != "#"
    cloud.attributes["uncertainty"] = np.array([0.5, 0.25])
    write_points(tmp_path / "more.xyz", cloud)
    read = read_points(tmp_path / "more.xyz")
    assert read.attributes.keys() == {"column_4", "uncertainty"}
    assert read.attributes["uncertainty"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".npy"])
def test_generated_points_follow_the_original_in_every_format(tmp_path, suffix):
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


def test_chunks_of_any_format_are_slices(tmp_path):
    write_points(tmp_path / "a.ply", make_cloud(10))
    assert [len(chunk) for chunk in iter_points(tmp_path / "a.ply", chunk_size=4)] == [4, 4, 2]
    bare = next(iter_points(tmp_path / "a.ply", attributes=False))
    assert not bare.attributes


def test_npz_keeps_its_key_and_arrays_of_any_width(tmp_path):
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
    "a number of points below names": ("//X Y Z I\n2\n1 2 3 7\n4 5 6 8\n", {"I": [7, 8]}),
    "a number of points": ("2\n1 2 3\n4 5 6\n", {}),
    "names of surveyors": ("N,Northing,EASTING,Elevation\n1,2,1,3\n2,5,4,6\n", {"N": [1, 2]}),
    "an elevation beside z": ("x,y,z,elevation\n1,2,3,7\n4,5,6,8\n", {"elevation": [7, 8]}),
    "a comma in a word": ("x;y;z;kind\n1.0;2;3;oak, beech\n4.0;5;6;fir\n", {}),
    "blanks before commas": ("1 ,2 ,3\n4 ,5 ,6\n", {}),
    "columns of words": ('"",x,y,kind,z\na,1,2,tree,3\nb,4,5,7,6\n', {}),
    "names in a comment": ("# notes\n# x y z i\n1 2 3 7\n4 5 6 8\n", {"i": [7, 8]}),
    "columns without names": ("1 2 3 7 9\n4 5 6 8 10\n", {"column_4": [7, 8], "column_5": [9, 10]}),
    "byte order mark": ("\ufeffx,y,z\n1,2,3\n4,5,6\n", {}),
    "delimiters at the ends of lines": ("x,y,z,i,\n1,2,3,7,\n4,5,6,8,\n", {"i": [7, 8]}),
    "delimiters at the ends, no names": ("1;2;3;7;\r\n4;5;6;8; \r\n", {"column_4": [7, 8]}),
    "delimiters at the ends of rows only": ("x,y,z\n1,2,3,\n\n4,5,6,", {}),
    "a delimiter at the end of names only": ("x,y,z,\n# of a site\n1,2,3\n4,5,6\n", {}),
    "tabs at the ends": ("x\ty\tz\ti\t\n1\t2\t3\t7\t\n4\t5\t6\t8\t\n", {"i": [7, 8]}),
    "delimiters at the ends, names in a comment": (
        "# x;y;z;i;\n1;2;3;7,5;\n4;5;6;8;\n",
        {"i": [7.5, 8]},
    ),
    "a last column without a name": ("x,y,z,\n1,2,3,7\n4,5,6,8\n", {"column_4": [7, 8]}),
    "missing attribute": ("x,y,z,h\n1,2,3,nan\n4,5,6,1.5\n", {"h": [np.nan, 1.5]}),
}


@pytest.mark.parametrize("case", TEXTS)
def test_common_variants_of_text_tables_are_read(tmp_path, case):
    text, attributes = TEXTS[case]
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    cloud = read_points(path)
    assert cloud.positions.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(cloud.attributes) == list(attributes)
    for name, values in attributes.items():
        assert np.array_equal(cloud.attributes[name], values, equal_nan=True)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_text_of_windows_is_read_whatever_its_encoding(encoding, tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z,Höhe\n1,2,3,7\n", encoding=encoding)
    cloud = read_points(tmp_path / "a.csv")
    assert cloud.positions.tolist() == [[1, 2, 3]]
    assert cloud.attributes["Höhe"].tolist() == [7]


def test_a_column_may_begin_with_integers_and_end_with_floats(tmp_path):
    rows = [f"{i} 0 0 {2**60 + i}" for i in range(60_000)]
    (tmp_path / "a.xyz").write_text("\n".join([*rows, "0.5 0 0 1"]))
    cloud = read_points(tmp_path / "a.xyz")
    assert cloud.positions[-1, 0] == 0.5
    assert cloud.attributes["column_4"].dtype == np.int64
    assert cloud.attributes["column_4"][1] == 2**60 + 1


def test_integers_of_64_bits_keep_their_digits_and_large_floats_stay_floats(tmp_path):
    large = [2**64 - 1, 2**63 + 1, 7]
    rows = [f"{i},0,{i},{large[i]},{i % 2}.5e19,{-i},{2**64 + i}" for i in range(3)]
    (tmp_path / "a.csv").write_text("\n".join(["X,Y,Z,id,e,f,g", *rows]))
    attributes = read_points(tmp_path / "a.csv").attributes
    assert attributes["id"].dtype == np.uint64 and attributes["id"].tolist() == large
    assert attributes["e"].tolist() == [0.5e19, 1.5e19, 0.5e19]
    assert attributes["f"].dtype == np.int64 and attributes["g"].dtype == np.float64
    write_points(tmp_path / "b.csv", read_points(tmp_path / "a.csv"))
    assert read_points(tmp_path / "b.csv").attributes["id"].tolist() == large


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "i,X,Y,Z\n3,1.5,2,3\n4,4.5,5,6\n"),
        ("a.txt", "# i X Y Z\n3 1.5 2 3\n4 4.5 5 6\n"),
        ("a.txt", "1.5;2;3;3\n4.5;5;6;4\n"),
        ("a.csv", "x;y;z;i\n1,5;2,25;-3;3\n4;5;6,125;4\n"),
        ("a.csv", "x;y;z\n1e-7;2;3\n1,5e+30;5;6\n"),
    ],
)
def test_text_is_written_in_the_layout_it_was_read_in(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    write_points(tmp_path / f"b{name}", read_points(tmp_path / name))
    assert (tmp_path / f"b{name}").read_text() == text


def test_files_in_hidden_folders_are_no_input(tmp_path):
    from pointup.cli.input_files import find_inputs

    for folder in (tmp_path, tmp_path / ".Trash-1000" / "files"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.las").touch()
    assert find_inputs([tmp_path], [".las"]) == [tmp_path / "a.las"]


def test_a_copy_does_not_bring_the_file_into_memory(tmp_path):
    import tracemalloc

    from pointup.io.files import copy_file

    (tmp_path / "a.las").write_bytes(bytes(32 << 20))
    tracemalloc.start()
    copy_file(tmp_path / "a.las", tmp_path / "out" / "a.las")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "out" / "a.las").stat().st_size == 32 << 20 and most < 4 << 20
