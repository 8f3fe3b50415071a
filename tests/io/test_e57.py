"""E57: poses, map coordinates, colours, and the missing package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_formats import READERS, assert_holds, scanned

from pointup.errors import FileError
from pointup.io.files import (
    PointCloud,
    check_writable,
    read_points,
    write_points,
)


def test_scans_of_an_e57_are_merged_by_their_poses(tmp_path: Path) -> None:
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


def test_e57_keeps_map_coordinates_exactly(tmp_path: Path) -> None:
    pytest.importorskip("pye57", reason=READERS)
    positions = np.random.default_rng(0).random((7, 3)) * 1000 + [4e5, 5.1e6, 100]
    write_points(tmp_path / "a.e57", PointCloud(positions))
    assert_holds(read_points(tmp_path / "a.e57"), positions)


def test_e57_without_pye57_is_refused_with_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointup.io.e57.find_spec", lambda name: None)
    (tmp_path / "a.e57").write_bytes(b"ASTM-E57")
    for refused in (
        lambda: read_points(tmp_path / "a.e57"),
        lambda: write_points(tmp_path / "b.e57", scanned()),
        lambda: check_writable(tmp_path / "b.e57"),
    ):
        with pytest.raises(FileError, match=r"E57 needs pye57; .* `pip install pointup\[e57\]`"):
            refused()


def test_colours_of_16_bits_become_8_in_e57(tmp_path: Path) -> None:
    pytest.importorskip("pye57", reason=READERS)
    cloud = scanned(3)
    for name in ("red", "green", "blue"):
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
    values: np.ndarray, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
