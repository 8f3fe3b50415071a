"""Upsamples the files of a survey, or a part of it, and writes an output file for each."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pointup.cli.upsample.plan import Job, before_rounding, copy_unchanged
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.disk import UNFINISHED, acquire_lock, os_errors, remove, short_name
from pointup.errors import ConfigError, DataError, FileError, NoPointsError, PointupError
from pointup.geometry.grids import in_box
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    CLASSIFICATION,
    LAS_EXTENSIONS,
    MUCH_VEGETATION,
    NUMBER_OF_RETURNS,
    SYNTHETIC,
    PointCloud,
    PointWriter,
    attribute,
    is_synthetic,
    is_vegetation,
)
from pointup.io.files import copy_points, iter_points, open_writer, read_extremes
from pointup.io.las_writer import LasWriter
from pointup.io.length_unit import UNKNOWN, length_unit, units_of_readable
from pointup.model.upsampler import Upsampler
from pointup.progress import ProgressBar, write_line
from pointup.terminal import in_bytes
from pointup.upsampling.attributes import PARENT, added_dimensions
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.ground import GROUND_CLASS
from pointup.upsampling.new_points import NewPoints, Summary
from pointup.upsampling.options import LARGEST_RATIO, MAX_LOCAL_RATIO, UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.scatter import MUCH_SCATTER, has_little_noise, scatter_of
from pointup.upsampling.single_pass.quotas import UnreachedArea
from pointup.upsampling.store.point_store import CHUNK_SIZE, Store, build_survey_store

if TYPE_CHECKING:
    from pointup.cli.upsample.upsample_command import Upsample

MAX_POINTS = 2_000_000_000
# Disk space in bytes of a new point, of a candidate until it is thinned out, and of the ground
# around a measured point.
POINT_BYTES, CANDIDATE_BYTES, GROUND_BYTES = 100, 16, 160
# Share of the area without the target density from which on a note says so.
_MOST_UNREACHED = 0.05
# Shares of the new points from which on a note says so: on taken places, below all returns.
_MOST_CROWDED, _MOST_BELOW = 0.01, 0.01
# Share of the new points that a class is named from.
_FEW_OF_CLASS = 0.02
# Shares of class 2 among measured and new points that differ by less are alike.
_LIKE_SHARES = 0.1
# Share of points of pulses with several returns above which a survey has crowns, and the share of
# new points on the ground below them up to which these are few.
_MANY_SEVERAL, _FEW_GROUND = 0.2, 0.01


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
    progress = ProgressBar(_name(jobs), hidden=not workers.is_main)
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
                for note in notes_on_input(given, found, store, options, command.model is None):
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
                notes = notes_on_output(store, options, model, found, summary)
                if coarsest and num_crowded > _MOST_CROWDED * summary.num_new:
                    notes.insert(0, _of_crowded(coarsest, num_crowded, summary.num_new))
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
            of_file = _count_text(inside, store, rows, len(jobs) == 1)
            time_taken = f", {seconds}" if len(jobs) == 1 else ""
            lines.append(f"{job.source}: {of_file}, {num_written:,} out{time_taken}: {job.target}")
        files.append(Written(job, inside[number], num_written))
    if len(jobs) > 1:
        of_all = _count_text(inside, store, slice(None), True)
        lines.append(f"{_name(jobs)}: {of_all}, {summary.num_new:,} new, {seconds}")
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


def _of_crowded(coarsest: LasWriter, num_crowded: int, num_new: int) -> str:
    scale = np.abs(coarsest.header.scales).max()
    return (
        f"note: {num_crowded:,} new points ({num_crowded / num_new:.0%}) are where another point "
        f"is: {coarsest.path} has a scale of {scale:g}, too coarse for them; give the input a "
        "finer scale, or write a PLY file"
    )


def notes_on_output(
    store: Store, options: UpsampleOptions, model: Upsampler, found: SortedFiles, summary: Summary
) -> list[str]:
    """Notes on the classes of new points, a largest uncertainty that leaves none, and a missed
    density."""
    notes = []
    if options.above_ground and summary.num_new:
        of_measured = found.num_class_2 / found.num_taken
        of_new = summary.num_class_2 / summary.num_new
        # Points that are read around those to upsample have other shares.
        is_whole = found.num_inside.total() == store.num_read.sum()
        if is_whole and abs(of_new - of_measured) > _LIKE_SHARES:
            notes.append(
                f"note: {of_measured:.0%} of the measured and {of_new:.0%} of the new points have "
                "class 2: a new point gets it where it lies on the ground, not by the class of its "
                "neighbours"
            )
        has_crowns = found.num_several > _MANY_SEVERAL * found.num_taken
        is_wanted = options.ground_density != 0 and not found.num_class_2
        if has_crowns and is_wanted and summary.num_ground < _FEW_GROUND * summary.num_new:
            notes.append(
                "note: no point that is upsampled has class 2, ground: few new points or none are "
                "on the ground below crowns; classify the ground first, as PDAL's filters.smrf does"
            )
    if options.max_uncertainty is not None and not summary.num_new:
        notes.append(
            f"note: no new point is within --max-uncertainty {options.max_uncertainty:g}; give a "
            "larger one"
        )
    if options.density is not None:
        unreached = UnreachedArea(store).share()
        if unreached > _MOST_UNREACHED:
            largest = max(MAX_LOCAL_RATIO, model.config.max_pass_ratio)
            notes.append(
                f"note: the density {options.density:g} was not reached: one point becomes at most "
                f"{largest:g}, too few on {unreached:.0%} of the area"
            )
    return notes


def summary_lines(summary: Summary, source: Path, reach: float) -> list[str]:
    """The lines that are printed of the new points of a survey."""
    unit = units_of_readable([source]).get(source, UNKNOWN)
    named = "" if unit.metres is None else f" {unit.name}"
    lines = []
    if summary.num_new > summary.num_ground:
        lines.append(
            f"new points at most {summary.farthest:.3g}{named} from a measured one, 99.9% of them "
            f"at most {summary.within:.3g}{named}, {summary.num_beyond or 'none'} beyond {reach:g} "
            "local spacings"
        )
    for of, (number, median, most) in summary.uncertainty.items():
        if of == "all":
            lines.append(f"uncertainty {median:.2g}{named} (median), {most:.2g}{named} (90 %)")
        elif number >= _FEW_OF_CLASS * summary.num_new:
            lines[-1] += f"; class {of}: {median:.2g}, {most:.2g}"
    if summary.num_ground:
        lines.append(
            f"{summary.num_ground:,} others on the ground below crowns, at most "
            f"{summary.farthest_ground:.3g}{named} from a measured one"
        )
    if summary.num_below > _MOST_BELOW * summary.num_new:
        lines.append(f"{summary.num_below:,} new points lie below all returns around them")
    return [f"  {line}" for line in lines or ["no new points"]]


def _name(jobs: Sequence[Job]) -> str:
    return jobs[0].source.name if len(jobs) == 1 else f"survey of {len(jobs)} files"


def _count_text(inside: Sequence[int], store: Store, files: slice, says_coincident: bool) -> str:
    """How many points the files had, and how many of them do not count."""
    num_inside, num_read = sum(inside[files]), int(store.num_read[files].sum())
    around, rest = num_read - num_inside, num_read - int(store.num_taken[files].sum())
    places = store.num_coincident if says_coincident else 0
    return (
        f"{num_inside:,} points in"
        + (f", {around:,} read around them" if around else "")
        + (f" ({rest:,} of them not upsampled)" if rest else "")
        + (f" ({places:,} of them where another one is)" if places else "")
    )


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


# Rounding to a larger share of the spacing changes the surface.
_COARSE_STEP = 0.2


def notes_on_input(
    jobs: Sequence[Job],
    found: SortedFiles,
    store: Store,
    options: UpsampleOptions,
    suggests_model: bool,
) -> list[str]:
    """Notes for a user who may want to stop, because other options give a better result.

    `found` counts the points of the files by the number of their job. With `suggests_model` a note
    names a model that may suit the points better than that of the jobs.
    """
    notes = []
    if found.num_synthetic:
        notes.append(_of_synthetic(jobs, found.num_synthetic))
    if jobs[0].source.suffix.lower() not in LAS_EXTENSIONS and (found_step := _rounding(store)):
        step, cause = found_step
        notes.append(
            f"{_name(jobs)}: coordinates are rounded to {step:g}, coarse beside the spacing of the "
            f"points: {cause} does this to map coordinates; export the points again, as doubles"
        )
    share = found.num_vegetation / max(1, found.num_taken)
    if suggests_model and jobs[0].model == "lidar" and share > MUCH_VEGETATION:
        notes.append(f"{_name(jobs)}: {share:.0%} of the points are vegetation: try --model forest")
    if jobs[0].model in ("shapes", "noisy") and not options.above_ground:
        noise = scatter_of(store)
        keeps = jobs[0].model == "shapes" or options.originals
        note = ""
        if keeps and noise.in_spacings >= MUCH_SCATTER:
            other = "; if these are plants, try --model forest" if suggests_model else ""
            note = "look noisy, {}: if they are, --model noisy --denoise is better" + other
        elif not keeps and noise.is_little:
            note = "have little noise, {}: shapes, without --denoise, is better"
        elif keeps and jobs[0].model == "noisy" and suggests_model:
            note = (
                "have little noise, {}: they are kept, and shapes makes the new ones, as without "
                "--denoise; to replace them, add --model noisy"
            )
        if note:
            of_radius = noise.share_of_radius(store)
            by = f"by about {noise.in_spacings:.2g} spacings, {of_radius:.1%} of the radius"
            notes.append(f"{_name(jobs)}: the points " + note.format(by))
    return notes


def _rounding(store: Store) -> tuple[float, str] | None:
    """The step to which the coordinates of the points are rounded coarsely, and what did it."""
    from pointup.datasets.checks import coarse_step

    finest = store.resolution * store.frame.unit
    points = store.frame.to_file(store.read_block(0)["position"])
    largest = np.abs(points).max(axis=0)
    step = float(np.spacing(np.float32(largest.max())))
    # The finest step of the store is at most 2**-14 of the spacing.
    coarse = _COARSE_STEP * 2**14 * finest
    if step > coarse and np.abs(points - points.astype(np.float32)).max() <= finest:
        return step, "float32"
    # C++ writes six digits if told nothing. A grid may have such coordinates by intention.
    step = 10.0 ** (np.floor(np.log10(max(1.0, largest.max()))) - 5)
    values = points[:, largest.argmax()]
    is_rounded = step > coarse and np.abs(values - np.rint(values / step) * step).max() <= finest
    # Without the rounding of the store.
    points = points.round(int(np.ceil(-np.log10(coarse))))
    return (step, "text of six digits") if is_rounded and coarse_step(points) else None


def _of_synthetic(jobs: Sequence[Job], num_synthetic: Mapping[int, int]) -> str:
    num_others = len(num_synthetic) - 1
    others = f" and {num_others:,} other file{'s' * (num_others > 1)}" if num_others else ""
    return (
        f"{jobs[min(num_synthetic)].source}{others}: {sum(num_synthetic.values()):,} points "
        "have the synthetic flag: they are not measured, but upsampled as if they were; remove "
        "them first"
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


@dataclass
class SortedFiles:
    """What the files of a survey gave.

    Attributes:
        left_out: the errors of files that can't be read, by number.
        num_inside: the number of points of each file that lie within its bounds, by its number; 0
            of a file that is only read.
        num_synthetic: how many of those read have the synthetic flag, of the files with any.
        num_taken: the number of points to upsample; of these are vegetation `num_vegetation`, of
            class 2, ground, `num_class_2`, and of pulses with several returns `num_several`, which
            is 0 with chosen classes.
        too_few: the error for fewer than two points to upsample in all files; None for more.
    """

    left_out: dict[int, FileError] = field(default_factory=dict)
    num_inside: Counter[int] = field(default_factory=Counter)
    num_synthetic: Counter[int] = field(default_factory=Counter)
    num_taken: int = 0
    num_vegetation: int = 0
    num_class_2: int = 0
    num_several: int = 0
    too_few: FileError | None = None


class _Unreadable(Exception):
    """Stops the building of a store at a file that can't be read."""


def sort_points(
    jobs: Sequence[Job],
    directory: Path,
    point_filter: PointFilter,
    upright: bool,
    progress: ProgressBar,
) -> SortedFiles:
    """Build the store of a survey; there is none if the files have too few points.

    Raises FileError if no file can be read, or if the points can't be upsampled.
    """
    files = SortedFiles()

    def chunks(number: int) -> Iterator[PointCloud]:
        job = jobs[number]
        try:
            bounds = job.bounds.grown(job.margin) if job.bounds else None
            for chunk in iter_points(job.source, CHUNK_SIZE, bounds=bounds):
                if job.extent and not job.extent.holds(chunk.positions):
                    remedy = "" if job.bounds else ", or add --separate"
                    raise FileError(
                        f"{job.source}: has points outside of the extent in its header, so "
                        f"that its neighbours are unknown; repair the header{remedy}"
                    )
                inside = job.bounds.inside(chunk.positions).sum() if job.bounds else len(chunk)
                files.num_inside[number] += 0 if job.is_context else int(inside)
                if num_synthetic := int(is_synthetic(chunk).sum()):
                    files.num_synthetic[number] += num_synthetic
                yield chunk
                progress.add(len(chunk))
        except FileError as error:
            files.left_out[number] = error
            raise _Unreadable from error

    def takes_part(cloud: PointCloud) -> np.ndarray:
        try:
            taken = point_filter(cloud)
        except DataError as error:
            raise FileError(f"{survey_text(jobs)}: {error}") from None
        files.num_taken += int(taken.sum())
        files.num_vegetation += int((taken & is_vegetation(cloud)).sum())
        classes = attribute(cloud, CLASSIFICATION)
        if classes is not None:
            files.num_class_2 += int((taken & (classes == GROUND_CLASS)).sum())
        number = attribute(cloud, NUMBER_OF_RETURNS)
        # Who names classes knows whether the ground is among them.
        if number is not None and point_filter.classes is None:
            files.num_several += int((taken & (number > 1)).sum())
        return taken

    while True:
        progress.begin("reading")
        files = SortedFiles(files.left_out)
        readable = [number for number in range(len(jobs)) if number not in files.left_out]
        try:
            build_survey_store(
                map(chunks, readable), directory, takes_part=takes_part, upright=upright
            )
            return files
        except _Unreadable:
            if len(files.left_out) == len(jobs):
                raise files.left_out.popitem()[1] from None
        except DataError as error:
            named = FileError(f"{survey_text(jobs)}: {error}")
            if files.num_taken >= 2:
                raise named from None
            files.too_few = named
            return files


def open_store(directory: Path) -> Store:
    """Open the store that the main process has built; FileError where it is not seen."""
    try:
        return Store(directory)
    except FileNotFoundError:
        raise FileError(
            f"{directory}: not seen by all processes; write to a folder that all machines share"
        ) from None


def survey_text(jobs: Sequence[Job]) -> str:
    """The files of a survey in an error."""
    others = f" and {len(jobs) - 1} files that border on it" if len(jobs) > 1 else ""
    return f"{jobs[0].source}{others}"
