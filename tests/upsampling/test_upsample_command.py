"""The output of `pointup upsample`, from file to file, through the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pytest
from forked import run_forked
from scipy.spatial import cKDTree
from typed import WKT, Result, digest, is_one_line, left_in, positions, write_las

from pointup import upsample
from pointup.io.files import PointCloud, read_points, write_points


@pytest.mark.parametrize(("suffix", "point_format"), [(".las", 7), (".laz", 7), (".las", 3)])
def test_las_keeps_every_original_and_adds_synthetic_points(
    suffix: str, point_format: int, tmp_path: Path, command: Callable[..., Result]
) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    before = write_las(source, point_format=point_format)
    result = command(source, "-o", target, "--ratio", "2.5")
    assert result.status == 0 and result.err == ""
    assert "300 points in, 750 out" in result.out and result.out.count("\n") == 1
    made = laspy.read(target)
    assert len(made.points) == 750
    raw = made.points.array
    for name in before.dtype.names:
        assert np.array_equal(raw[name][:300], before[name]), name
    original = laspy.read(source)
    assert made.header.point_format.id == point_format
    assert np.array_equal(made.header.scales, original.header.scales)
    assert np.array_equal(made.header.offsets, original.header.offsets)
    assert any(WKT.record_data in vlr.record_data_bytes() for vlr in made.header.vlrs)
    assert np.asarray(made.synthetic).tolist() == [0] * 300 + [1] * 450
    assert np.array_equal(made.parent_index[:300], np.arange(300))
    distance, nearest = cKDTree(original.xyz).query(made.xyz[300:], k=2)
    assert np.allclose(made.distance_to_measured[300:], distance[:, 0], atol=0.02)
    is_clear = distance[:, 0] < distance[:, 1] - 0.03
    for name in ("classification", "return_number", "gps_time", "height"):
        values = np.asarray(made[name])[300:][is_clear]
        expected = np.asarray(original[name])[nearest[is_clear, 0]]
        # The class of new points is not always that of the nearest point.
        is_ground = (name == "classification") & ((values == 2) | (expected == 2))
        assert np.array_equal(values[~is_ground], expected[~is_ground]), name
        assert np.mean(is_ground) < 0.3
    assert len(set(np.asarray(made.intensity)[300:]) - set(np.asarray(original.intensity))) > 100


@pytest.mark.parametrize("suffix", [".ply", ".csv", ".npz", ".xyz"])
def test_other_formats_keep_their_attributes(
    suffix: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    cloud = PointCloud(positions(100), {"label": np.arange(100), "weight": np.arange(100) / 7})
    write_points(source, cloud)
    assert command(source, "-o", target).status == 0
    before, after = read_points(source), read_points(target)
    assert len(after) == 400
    assert np.array_equal(after.positions[:100], before.positions)
    for name, values in before.attributes.items():
        assert np.array_equal(after.attributes[name][:100], values)
        assert np.isin(after.attributes[name][100:], values).all()
    assert after.attributes["synthetic"].sum() == 300
    assert set(after.attributes) - set(before.attributes) == {
        "synthetic",
        "parent_index",
        "distance_to_measured",
    }


def test_the_format_follows_the_name(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_las(tmp_path / "in.laz")
    assert command(tmp_path / "in.laz", "-o", tmp_path / "out.ply").status == 0
    assert command(tmp_path / "out.ply", "-o", tmp_path / "again.laz", "--ratio", "1").status == 0
    made = laspy.read(tmp_path / "again.laz")
    assert len(made.points) == 1200 and np.asarray(made.synthetic).sum() == 900


def test_a_las_output_has_the_whole_extent_of_a_file_of_another_format(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    cloud = PointCloud(np.concatenate([1e-3 * positions(30), 1e3 * positions(30, seed=1)]))
    write_points(tmp_path / "in.npy", cloud)
    assert command(tmp_path / "in.npy", "-o", tmp_path / "out.laz").status == 0
    extent = np.ptp(cloud.positions)
    made = laspy.read(tmp_path / "out.laz").xyz
    assert np.abs(made[:60] - cloud.positions).max() < 1e-6 * extent
    assert np.asarray(laspy.read(tmp_path / "out.laz").synthetic).sum() == 180


def test_originals_or_new_points_can_be_left_out(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in.las")
    for name, options in (("all", []), ("new", ["--only-new"]), ("model", ["--no-originals"])):
        assert command(tmp_path / "in.las", "-o", tmp_path / f"{name}.las", *options).status == 0
    every, new, model = (laspy.read(tmp_path / f"{name}.las") for name in ("all", "new", "model"))
    assert np.array_equal(every.points.array[300:], new.points.array)
    assert len(model.points) == 1200 and np.asarray(model.synthetic).all()


def test_the_command_and_python_make_the_same_points(
    tmp_path: Path, command: Callable[..., Result], model_directory: Path
) -> None:
    write_points(tmp_path / "in.npy", PointCloud(positions(200)))
    options = ("--density", "8", "--max-distance", "0.4", "--seed", "3")
    assert command(tmp_path / "in.npy", "-o", tmp_path / "out.npy", *options).status == 0
    made = upsample(positions(200), density=8.0, max_distance=0.4, seed=3, model=model_directory)
    assert 600 < len(made) < 900
    assert np.array_equal(read_points(tmp_path / "out.npy").positions, made)


def test_the_largest_distance_holds_after_rounding_to_the_scale_of_the_file(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.scales, header.offsets = np.full(3, 0.01), np.array([5e5, 4e6, 0.0])
    las = laspy.LasData(header)
    # Points 5 cm apart, so that there is room for new ones.
    las.xyz = positions(600) * (0.1, 0.1, 0.02) + (4.5e5, 3.59e6, 0)
    las.write(tmp_path / "in.las")
    words = tmp_path / "in.las", "-o", tmp_path / "out.las", "--ratio", "3", "--max-distance"
    assert command(*words, "0.02").status == 0
    made = laspy.read(tmp_path / "out.las")
    is_new = np.asarray(made.synthetic) == 1
    assert is_new.sum() > 100
    distance = cKDTree(made.xyz[~is_new]).query(made.xyz[is_new])[0]
    assert distance.max() <= 0.02 + 1e-9
    result = command(*words, "0.005")
    assert result.status == 1 and is_one_line(result.err)
    assert "rounded by up to 0.00866" in result.err and "give a larger one" in result.err


@pytest.mark.parametrize("has_outlier", [False, True])
def test_the_share_of_the_area_that_misses_a_density_is_noted(
    has_outlier: bool, tmp_path: Path, command: Callable[..., Result]
) -> None:
    # Half of the area has 1 point in a square unit, which becomes 16; the rest has 6.
    rng = np.random.default_rng(0)
    sparse, dense = rng.random((800, 2)) * (20, 40), rng.random((4800, 2)) * (20, 40) + (20, 0)
    points = np.pad(np.concatenate([sparse, dense]), ((0, 0), (0, 1)))
    if has_outlier:
        points = np.append(points, [[1000.0, 0.0, 0.0]], axis=0)
    write_points(tmp_path / "in.npy", PointCloud(points))
    words = tmp_path / "in.npy", "-o", tmp_path / "out.npy"
    result = command(*words, "--density", "40", "--only-new")
    found = re.search(r"was not reached: .* at most 16, too few on (\d+)% of the area", result.out)
    assert found and abs(int(found[1]) - 50) <= 5
    assert "not reached" not in command(*words, "--density", "6", "--only-new").out


@pytest.mark.parametrize("oversampling", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_tiles_and_processes_give_the_same_file(
    oversampling: str,
    tmp_path: Path,
    command: Callable[..., Result],
    model_directory: Path,
) -> None:
    # Points enough for several blocks.
    rng = np.random.default_rng(0)
    cloud = PointCloud(np.column_stack([40 * rng.random((9_000, 2)), rng.random(9_000)]).round(2))
    write_points(tmp_path / "in.las", cloud)
    options = ["--ratio", "1.5", "--oversampling", oversampling]
    for tile in ("5", "100"):
        target = tmp_path / f"{tile}.laz"
        assert command(tmp_path / "in.las", "-o", target, *options, "--tile", tile)[0] == 0
    modules = "pointup.cli.main,pointup.cli.upsample.files"
    words = (tmp_path / "in.las", "-o", tmp_path / "two.laz", "--model", model_directory, *options)
    result = run_forked(modules, "upsample", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("9,000 points in, 13,500 out") == 1
    files = [digest(tmp_path / f"{name}.laz") for name in ("5", "100", "two")]
    assert files[0] == files[1] == files[2]
    assert left_in(tmp_path) == ["100.laz", "5.laz", "in.las", "two.laz"]


def test_a_picture_shows_before_and_after(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_las(tmp_path / "in.las")
    picture = tmp_path / "out.png"
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", "--picture", picture)
    assert result.status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_goes_into_a_folder_and_its_bad_file_is_reported(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    write_las(folder / "a.laz")
    (folder / "b.laz").write_bytes((folder / "a.laz").read_bytes()[:2000])
    write_points(folder / "c.ply", PointCloud(positions(50)))
    result = command(folder, "-o", out)
    assert result.status == 1
    assert is_one_line(result.err) and "b.laz" in result.err
    assert left_in(out) == ["a.laz", "c.ply"]
    assert result.out.count("points in") == 2


def test_the_summary_names_coincident_points(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    once, twice = positions(200), np.concatenate([positions(200), positions(200)[:50]])
    clouds = (
        ("once", once, "200 points in,"),
        ("twice", twice, "250 points in (50 of them where "),
    )
    for name, points, words in clouds:
        write_points(tmp_path / f"{name}.xyz", PointCloud(points))
        result = command(tmp_path / f"{name}.xyz", "-o", tmp_path / f"{name}_out.xyz")
        assert result.status == 0
        assert words in result.out and f"{len(points) + 600} out" in result.out
