"""The files of a command: inputs by name and in folders, their shards, and the files it writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pointup.disk import check_dataset_exists
from pointup.errors import ConfigError, FileError
from pointup.option_help import optional
from pointup.terminal import note, printable

Inputs = Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    tyro.conf.arg(metavar="PATH ...", help_behavior_hint="(required)"),
]

_MAX_NAMED = 5
_SIDES = ("source", "target", "reference", "prediction", "predictions", "second", "truth")
_READ = frozenset({"inputs", *_SIDES, "thin", "passes", "runs", "meshes"})


def check_inputs(command: object) -> None:
    """Raise FileError or DataError for an input of a command, or of its subcommand, that does not
    exist. Called before the command imports PyTorch, which takes a second or more.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for name, value in vars(command).items():
        if is_dataclass(value):
            check_inputs(value)
        for path in value if isinstance(value, tuple) else (value,):
            if name == "dataset" and isinstance(path, str):
                check_dataset_exists(path)
            if name in _READ and isinstance(path, Path) and not path.exists():
                raise FileError(f"{path}: no such file or folder")


def find_inputs(paths: Sequence[Path], extensions: Sequence[str]) -> list[Path]:
    """The files in `paths`, and the files with the given extensions in folders, at any depth, but
    for hidden files, whose names begin with a dot. A virtual point cloud stands for its files.

    Links to folders are followed, and each folder is read once. Broken links are returned, for the
    error of a missing file. In a folder with LAS or LAZ files, text files are lists and notes that
    were delivered with them: they are left out, and a note on stderr names the first.

    Raises FileError for a path that does not exist and for a folder without such files, ConfigError
    if `paths` is empty.
    """
    if not paths:
        raise ConfigError(f"no input: name files or folders ({' '.join(extensions)})")
    from pointup.io.virtual_clouds import files_of

    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = [p for p in _inside(path) if _is_input(p, extensions)]
            if not inside:
                raise FileError(f"{path}: no files in it end in {' '.join(extensions)}")
            found |= dict.fromkeys(sorted(_without_tables(path, inside)))
        elif path.exists():
            found |= dict.fromkeys(files_of(path))
        else:
            raise FileError(f"{path}: no such file or folder")
    return list(found)


def holds_points(path: Path) -> bool:
    """Whether a path is a file, or a folder with LAS or LAZ files that is no pair dataset."""
    from pointup.io.cloud import LAS_EXTENSIONS

    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return False
    return path.is_file() or any(file.suffix.lower() in LAS_EXTENSIONS for file in _inside(path))


def _inside(folder: Path) -> Iterator[Path]:
    """The files in a folder at any depth, but for hidden ones and those in hidden folders."""
    seen: set[str] = set()
    waiting = [folder]
    while waiting:
        # Links come after the folders that really lie here, so that these keep their own paths.
        for parent, folders, names in os.walk(waiting.pop(0)):
            if os.path.realpath(parent) in seen:
                folders.clear()
                continue
            seen.add(os.path.realpath(parent))
            # macOS leaves files such as ._a.las beside a.las on disks of other systems.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links = (Path(parent, name) for name in folders)
            waiting += [path for path in links if path.is_symlink()]
            yield from (Path(parent, name) for name in names if not name.startswith("."))


def _is_input(path: Path, extensions: Sequence[str]) -> bool:
    if path.is_symlink() and not path.exists():
        # Without an extension it may be that of a folder, such as one on another disk.
        return path.suffix.lower() in ("", *extensions)
    return path.suffix.lower() in extensions and path.is_file()


def _without_tables(folder: Path, files: list[Path]) -> list[Path]:
    """The files of a folder without text files, if there are LAS or LAZ files among them."""
    from pointup.io.cloud import LAS_EXTENSIONS
    from pointup.io.files import TEXT_EXTENSIONS

    tables = [path for path in files if path.suffix.lower() in TEXT_EXTENSIONS]
    if not tables or all(path.suffix.lower() not in LAS_EXTENSIONS for path in files):
        return files
    if os.environ.get("RANK", "0") == "0":
        names = ", ".join(str(path.relative_to(folder)) for path in sorted(tables)[:_MAX_NAMED])
        more = f" and {len(tables) - _MAX_NAMED:,} more" if len(tables) > _MAX_NAMED else ""
        note(
            f"{folder}: has LAS or LAZ files, so that text files in it are left out: "
            f"{names}{more}. To take one, give it by name"
        )
    return [path for path in files if path not in set(tables)]


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


ShardOption = Annotated[str | None, optional("K/N")]


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """K and N of "K/N", K from 1 to N; None for None. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard {text}: give K/N with K from 1 to N, as in --shard 3/64")
    return int(found[1]), int(found[2])


HtmlFile = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE.html")]
View = Annotated[Path | None, optional("FILE.html")]
Picture = Annotated[Path | None, optional("FILE.png")]
File = Annotated[Path | None, optional("FILE")]
Folder = Annotated[Path | None, optional("DIR")]
Title = Annotated[str | None, optional("TEXT")]
Model = Annotated[str | None, optional("shapes|noisy|lidar|forest|DIR|HUB_ID")]


def check_shown(picture: Path | None, view: Path | None, rasters: Path | None = None) -> None:
    """Raise FileError if a picture, viewer or rasters can't be written. Call it before the work."""
    if rasters is not None:
        from pointup.evaluation.rasters import check_rasters

        check_rasters(rasters)
    if picture is not None:
        from pointup.visualization.page import check_picture_path

        check_picture_path(picture)
    if view is not None:
        from pointup.visualization.viewer.document import check_viewer_path

        check_viewer_path(view)


def describe_page(path: Path, size: int) -> str:
    """The last line that a command prints about an HTML file of `size` bytes."""
    return f"{path}: {size / 1e6:.1f} MB; open it in a browser"
