"""The work directory of a survey, its lock, and what a killed call leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sheets import sheet

from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.survey_store import work_directory
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


def test_a_second_call_for_a_survey_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.txt" for name in "abc")
    cloud = PointCloud(sheet(20))
    with call_for(a, b) as first:
        with open_writer(b, cloud) as writer:
            writer.write(cloud)
            for others in ((a,), (b, a)):
                with (
                    pytest.raises(FileError, match=r"a\.txt: another call upsamples into it"),
                    call_for(*others),
                ):
                    pass
            with call_for(c) as second:
                assert first.is_dir() and second.is_dir() and first != second
        assert len(read_points(b)) == 20
    with call_for(c, b, a):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_what_killed_calls_left_locks_nothing_and_is_deleted(tmp_path: Path) -> None:
    a, b = (tmp_path / f"{name}.laz" for name in "ab")
    (tmp_path / ".a.laz.work" / "survey" / "points").mkdir(parents=True)
    (tmp_path / ".a.laz.work" / "lock").touch()
    for target in (a, b):
        (tmp_path / f".{target.name}.0a1b2c3d.part").touch()
    with call_for(b, a) as directory:
        assert not list(directory.iterdir()) and not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.iterdir())


def test_the_unfinished_file_of_a_name_that_begins_alike_is_left(tmp_path: Path) -> None:
    other = [".a.laz.laz.0a1b2c3d.part", ".a.laz.b.0a1b2c3d.part", ".a.laz.part", ".a.laz.x1.part"]
    for name in (*other, ".a.laz.0a1b2c3d.part"):
        (tmp_path / name).touch()
    with call_for(tmp_path / "a.laz"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(other)
