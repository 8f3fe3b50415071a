"""Pictures of clouds side by side: before and after, prediction and target, a dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from pointup.visualization.page import FAINT, Page, labelled, number, save_picture
from pointup.visualization.rendering import (
    ERRORS,
    HEIGHTS,
    Camera,
    Paint,
    distances,
    error_limit,
    fit_camera,
    point_spacing,
    view_axes,
)
from pointup.visualization.surveys import survey_picture

SIZE, GAP, FOOT = 392, 16, 84
SHAPE_SIZE, SHAPE_ROWS = 776, 620


def evaluation_picture(
    source: np.ndarray,
    prediction: np.ndarray,
    target: np.ndarray,
    error: np.ndarray | None = None,
    title: str = "",
    unit: str = "",
    vertical: bool = False,
    baseline: np.ndarray | None = None,
) -> np.ndarray:
    """Panels with the same camera: source, prediction, target, and error of the prediction.

    source, prediction, target: (N, 3), (P, 3), (M, 3); each may be empty.
    error: (P,) unsquared distance of each predicted point to the target, computed if not given.
    unit: of the coordinates, such as "m"; it is appended to distances.
    vertical: z is up and height gives the colour; otherwise y is up, and points are lit clay.
    baseline: (B, 3) output of the midpoint baseline, in one more panel beside the source.

    The lower row shows a close-up, outlined in the upper row: the nearest part of the target that
    the source covers badly. Camera, close-up and colour ranges depend on source and target alone,
    so that pictures of one sample at different training steps are comparable: the error scale ends
    at the larger of the target's spacing and the 95th percentile of the source's distance to the
    target. Points that are not finite are left out and counted in the caption. Chamfer is the
    unsquared mean distance from prediction (or source) to target plus the mean distance back.
    """
    everything = [np.asarray(cloud, dtype=np.float64) for cloud in (source, prediction, target)]
    finite = [np.asarray(np.isfinite(cloud).all(axis=1)) for cloud in everything]
    source, prediction, target = (
        cloud[keep] for cloud, keep in zip(everything, finite, strict=True)
    )
    error = distances(prediction, target) if error is None else np.asarray(error)[finite[1]]
    known = np.concatenate([source, target])
    paint = Paint(known, vertical)
    axes = view_axes(20, 28) if vertical else view_axes(30, 20, up="y")
    size, gap, foot = SIZE, GAP, FOOT
    across, upwards, _ = np.ptp(known @ axes.T, axis=0) if len(known) else (1.0, 1.0, 1.0)
    rows = int(np.clip(size * upwards / max(across, 1e-9), 0.6 * size, size))
    camera = fit_camera(known, axes, size, rows)
    close = _close_up(source, target, camera)
    limit = error_limit(source, target)
    # The ball size is limited for a prediction that diverged.
    largest = 2 * point_spacing(target) or np.inf

    panels: list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]
    panels = [("source", source, finite[0], distances(source, target))]
    if baseline is not None:
        baseline = np.asarray(baseline, dtype=np.float64)
        panels.append(("midpoint baseline", baseline, finite[0], distances(baseline, target)))
    panels += [("prediction", prediction, finite[1], error), ("target", target, finite[2], None)]
    page = Page((len(panels) + 1) * (size + gap) + gap, rows + close.height + gap + foot + 128)
    page.write(gap, page.height - 38, title, 26, weight="bold")
    lefts = [gap + panel * (size + gap) for panel in range(len(panels) + 1)]
    upper = foot + close.height + gap
    for left, (name, cloud, keep, distance) in zip(lefts, panels, strict=False):
        notes = [f"{len(cloud):,} points"]
        if distance is not None and len(cloud) and len(target):
            chamfer = distance.mean() + distances(target, cloud).mean()
            notes.append(f"Chamfer {number(chamfer, unit)}")
        if not keep.all():
            notes.append(f"{np.count_nonzero(~keep):,} not finite")
        page.caption(left, upper + rows + 10, name, ", ".join(notes))
        page.paste(left, upper, paint.render(cloud, camera, largest))
        page.paste(left, foot, paint.render(cloud, close, largest))
        page.outline(left, upper, camera, close)
    note = "no points"
    if len(error):
        note = f"mean {number(error.mean(), unit)}, largest {number(error.max(), unit)}"
    page.caption(lefts[-1], upper + rows + 10, "error of the prediction", note)
    colors = ERRORS(np.clip(error / limit, 0, 1))[:, :3]
    page.paste(lefts[-1], upper, paint.render(prediction, camera, largest, colors))
    page.paste(lefts[-1], foot, paint.render(prediction, close, largest, colors))

    page.color_bar(lefts[-1], size, ERRORS, (0, limit), labelled("distance to target", unit))
    if vertical:
        page.color_bar(lefts[0], size, HEIGHTS, paint.heights, labelled("height", unit))
    convention = "Chamfer: mean distance to the target + mean distance from it, unsquared"
    page.write(lefts[1] if vertical else gap, 42, convention, 18, FAINT)
    return page.pixels()


def _close_up(source: np.ndarray, target: np.ndarray, camera: Camera) -> Camera:
    """Camera on the nearest part of the target that is far from the source, four times as large."""
    rows = max(16, round(0.62 * camera.width))
    if not len(target):
        return replace(camera, height=rows)
    distance = distances(target, source)
    far = target[distance >= np.percentile(distance, 90)]
    towards = far @ camera.axes[2]
    # Not the very nearest one, which may be an outlier.
    centre = far[np.argsort(towards)[int(0.8 * (len(far) - 1))]]
    return replace(camera, centre=centre, scale=4 * camera.scale, height=rows)


def before_after_picture(
    before: np.ndarray,
    after: np.ndarray,
    path: str | Path | None = None,
    vertical: bool = False,
    unit: str = "m",
    totals: tuple[int, int] | None = None,
) -> np.ndarray:
    """Two clouds side by side, 1600 pixels wide, written to `path` (PNG or JPEG) if given.

    before, after: (N, 3) and (M, 3); either may be empty. Points that are not finite are left out.
    vertical: survey data with z up, coloured by height. The lower row is a view from above, the
        upper row a cross-section through the greatest differences in height, with scale bars and a
        colour bar in `unit`. A large area is cut to a window in its middle, about 240 spacings of
        `before` wide. Otherwise a shape with y up in a three-quarter view.
    totals: sizes of the whole clouds, where `before` and `after` are parts of them. Captions state
        them and the number of points shown.

    Raises FileError where `path` can't be written.
    """
    before, after = (np.asarray(cloud, dtype=np.float64) for cloud in (before, after))
    before, after = (cloud[np.isfinite(cloud).all(axis=1)] for cloud in (before, after))
    totals = totals or (len(before), len(after))
    if vertical:
        picture = survey_picture(before, after, unit, totals)
    else:
        picture = _shape_picture(before, after, totals)
    if path is not None:
        save_picture(picture, path)
    return picture


def _shape_picture(before: np.ndarray, after: np.ndarray, totals: tuple[int, int]) -> np.ndarray:
    size, gap, rows = SHAPE_SIZE, GAP, SHAPE_ROWS
    paint = Paint(before, vertical=False)
    camera = fit_camera(before if len(before) else after, view_axes(30, 20, up="y"), size, rows)
    page = Page(2 * size + 3 * gap, rows + 60)
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = gap + panel * (size + gap)
        shown = "" if len(cloud) == totals[panel] else f", {len(cloud):,} of them shown"
        page.heading(left, rows + 28, name, f"{totals[panel]:,} points{shown}")
        page.paste(left, 0, paint.render(cloud, camera))
    return page.pixels()


def dataset_picture(
    num_source: np.ndarray,
    num_target: np.ndarray,
    extent: np.ndarray,
    unit: str = "",
) -> np.ndarray:
    """Histograms of a dataset: points per sample, ratio of target to source, extent of the source.

    num_source, num_target: (B,) number of points of each sample.
    extent: (B,) longest side of the bounding box of each sample's source, in `unit`.
    """
    num_source, num_target = np.asarray(num_source), np.asarray(num_target)
    ratio = num_target[num_source > 0] / num_source[num_source > 0]
    page = Page(1600, 400)
    total = int(num_source.sum()) + int(num_target.sum())
    page.heading(24, 366, f"{len(num_source):,} samples", f"{total:,} points")
    page.histogram(72, "points per sample", {"source": num_source, "target": num_target})
    page.histogram(592, "upsampling ratio, target / source", {"": ratio})
    page.histogram(1112, labelled("longest side of the source", unit), {"": np.asarray(extent)})
    return page.pixels()
