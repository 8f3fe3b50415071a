"""Files that are written whole or not at all, locks, checksums."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from pointup.disk import (
    UNFINISHED,
    acquire_lock,
    check_output_file,
    checksum,
    read_json,
    replace_directory,
    temporary_directory,
    write_text,
    written_whole,
)
from pointup.errors import FileError
from pointup.geometry.surfaces import Surface
from pointup.io.files import read_points


def test_a_file_appears_when_it_is_complete_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("old", "new"):
        with written_whole(path, flushed=True) as part:
            part.write_text(text)
            assert UNFINISHED.fullmatch(part.name)[1] == path.name  # type: ignore[index]
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    path = tmp_path / "null"
    os.mkfifo(path)
    for write in (check_output_file, lambda path: write_text(path, "a")):
        with pytest.raises(FileError, match="null: is a device or a pipe; name a file"):
            write(path)
    assert path.is_fifo()


@pytest.mark.parametrize("is_directory", [False, True])
def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path, is_directory):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as part:
        if is_directory:
            part.mkdir()
            (part / "file").touch()
        else:
            part.touch()
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_directory_replaces_an_empty_one_and_a_full_one_only_when_asked(tmp_path):
    path, new = tmp_path / "a", tmp_path / "new"

    def write(text: str) -> None:
        with written_whole(path, flushed=True) as part:
            part.mkdir()
            (part / "file").write_text(text)

    path.mkdir()
    write("first")
    with pytest.raises(OSError):
        write("second")
    assert (path / "file").read_text() == "first" and list(tmp_path.iterdir()) == [path]
    new.mkdir()
    replace_directory(path, new)
    assert list(tmp_path.rglob("*")) == [path]


def test_a_sole_writer_deletes_what_a_killed_process_left(tmp_path):
    path, names = tmp_path / "a", []
    for _ in range(2):
        with written_whole(path, is_sole_writer=True) as part:
            names.append(part.name)
            part.mkdir()
        part.mkdir()
        (part / "left").touch()
        path.rmdir()
    assert names[0] == names[1]


def test_the_target_of_a_symbolic_link_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "target").read_text() == "text" and (tmp_path / "link").is_symlink()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileError, match=r"loop: a symbolic link that leads nowhere; remove it"):
        write_text(tmp_path / "loop", "text")


def test_a_lock_that_is_held_is_refused(tmp_path):
    with (
        acquire_lock(tmp_path / "lock"),
        pytest.raises(FileError, match="taken"),
        acquire_lock(tmp_path / "lock", refusal="taken"),
    ):
        pass
    with acquire_lock(tmp_path / "lock", refusal="taken"):
        pass


def test_the_checksum_is_that_of_the_content(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert checksum(tmp_path / "a") == zlib.crc32(content)


@pytest.mark.parametrize("length", [5, 230, 231, 255])
def test_names_up_to_the_limit_of_file_systems_are_written(length, tmp_path):
    path = tmp_path / ("n" * length)
    write_text(path, "text")
    assert path.read_text() == "text"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_expands_too_far_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pointup.disk.ALWAYS_READ", 10**6)
    np.savez_compressed(tmp_path / "a.npz", positions=np.zeros((10**6, 3)))
    np.savez_compressed(tmp_path / "b.npz", vertices=np.zeros((10**6, 3)), faces=[[0, 1, 2]])
    for read, name in ((read_points, "a.npz"), (Surface.load, "b.npz")):
        with pytest.raises(FileError, match=rf"{name}: its .* bytes would expand to 24,000,"):
            read(tmp_path / name)


@pytest.mark.parametrize("content", [b'{"a": ', b"[1]", b"\xff\xfe{", b"[" * 100_000])
def test_a_file_without_valid_entries_is_an_error_that_names_it(content, tmp_path):
    assert read_json(tmp_path / "a.json") == {}
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileError, match=r"a\.json: .*copy it again"):
        read_json(tmp_path / "a.json")


HOLD = """
import sys
from pathlib import Path
from pointup.disk import temporary_directory

with temporary_directory() as directory:
    (directory / "points").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_temporary_directories_of_killed_processes_are_deleted_by_the_next_call(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    foreign = tmp_path / "pointup_notes"
    foreign.mkdir()
    at_work, killed = (
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True)
        for _ in range(2)
    )
    with at_work, killed:
        held, left = (Path(p.stdout.readline().strip()) for p in (at_work, killed))  # type: ignore[union-attr]
        killed.kill()
        killed.wait()
        for lock in tmp_path.glob("*/lock"):
            os.utime(lock, (0, 0))
        with temporary_directory() as own:
            assert set(tmp_path.iterdir()) == {foreign, held, own}
        assert (held / "points").exists() and not left.exists()
        at_work.communicate("")
    assert list(tmp_path.iterdir()) == [foreign]
