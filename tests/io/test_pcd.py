"""PCD of other programs: encodings, packed colours, missing returns, arbitrary bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import READERS, assert_holds

from pointup.errors import FileError
from pointup.io.files import (
    read_points,
    write_points,
)


@pytest.mark.parametrize("encoding", ["ASCII", "BINARY", "BINARY_COMPRESSED"])
def test_pcd_of_another_program_is_read(tmp_path: Path, encoding: str) -> None:
    pypcd4 = pytest.importorskip("pypcd4", reason=READERS)
    rng = np.random.default_rng(1)
    count = 300
    packed = pypcd4.PointCloud.encode_rgb(rng.integers(0, 256, (count, 3)).astype(np.uint8))
    if encoding == "ASCII":
        # pypcd4 writes 10 decimals, which lose small floats.
        packed = np.zeros(count, np.float32)
    points = [*rng.random((3, count)).astype(np.float32), packed, np.arange(count)]
    other = pypcd4.PointCloud.from_points(
        points, ("x", "y", "z", "rgb", "label"), (np.float32,) * 4 + (np.uint16,)
    )
    other.save(tmp_path / "a.pcd", getattr(pypcd4.Encoding, encoding))
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
def test_packed_colours_in_text_are_unpacked(tmp_path: Path, text: str) -> None:
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


def test_missing_returns_of_an_organised_pcd_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_any_bytes_after_a_pcd_header_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, encoding: str
) -> None:
    path = tmp_path_factory.mktemp("pcd") / "a.pcd"
    head = ORGANISED.partition("DATA")[0] + f"DATA {encoding}\n"
    path.write_bytes(head.encode() + body)
    try:
        assert len(read_points(path)) <= 4
    except FileError as error:
        assert "a.pcd: " in str(error) and "\n" not in str(error)
