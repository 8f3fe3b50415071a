"""What `pointup upsample` prints of a survey: notes before and after the work, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.reading import SortedFiles
from pointup.io.cloud import LAS_EXTENSIONS, MUCH_VEGETATION
from pointup.io.las_writer import LasWriter
from pointup.io.length_unit import UNKNOWN, units_of_readable
from pointup.model.upsampler import Upsampler
from pointup.upsampling.new_points import Summary
from pointup.upsampling.options import MAX_LOCAL_RATIO, UpsampleOptions
from pointup.upsampling.scatter import MUCH_SCATTER, scatter_of
from pointup.upsampling.single_pass.quotas import UnreachedArea
from pointup.upsampling.store.point_store import Store

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
    notes, name = [], survey_name(jobs)
    if found.num_synthetic:
        notes.append(_of_synthetic(jobs, found.num_synthetic))
    if jobs[0].source.suffix.lower() not in LAS_EXTENSIONS and (found_step := _rounding(store)):
        step, cause = found_step
        notes.append(
            f"{name}: coordinates are rounded to {step:g}, coarse beside the spacing of the "
            f"points: {cause} does this to map coordinates; export the points again, as doubles"
        )
    share = found.num_vegetation / max(1, found.num_taken)
    if suggests_model and jobs[0].model == "lidar" and share > MUCH_VEGETATION:
        notes.append(f"{name}: {share:.0%} of the points are vegetation: try --model forest")
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
            notes.append(f"{name}: the points " + note.format(by))
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


def notes_on_places(coarsest: LasWriter | None, num_crowded: int, num_new: int) -> list[str]:
    """A note on new points where another point is, of a file whose scale is too coarse for them."""
    if coarsest is None or num_crowded <= _MOST_CROWDED * num_new:
        return []
    scale = np.abs(coarsest.header.scales).max()
    return [
        f"note: {num_crowded:,} new points ({num_crowded / num_new:.0%}) are where another point "
        f"is: {coarsest.path} has a scale of {scale:g}, too coarse for them; give the input a "
        "finer scale, or write a PLY file"
    ]


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


def survey_name(jobs: Sequence[Job]) -> str:
    return jobs[0].source.name if len(jobs) == 1 else f"survey of {len(jobs)} files"


def count_text(inside: Sequence[int], store: Store, files: slice, says_coincident: bool) -> str:
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
