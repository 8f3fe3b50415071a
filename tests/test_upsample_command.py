"""`pointup upsample`, from file to file, as it is typed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import ANY

import laspy
import numpy as np
import pytest
import torch
from laspy.vlrs.vlr import VLR
from scipy.spatial import cKDTree

from pointup import Upsampler, upsample
from pointup.apps import cli
from pointup.data.files import PointCloud, read_points, write_points
from pointup.upsampling import job
from pointup.upsampling.store import Store

WKT = VLR("LASF_Projection", 2112, "WKT", b'LOCAL_CS["somewhere"]')


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Upsampler(feature_dim=8, k=6, num_layers=1, heads=2, child_heads=2)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.1 * torch.randn_like(weights)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(model_directory: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `pointup upsample` with the small model."""

    def run(*arguments: str | Path, model: str | Path = model_directory) -> Result:
        words = ["upsample", *map(str, arguments), "--model", str(model)]
        return Result(cli.main(words), *capfd.readouterr())

    return run


def positions(num_points: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x, y = 10 * rng.random((2, num_points))
    return np.column_stack([x + 5e5, y + 4.1e6, 2 * np.sin(x)]).round(2)


def write_las(path: Path, num_points: int = 300, point_format: int = 7) -> np.ndarray:
    """A survey whose attributes are random, with a CRS and an extra dimension."""
    rng = np.random.default_rng(point_format)
    version = "1.4" if point_format > 5 else "1.2"
    header = laspy.LasHeader(version=version, point_format=point_format)
    header.scales, header.offsets = np.full(3, 0.01), np.array([5e5, 4e6, 0.0])
    header.add_extra_dim(laspy.ExtraBytesParams("height", "int16", scales=[0.1], offsets=[5.0]))
    header.vlrs.append(WKT)
    las = laspy.LasData(header)
    las.xyz = positions(num_points)
    for name, top in (("intensity", 2**16), ("red", 2**16), ("classification", 20)):
        las[name] = rng.integers(0, top, num_points)
    las.gps_time = np.sort(rng.random(num_points))
    las.return_number = rng.integers(1, 6, num_points)
    las.height = rng.integers(0, 100, num_points) / 10
    las.write(path)
    return np.asarray(las.points.array)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_one_line(text: str) -> bool:
    return text.startswith("pointup: error: ") and text.count("\n") == 1


# What it writes


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
        values, expected = np.asarray(made[name])[300:], np.asarray(original[name])
        assert np.array_equal(values[is_clear], expected[nearest[is_clear, 0]]), name
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


def test_a_las_file_holds_the_whole_extent_of_another_kind(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    cloud = PointCloud(np.concatenate([1e-3 * positions(30), 1e3 * positions(30, seed=1)]))
    write_points(tmp_path / "in.npy", cloud)
    assert command(tmp_path / "in.npy", "-o", tmp_path / "out.laz").status == 0
    extent = np.ptp(cloud.positions)
    made = laspy.read(tmp_path / "out.laz").xyz
    assert np.abs(made[:60] - cloud.positions).max() < 1e-6 * extent
    assert np.asarray(laspy.read(tmp_path / "out.laz").synthetic).sum() == 180


def test_parts_can_be_left_out(tmp_path: Path, command: Callable[..., Result]) -> None:
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


def test_tiles_and_processes_give_the_same_file(
    tmp_path: Path,
    command: Callable[..., Result],
    launch: Callable[..., Any],
    model_directory: Path,
) -> None:
    # Points enough for several blocks.
    rng = np.random.default_rng(0)
    cloud = PointCloud(np.column_stack([40 * rng.random((9_000, 2)), rng.random(9_000)]).round(2))
    write_points(tmp_path / "in.las", cloud)
    arguments = ["upsample", tmp_path / "in.las", "--model", model_directory, "--ratio", "1.5"]
    for tile in ("5", "100"):
        target = tmp_path / f"{tile}.laz"
        assert command(tmp_path / "in.las", "-o", target, "--ratio", "1.5", "--tile", tile)[0] == 0
    result = launch("pointup", *arguments, "-o", tmp_path / "two.laz", script="-m", num_processes=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("9,000 points in, 13,500 out") == 1
    files = [(tmp_path / f"{name}.laz").read_bytes() for name in ("5", "100", "two")]
    assert files[0] == files[1] == files[2]
    assert left_in(tmp_path) == ["100.laz", "5.laz", "in.las", "two.laz"]


def test_a_picture_shows_before_and_after(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_las(tmp_path / "in.las")
    picture = tmp_path / "out.png"
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", "--picture", picture)
    assert result.status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_goes_into_a_folder_and_its_bad_file_is_told(
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


# What it refuses


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.las", b"", "0 bytes"),
        ("none.csv", b"x,y,z\n", "no points"),
        ("one.xyz", b"1 2 3\n", "has 1 point"),
        ("place.xyz", b"1 2 3\n" * 5, "all 5 points are in one place"),
        ("nan.xyz", b"1 2 3\n4 5 nan\n", "NaN"),
        ("text.laz", b"hello" * 100, "not a whole LAS/LAZ file"),
        ("cloud.e57", b"hello", "unknown extension '.e57'"),
        ("missing.las", None, "no such file"),
        ("points", b"1 2 3\n", "without an extension"),
    ],
)
def test_bad_files_are_told_in_one_line(
    name: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = command(tmp_path / name, "-o", out / "made.las")
    assert result.status == 1
    assert is_one_line(result.err)
    assert name in result.err and message in result.err
    assert left_in(out) == []


def test_damaged_and_empty_surveys_are_told_in_one_line(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    write_las(folder / "whole.laz")
    content = (folder / "whole.laz").read_bytes()
    (folder / "cut.laz").write_bytes(content[: len(content) * 2 // 3])
    (folder / "header.laz").write_bytes(content[:100])
    garbled = bytearray(content)
    garbled[-900:-400] = np.random.default_rng(0).bytes(500)
    (folder / "garbled.laz").write_bytes(garbled)
    laspy.LasData(laspy.LasHeader(version="1.4", point_format=6)).write(folder / "none.las")
    for name in ("cut.laz", "header.laz", "garbled.laz", "none.las"):
        result = command(folder / name, "-o", out / "made.laz")
        assert result.status == 1 and is_one_line(result.err) and name in result.err
        assert left_in(out) == []
    result = command(folder, "-o", out)
    assert result.status == 1 and result.err.count("pointup: error: ") == 4
    assert result.err.count("\n") == 4
    assert left_in(out) == ["whole.laz"]


def test_clouds_that_are_hardly_clouds_are_upsampled(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    few = positions(3)
    clouds = {
        "few": few,
        "twice": np.repeat(positions(30), 2, axis=0),
        "line": np.arange(50.0)[:, None] * (1, 2, 0.5) + 5e5,
    }
    for name, points in clouds.items():
        write_points(tmp_path / f"{name}.npy", PointCloud(points))
        target = tmp_path / f"{name}.laz"
        assert command(tmp_path / f"{name}.npy", "-o", target) == (0, ANY, "")
        assert len(laspy.read(target).points) == 4 * len(points)


def test_what_is_no_model_is_told_in_one_line(
    tmp_path: Path, command: Callable[..., Result], model_directory: Path
) -> None:
    write_las(tmp_path / "in.las")
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(model_directory, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"cut")
    before = left_in(tmp_path)
    for model in (tmp_path / "empty", tmp_path / "in.las", broken):
        result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", model=model)
        assert result.status == 1 and is_one_line(result.err) and str(model) in result.err
        assert left_in(tmp_path) == before


def test_a_folder_that_cannot_be_written_to_is_told(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_las(tmp_path / "in.las")
    # Permissions don't keep out a superuser, who may run the tests.
    monkeypatch.setattr("pointup.apps.upsample.os.access", lambda path, mode: False)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1 and is_one_line(result.err) and "can't be written to" in result.err
    assert left_in(tmp_path) == ["in.las"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.5"], "at least 1"),
        (["--ratio", "nan"], "at least 1"),
        (["--ratio", "1000"], "300,000 points of 300, about 30.0 MB; lower it, or add --force"),
        (["--ratio", "2", "--density", "3"], "give one"),
        (["--only-new", "--no-originals"], "give one"),
        (["--only-new", "--ratio", "1"], "no points to write"),
        (["--tile", "0"], "must be positive"),
        (["--density", "-3"], "must be positive"),
        (["--model", "nowhere/at-all"], "nowhere/at-all"),
    ],
)
def test_bad_options_are_told_in_one_line(
    options: list[str], message: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in.las")
    model = options.pop() if "--model" in options else None
    if model:
        result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", model=model)
    else:
        result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", *options)
    assert result.status == 1
    assert is_one_line(result.err) and message in result.err
    assert left_in(tmp_path) == ["in.las"]


def test_force_goes_ahead(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_points(tmp_path / "in.npy", PointCloud(positions(20)))
    result = command(tmp_path / "in.npy", "-o", tmp_path / "o.npy", "--ratio", "101", "--force")
    assert result.status == 0
    assert len(read_points(tmp_path / "o.npy")) == 2020


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere/out.las", "there is no such folder"),
        ("out.e57", "unknown extension '.e57' to write"),
        ("in.las", "is the output, too"),
        ("out.copc.laz", "COPC files can't be written"),
    ],
)
def test_bad_outputs_are_told_in_one_line(
    target: str, message: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    before = write_las(tmp_path / "in.las")
    result = command(tmp_path / "in.las", "-o", tmp_path / target)
    assert result.status == 1
    assert is_one_line(result.err) and message in result.err
    assert left_in(tmp_path) == ["in.las"]
    assert np.array_equal(laspy.read(tmp_path / "in.las").points.array, before)


def test_two_files_of_one_name_are_not_mixed_up(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    for folder in ("a", "b", "out"):
        (tmp_path / folder).mkdir()
    write_points(tmp_path / "a" / "in.npy", PointCloud(positions(20)))
    write_points(tmp_path / "b" / "in.npy", PointCloud(positions(30)))
    result = command(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert result.status == 1 and is_one_line(result.err) and "same name" in result.err
    assert len(read_points(tmp_path / "out" / "in.npy")) == 80


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_las(tmp_path / "in.las")
    (tmp_path / "out.las").write_bytes(b"older")

    def full(*arguments: Any, **arrays: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(job.np, "savez", full)
        result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1
    assert is_one_line(result.err) and "No space left on device" in result.err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert is_one_line(result.err) and "make room" in result.err
    assert left_in(tmp_path) == ["in.las", "out.las"]
    assert (tmp_path / "out.las").read_bytes() == b"older"


def test_an_interrupt_leaves_nothing(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_las(tmp_path / "in.las")

    def interrupt(store: Store, block: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "read_block", interrupt)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == cli.INTERRUPTED
    assert left_in(tmp_path) == ["in.las"]
