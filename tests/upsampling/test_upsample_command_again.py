"""`pointup upsample` again: calls that skip what is written, and continue where others stopped.

Then the work directory of a survey, its lock, and what a killed call leaves of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sheets import sheet
from survey_files import WIDTH, surface, upsample, write_las, write_model, write_row

from pointup.cli.upsample.files import Written, work_directory
from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.written_files import FinishedFiles
from pointup.errors import FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import open_writer, read_points
from pointup.io.virtual_clouds import files_of
from pointup.model.upsampler import Upsampler


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tiles(tmp_path) -> Path:
    return write_row(tmp_path / "tiles")


def test_a_second_call_skips_what_is_written_and_says_so(tiles, tmp_path, model, capsys):
    out = tmp_path / "out"
    assert upsample(model, tiles, "-o", out, "--separate") == 0
    assert "3 files written: from 1,200 to 2,400 points" in capsys.readouterr().out
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("*.las")}

    def rewritten() -> set[str]:
        now = {p.name: p.stat().st_mtime_ns for p in out.glob("*.las")}
        changed = {name for name in now if now[name] != times.get(name)}
        times.update(now)
        return changed

    (out / "1.las").unlink()
    assert upsample(model, tiles, "-o", out, "--separate") == 0
    text = capsys.readouterr().out
    assert rewritten() == {"1.las"}
    assert f"{tiles / '0.las'}: already written, skipped: {out / '0.las'}" in text
    assert "1 file written, 2 skipped, which were already written (see --redo)" in text

    (out / "2.las").write_bytes(b"cut short")
    assert upsample(model, tiles, "-o", out, "--separate") == 0
    assert rewritten() == {"2.las"}
    write_las(tiles / "0.las", surface(300, 5, WIDTH))
    assert upsample(model, tiles, "-o", out, "--separate") == 0
    assert rewritten() == {"0.las"}
    assert upsample(model, tiles, "-o", out, "--separate", "--seed", 1) == 0
    assert len(rewritten()) == 3, "other options"

    # Of the same model in another directory, and of one with another configuration.
    for exponent, number in ((None, 0), (0.3, 3)):
        other = Upsampler.from_pretrained(model)
        if exponent:
            other.config = replace(other.config, density_exponent=exponent)
        other.save_pretrained(tmp_path / "model")
        assert upsample(tmp_path / "model", tiles, "-o", out, "--separate", "--seed", 1) == 0
        assert len(rewritten()) == number


def test_what_calls_with_other_options_left_is_not_listed(tiles, tmp_path, model):
    def listed(*words: object) -> list[str]:
        assert upsample(model, tiles, "-o", tmp_path / "out", *words) == 0
        return [path.name for path in files_of(tmp_path / "out" / "out.vpc")]

    assert listed() == ["0.las", "1.las", "2.las"]
    assert listed("--bounds", 500_002, 4_000_000, 500_079, 4_000_020) == ["0.las", "1.las"]
    assert listed("--bounds", 500_002, 4_000_000, 500_039, 4_000_020) == ["0.las"]
    # A job of an array lists what the others wrote.
    assert listed("--seed", 1, "--shard", "1/3") == ["0.las"]
    assert listed("--seed", 1, "--shard", "3/3") == ["0.las", "2.las"]


def test_names_as_long_as_file_systems_allow_are_written_and_skipped(tmp_path, model, capsys):
    (tmp_path / "in").mkdir()
    name = "n" * 251 + ".las"
    write_las(tmp_path / "in" / name, surface(300, 5))
    for expected in ("1 file written: from 300 to 600 points", "1 skipped"):
        assert upsample(model, tmp_path / "in", "-o", tmp_path / "out") == 0
        assert expected in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, ".upsampled"}


def test_a_second_call_skips_the_only_file_of_a_folder_and_says_so(tiles, tmp_path, model, capsys):
    for name in ("1.las", "2.las"):
        (tiles / name).unlink()
    out = tmp_path / "out"
    # A file that is given by its name goes into the same folder.
    for source, words, number in (
        (tiles, (), 1),
        (tiles, (), 0),
        (tiles / "0.las", (), 0),
        (tiles, ("--redo",), 1),
        (tiles, ("--picture", tmp_path / "drawn.png"), 1),
    ):
        before = {path: path.stat().st_mtime_ns for path in out.glob("*.las")}
        assert upsample(model, source, "-o", out, *words) == 0
        after = {path: path.stat().st_mtime_ns for path in out.glob("*.las")}
        assert list(after) == [out / "0.las"] and (after != before) == bool(number)
        text = capsys.readouterr().out
        skipped = "" if number else ", 1 skipped, which were already written (see --redo)"
        written = "1 file written" if number else "0 files written"
        points = ": from 408 to 816 points" if number else ""
        assert f"{written}{skipped}{points}, " in text
        assert ("already written, skipped" in text) == (not number)
    assert (tmp_path / "drawn.png").exists()

    # An output file is written at each call.
    for _ in range(2):
        assert upsample(model, tiles / "0.las", "-o", tmp_path / "one.las") == 0
        text = capsys.readouterr().out
        assert "skipped" not in text and "written" not in text


def test_the_only_file_of_a_folder_is_copied_if_it_has_nothing_to_upsample(
    tiles, tmp_path, model, capsys
):
    for name in ("1.las", "2.las"):
        (tiles / name).unlink()
    out = tmp_path / "out"
    bounds = ("--bounds", 0, 0, 1, 1)
    for number, what in ((0, "no points in it"), (1, "1 points in, fewer than 2")):
        write_las(tiles / "0.las", surface(number, 1))
        assert upsample(model, tiles, "-o", out) == 0
        text = capsys.readouterr()
        assert f"{tiles / '0.las'}: {what}" in text.out and f"copied: {out / '0.las'}\n" in text.out
        written = "1 file written" if number else "0 files written"
        assert f"{written}: from {number} to {number} points" in text.out
        assert text.err == ""
        assert (out / "0.las").read_bytes() == (tiles / "0.las").read_bytes()
        # There is nothing to draw, nothing within bounds, and no folder to copy into.
        for source, target, words in (
            (tiles, out, ("--picture", tmp_path / "drawn.png")),
            (tiles, tmp_path / "part", bounds),
            (tiles / "0.las", tmp_path / "one.las", ()),
        ):
            assert upsample(model, source, "-o", target, *words) == 1
            text = capsys.readouterr()
            assert text.err.startswith("pointup: error: ") and text.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiles"]


@pytest.mark.slow
def test_a_folder_whose_call_was_killed_continues_with_the_survey_that_was_not_finished(
    tiles, tmp_path, model, capsys
):
    # A second survey of two files, far from the first.
    for i in (3, 4):
        write_las(tiles / f"{i}.las", surface(400, i, WIDTH) + np.array([1e5 + i * WIDTH, 0, 0]))
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert upsample(model, tiles, "-o", whole) == 0
    command = [sys.executable, "-m", "pointup", "upsample", tiles, "-o", out, "--model", model,
               "--ratio", "2"]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (out / ".3.las.work" / "survey" / "blocks.npz").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert sorted(p.name for p in out.glob("*.las")) == ["0.las", "1.las", "2.las"]
    times = {p: p.stat().st_mtime_ns for p in out.glob("*.las")}
    capsys.readouterr()
    assert upsample(model, tiles, "-o", out) == 0
    assert "2 files written, 3 skipped" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    for path in whole.glob("*.las"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert [p.name for p in out.glob(".*")] == [".upsampled"]

    # One file of a survey is missing: the whole survey is done again.
    (out / "4.las").unlink()
    assert upsample(model, tiles, "-o", out) == 0
    assert "2 files written, 3 skipped" in capsys.readouterr().out


class SingleProcess:
    is_main = True

    @contextmanager
    def barrier(self) -> Iterator[None]:
        yield

    def from_main(self, value: Any) -> Any:
        return value


def call_for(*targets: Path) -> AbstractContextManager[Path]:
    workers: Any = SingleProcess()
    return work_directory([Job(Path("input.txt"), target, "shapes") for target in targets], workers)


def test_a_second_call_for_a_survey_is_refused_and_the_first_one_goes_on(tmp_path):
    a, b, c = (tmp_path / f"{name}.txt" for name in "abc")
    cloud = PointCloud(sheet(20))
    with call_for(a, b) as first:
        with open_writer(b, cloud) as writer:
            writer.write(cloud)
            for others, refusal in (
                ((a,), r"a\.txt: another call upsamples into it"),
                ((b, a), r"a\.txt: another call upsamples into it"),
                ((b,), r"b\.txt: another call may be writing it"),
            ):
                with (
                    pytest.raises(FileError, match=refusal),
                    call_for(*others),
                ):
                    pass
            with call_for(c) as second:
                assert first.is_dir() and second.is_dir() and first != second
        assert len(read_points(b)) == 20
    with call_for(c, b, a):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_a_call_into_a_folder_waits_for_the_surveys_of_another_call(
    tiles, tmp_path, model, capsys, monkeypatch
):
    out = tmp_path / "out"
    command = (tiles, "-o", out, "--separate")
    assert upsample(model, *command) == 0
    done = {path: path.read_bytes() for path in out.glob("*.las")}
    (out / "0.las").unlink()
    (out / "1.las").unlink()
    capsys.readouterr()
    other = ExitStack()
    other.enter_context(call_for(out / "0.las"))

    def other_ends(_: float) -> None:
        if (out / "1.las").exists() and not (out / "0.las").exists():
            (out / "0.las").write_bytes(done[out / "0.las"])
            other.close()

    monkeypatch.setattr("time.sleep", other_ends)
    assert upsample(model, *command) == 0
    found = capsys.readouterr()
    assert "1 file written, 2 skipped" in found.out and "error" not in found.out + found.err
    waits = f"note: {out / '0.las'}: another call upsamples into it; waiting for its end"
    assert found.err.count(waits) == 1
    assert {path: path.read_bytes() for path in out.glob("*.las")} == done


def test_a_survey_is_held_until_other_calls_see_that_it_is_written(
    tiles, tmp_path, model, monkeypatch
):
    held = []

    def record(self: FinishedFiles, files: list[Written], *others: Any) -> None:
        with pytest.raises(FileError, match="another call"), call_for(files[0].job.target):
            pass
        held.append(files[0].job.target.name)

    monkeypatch.setattr(FinishedFiles, "record", record)
    assert upsample(model, tiles, "-o", tmp_path / "out", "--separate") == 0
    assert held == ["0.las", "1.las", "2.las"]


def test_what_killed_calls_left_locks_nothing_and_is_deleted(tmp_path):
    a, b = (tmp_path / f"{name}.laz" for name in "ab")
    (tmp_path / ".a.laz.work" / "survey" / "points").mkdir(parents=True)
    (tmp_path / ".a.laz.work" / "lock").touch()
    for target in (a, b):
        (tmp_path / f".{target.name}.0a1b2c3d.part").touch()
    with call_for(b, a) as directory:
        assert not list(directory.iterdir()) and not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.iterdir())


def test_the_unfinished_file_of_a_name_that_begins_alike_is_left(tmp_path):
    other = [".a.laz.laz.0a1b2c3d.part", ".a.laz.b.0a1b2c3d.part", ".a.laz.part", ".a.laz.x1.part"]
    for name in (*other, ".a.laz.0a1b2c3d.part"):
        (tmp_path / name).touch()
    with call_for(tmp_path / "a.laz"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(other)
