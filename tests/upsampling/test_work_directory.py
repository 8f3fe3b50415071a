"""The locks of output files, and what a killed call leaves of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sheets import sheet

from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.work_directory import work_directory
from pointup.errors import FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import open_writer, read_points


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


@pytest.fixture(params=["links", "no links"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder, on a file system with hard links and on one without."""

    def no_link(*_: object) -> None:
        raise PermissionError("no links here")

    if request.param == "no links":
        monkeypatch.setattr("os.link", no_link)
    return tmp_path


def test_a_second_call_for_any_of_the_files_is_refused_and_the_first_one_goes_on(
    out: Path,
) -> None:
    a, b, c = (out / f"{name}.txt" for name in "abc")
    cloud = PointCloud(sheet(20))
    with call_for(a, b) as first:
        with open_writer(b, cloud) as writer:
            writer.write(cloud)
            for others in ((a,), (b,), (c, b), (b, a)):
                with (
                    pytest.raises(FileError, match=r"[ab]\.txt: another call upsamples into it"),
                    call_for(*others),
                ):
                    pass
            with call_for(c) as second:
                assert first.is_dir() and second.is_dir() and first != second
        assert len(read_points(b)) == 20
    with call_for(c, b, a):
        pass
    assert [path.name for path in out.iterdir()] == ["b.txt"]


def test_what_killed_calls_left_locks_nothing_and_is_deleted(out: Path) -> None:
    a, b, c = (out / f"{name}.laz" for name in "abc")
    for target in (a, b, c):
        (out / f".{target.name}.work" / "survey").mkdir(parents=True)
        (out / f".{target.name}.work" / "lock").touch()
        (out / f".{target.name}.0a1b2c3d.part").touch()
    (out / ".c.laz.work" / "lock").unlink()
    with call_for(b), call_for(a, c) as directory:
        assert not list(directory.iterdir()) and not list(out.glob("*.part"))
    assert not list(out.iterdir())


def test_locks_that_a_killed_call_linked_are_free_one_by_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a.laz", tmp_path / "b.laz"
    for name in ("a", "b"):
        (tmp_path / f".{name}.laz.work").mkdir()
    (tmp_path / ".a.laz.work" / "lock").touch()
    os.link(tmp_path / ".a.laz.work" / "lock", tmp_path / ".b.laz.work" / "lock")
    with call_for(b), call_for(a), pytest.raises(FileError, match="another call"), call_for(b):
        pass
    assert not list(tmp_path.iterdir())


def test_thousands_of_files_are_locked_with_one_open_file(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    with call_for(*(tmp_path / f"{number}.laz" for number in range(2000))):
        assert psutil.Process().num_fds() <= before + 1
        with pytest.raises(FileError, match="another call"), call_for(tmp_path / "1234.laz"):
            pass
    assert not list(tmp_path.iterdir())


def test_the_unfinished_file_of_a_name_that_begins_alike_is_left(tmp_path: Path) -> None:
    other = [".a.laz.laz.0a1b2c3d.part", ".a.laz.b.0a1b2c3d.part", ".a.laz.part", ".a.laz.x1.part"]
    for name in (*other, ".a.laz.0a1b2c3d.part"):
        (tmp_path / name).touch()
    with call_for(tmp_path / "a.laz"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(other)
