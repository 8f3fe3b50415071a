"""Plans `pointup upsample`: the output file of each input, and the files of each survey."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pointup.cli.input_files import find_inputs
from pointup.errors import ConfigError, FileError, NoPointsError, PointupError
from pointup.io.adjacent_files import find_surveys
from pointup.io.bounds import Bounds
from pointup.io.extents import FileExtent, read_extent
from pointup.io.files import (
    LAS_EXTENSIONS,
    check_readable,
    check_writable,
    point_extensions,
    read_first,
)
from pointup.upsampling.models import shipped_for


@dataclass(frozen=True)
class Job:
    """A file to upsample.

    Attributes:
        target: its output file.
        model: the name of its model.
        extent: the extent of its points, if known.
        bounds: the part that is written; all if None.
        margin: width of the strip around the bounds that is read as well.
        is_context: whether it is only read, for the new points of files that border on it.
    """

    source: Path
    target: Path
    model: str
    extent: FileExtent | None = None
    bounds: Bounds | None = None
    margin: float = 0.0
    is_context: bool = False


@dataclass(frozen=True)
class Plan:
    """Surveys to upsample, each of one file or several; what is wrong with those left out; what
    the user should know of them; and files among others that have no points."""

    surveys: list[list[Job]] = field(default_factory=list)
    complaints: list[Exception] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_points: list[Job] = field(default_factory=list)


def needs_folder(inputs: Sequence[Path], output: Path, is_folder: bool = False) -> bool:
    """Whether the output is a folder, with a file for each input.

    It is one if `is_folder`, if there are several inputs or one that is a folder, and if it is one
    already or has no extension.
    """
    is_named_so = is_folder or output.is_dir() or not output.suffix
    return is_named_so or len(inputs) > 1 or any(path.is_dir() for path in inputs)


def plan_jobs(
    inputs: Sequence[Path],
    output: Path,
    model: str | None,
    denoise: bool = False,
    is_folder: bool = False,
) -> tuple[list[Job], list[Exception]]:
    """The files to upsample with their output files, and the errors of those that are left out.

    Files of a folder keep their relative path. `needs_folder` says whether the output is a folder.
    The model is that of `shipped_for` if None is given.

    Raises ConfigError if two files have the same output file, and if a folder is needed and the
    output has the name of a file; FileError if the output can't be written.
    """
    if not inputs:
        raise ConfigError(f"no input: name files or folders ({' '.join(point_extensions)})")
    if str(output) == "-" or (output.exists() and not (output.is_file() or output.is_dir())):
        raise ConfigError(f"-o {output}: is no file; name a file or a folder to write to")
    found: list[tuple[Path, Path]] = []
    complaints: list[Exception] = []
    for path in inputs:
        try:
            folder = path if path.is_dir() else path.parent
            found += [(source, source.relative_to(folder)) for source in _find(path, output)]
        except FileError as error:
            complaints.append(error)
    into_folder = needs_folder(inputs, output, is_folder)
    is_named_as_file = output.suffix.lower() in point_extensions and not output.is_dir()
    if into_folder and is_named_as_file and not is_folder:
        raise ConfigError(
            f"-o {output}: has the name of a file, and the inputs need a folder; name one without "
            "an extension, or end it with /"
        )
    _check_writable(output, into_folder)
    targets: dict[Path, Path] = {}
    jobs = []
    known = {os.path.realpath(source) for source, _ in found}
    for source, inside in dict.fromkeys(found):
        target = output / inside.with_name(written_name(source)) if into_folder else output
        try:
            check_readable(source)
        except FileError as error:
            complaints.append(error)
            continue
        check_writable(target)
        if os.path.realpath(target) in known:
            is_own = os.path.realpath(target) == os.path.realpath(source)
            what = "is the output, too" if is_own else f"its output {target} is an input, too"
            complaints.append(FileError(f"{source}: {what}; write elsewhere"))
            continue
        if target in targets:
            raise ConfigError(
                f"{targets[target]} and {source} would both become {target}; upsample them into "
                "different folders"
            )
        targets[target] = source
        jobs.append(Job(source, target, model or shipped_for(source, denoise)))
    return jobs, complaints


def plan_surveys(jobs: Sequence[Job], separate: bool, in_folder: bool = True) -> Plan:
    """Group files that border on each other; with `separate`, each is a survey of its own.

    LAS and LAZ files without points are set aside, if the output is a folder (`in_folder`): a tile
    may have no returns.
    """
    if not in_folder:
        return Plan([[job] for job in jobs])
    # One file has no neighbours: its extent, for which some formats are read, is not needed.
    separate = separate or len(jobs) < 2
    readable, without_points, complaints = [], list[Job](), list[Exception]()
    for job in jobs:
        try:
            extent = None if separate else read_extent(job.source)
            if separate and job.source.suffix.lower() in LAS_EXTENSIONS:
                read_first(job.source, 1)
        except NoPointsError:
            without_points.append(job)
        except PointupError as error:
            complaints.append(error)
        else:
            readable.append(replace(job, extent=extent))
    if separate:
        return Plan([[job] for job in readable], complaints, [], without_points)
    extents = [job.extent for job in readable if job.extent]
    found = find_surveys(extents, [job.model for job in readable])
    notes = []
    if found.unlike:
        one, other = (readable[number].source for number in found.unlike)
        notes.append(
            f"{one} and {other} border on each other and differ in {found.difference}: such files "
            "are upsampled apart, with a seam between them"
        )
    if found.by_folder:
        notes.append(
            "files of different folders lie over each other: each folder is taken for a survey of "
            "its own"
        )
    stacked = [readable[number] for number in found.stacked]
    # Shapes overlap without being a survey: all are centred on the origin.
    if any(job.source.suffix.lower() in LAS_EXTENSIONS for job in stacked):
        notes.append(
            f"{stacked[0].source} and {len(stacked) - 1} more lie over each other: each of them is "
            "upsampled apart"
        )
    surveys = [[readable[i] for i in group] for group in found.groups]
    return Plan(surveys, complaints, notes, without_points)


def written_name(source: Path) -> str:
    """Name of an output file in a folder: the input's, with an extension that can be written."""
    if source.name.lower().endswith(".copc.laz"):
        return source.name[: -len(".copc.laz")] + ".laz"
    return source.stem + ".ply" if source.suffix.lower() == ".obj" else source.name


def _find(path: Path, output: Path) -> list[Path]:
    """The files of an input, without those in an output folder inside of it."""
    found = find_inputs([path], point_extensions)
    inner = output.resolve()
    if not path.is_dir() or inner == path.resolve() or not output.is_dir():
        return found
    return [source for source in found if inner not in Path(os.path.realpath(source)).parents]


def _check_writable(output: Path, into_folder: bool) -> None:
    folder = output if into_folder else output.parent
    if into_folder:
        # The output folder is created, with its missing parents.
        while not folder.exists():
            folder = folder.parent
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file, and a folder is needed; choose another name")
    if not folder.is_dir():
        raise FileError(f"{folder}: there is no such folder to write to; make it")
    if not os.access(folder, os.W_OK):
        raise FileError(f"{folder}: can't be written to; choose another folder")
