"""Upsamples the files of a survey, or a part of it, and writes an output file for each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pointup.cli.upsample.notes import (
    count_text,
    notes_on_input,
    notes_on_output,
    notes_on_places,
    summary_lines,
    survey_name,
)
from pointup.cli.upsample.plan import Job, before_rounding, copy_unchanged
from pointup.cli.upsample.reading import SortedFiles, open_store, sort_points, survey_text
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.disk import UNFINISHED, acquire_lock, os_errors, remove, short_name
from pointup.errors import ConfigError, FileError, NoPointsError, PointupError
from pointup.geometry.grids import in_box
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    LAS_EXTENSIONS,
    SYNTHETIC,
    PointWriter,
)
from pointup.io.files import copy_points, iter_points, open_writer, read_extremes
from pointup.io.las_writer import LasWriter
from pointup.io.length_unit import UNKNOWN, length_unit, units_of_readable
from pointup.model.upsampler import Upsampler
from pointup.progress import ProgressBar, write_line
from pointup.terminal import in_bytes
from pointup.upsampling.attributes import PARENT, added_dimensions
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.new_points import NewPoints, Summary
from pointup.upsampling.options import LARGEST_RATIO, UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.scatter import has_little_noise
from pointup.upsampling.store.point_store import CHUNK_SIZE, Store

if TYPE_CHECKING:
    from pointup.cli.upsample.upsample_command import Upsample

MAX_POINTS = 2_000_000_000
# Disk space in bytes of a new point, of a candidate until it is thinned out, and of the ground
# around a measured point.
POINT_BYTES, CANDIDATE_BYTES, GROUND_BYTES = 100, 16, 160


@dataclass(frozen=True)
class Written:
    """A file that was written, with its numbers of points in and out; with none out, no file."""

    job: Job
    num_in: int
    num_out: int


def upsample_survey(
    jobs: Sequence[Job],
    model: Upsampler,
    options: UpsampleOptions,
    workers: LaunchedWorkerGroup,
    command: Upsample,
    directory: Path,
    copies_rest: bool,
    without_noise: Upsampler | None = None,
) -> tuple[list[Written], list[Exception]]:
    """Upsample the files of a survey, and print what became of it; returns the files and errors.

    `directory` is that of `work_directory`. Files that can't be read or written are left out. With
    `copies_rest` files with too few points to upsample are copied, and those with nothing to write
    are skipped; else they are errors. The model `without_noise` takes the place of `model` for a
    shape with little noise, whose points are kept. Notes on the points are printed before the work.
    All processes of `workers` must call this; files and lines are those of the main process. A
    PointupError that concerns the survey as a whole is raised in all processes, and then nothing is
    written.
    """
    began = time.monotonic()
    options = replace(options, max_distance=before_rounding(options.max_distance, jobs))
    point_filter = PointFilter(
        classes=command.classes_and_inputs()[0], include_noise=command.include_noise
    )
    found = SortedFiles()
    progress = ProgressBar(survey_name(jobs), hidden=not workers.is_main)
    with progress:
        with workers.barrier():
            if workers.is_main:
                upright = options.is_upright(model.config)
                found = sort_points(jobs, directory, point_filter, upright, progress)
        found = workers.from_main(found)
        errors = list[Exception](found.left_out.values())
        if found.too_few:
            if not copies_rest:
                raise found.too_few
            return _copy_each(jobs, found, options.originals and not command.only_new, workers)
        kept = [number for number in range(len(jobs)) if number not in found.left_out]
        given, jobs = jobs, [jobs[number] for number in kept]
        inside = [found.num_inside[number] for number in kept]
        if all(job.is_context for job in jobs):
            return [], errors
        coarsest = None
        with workers.barrier():
            store = open_store(directory)
            if without_noise and has_little_noise(store, options):
                model, options = without_noise, replace(options, originals=True)
            if not command.force:
                check_size(jobs, store, options, model)
            if workers.is_main:
                coarsest = check_outputs(jobs, store, options.has_uncertainty(model))
                notes = notes_on_input(given, found, store, options, command.model is None)
                for note in notes:
                    write_line(f"note: {note}")
        new_points = run_passes(
            store,
            model,
            options,
            workers,
            workers.device,
            token_budget=command.token_budget,
            tile=command.tile,
            begin=progress.begin,
            # The main process assumes that the others progress at its own rate.
            report=lambda points: progress.add(points * workers.num_processes),
        )
        with_originals = options.originals and not command.only_new
        summary, notes = Summary(), list[str]()
        # Writing deletes block files, so that it starts after the summary.
        with workers.barrier():
            if workers.is_main:
                num_crowded = 0
                if coarsest:
                    grid = np.abs(coarsest.header.scales), coarsest.header.offsets
                    num_crowded = new_points.move_to_free_places(*grid, options)
                own = [number for number, job in enumerate(jobs) if not job.is_context]
                summary = new_points.summary(own, jobs[0].bounds)
                notes = notes_on_places(coarsest, num_crowded, summary.num_new)
                notes += notes_on_output(store, options, model, found, summary)
        with workers.barrier():
            window = Window(store, jobs[0].bounds) if command.picture and workers.is_main else None
            progress.begin("writing")
            written = write_each(jobs, store, new_points, with_originals, window, workers, progress)
            if window and command.picture:
                source, heights = jobs[0].source, options.above_ground
                try:
                    window.draw(source, sum(inside), with_originals, command.picture, heights)
                except FileError as not_drawn:
                    errors.append(not_drawn)
        written = sorted(workers.from_all(written), key=itemgetter(0))
    seconds = f"{time.monotonic() - began:.1f} s"
    lines, files, nothing_in = [], list[Written](), []
    for number, num_written, error in written:
        job, rows = jobs[number], slice(number, number + 1)
        if isinstance(error, NoPointsError) and copies_rest:
            nothing_in.append(f"{job.source}: nothing to write, skipped")
        elif error:
            if isinstance(error, NoPointsError):
                error = FileError(f"{error}: none are new; raise --ratio or --density")
            errors.append(error)
            continue
        else:
            of_file = count_text(inside, store, rows, len(jobs) == 1)
            time_taken = f", {seconds}" if len(jobs) == 1 else ""
            lines.append(f"{job.source}: {of_file}, {num_written:,} out{time_taken}: {job.target}")
        files.append(Written(job, inside[number], num_written))
    if len(jobs) > 1:
        of_all = count_text(inside, store, slice(None), True)
        lines.append(f"{survey_name(jobs)}: {of_all}, {summary.num_new:,} new, {seconds}")
    if lines:
        lines += summary_lines(summary, jobs[0].source, model.config.reach) + notes
    if workers.is_main and (lines or nothing_in):
        print(*nothing_in, *lines, sep="\n")
    return files, errors


def _copy_each(
    jobs: Sequence[Job], found: SortedFiles, with_originals: bool, workers: LaunchedWorkerGroup
) -> tuple[list[Written], list[Exception]]:
    """Copy the files of a survey that has too few points."""
    files, errors = [], list[Exception](found.left_out.values())
    for number, job in enumerate(jobs):
        if job.is_context or number in found.left_out or not workers.is_main:
            continue
        num_out, num_in = 0, found.num_inside[number]
        end = "nothing to write, skipped"
        if with_originals:
            try:
                num_out, end = copy_unchanged(job, num_in), f"copied: {job.target}"
            except (PointupError, OSError) as error:
                errors.append(error)
                continue
        print(f"{job.source}: {num_in:,} points in, fewer than 2 of them to upsample, {end}")
        files.append(Written(job, num_in, num_out))
    return files, errors


def check_size(
    jobs: Sequence[Job], store: Store, options: UpsampleOptions, model: Upsampler
) -> None:
    """Raise ConfigError for a huge output, and FileError if the disk is too small."""
    num_points = len(store)
    num_out = options.num_out(num_points, model.config.max_pass_ratio)
    what = f"ratio {options.ratio:g} makes"
    if options.density is not None:
        # Denser places keep their points, and others get no more than the density.
        area = float(np.prod((store.high - store.low)[:, :2], axis=1).sum())
        num_out = min(num_out, num_points + round(options.density * area))
        what = f"density {options.density:g} makes up to"
    size = num_out * POINT_BYTES
    if options.ratio > LARGEST_RATIO or num_out > MAX_POINTS:
        raise ConfigError(
            f"{survey_text(jobs)}: {what} {num_out:,} points of "
            f"{num_points:,}, about {in_bytes(size)}; lower it, or add --force"
        )
    if options.density is None:
        needed = size + int(num_out * model.config.slots_per_ratio) * CANDIDATE_BYTES
        if options.above_ground:
            needed += num_points * GROUND_BYTES
        oversampling = options.oversampling_of(model.config)
        if oversampling > 1:
            needed += int(oversampling * needed)
        # A file that is only read has no output folder.
        target = next(job.target for job in jobs if not job.is_context)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise FileError(
                f"{target}: {num_out:,} points and what it takes to make them need about "
                f"{in_bytes(needed)}, and {target.parent} has {in_bytes(free)}; make room, write "
                "elsewhere, or add --force"
            )


class _Discarded(Exception):
    """Leaves a writer without a file."""


def check_outputs(jobs: Sequence[Job], store: Store, has_uncertainty: bool) -> LasWriter | None:
    """The writer of the coarsest LAS file, whose header has its grid; None for other formats.

    Raises the error of the first output if none can be opened: before any work, not after it.
    """
    errors = []
    own = [job for job in jobs if not job.is_context]
    own.sort(key=lambda job: -job.extent.scale.max() if job.extent else 0.0)
    for job in sorted(own, key=lambda job: job.target.suffix.lower() not in LAS_EXTENSIONS):
        try:
            with suppress(_Discarded), _opened(job, store, has_uncertainty) as writer:
                raise _Discarded
        except PointupError as error:
            errors.append(error)
            continue
        return writer if isinstance(writer, LasWriter) else None
    raise errors[0]


def write_each(
    jobs: Sequence[Job],
    store: Store,
    new_points: NewPoints,
    with_originals: bool,
    window: Window | None,
    workers: LaunchedWorkerGroup,
    progress: ProgressBar,
) -> list[tuple[int, int, Exception | None]]:
    """Write the files of this process: their points, then the new ones. Returns number, points
    written and error of each."""
    written: list[tuple[int, int, Exception | None]] = []
    own = [number for number, job in enumerate(jobs) if not job.is_context]
    for number in workers.shard(own):
        job = jobs[number]
        try:
            job.check_source()
            with _opened(job, store, new_points.has_uncertainty) as writer:
                if with_originals:
                    copy_points(job.source, writer, CHUNK_SIZE, bounds=job.bounds)
                    progress.add(writer.num_points)
                index = None if job.bounds is None else index_in_window(job, CHUNK_SIZE)
                for cloud in new_points.of_file(number):
                    if job.bounds is not None and index is not None:
                        cloud = cloud.select(job.bounds.inside(cloud.positions))
                        cloud.attributes[PARENT] = index[cloud.attributes[PARENT]]
                    writer.write(cloud)
                    progress.add(len(cloud))
                    if window:
                        window.add(cloud.positions)
                job.check_source()
            written.append((number, writer.num_points, None))
        except (PointupError, ValueError, OSError) as error:
            written.append((number, 0, error))
    return written


def _opened(job: Job, store: Store, has_uncertainty: bool) -> PointWriter:
    """The writer of an output file."""
    like = read_extremes(job.source)
    if len(store.num_read) > 1:
        # If the input is not LAS, the files of a survey get one scale, computed from its extent.
        both = np.concatenate([like.positions, *store.bounds_in_file()])
        like.positions = np.stack([both.min(axis=0), both.max(axis=0)])
    unit = units_of_readable([job.source]).get(job.source, UNKNOWN)
    added = added_dimensions(like, has_uncertainty, unit.name if unit.metres else "")
    if job.target.suffix.lower() in LAS_EXTENSIONS:
        # LAS has a flag bit for synthetic points.
        added = [dimension for dimension in added if dimension.name != SYNTHETIC]
    return open_writer(job.target, like, added)


NOT_WRITTEN = np.iinfo(np.uint32).max
"""`parent_index` of a new point whose parent lies outside of the window."""


def index_in_window(job: Job, chunk_size: int) -> np.ndarray:
    """For each point that is read for a job with bounds (N,): its index among those in the window.

    The points are those of the window and of the margin around it, in the order of the file. Points
    of the margin are not written: they have `NOT_WRITTEN`.
    """
    assert job.bounds is not None
    parts, number = [np.empty(0, np.uint32)], 0
    for chunk in iter_points(job.source, chunk_size, bounds=job.bounds.grown(job.margin)):
        inside = job.bounds.inside(chunk.positions)
        index = number + np.cumsum(inside) - 1
        parts.append(np.where(inside, index, NOT_WRITTEN).astype(np.uint32))
        number += int(inside.sum())
    return np.concatenate(parts)


MAX_POINTS_OF_WINDOW = 1_000_000
"""A cloud of at most this many measured points is shown as a whole."""

_SPACINGS = 400
_FLAT = 0.25


class Window:
    """The points of a cloud before and after upsampling, within `bounds` if there are any; of a
    large one, those near its middle."""

    def __init__(self, store: Store, bounds: Bounds | None) -> None:
        corners = (bounds.low, bounds.high) if bounds else (2 * (-np.inf,), 2 * (np.inf,))
        self._low, self._high = map(np.array, corners)
        lows, highs = store.bounds_in_file()
        extent = highs.max(axis=0) - lows.min(axis=0)
        self._is_flat = bool(extent[2] < _FLAT * extent[:2].max())
        if len(store) > MAX_POINTS_OF_WINDOW:
            middle = int(np.searchsorted(store.block_ptr, len(store) // 2, side="right")) - 1
            low, high = lows[middle, :2], highs[middle, :2]
            points = store.block_ptr[middle + 1] - store.block_ptr[middle]
            half = _SPACINGS / 2 * np.sqrt((high - low).prod() / points)
            self._low = np.maximum(self._low, (low + high) / 2 - half)
            self._high = np.minimum(self._high, (low + high) / 2 + half)
        touched = (lows[:, :2] <= self._high) & (highs[:, :2] >= self._low)
        self._before, self._new = [], list[np.ndarray]()
        self._num_new = 0
        for block in np.flatnonzero(touched.all(axis=1)).tolist():
            positions = store.frame.to_file(store.read_block(block)["position"])
            self._before.append(self._inside(positions))

    def add(self, positions: np.ndarray) -> None:
        """Add new points (N, 3)."""
        self._num_new += len(positions)
        self._new.append(self._inside(positions))

    def draw(
        self, source: Path, num_before: int, with_originals: bool, path: Path, has_heights: bool
    ) -> None:
        """Write the picture. In its captions are the numbers of points of the whole cloud,
        `num_before` of which were measured.

        Points that are copied without upsampling are counted, but not drawn. Raises FileError if
        the picture can't be written.
        """
        from pointup.visualization.before_after import before_after_picture

        before = np.concatenate(self._before)
        after = np.concatenate([before[: with_originals * len(before)], *self._new])
        # A cloud that is flat and wide is a survey, too.
        vertical = self._is_flat or has_heights
        unit = length_unit(source)
        totals = num_before, with_originals * num_before + self._num_new
        name = unit.name if unit.metres else ""
        before_after_picture(before, after, path, vertical=vertical, unit=name, totals=totals)

    def _inside(self, positions: np.ndarray) -> np.ndarray:
        return positions[in_box(positions, self._low, self._high)]


@contextmanager
def work_directory(jobs: Sequence[Job], workers: LaunchedWorkerGroup) -> Iterator[Path]:
    """An empty directory for the files of a survey, deleted at the end; makes the output folders.

    It is beside the first output file and named after it. A call that is killed leaves it, and the
    next call for the same files deletes what is in it. Raises FileError, in all processes, while
    another call works on the survey.
    """
    path = ""
    with ExitStack() as stack:
        with workers.barrier():
            if workers.is_main:
                targets = [job.target for job in jobs if not job.is_context]
                first = min(targets)
                folder = first.with_name(f".{short_name(first)}.work")
                refusal = f"{first}: another call upsamples into it; wait for its end"
                with os_errors(first, "written"):
                    for target in targets:
                        target.parent.mkdir(parents=True, exist_ok=True)
                    folder.mkdir(exist_ok=True)
                    stack.enter_context(acquire_lock(folder / "lock", refusal))
                    # Before the release: only the holder of a lock may delete it.
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    remove(folder / "survey")
                    (folder / "survey").mkdir()
                    _delete_unfinished(targets, folder)
                path = str(folder / "survey")
        yield Path(workers.from_main(path))


def _delete_unfinished(targets: Sequence[Path], own: Path) -> None:
    """Delete the output files that a killed call was writing.

    Raises FileError if there are any while another call, whose work directory is not `own`, works
    in their folder: it may be writing them.
    """
    for folder in {target.parent for target in targets}:
        names = {short_name(target) for target in targets if target.parent == folder}
        for path in folder.glob(".*.part"):
            of = UNFINISHED.fullmatch(path.name)
            if of and of[1] in names:
                refusal = f"{folder / of[1]}: another call may be writing it; wait for its end"
                for lock in folder.glob(".*.work/lock"):
                    if lock.parent != own:
                        with acquire_lock(lock, refusal):
                            pass
                path.unlink()
