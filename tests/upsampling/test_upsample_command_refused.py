"""Errors of `pointup upsample` through the command line, and what a failure leaves on disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import laspy
import numpy as np
import pytest
from typed import Result, is_one_line, left_in, positions, write_las, write_two_tiles

from pointup.cli import main as cli
from pointup.cli.upsample.files import _check_size
from pointup.cli.upsample.plan import Job
from pointup.errors import ConfigError
from pointup.io.files import PointCloud, read_points, write_points
from pointup.model.upsampler import Upsampler
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass import upsampling_pass as job
from pointup.upsampling.store.point_store import Store


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("text.laz", "out.las", [], "not a whole LAS/LAZ file"),
        ("missing.las", "out.las", [], "no such file"),
        ("one.xyz", "out.las", [], "has 1 point"),
        ("in.las", "out.las", ["--ratio", "0.5"], "at least 1"),
        ("in.las", "out.las", ["--ratio", "1000"], "300,000 points of 300, about 30.0 MB; lower"),
        ("in.las", "out.las", ["--ratio", "2", "--density", "3"], "give one"),
        ("in.las", "out.las", ["--only-new", "--no-originals"], "give one"),
        ("in.las", "out.las", ["--only-new", "--ratio", "1"], "no points to write"),
        ("in.las", "out.las", ["--tile", "0"], "must be positive"),
        ("in.las", "out.las", ["--picture", "nowhere/a.png"], "there is no folder nowhere"),
        ("in.las", "out.las", ["--model", "nowhere/at-all"], "nowhere/at-all"),
        ("in.las", "nowhere/out.las", [], "there is no such folder"),
        ("in.las", "out.rcp", [], "unknown extension '.rcp' to write"),
        ("in.las", "in.las", [], "is the output, too"),
        ("in.las", "in.las/out", [], "in.las: is a file, and a folder is needed"),
    ],
)
def test_bad_files_options_and_outputs_are_reported_in_one_line_and_leave_nothing(
    source: str,
    target: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
    before = write_las(tmp_path / "in.las")
    (tmp_path / "text.laz").write_bytes(b"hello" * 100)
    (tmp_path / "one.xyz").write_bytes(b"1 2 3\n")
    model = {"model": options.pop()} if "--model" in options else {}
    words = options if not model else []
    result = command(tmp_path / source, "-o", tmp_path / target, *words, **model)
    assert result.status == 1
    assert is_one_line(result.err) and message in result.err
    assert left_in(tmp_path) == ["in.las", "one.xyz", "text.laz"]
    assert np.array_equal(laspy.read(tmp_path / "in.las").points.array, before)


def test_a_folder_that_cannot_be_written_to_is_reported(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_las(tmp_path / "in.las")
    # A superuser, who may run the tests, can write in spite of permissions.
    monkeypatch.setattr("pointup.cli.upsample.upsample_command.os.access", lambda path, mode: False)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1 and is_one_line(result.err) and "can't be written to" in result.err
    assert left_in(tmp_path) == ["in.las"]


def test_force_skips_the_check_of_the_size(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_points(tmp_path / "in.npy", PointCloud(positions(20)))
    result = command(tmp_path / "in.npy", "-o", tmp_path / "o.npy", "--ratio", "101", "--force")
    assert result.status == 0
    assert len(read_points(tmp_path / "o.npy")) == 2020


@pytest.mark.parametrize("output", ["-", os.devnull, "merged.laz"])
def test_names_that_are_no_folder_are_refused_for_several_files(
    output: str, tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.npy", "b.npy"):
        write_points(tmp_path / name, PointCloud(positions(20)))
    result = command("a.npy", "b.npy", "-o", output)
    assert result.status == 1 and is_one_line(result.err)
    assert f"-o {output}: " in result.err and "; name " in result.err
    assert left_in(tmp_path) == ["a.npy", "b.npy"]
    # What the caller has made, or marks as a folder, is one.
    (tmp_path / "made.laz").mkdir()
    for folder in ("made.laz", "run_v1.2/"):
        assert command("a.npy", "-o", folder, "--ratio", "1.5").status == 0
        assert left_in(tmp_path / folder) == ["a.npy"]


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


def test_an_output_that_cannot_be_written_is_refused_before_the_model_runs(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object) -> None:
        raise AssertionError("the model runs")

    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", run)
    write_las(tmp_path / "in.las")
    las = laspy.read(tmp_path / "in.las")
    las.add_extra_dim(laspy.ExtraBytesParams("parent_index", "float32"))
    las.write(tmp_path / "in.las")
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 1 and is_one_line(result.err) and "parent_index" in result.err
    assert left_in(tmp_path) == ["in.las"]


def test_a_density_is_checked_by_the_area(tmp_path: Path) -> None:
    class Large(SimpleNamespace):
        def __len__(self) -> int:
            return 32_000_000

    side = np.array([[4000.0, 2000.0, 50.0]])
    store, job = Large(low=0 * side, high=side), Job(Path("a.las"), tmp_path / "b.las", "forest")
    model = Upsampler(max_pass_ratio=64.0)
    _check_size([job], store, UpsampleOptions(density=40.0), model, False)
    with pytest.raises(ConfigError, match="density 300 makes up to 2,048,000,000 points"):
        _check_size([job], store, UpsampleOptions(density=300.0), model, False)


def test_a_view_of_nothing_is_noted(tmp_path: Path, command: Callable[..., Result]) -> None:
    write_two_tiles(tmp_path / "in")
    paths = tmp_path / "in", "-o", tmp_path / "out", "--view", tmp_path / "a.html", "--ratio"
    for rest in (("2", "--shard", "1/4"), ("1", "--only-new")):
        result = command(*paths, *rest)
        assert result.status == 0 and "no file to show" in result.err
