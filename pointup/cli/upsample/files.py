"""Upsamples the files of a survey, and writes an output file for each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from pointup.cli.progress import ProgressBar
from pointup.cli.upsample.copies import copy_unchanged
from pointup.cli.upsample.input_notes import notes_on_input
from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.survey_store import SortedFiles, open_store, sort_points, survey_text
from pointup.cli.upsample.window import Window
from pointup.cli.upsample.work_directory import work_directory
from pointup.cli.upsample.writing import check_outputs, write_each
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.errors import ConfigError, FileError, NoPointsError, PointupError
from pointup.io.length_unit import UNKNOWN, units_of_readable
from pointup.model.upsampler import Upsampler
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.new_points import Summary
from pointup.upsampling.options import LARGEST_RATIO, MAX_LOCAL_RATIO, UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.single_pass.density import UnreachedArea
from pointup.upsampling.store.point_store import Store

MAX_POINTS = 2_000_000_000
# Disk space in bytes of a new point, and of a candidate until it is thinned out.
POINT_BYTES, CANDIDATE_BYTES = 100, 16
# Share of the area without the target density from which on a note says so.
_MOST_UNREACHED = 0.05


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
    *,
    point_filter: PointFilter,
    only_new: bool = False,
    tile: float | None = None,
    token_budget: int | None = None,
    picture: Path | None = None,
    force: bool = False,
    copies_rest: bool = False,
    suggests_model: bool = False,
) -> tuple[list[str], list[Written], list[Exception]]:
    """Upsample the files of a survey.

    Returns the lines to print, the files that were written, and the errors of single files.

    Files that can't be read or written are left out. With `copies_rest` files with too few points
    to upsample are copied, and those with nothing to write are skipped; else they are errors. Notes
    on the points are printed before the work; with `suggests_model` one names a model that may suit
    them better than that of the jobs. All processes of `workers` must call this. A PointupError
    that concerns the survey as a whole is raised in all processes, and then nothing is written.
    """
    began = time.monotonic()
    hidden = not workers.is_main
    found = SortedFiles()
    with work_directory(jobs, workers) as directory, ProgressBar(_name(jobs), hidden) as progress:
        with workers.barrier():
            if workers.is_main:
                upright = options.is_upright(model.config)
                found = sort_points(jobs, directory, point_filter, upright, progress)
        found = workers.from_main(found)
        left_out = found.left_out
        if found.too_few:
            if not copies_rest:
                raise found.too_few
            return _copy_each(jobs, found, options.originals and not only_new, workers)
        inside = [found.num_inside[number] for number in range(len(jobs)) if number not in left_out]
        given = jobs
        jobs = [job for number, job in enumerate(jobs) if number not in left_out]
        if all(job.is_context for job in jobs):
            return [], [], list(left_out.values())
        with workers.barrier():
            store = open_store(directory)
            _check_size(jobs, store, options, model, force)
            if workers.is_main:
                check_outputs(jobs, store)
                for note in notes_on_input(given, found, store, suggests_model):
                    progress.note(note)
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
        summary, unreached = Summary(), 0.0
        # Writing deletes block files, so that it starts after the summary.
        with workers.barrier():
            if workers.is_main:
                own = [number for number, job in enumerate(jobs) if not job.is_context]
                summary = new_points.summary(own, jobs[0].bounds)
                if options.density is not None:
                    unreached = UnreachedArea(store).share()
        with workers.barrier():
            window = Window(store) if picture and workers.is_main else None
            keep = options.originals and not only_new
            progress.begin("writing")
            written = write_each(jobs, store, new_points, keep, window, workers, progress)
            if picture and window:
                window.draw(jobs[0].source, keep, picture, bool(options.above_ground))
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
        lines[-1] += f"; {_summary_text(summary, options, jobs[0].source)}"
        if unreached > _MOST_UNREACHED:
            largest = max(MAX_LOCAL_RATIO, model.config.max_pass_ratio)
            lines.append(
                f"note: the density {options.density:g} was not reached: one point becomes at most "
                f"{largest:g}, too few on {unreached:.0%} of the area"
            )
    return [*nothing_in, *lines], files, errors


def _copy_each(
    jobs: Sequence[Job], found: SortedFiles, with_originals: bool, workers: LaunchedWorkerGroup
) -> tuple[list[str], list[Written], list[Exception]]:
    """Copy the files of a survey that has too few points; returns as `upsample_survey` does."""
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
    return lines, files, errors


def _summary_text(summary: Summary, options: UpsampleOptions, source: Path) -> str:
    unit = units_of_readable([source]).get(source, UNKNOWN)
    named = "" if unit.metres is None else f" {unit.name}"
    words = f"new points at most {summary.farthest:.3g}{named} from a measured one"
    if options.above_ground:
        words += f", {summary.num_below:,} of them below all returns around them"
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
