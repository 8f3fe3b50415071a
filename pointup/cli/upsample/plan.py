"""Plans `pointup upsample`: which files a call does, those of each survey, and their outputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pointup.cli.coordinate_systems import note_mixed
from pointup.cli.input_files import find_inputs
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.disk import check_output_file, check_output_folder, file_state, os_errors
from pointup.errors import ConfigError, FileError, NoPointsError, PointupError
from pointup.geometry.grids import codes_in_cube
from pointup.io.bounds import Bounds
from pointup.io.cloud import LAS_EXTENSIONS
from pointup.io.extents import FileExtent, Surveys, find_surveys, read_extent
from pointup.io.files import (
    check_readable,
    check_writable,
    copy_file,
    copy_points,
    iter_points,
    open_writer,
    point_extensions,
    read_extremes,
    read_first,
    writable_extensions,
)
from pointup.io.las import read_header
from pointup.io.length_unit import (
    ANGLES,
    LIKELY_ANGLES,
    UNKNOWN,
    agreed_unit,
    mercator_stretch,
    names_geocentric,
    units_of_readable,
)
from pointup.io.virtual_clouds import EXTENSION as VIRTUAL
from pointup.terminal import note
from pointup.upsampling.in_memory import shipped_for
from pointup.upsampling.store.point_store import CHUNK_SIZE


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
        state: the `file_state` of the source before it was read.
    """

    source: Path
    target: Path
    model: str
    extent: FileExtent | None = None
    bounds: Bounds | None = None
    margin: float = 0.0
    is_context: bool = False
    state: tuple[int, ...] = ()

    def check_source(self) -> None:
        """Raise FileError if the source is no longer what it was: call it before the output is
        complete, which would mix points of two files."""
        with os_errors(self.source, "read"):
            if file_state(self.source) != self.state:
                raise FileError(
                    f"{self.source}: changed while it was upsampled, nothing is written; upsample "
                    "it again when it is complete"
                )


@dataclass
class UpsamplePlan:
    """Surveys to upsample, each of one file or several; what is wrong with those left out; what
    the user should know of them; and files among others that have no points."""

    surveys: list[list[Job]] = field(default_factory=list)
    complaints: list[Exception] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_points: list[Job] = field(default_factory=list)


def needs_folder(inputs: Sequence[Path], output: Path, is_folder: bool = False) -> bool:
    """Whether the output is a folder, with a file for each input.

    It is one if `is_folder`, if there are several inputs or one that is a folder or a virtual point
    cloud, and if it is one already or has no extension.
    """
    is_named_so = is_folder or output.is_dir() or not output.suffix
    hold_files = (path.is_dir() or path.suffix.lower() == VIRTUAL for path in inputs)
    return is_named_so or len(inputs) > 1 or any(hold_files)


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
            sources = _find(path, output)
            folder = path if path.is_dir() else path.parent
            if any(not source.is_relative_to(folder) for source in sources):
                # A virtual point cloud may lie anywhere.
                folder = Path(os.path.commonpath([source.parent for source in sources]))
            found += [(source, source.relative_to(folder)) for source in sources]
        except FileError as error:
            complaints.append(error)
    into_folder = needs_folder(inputs, output, is_folder)
    has_extension = output.suffix.lower() in (*point_extensions, VIRTUAL)
    is_named_as_file = has_extension and not output.is_dir()
    if into_folder and is_named_as_file and not is_folder:
        if complaints:  # A word among classes was taken for a file.
            raise complaints[0]
        raise ConfigError(
            f"-o {output}: has the name of a file, and the inputs need a folder; name one without "
            "an extension, or end it with /"
        )
    if into_folder:
        check_output_folder(output)
    else:
        check_output_file(output)
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
        chosen = model or shipped_for(source, denoise)
        jobs.append(Job(source, target, chosen, state=file_state(source)))
    return jobs, complaints


def plan_surveys(jobs: Sequence[Job], separate: bool, in_folder: bool = True) -> UpsamplePlan:
    """Group files that border on each other; with `separate`, each is a survey of its own.

    LAS and LAZ files without points are set aside, if the output is a folder (`in_folder`): a tile
    may have no returns.
    """
    if not in_folder:
        return UpsamplePlan([[job] for job in jobs])
    # One file has no neighbours: its extent, for which some formats are read, is not needed.
    separate = separate or len(jobs) < 2
    plan, readable = UpsamplePlan(), []
    for job in jobs:
        try:
            extent = None if separate else read_extent(job.source)
            if separate and job.source.suffix.lower() in LAS_EXTENSIONS:
                read_first(job.source, 1)
        except NoPointsError:
            plan.without_points.append(job)
        except PointupError as error:
            plan.complaints.append(error)
        else:
            readable.append(replace(job, extent=extent))
    if separate:
        plan.surveys = [[job] for job in readable]
        return plan
    found = find_surveys([job.extent for job in readable if job.extent])
    plan.surveys = [[readable[i] for i in group] for group in found.groups]
    plan.notes = _notes_on_places(found, readable)
    return plan


def _notes_on_places(found: Surveys, jobs: Sequence[Job]) -> list[str]:
    """Notes on how files lie beside and over each other, where users may not expect it."""
    paths, extents = [job.source for job in jobs], [job.extent for job in jobs if job.extent]
    notes = []
    if found.unlike:
        one, other = (paths[number] for number in found.unlike)
        of_pair = (set(extents[number].attributes) for number in found.unlike)
        names = ", ".join(sorted({name for name, *_ in set.symmetric_difference(*of_pair)}))
        named = f" ({names})" if found.difference == "attributes" else ""
        more = f" (and {found.num_unlike - 1} other pairs)" if found.num_unlike > 1 else ""
        notes.append(
            f"{one} and {other}{more} border on each other and differ in {found.difference}"
            f"{named}: such files are upsampled apart, with a seam between them"
        )
    if found.rescaled:
        one, other = (paths[number] for number in found.rescaled)
        scales = [f"{extents[number].scale.max():g}" for number in found.rescaled]
        differ = f"different scales ({' and '.join(scales)})"
        if scales[0] == scales[1]:
            differ = f"offsets that are no whole steps of the scale {scales[0]} apart"
        notes.append(
            f"{one} and {other} overlap and have {differ}: a point in both is "
            "rounded to two places and counts twice; cut the tiles without an overlap, or from "
            "one file"
        )
    if found.by_folder:
        notes.append(
            "files of different folders lie over each other: each folder is taken for a survey of "
            "its own"
        )
    stacked = [paths[number] for number in found.stacked]
    # Shapes overlap without being a survey: all are centred on the origin.
    if any(source.suffix.lower() in LAS_EXTENSIONS for source in stacked):
        notes.append(
            f"{stacked[0]} and {len(stacked) - 1} more lie over each other: each of them is "
            "upsampled apart"
        )
    return notes


def written_name(source: Path) -> str:
    """Name of an output file in a folder: the input's, with an extension that can be written."""
    if source.name.lower().endswith(".copc.laz"):
        return source.name[: -len(".copc.laz")] + ".laz"
    return source.name if source.suffix.lower() in writable_extensions else source.stem + ".ply"


def _find(path: Path, output: Path) -> list[Path]:
    """The files of an input, without those in an output folder inside of it."""
    found = find_inputs([path], point_extensions)
    if not (path.is_dir() and output.is_dir()) or output.samefile(path):
        return found
    inner = output.resolve()
    return [source for source in found if inner not in Path(os.path.realpath(source)).parents]


def before_rounding(max_distance: float | None, jobs: Sequence[Job]) -> float | None:
    """The largest distance of a new point before it is rounded, so that `max_distance` holds after.

    Rounding to the scale of a LAS file moves a point by up to half the diagonal of a cell. Raises
    ConfigError if that is more than `max_distance`.
    """
    if max_distance is None:
        return None
    largest = 0.0
    for job in jobs:
        names = job.source, job.target
        if all(path.suffix.lower() in LAS_EXTENSIONS for path in names):
            # A file that can't be read is reported when it is read.
            with suppress(FileError):
                scales = read_header(job.source).scales
                largest = max(largest, float(np.linalg.norm(scales)) / 2)
    if largest >= max_distance:
        raise ConfigError(
            f"{jobs[0].source}: its coordinates are rounded by up to {largest:.3g}, so that no new "
            f"point can keep --max-distance {max_distance:g}; give a larger one"
        )
    return max_distance - largest


def check_units(
    paths: Sequence[Path], density: float | None, has_lengths: bool, allow_degrees: bool = False
) -> list[str]:
    """Check that coordinates are lengths. Returns notes on units that the user may not expect.

    With a density, or with other lengths among the options (`has_lengths`), all files must have one
    unit; without, each may have its own. A damaged file is skipped: it is reported when it is read.
    Many surveys name a unit of heights that theirs are not in: mixed units are noted, not refused.
    So are Mercator and geocentric systems, because some files name the latter by mistake.
    Raises DataError for coordinates in several units or, unless `allow_degrees`, in degrees.
    """
    units = units_of_readable(paths)
    if allow_degrees:
        angles = ANGLES, LIKELY_ANGLES
        units = {path: UNKNOWN if unit in angles else unit for path, unit in units.items()}
    lengths, notes = note_mixed(units)
    notes += _projection_notes(list(units))
    if density is None and not has_lengths:
        for path, unit in lengths.items():
            agreed_unit({path: unit})
        return notes
    unit = agreed_unit(lengths)
    if density is not None and unit.metres not in (None, 1):
        notes.append(
            f"the files are in {unit.name}: --density {density:g} is points per square "
            f"{unit.name}, {density / unit.metres**2:.4g} points per square metre"
        )
    return notes


def _projection_notes(paths: Sequence[Path]) -> list[str]:
    """A note on the first file in a Mercator projection or with geocentric coordinates; other files
    are often its neighbours."""
    for path in paths:
        if names_geocentric(path):
            return [
                f"{path}: by its coordinate system, coordinates are geocentric, so that z is no "
                "height; if they are, reproject it, for example to UTM"
            ]
        stretch = mercator_stretch(path)
        if stretch is not None:
            return [
                f"{path}: is in a Mercator projection, where lengths are {stretch:.3g} times those "
                "on the ground, but heights are not; reproject it, for example to UTM"
            ]
    return []


def copy_unchanged(job: Job, num_points: int) -> int:
    """Copy a file of `num_points`, or its part within bounds. Returns the number of points copied.

    Raises FileError if it can't be read or written.
    """
    if job.bounds is None and job.source.suffix.lower() == job.target.suffix.lower():
        copy_file(job.source, job.target)
        return num_points
    with open_writer(job.target, read_extremes(job.source)) as writer:
        copy_points(job.source, writer, CHUNK_SIZE, bounds=job.bounds)
        return writer.num_points


def group_files(
    jobs: Sequence[Job],
    workers: LaunchedWorkerGroup,
    separate: bool,
    bounds: Bounds | None,
    shard: tuple[int, int] | None,
    in_folder: bool,
) -> tuple[list[list[Job]], list[Exception]]:
    """The surveys that the files make up, as the main process sees them, and what is wrong.

    With bounds and a shard, only what they select. If the output is a folder (`in_folder`), the
    main process copies files without points.
    """
    plan = UpsamplePlan()
    with workers.barrier():
        if workers.is_main:
            plan = plan_surveys(jobs, separate, in_folder)
            if bounds:
                cut_to_bounds(plan, bounds)
            if shard:
                keep_shard(plan, shard)
    plan = workers.from_main(plan)
    if workers.is_main:
        note(*plan.notes)
        for job in plan.without_points:
            try:
                copy_file(job.source, job.target)
                print(f"{job.source}: no points in it, copied: {job.target}")
            except FileError as error:
                plan.complaints.append(error)
    return plan.surveys, plan.complaints


MARGIN = 64.0
"""Width of the strip that is read around what is written, in mean point spacings of the file. New
points depend on measured points within about 20 local spacings."""


def cut_to_bounds(plan: UpsamplePlan, bounds: Bounds) -> None:
    """Cut the surveys to `bounds`, with notes on files that touch them without a point inside.

    Files outside are dropped, or only read near the bounds. Raises FileError if no file has points
    inside.
    """
    found, extents = [], []
    for survey in plan.surveys:
        jobs = []
        for job in survey:
            try:
                extent = job.extent or read_extent(job.source)
            except PointupError as error:
                plan.complaints.append(error)
                continue
            extents.append(extent)
            margin = MARGIN * extent.spacing
            if not bounds.grown(margin).touch(extent.low, extent.high):
                continue
            touches = bounds.touch(extent.low, extent.high)
            is_context = not touches or not _has_points_inside(job, bounds)
            if touches and is_context:
                plan.notes.append(f"{job.source}: no points within --bounds, skipped")
            cut = replace(job, extent=extent, bounds=bounds, margin=margin, is_context=is_context)
            jobs.append(cut)
        if not all(job.is_context for job in jobs):
            found.append(jobs)
    if not found and len(extents) < sum(map(len, plan.surveys)):
        raise plan.complaints[-1]
    if not found:
        spans = "no file has points"
        if extents:
            low = np.min([extent.low for extent in extents], axis=0)
            high = np.max([extent.high for extent in extents], axis=0)
            spans = (
                f"the files span x {low[0]:.10g} to {high[0]:.10g}, y {low[1]:.10g} to "
                f"{high[1]:.10g}"
            )
        raise FileError(f"no file has points within --bounds: {spans}")
    plan.surveys, plan.without_points = found, []


def _has_points_inside(job: Job, bounds: Bounds) -> bool:
    """Whether a file has points inside: its extent may have empty corners."""
    try:
        chunks = iter_points(job.source, attributes=False, bounds=bounds)
        return any(len(chunk) for chunk in chunks)
    except FileError:
        # Reported when the file is read for upsampling.
        return True


def keep_shard(plan: UpsamplePlan, shard: tuple[int, int]) -> None:
    """Keep shard k of n: consecutive files in space, of about as many points in each shard.

    Files of the same survey that border on them are kept as context: they are read, not written.
    """
    number, total = shard
    jobs = [survey[i] for survey in plan.surveys for i in _order(survey)]
    sizes = np.array(
        [job.extent.num_points if job.extent else job.source.stat().st_size for job in jobs],
        dtype=np.float64,
    )
    middles = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1.0)
    is_chosen = np.minimum((middles * total).astype(int), total - 1) == number - 1
    chosen = {id(job) for job, is_own in zip(jobs, is_chosen, strict=True) if is_own}
    found = []
    for survey in plan.surveys:
        own = [job for job in survey if id(job) in chosen and not job.is_context]
        if own:
            found.append(
                [
                    job if id(job) in chosen else replace(job, is_context=True)
                    for job in survey
                    if id(job) in chosen or any(_border(job, other) for other in own)
                ]
            )
    plan.surveys = found
    if number > 1:
        plan.without_points = []


def _order(survey: Sequence[Job]) -> np.ndarray:
    """The files of a survey along a Morton curve."""
    extents = [job.extent for job in survey if job.extent]
    if len(extents) < max(len(survey), 2):
        return np.arange(len(survey))
    centres = np.array([(extent.low + extent.high) / 2 for extent in extents])
    return np.argsort(codes_in_cube(centres, 20), kind="stable")


def _border(one: Job, other: Job) -> bool:
    if not one.extent or not other.extent:
        return False
    margin = MARGIN * max(one.extent.spacing, other.extent.spacing)
    low, high = np.maximum(one.extent.low, other.extent.low), (one.extent.high, other.extent.high)
    return bool((low - np.minimum(*high) <= margin).all())
