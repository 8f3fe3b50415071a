"""Errors of `pointup upsample` through the command line, and what a failure leaves on disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import laspy
import numpy as np
import pytest
from survey_files import (
    is_one_line,
    left_in,
    positions,
    write_las,
    write_random_las,
    write_two_tiles,
)

from pointup.cli import main as cli
from pointup.cli.upsample.files import check_size
from pointup.cli.upsample.plan import Job, plan_jobs
from pointup.errors import ConfigError, FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points
from pointup.model.upsampler import Upsampler
from pointup.upsampling import passes
from pointup.upsampling.new_points import NewPoints
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.store.point_store import Store


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("text.laz", "out.las", [], "not a whole LAS/LAZ file"),
        ("missing.las", "out.las", [], "no such file"),
        ("one.xyz", "out.las", [], "has 1 point"),
        ("in.las", "out.las", ["--ratio", "0.5"], "at least 1"),
        ("in.las", "out.las", ["--ratio", "2", "--density", "3"], "give one"),
        ("in.las", "out.las", ["--only-new", "--no-originals"], "give one"),
        ("in.las", "out.las", ["--only-new", "--ratio", "1"], "no points to write"),
        ("in.las", "out.las", ["--only-new", "--ratio", "1"], "none are new; raise --ratio or"),
        ("in.las", "out.las", ["--tile", "0"], "must be positive"),
        ("in.las", "out.las", ["--classes", "9"], "has 0 of 300 points without noise, withheld p"),
        ("in.las", "out.las", ["--classes", "ground", "2"], "--classes ground 2: give numbers, as"),
        ("in.las", "out.las", ["--picture", "nowhere/a.png"], "there is no folder nowhere"),
        ("in.las", "out.las", ["--model", "nowhere/at-all"], "nowhere/at-all"),
        ("in.las", "nowhere/out.las", [], "there is no folder"),
        ("in.las", "out.rcp", [], "unknown extension '.rcp' to write"),
        ("in.las", "in.las", [], "is the output, too"),
        ("in.las", "in.las/out", [], "in.las: is a file, and a folder is needed"),
    ],
)
def test_bad_files_options_and_outputs_are_reported_in_one_line_and_leave_nothing(
    source, target, options, message, tmp_path, command
):
    before = write_random_las(tmp_path / "in.las")
    (tmp_path / "text.laz").write_bytes(b"hello" * 100)
    (tmp_path / "one.xyz").write_bytes(b"1 2 3\n")
    model = {"model": options.pop()} if "--model" in options else {}
    words = options if not model else []
    result = command(tmp_path / source, "-o", tmp_path / target, *words, **model)
    assert result.status == 1
    assert is_one_line(result.err) and message in result.err
    assert left_in(tmp_path) == ["in.las", "one.xyz", "text.laz"]
    assert np.array_equal(laspy.read(tmp_path / "in.las").points.array, before)


def test_damaged_and_empty_files_of_a_folder_are_reported_and_the_others_are_written(
    tmp_path, command
):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_random_las(folder / "whole.laz")
    write_points(folder / "shape.ply", PointCloud(positions(50)))
    content = (folder / "whole.laz").read_bytes()
    (folder / "cut.laz").write_bytes(content[: len(content) * 2 // 3])
    (folder / "header.laz").write_bytes(content[:100])
    garbled = bytearray(content)
    garbled[-900:-400] = np.random.default_rng(0).bytes(500)
    (folder / "garbled.laz").write_bytes(garbled)
    laspy.LasData(laspy.LasHeader(version="1.4", point_format=6)).write(folder / "none.las")
    result = command(folder, "-o", out)
    assert result.status == 1 and result.err.count("pointup: error: ") == 3
    # Some of them have a header, and a note says that they overlap.
    assert result.err.count("\n") == 4 and result.err.startswith("note: ")
    # A tile without points is no failure.
    assert left_in(out) == ["none.las", "shape.ply", "whole.laz"]


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path, command, monkeypatch):
    write_random_las(tmp_path / "in.las")
    # A superuser, who may run the tests, can write in spite of permissions.
    monkeypatch.setattr("pointup.cli.upsample.upsample_command.os.access", lambda path, mode: False)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1 and is_one_line(result.err) and "can't be written to" in result.err
    assert left_in(tmp_path) == ["in.las"]


@pytest.mark.parametrize(
    ("option", "name"), [("--picture", "a.png"), ("--view", "a.html"), ("--rasters", "new/tif")]
)
def test_what_shows_points_is_refused_before_the_work_in_a_folder_that_cannot_be_written_to(
    option, name, tmp_path, command, monkeypatch
):
    if option == "--rasters":
        pytest.importorskip("rasterio")
    write_random_las(tmp_path / "in.las")
    shut = tmp_path / "shut"
    shut.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != shut)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", option, shut / name)
    assert result.status == 1 and is_one_line(result.err)
    assert f"{shut}: can't be written to" in result.err
    assert left_in(tmp_path) == ["in.las", "shut"]


def test_a_picture_that_cannot_be_written_is_an_error_of_a_file_that_is_written(
    tmp_path, command, monkeypatch
):
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "in").mkdir()
    write_random_las(tmp_path / "in" / "in.las")
    words = tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2"
    with monkeypatch.context() as patch:
        patch.setattr("pointup.visualization.page.imsave", full)
        result = command(*words, "--picture", tmp_path / "a.png")
    assert result.status == 1 and is_one_line(result.err) and "No space left" in result.err
    assert "1 file written, 1 error: from 300 to 600 points" in result.out
    assert "0 files written, 1 skipped" in command(*words).out


@pytest.mark.parametrize("output", ["-", os.devnull, "merged.laz"])
def test_names_that_are_no_folder_are_refused_for_several_files(
    output, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a.npy", "b.npy"):
        write_points(tmp_path / name, PointCloud(positions(20)))
    result = command("a.npy", "b.npy", "-o", output)
    assert result.status == 1 and is_one_line(result.err)
    assert f"-o {output}: " in result.err and "; name " in result.err
    assert left_in(tmp_path) == ["a.npy", "b.npy"]


def test_a_word_among_classes_is_a_file_that_is_missing(tmp_path, command):
    write_random_las(tmp_path / "in.las")
    words = tmp_path / "in.las", "-o", tmp_path / "out.las", "--classes", "2", "ground"
    result = command(*words)
    assert result.status == 1 and is_one_line(result.err)
    assert "error: ground: no such file or folder" in result.err
    assert left_in(tmp_path) == ["in.las"]


def test_what_exists_or_is_marked_as_a_folder_is_one(tmp_path):
    write_points(tmp_path / "a.npy", PointCloud(positions(20)))
    (tmp_path / "made.laz").mkdir()
    for output, is_folder in (("made.laz", False), ("run_v1.2", True)):
        (job,), _ = plan_jobs([tmp_path / "a.npy"], tmp_path / output, None, False, is_folder)
        assert job.target == tmp_path / output / "a.npy"


def test_two_files_with_the_same_output_are_refused(tmp_path, command):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_points(tmp_path / folder / "in.npy", PointCloud(positions(20)))
    result = command(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert result.status == 1 and is_one_line(result.err) and "both become" in result.err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(tmp_path, command, monkeypatch):
    write_random_las(tmp_path / "in.las")
    (tmp_path / "out.las").write_bytes(b"older")

    def full(*arguments: Any, **arrays: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for at_work in ("numpy.savez", "pickle.dump"):
        with monkeypatch.context() as patch:
            patch.setattr(at_work, full)
            result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
        assert result.status == 1 and is_one_line(result.err)
        assert "No space left on device; free space on its disk" in result.err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert is_one_line(result.err) and "make room" in result.err
    assert left_in(tmp_path) == ["in.las", "out.las"]
    assert (tmp_path / "out.las").read_bytes() == b"older"


def test_an_interrupt_leaves_nothing(tmp_path, command, monkeypatch):
    write_random_las(tmp_path / "in.las")

    def interrupt(store: Store, block: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "read_block", interrupt)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == cli.INTERRUPTED
    assert left_in(tmp_path) == ["in.las"]


def replace(path: Path) -> None:
    write_random_las(path.with_name("other.las"), 100)
    path.with_name("other.las").replace(path)


def rescale(path: Path) -> None:
    write_las(path, np.zeros((9, 3)), scale=1e-9, offset=np.zeros(3))


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"more")


@pytest.mark.parametrize("change", [replace, rescale, append, Path.unlink])
def test_an_input_that_changes_while_it_is_upsampled_is_an_error_and_nothing_is_written(
    change, tmp_path, command, monkeypatch
):
    write_random_las(tmp_path / "in.las")

    def run_passes(*arguments: Any, **options: Any) -> NewPoints:
        new_points = passes.run_passes(*arguments, **options)
        change(tmp_path / "in.las")
        return new_points

    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", run_passes)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1 and is_one_line(result.err)
    assert ("in.las: changed while it was upsampled" in result.err) == (change is not Path.unlink)
    assert "error: " in result.err and "in.las: " in result.err.partition("error: ")[2]
    assert "out.las" not in left_in(tmp_path)


def test_a_loop_of_links_is_no_output(tmp_path, command):
    write_random_las(tmp_path / "in.las")
    for name in ("a.las", "folder"):
        (tmp_path / name).symlink_to(tmp_path / f"{name}.link")
        (tmp_path / f"{name}.link").symlink_to(tmp_path / name)
        result = command(tmp_path / "in.las", "-o", tmp_path / name)
        assert result.status == 1
        assert is_one_line(result.err) and "a symbolic link that leads nowhere" in result.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(9, np.float32), "parent_index"),
        (np.arange(-4, 5), "parent_index: values -4 to 4 don't fit uint32"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_runs(
    values, message, tmp_path, command, monkeypatch
):
    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", None)
    name = "a.las" if values.dtype == np.float32 else "a.csv"
    write_points(tmp_path / name, PointCloud(positions(9), {"parent_index": values}))
    result = command(tmp_path / name, "-o", tmp_path / "b.las")
    assert result.status == 1 and is_one_line(result.err) and message in result.err
    assert left_in(tmp_path) == [name]


class Large(SimpleNamespace):
    def __len__(self) -> int:
        return 32_000_000


def test_the_disk_has_to_hold_the_ground_of_a_survey_too(tmp_path, monkeypatch):
    job, model = Job(Path("a.las"), tmp_path / "b.las", "forest"), Upsampler(slots_per_ratio=3.0)
    free = 2 * len(Large()) * (100 + 3 * 16)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_size([job], Large(), UpsampleOptions(ratio=2.0), model)
    with pytest.raises(FileError, match=r"about 14\.6 GB, .* has 9\.47 GB; make room"):
        check_size([job], Large(), UpsampleOptions(ratio=2.0, above_ground=True), model)


def test_a_density_is_checked_by_the_area(tmp_path):
    side = np.array([[4000.0, 2000.0, 50.0]])
    store, job = Large(low=0 * side, high=side), Job(Path("a.las"), tmp_path / "b.las", "forest")
    model = Upsampler(max_pass_ratio=64.0)
    check_size([job], store, UpsampleOptions(density=40.0), model)
    with pytest.raises(ConfigError, match="density 300 makes up to 2,048,000,000 points"):
        check_size([job], store, UpsampleOptions(density=300.0), model)


def test_a_view_of_nothing_is_noted(tmp_path, command):
    write_two_tiles(tmp_path / "in")
    paths = tmp_path / "in", "-o", tmp_path / "out", "--view", tmp_path / "a.html", "--ratio"
    for rest in (("2", "--shard", "1/4"), ("1", "--only-new")):
        result = command(*paths, *rest)
        assert result.status == 0 and "no file to show" in result.err
