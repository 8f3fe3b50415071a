"""Finds the input files of a command: files by name, and the files in folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from pointup.errors import ConfigError, FileError

Inputs = Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    tyro.conf.arg(metavar="PATH ...", help_behavior_hint="(required)"),
]


def find_inputs(paths: Sequence[Path], extensions: Sequence[str]) -> list[Path]:
    """The files in `paths`, and the files with the given extensions in folders, at any depth, but
    for hidden files, whose names begin with a dot.

    Raises FileError for a path that does not exist and for a folder without such files, ConfigError
    if `paths` is empty.
    """
    if not paths:
        raise ConfigError(f"no input: name files or folders ({' '.join(extensions)})")
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            # macOS leaves files such as ._a.las beside a.las on disks of other systems.
            inside = [
                p
                for p in path.rglob("[!.]*")
                if p.suffix.lower() in extensions
                and p.is_file()
                and not any(part.startswith(".") for part in p.relative_to(path).parts)
            ]
            if not inside:
                raise FileError(f"{path}: no files in it end in {' '.join(extensions)}")
            found |= dict.fromkeys(sorted(inside))
        elif path.exists():
            found[path] = None
        else:
            raise FileError(f"{path}: no such file or folder")
    return list(found)


def name_inputs(paths: Sequence[Path]) -> dict[str, Path]:
    """A unique name for each file or folder: its name, that of a file without extension, with as
    many folders as needed. It is `printable`."""
    named: dict[str, Path] = {}
    for path in paths:
        whole = path.resolve()
        parts = (whole if whole.is_dir() else whole.with_suffix("")).parts[1:]
        depth = 1
        while (name := printable("/".join(parts[-depth:]))) in named and depth < len(parts):
            depth += 1
        named[name if name not in named else printable(str(path))] = path
    return named


def printable(text: str) -> str:
    """A text with file names, as valid UTF-8: bytes of a name that are not UTF-8 become \\xff."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
