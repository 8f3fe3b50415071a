"""Files and directories that are written whole or not at all, locks of files, checksums."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from uuid import uuid4

from pointup.errors import BusyError, DataError, FileError, PointupError
from pointup.terminal import first_line

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")
"""Matches the names of files that `written_whole` had not finished; the group is the `short_name`
of the final one."""


LARGEST_EXPANSION = 100
"""Of a compressed file. Deflate shrinks constants 1,000-fold and coordinates barely 2-fold."""
ALWAYS_READ = 256 * 2**20
"""Bytes that are read whatever the expansion."""

_TEMPORARY, _SECONDS_TO_LOCK = "pointup_", 60.0
# Longest name in bytes beside which the rest of a temporary name fits into the 255 of file systems.
_LONGEST_NAME = 230


@contextmanager
def written_whole(
    path: Path, *, is_sole_writer: bool = False, flushed: bool = False
) -> Iterator[Path]:
    """Yield a path in the folder of `path`; the file or directory there becomes `path` at the end.

    A file replaces an existing file, and the target of a symbolic link rather than the link. A
    directory replaces only an empty directory, see `replace_directory`; others raise OSError. After
    an error or interrupt nothing is left. What a killed process leaves is deleted by the next call
    if `is_sole_writer`, for paths that no two processes write at a time. With `flushed`, content
    and name are on the disk when the block has ended. Raises FileError for a loop of links, and for
    a device such as /dev/null, which a user root would replace for all programs.
    """
    path = resolve_symlink(path)
    _check_no_device(path)
    # Unique on all hosts: locks may not work on a network file system.
    unique = "" if is_sole_writer else f".{uuid4().hex[:8]}"
    part = path.with_name(f".{short_name(path)}{unique}.part")
    try:
        remove(part)
        yield part
        if flushed:
            for each in [*part.rglob("*"), part]:
                flush_to_disk(each)
        part.replace(path)
        if flushed:
            flush_to_disk(path.parent)
    finally:
        remove(part)


def _check_no_device(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileError(f"{path}: is a device or a pipe; name a file")


def short_name(path: Path) -> str:
    """The name of a file, or a checksum of one that is too long for a file named after it."""
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST_NAME else f"{zlib.crc32(name):08x}"


def replace_directory(path: Path, new: Path) -> None:
    """Rename the directory `new` to `path`; what was at `path` is deleted afterwards."""
    replaced = path.with_name(f".{short_name(path)}.old")
    remove(replaced)
    if path.exists():
        path.rename(replaced)
    new.rename(path)
    remove(replaced)


def remove(path: Path) -> None:
    """Delete a file or a directory with its content, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_expansion(path: Path, num_bytes: int) -> None:
    """Raise FileError where a compressed file would expand to far too many bytes for coordinates.

    A damaged count, or a file made to do so, would take all memory of the machine.
    """
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_READ, LARGEST_EXPANSION * size):
        raise FileError(
            f"{path}: its {size:,} bytes would expand to {num_bytes:,}, too many for measured "
            "points; it is damaged or holds one value throughout: save it without compression"
        )


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_dataset_exists(path_or_hub_id: str | Path) -> None:
    """Raise DataError for a dataset that is not on the disk and can't be on the Hub by its name."""
    path = Path(path_or_hub_id)
    if not path.exists() and (path.is_absolute() or len(path.parts) != 2):
        raise DataError(f"{path}: no such directory; make a dataset with `pointup prepare`")


def resolve_symlink(path: Path) -> Path:
    """The target of a symbolic link; any other path unchanged. FileError for a loop."""
    if not path.is_symlink():
        return path
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # RuntimeError in Python 3.11 and 3.12 for a loop.
        target = path
    if target.is_symlink():
        raise FileError(f"{path}: a symbolic link that leads nowhere; remove it")
    return target


def check_output_file(path: Path) -> None:
    """Raise FileError for a path that no file can be written to. Call it before the work."""
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name a file in it")
    _check_no_device(path)
    folder = resolve_symlink(path).parent
    if not folder.exists():
        raise FileError(f"{path}: there is no folder {folder}; make it")
    check_output_folder(folder)


def check_output_folder(folder: Path) -> None:
    """Raise FileError for a folder that can't be written to, or made with its missing parents."""
    if folder.is_symlink() and not folder.exists():
        raise FileError(f"{folder}: a symbolic link that leads nowhere; remove it")
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise FileError(f"{folder}: is a file, and a folder is needed; choose another name")
    if not os.access(folder, os.W_OK):
        raise FileError(f"{folder}: can't be written to; choose another folder")


@contextmanager
def os_errors(path: Path, verb: Literal["read", "written"]) -> Iterator[None]:
    """Raise an OSError of the block as a FileError that names the file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: can't be {verb}: {error.strerror or error}") from error


@contextmanager
def library_errors(path: Path, message: str) -> Iterator[None]:
    """Raise any error of the block but those of pointup as a FileError that names the file.

    For a damaged file libraries raise errors of many classes. The `message` has {} for the reason.
    """
    try:
        yield
    except PointupError:
        raise
    except Exception as error:
        is_cut = isinstance(error, EOFError) and not str(error)
        reason = "it is cut short" if is_cut else first_line(error)[:200].rstrip(".")
        raise FileError(f"{path}: {message.format(reason)}") from error


@contextmanager
def scratch_errors(path: Path) -> Iterator[None]:
    """Name the scratch file in an OSError of the block. It stays an OSError, which ends the command
    where a FileError would leave out an input."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path}: can't be written: {error.strerror or error}; free space on its disk, then "
            "run the same command again"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, as UTF-8. Raises FileError if it can't be written."""
    with os_errors(path, "written"), written_whole(path) as part:
        part.write_text(text, encoding="utf-8")


def file_state(path: Path) -> tuple[int, int, int]:
    """Inode, size and time of the last change, which differ once a file is replaced or changed."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file. FileError for anything else in it."""
    if not path.is_file():
        return {}
    with os_errors(path, "read"):
        content = path.read_bytes()
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is no valid JSON ({error}); copy it again") from None
    if not isinstance(stored, dict):
        raise FileError(f"{path}: holds no entries by name; copy it again")
    return stored


def readable_json(path: Path) -> dict[str, Any]:
    """`read_json`, with {} for a file that can't be read, too."""
    try:
        return read_json(path)
    except FileError:
        return {}


def acquire_lock(path: Path, refusal: str = "") -> AbstractContextManager[object]:
    """Lock the file `path`, which is made if it is missing, until the block of the result ends.

    The system releases the lock of a process that ends in any way. Waits while another process
    holds it, or raises BusyError(refusal) then if there is a `refusal`. Raises OSError if the file
    can't be made.
    """
    # Imported here, because `pointup --help` imports this module.
    from filelock import FileLock, Timeout

    try:
        return FileLock(path).acquire(blocking=not refusal)
    except Timeout:
        raise BusyError(refusal) from None


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield an empty directory for temporary files, and delete it at the end.

    It is locked meanwhile: those of processes that were killed are deleted by the next call.
    """
    with TemporaryDirectory(prefix=_TEMPORARY) as name:
        directory = Path(name)
        for lock in directory.parent.glob(f"{_TEMPORARY}*/lock"):
            left = lock.parent
            with suppress(OSError, FileError):
                # Not those of other users, and none that is about to be locked.
                is_own = left.lstat().st_uid == directory.stat().st_uid
                if is_own and time.time() - lock.lstat().st_mtime > _SECONDS_TO_LOCK:
                    with acquire_lock(lock, "in use"):
                        shutil.rmtree(left)
        with acquire_lock(directory / "lock"):
            yield directory


def checksum(path: Path) -> int:
    """The CRC-32 of the content of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
