"""Attributes of new points: interpolated where there are values, and there even if empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pytest
from sheets import small_model
from typed import Result, positions

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.io.files import read_points, write_points
from pointup.upsampling.attributes import attributes_between


def test_values_that_are_not_numbers_don_t_spread() -> None:
    rows = np.zeros(4, [("intensity", np.float32), ("rgb", np.float64, 3)])
    rows["intensity"] = [1.0, np.nan, 4.0, np.nan]
    rows["rgb"] = [[1, 2, 3], [np.nan, 2, 3], [3, 4, 5], [3, 4, np.nan]]
    distance = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, np.inf], [1.0, 1.0, 1.0]])
    nearest = np.array([[0, 1, 2], [0, 1, -1], [1, 3, 3]])
    found = attributes_between(rows, distance, nearest)
    assert found["intensity"][:2].tolist() == [2.5, 1.0]
    assert np.isnan(found["intensity"][2])
    np.testing.assert_allclose(found["rgb"][0], [2, 8 / 3, 11 / 3])
    np.testing.assert_allclose(found["rgb"][1], [1, 2, 3])


def test_no_new_point_is_a_key_point_or_at_the_edge_of_a_flight_line(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    flags = {"key_point": np.ones(40, np.uint8), "edge_of_flight_line": np.ones(40, np.uint8)}
    overlap = {"overlap": np.ones(40, np.uint8)}
    write_points(tmp_path / "a.las", PointCloud(positions(40), flags | overlap))
    assert command(tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "b.las")
    is_new = np.arange(80) >= 40
    for name in flags:
        assert np.array_equal(las[name] == 1, ~is_new)
    assert np.array_equal(las["overlap"], np.ones(80))
    # PDAL and text files have other names.
    cloud = PointCloud(positions(40), {"KeyPoint": flags["key_point"]})
    assert not upsample(cloud, 2.0, model=small_model(), only_new=True).attributes["KeyPoint"].any()


@pytest.mark.parametrize("options", [{"only_new": True}, {"originals": False}])
def test_an_empty_result_has_the_attributes_of_any_other(options: dict[str, bool]) -> None:
    rng = np.random.default_rng(0)
    classes = np.full(100, 5, np.uint8)
    cloud = PointCloud(rng.random((100, 3)), {"classification": classes})
    model = small_model()
    none = upsample(cloud, 1.0, model=model, only_new=True)
    some = upsample(cloud, 2.0, model=model, **options)
    assert len(none) == 0 < len(some)
    assert none.attributes.keys() == some.attributes.keys()
    assert none.attributes["classification"].dtype == np.uint8


@pytest.mark.parametrize("suffix", [".laz", ".xyz", ".csv", ".ply", ".npz"])
def test_a_file_that_pointup_wrote_is_upsampled_again_to_las(
    suffix: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / "b.las"
    once = upsample(PointCloud(positions(40), {}), 2.0, model=small_model())
    assert once.attributes["parent_index"].dtype == np.uint32
    write_points(first, once)
    assert command(first, "-o", second, "--ratio", "2").status == 0
    las = laspy.read(second)
    assert las.parent_index.dtype == np.uint32 and las.distance_to_measured.dtype == np.float32
    assert np.array_equal(las.parent_index[:80], once.attributes["parent_index"])
    again = upsample(read_points(first), 2.0, model=small_model())
    assert again.attributes["parent_index"].dtype == np.uint32


def test_a_wider_parent_index_of_a_las_file_is_kept(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    index = np.arange(40)[::-1].astype(np.int64)
    write_points(tmp_path / "a.las", PointCloud(positions(40), {"parent_index": index}))
    assert command(tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "b.las")
    assert las.parent_index.dtype == np.int64 and np.array_equal(las.parent_index[:40], index)
    assert las.parent_index[40:].max() < 40


def test_a_parent_index_that_is_no_index_is_refused(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", None)
    write_points(tmp_path / "a.csv", PointCloud(positions(9), {"parent_index": np.arange(-4, 5)}))
    result = command(tmp_path / "a.csv", "-o", tmp_path / "b.las")
    assert result.status == 1 and "parent_index: values -4 to 4 don't fit uint32" in result.err
