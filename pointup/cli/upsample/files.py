"""Upsamples the files of a survey, or a part of it, and writes an output file for each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from pointup.cli.upsample.plan import Job, copy_unchanged
from pointup.cli.upsample.survey_store import (
    SortedFiles,
    open_store,
    sort_points,
    survey_text,
    work_directory,
)
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.errors import ConfigError, FileError, NoPointsError, PointupError
from pointup.io.cloud import SYNTHETIC, PointWriter
from pointup.io.files import (
    LAS_EXTENSIONS,
    PointCloud,
    copy_points,
    iter_points,
    open_writer,
    read_extremes,
)
from pointup.io.length_unit import UNKNOWN, length_unit, units_of_readable
from pointup.model.upsampler import Upsampler
from pointup.progress import ProgressBar, write_line
from pointup.upsampling.attributes import PARENT, added_dimensions
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.new_points import NewPoints, Summary
from pointup.upsampling.options import LARGEST_RATIO, MAX_LOCAL_RATIO, UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.scatter import MUCH_SCATTER, scatter
from pointup.upsampling.single_pass.quotas import UnreachedArea
from pointup.upsampling.store.point_store import CHUNK_SIZE, Store

MAX_POINTS = 2_000_000_000
# Disk space in bytes of a new point, and of a candidate until it is thinned out.
POINT_BYTES, CANDIDATE_BYTES = 100, 16
# Share of the area without the target density from which on a note says so.
_MOST_UNREACHED = 0.05
# Shares of the new points from which on a note says so: on taken places, below all returns.
_MOST_CROWDED, _MOST_BELOW = 0.01, 0.01
# Shares of class 2 among measured and new points that differ by less are alike.
_LIKE_SHARES = 0.1


@dataclass(frozen=True)
class Written:
    """A file that was written, with its numbers of points in and out; with none out, no file."""

    job: Job
    num_in: int
    num_out: int


@dataclass(frozen=True)
class SurveyResult:
    """What became of a survey: lines to print, the files written, and the errors of others."""

    lines: list[str]
    files: list[Written]
    errors: list[Exception]


def upsample_survey(
    jobs: Sequence[Job],
    model: Upsampler,
    options: UpsampleOptions,
    workers: LaunchedWorkerGroup,
    *,
    point_filter: PointFilter,
    only_new: bool,
    tile: float | None,
    token_budget: int | None,
    picture: Path | None,
    force: bool,
    copies_rest: bool,
    suggests_model: bool,
) -> SurveyResult:
    """Upsample the files of a survey.

    Files that can't be read or written are left out. With `copies_rest` files with too few points
    to upsample are copied, and those with nothing to write are skipped; else they are errors. Notes
    on the points are printed before the work; with `suggests_model` one names a model that may suit
    them better than that of the jobs. All processes of `workers` must call this. A PointupError
    that concerns the survey as a whole is raised in all processes, and then nothing is written.
    """
    began = time.monotonic()
    with_originals = options.originals and not only_new
    found = SortedFiles()
    progress = ProgressBar(_name(jobs), hidden=not workers.is_main)
    with work_directory(jobs, workers) as directory, progress:
        with workers.barrier():
            if workers.is_main:
                upright = options.is_upright(model.config)
                found = sort_points(jobs, directory, point_filter, upright, progress)
        found = workers.from_main(found)
        left_out = found.left_out
        if found.too_few:
            if not copies_rest:
                raise found.too_few
            return _copy_each(jobs, found, with_originals, workers)
        inside = [found.num_inside[number] for number in range(len(jobs)) if number not in left_out]
        given = jobs
        jobs = [job for number, job in enumerate(jobs) if number not in left_out]
        if all(job.is_context for job in jobs):
            return SurveyResult([], [], list(left_out.values()))
        with workers.barrier():
            store = open_store(directory)
            _check_size(jobs, store, options, model, force)
            if workers.is_main:
                check_outputs(jobs, store)
                for note in notes_on_input(given, found, store, suggests_model):
                    write_line(f"note: {note}")
        new_points = run_passes(
            store,
            model,
            options,
            workers,
            workers.device,
            token_budget=token_budget,
            tile=tile,
            begin=progress.begin,
            # The main process assumes that the others progress at its own rate.
            report=lambda points: progress.add(points * workers.num_processes),
        )
        summary, unreached, num_crowded = Summary(), 0.0, 0
        grid = _grid(jobs, store)
        # Writing deletes block files, so that it starts after the summary.
        with workers.barrier():
            if workers.is_main:
                if grid:
                    num_crowded = new_points.move_to_free_places(*grid, options)
                own = [number for number, job in enumerate(jobs) if not job.is_context]
                summary = new_points.summary(own, jobs[0].bounds)
                if options.density is not None:
                    unreached = UnreachedArea(store).share()
        with workers.barrier():
            window = Window(store) if picture and workers.is_main else None
            progress.begin("writing")
            written = write_each(jobs, store, new_points, with_originals, window, workers, progress)
            if picture and window:
                window.draw(jobs[0].source, with_originals, picture, bool(options.above_ground))
        written = sorted(workers.from_all(written), key=itemgetter(0))
    seconds = f"{time.monotonic() - began:.1f} s"
    lines, files, errors = [], [], list[Exception](left_out.values())
    nothing_in = []
    for number, num_written, error in written:
        if isinstance(error, NoPointsError) and copies_rest:
            nothing_in.append(f"{jobs[number].source}: nothing to write, skipped")
            files.append(Written(jobs[number], inside[number], 0))
        elif error:
            errors.append(error)
        else:
            num_read, num_taken = int(store.num_read[number]), int(store.num_taken[number])
            of_file = _count_text(inside[number], num_read, num_taken)
            if len(jobs) == 1:
                of_file += _coincident_text(store)
            time_taken = f", {seconds}" if len(jobs) == 1 else ""
            job = jobs[number]
            files.append(Written(job, inside[number], num_written))
            lines.append(f"{job.source}: {of_file}, {num_written:,} out{time_taken}: {job.target}")
    if len(jobs) > 1:
        num_taken = int(store.num_taken.sum())
        of_all = _count_text(sum(inside), int(store.num_read.sum()), num_taken)
        of_all += _coincident_text(store)
        lines.append(f"{_name(jobs)}: {of_all}, {summary.num_new:,} new, {seconds}")
    if lines:
        lines[-1] += f"; {_summary_text(summary, options, jobs[0].source, model.config.reach)}"
        if grid and num_crowded > _MOST_CROWDED * summary.num_new:
            lines.append(
                f"note: {num_crowded:,} new points ({num_crowded / summary.num_new:.0%}) are where "
                f"another point is: {jobs[0].target} has a scale of {grid[0].max():g}, too coarse "
                "for them; give the input a finer scale, or write a PLY file"
            )
        if options.above_ground and summary.num_new:
            lines += _note_on_ground(found.num_class_2 / int(store.num_taken.sum()), summary)
        if unreached > _MOST_UNREACHED:
            largest = max(MAX_LOCAL_RATIO, model.config.max_pass_ratio)
            lines.append(
                f"note: the density {options.density:g} was not reached: one point becomes at most "
                f"{largest:g}, too few on {unreached:.0%} of the area"
            )
    return SurveyResult([*nothing_in, *lines], files, errors)


def _copy_each(
    jobs: Sequence[Job], found: SortedFiles, with_originals: bool, workers: LaunchedWorkerGroup
) -> SurveyResult:
    """Copy the files of a survey that has too few points."""
    lines, files, errors = [], [], list[Exception](found.left_out.values())
    for number, job in enumerate(jobs):
        if job.is_context or number in found.left_out or not workers.is_main:
            continue
        num_in = found.num_inside[number]
        few = f"{job.source}: {num_in:,} points in, fewer than 2 of them to upsample"
        if not with_originals:
            lines.append(f"{few}, nothing to write, skipped")
            files.append(Written(job, num_in, 0))
            continue
        try:
            num_out = copy_unchanged(job, num_in)
        except (PointupError, OSError) as error:
            errors.append(error)
            continue
        lines.append(f"{few}, copied: {job.target}")
        files.append(Written(job, num_in, num_out))
    return SurveyResult(lines, files, errors)


def _note_on_ground(of_measured: float, summary: Summary) -> list[str]:
    of_new = summary.num_class_2 / summary.num_new
    if abs(of_new - of_measured) <= _LIKE_SHARES:
        return []
    return [
        f"note: {of_measured:.0%} of the measured and {of_new:.0%} of the new points have class 2: "
        "a new point gets it where it lies on the ground, not by the class of its neighbours"
    ]


def _grid(jobs: Sequence[Job], store: Store) -> tuple[np.ndarray, np.ndarray] | None:
    """Scale and offset (3,) of the LAS files that are written; None for other formats."""
    from pointup.io.las_writer import LasWriter

    for job in jobs:
        if not job.is_context and job.target.suffix.lower() in LAS_EXTENSIONS:
            with suppress(PointupError):  # Raised again when this file is written.
                writer = _opened(job, store)
                assert isinstance(writer, LasWriter)
                return np.array(writer.header.scales), np.array(writer.header.offsets)
    return None


def _summary_text(summary: Summary, options: UpsampleOptions, source: Path, reach: float) -> str:
    unit = units_of_readable([source]).get(source, UNKNOWN)
    named = "" if unit.metres is None else f" {unit.name}"
    words = f"new points at most {summary.farthest:.3g}{named} from a measured one"
    words += f", 99.9% of them at most {summary.within:.3g}{named}"
    words += f", {summary.num_beyond or 'none'} beyond {reach:g} local spacings"
    if summary.num_ground:
        words += f", {summary.num_ground:,} others on the ground below crowns"
    if summary.num_below > _MOST_BELOW * summary.num_new:
        words += f"; {summary.num_below:,} of them lie below all returns around them"
    return words


def _coincident_text(store: Store) -> str:
    """How many points do not count, because they lie where others do; "" for none."""
    number = store.num_coincident
    return f" ({number:,} of them where another one is)" if number else ""


def _name(jobs: Sequence[Job]) -> str:
    return jobs[0].source.name if len(jobs) == 1 else f"survey of {len(jobs)} files"


def _count_text(num_inside: int, num_read: int, num_taken: int) -> str:
    around, rest = num_read - num_inside, num_read - num_taken
    return (
        f"{num_inside:,} points in"
        + (f", {around:,} read around them" if around else "")
        + (f" ({rest:,} of them not upsampled)" if rest else "")
    )


def _check_size(
    jobs: Sequence[Job], store: Store, options: UpsampleOptions, model: Upsampler, force: bool
) -> None:
    """Raise ConfigError for a huge output, and FileError if the disk is too small."""
    if force:
        return
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
            f"{num_points:,}, about {_in_units(size)}; lower it, or add --force"
        )
    if options.density is None:
        needed = size + int(num_out * model.config.slots_per_ratio) * CANDIDATE_BYTES
        oversampling = options.oversampling_of(model.config)
        if oversampling > 1:
            needed += int(oversampling * needed)
        # A file that is only read has no output folder.
        target = next(job.target for job in jobs if not job.is_context)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise FileError(
                f"{target}: {num_out:,} points and what it takes to make them need about "
                f"{_in_units(needed)}, and {target.parent} has {_in_units(free)}; make room, write "
                "elsewhere, or add --force"
            )


def _in_units(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


# Share of vegetation from which on the model for forests is named.
_MUCH_VEGETATION = 0.3


def notes_on_input(
    jobs: Sequence[Job], found: SortedFiles, store: Store, suggests_model: bool
) -> list[str]:
    """Notes for a user who may want to stop, because other options give a better result.

    `found` counts the points of the files by the number of their job. With `suggests_model` a note
    names a model that may suit the points better than that of the jobs.
    """
    notes = []
    if found.num_synthetic:
        notes.append(_of_synthetic(jobs, found.num_synthetic))
    share = found.num_vegetation / max(1, int(store.num_taken.sum()))
    if suggests_model and jobs[0].model == "lidar" and share > _MUCH_VEGETATION:
        notes.append(f"{share:.0%} of the points are vegetation: try --model forest")
    if suggests_model and jobs[0].model == "shapes" and (noise := scatter(store)) >= MUCH_SCATTER:
        notes.append(
            f"the points look noisy, by about {noise:.2g} spacings: if they are, --denoise "
            "replaces them; if these are plants, try --model forest"
        )
    return notes


def _of_synthetic(jobs: Sequence[Job], num_synthetic: Mapping[int, int]) -> str:
    others = f" and {len(num_synthetic) - 1:,} other files" if len(num_synthetic) > 1 else ""
    return (
        f"{jobs[min(num_synthetic)].source}{others}: {sum(num_synthetic.values()):,} points "
        "have the synthetic flag: they are not measured, but upsampled as if they were; remove "
        "them first"
    )


class _Discarded(Exception):
    """Leaves a writer without a file."""


def check_outputs(jobs: Sequence[Job], store: Store) -> None:
    """Raise the error of the first output if none can be opened: before any work, not after it."""
    errors = []
    for job in jobs:
        if job.is_context:
            continue
        try:
            with suppress(_Discarded), _opened(job, store):
                raise _Discarded
            return
        except PointupError as error:
            errors.append(error)
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
    """Write the files of this process. Returns number, points written and error of each."""
    written: list[tuple[int, int, Exception | None]] = []
    own = [number for number, job in enumerate(jobs) if not job.is_context]
    for number in workers.shard(own):
        job = jobs[number]
        try:
            num_points = _write(
                job, store, new_points.of_file(number), with_originals, window, progress
            )
            written.append((number, num_points, None))
        except (PointupError, ValueError, OSError) as error:
            written.append((number, 0, error))
    return written


def _write(
    job: Job,
    store: Store,
    new_points: Iterator[PointCloud],
    with_originals: bool,
    window: Window | None,
    progress: ProgressBar,
) -> int:
    """Write the points of a file, then the new points. Returns the number of points."""
    with _opened(job, store) as writer:
        if with_originals:
            copy_points(job.source, writer, CHUNK_SIZE, bounds=job.bounds)
            progress.add(writer.num_points)
        index = None if job.bounds is None else index_in_window(job, CHUNK_SIZE)
        for cloud in new_points:
            if job.bounds is not None and index is not None:
                cloud = cloud.select(job.bounds.inside(cloud.positions))
                cloud.attributes[PARENT] = index[cloud.attributes[PARENT]]
            writer.write(cloud)
            progress.add(len(cloud))
            if window:
                window.add(cloud.positions)
        job.check_source()
        return writer.num_points


def _opened(job: Job, store: Store) -> PointWriter:
    """The writer of an output file."""
    like = read_extremes(job.source)
    if len(store.num_read) > 1:
        # If the input is not LAS, the files of a survey get one scale, computed from its extent.
        both = np.concatenate([like.positions, *store.bounds_in_file()])
        like.positions = np.stack([both.min(axis=0), both.max(axis=0)])
    added = added_dimensions(like)
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
    """The points of a cloud before and after upsampling; of a large one, those near its middle."""

    def __init__(self, store: Store) -> None:
        self._low, self._high = np.full(2, -np.inf), np.full(2, np.inf)
        lows, highs = store.bounds_in_file()
        extent = highs.max(axis=0) - lows.min(axis=0)
        self._is_flat = bool(extent[2] < _FLAT * extent[:2].max())
        if len(store) > MAX_POINTS_OF_WINDOW:
            middle = int(np.searchsorted(store.block_ptr, len(store) // 2, side="right")) - 1
            low, high = lows[middle, :2], highs[middle, :2]
            points = store.block_ptr[middle + 1] - store.block_ptr[middle]
            half = _SPACINGS / 2 * np.sqrt((high - low).prod() / points)
            self._low, self._high = (low + high) / 2 - half, (low + high) / 2 + half
        touched = (lows[:, :2] <= self._high) & (highs[:, :2] >= self._low)
        self._before, self._new = [], list[np.ndarray]()
        self._num_before, self._num_new = int(store.num_read.sum()), 0
        for block in np.flatnonzero(touched.all(axis=1)).tolist():
            positions = store.frame.to_file(store.read_block(block)["position"])
            self._before.append(self._inside(positions))

    def add(self, positions: np.ndarray) -> None:
        """Add new points (N, 3)."""
        self._num_new += len(positions)
        self._new.append(self._inside(positions))

    def draw(self, source: Path, with_originals: bool, path: Path, has_heights: bool) -> None:
        """Write the picture, with the numbers of points of the whole files in its captions.

        Points that are copied without upsampling are counted, but not drawn. Raises FileError if
        the picture can't be written.
        """
        from pointup.visualization import before_after_picture

        before = np.concatenate(self._before)
        after = np.concatenate([before[: with_originals * len(before)], *self._new])
        # A cloud that is flat and wide is a survey, too.
        vertical = self._is_flat or has_heights
        unit = length_unit(source)
        totals = self._num_before, with_originals * self._num_before + self._num_new
        name = "" if unit == UNKNOWN else unit.name
        before_after_picture(before, after, path, vertical=vertical, unit=name, totals=totals)

    def _inside(self, positions: np.ndarray) -> np.ndarray:
        xy = positions[:, :2]
        return positions[((xy >= self._low) & (xy <= self._high)).all(axis=1)]
