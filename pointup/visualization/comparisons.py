"""Pictures of clouds side by side: before and after upsampling, prediction and target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from pointup.visualization.coloring import ERRORS, HEIGHTS, Paint
from pointup.visualization.page import FAINT, Page, labelled, number, save_picture
from pointup.visualization.rendering import fit_camera, point_spacing, view_axes
from pointup.visualization.surveys import survey_picture


def evaluation_picture(
    source: np.ndarray,
    prediction: np.ndarray,
    target: np.ndarray,
    error: np.ndarray | None = None,
    title: str = "",
    unit: str = "",
    vertical: bool = False,
) -> np.ndarray:
    """Four panels with the same camera: source, prediction, target, and error of the prediction.

    source, prediction, target: (N, 3), (P, 3), (M, 3); each may be empty.
    error: (P,) unsquared distance of each predicted point to the target, computed if not given.
    unit: of the coordinates, such as "m"; it is appended to distances.
    vertical: z is up and height gives the colour; otherwise y is up, and points are lit clay.

    Camera and colour ranges depend on source and target alone, so that pictures of one sample at
    different training steps are comparable: the error scale ends at the larger of the target's
    spacing and the 95th percentile of the source's distance to the target. Points that are not
    finite are left out and counted in the caption. Chamfer is the unsquared mean distance from
    prediction (or source) to target plus the mean distance back.
    """
    everything = [np.asarray(cloud, dtype=np.float64) for cloud in (source, prediction, target)]
    finite = [np.isfinite(cloud).all(axis=1) for cloud in everything]
    source, prediction, target = clouds = [
        cloud[keep] for cloud, keep in zip(everything, finite, strict=True)
    ]
    error = _distances(prediction, target) if error is None else np.asarray(error)[finite[1]]
    known = np.concatenate([source, target])
    paint = Paint(known, vertical)
    axes = view_axes(20, 28) if vertical else view_axes(30, 20, up="y")
    size, gap, foot = 392, 16, 84
    across, upwards, _ = np.ptp(known @ axes.T, axis=0) if len(known) else (1.0, 1.0, 1.0)
    rows = int(np.clip(size * upwards / max(across, 1e-9), 0.6 * size, size))
    camera = fit_camera(known, axes, size, rows)
    limit = _error_limit(source, target)
    # The ball size is limited for a prediction that diverged.
    largest = 2 * point_spacing(target) or np.inf

    page = Page(4 * size + 5 * gap, rows + foot + 128)
    page.write(gap, page.height - 38, title, 26, weight="bold")
    lefts = [gap + panel * (size + gap) for panel in range(4)]
    names = ("source", "prediction", "target")
    to_target = (_distances(source, target), error, None)
    for left, name, cloud, keep, distance in zip(
        lefts, names, clouds, finite, to_target, strict=False
    ):
        notes = [f"{len(cloud):,} points"]
        if distance is not None and len(cloud) and len(target):
            chamfer = distance.mean() + _distances(target, cloud).mean()
            notes.append(f"Chamfer {number(chamfer, unit)}")
        if not keep.all():
            notes.append(f"{np.count_nonzero(~keep):,} not finite")
        page.caption(left, foot + rows + 10, name, ", ".join(notes))
        page.paste(left, foot, paint.render(cloud, camera, largest))
    note = "no points"
    if len(error):
        note = f"mean {number(error.mean(), unit)}, largest {number(error.max(), unit)}"
    page.caption(lefts[3], foot + rows + 10, "error", note)
    colors = ERRORS(np.clip(error / limit, 0, 1))[:, :3]
    page.paste(lefts[3], foot, paint.render(prediction, camera, largest, colors))

    page.color_bar(lefts[3], size, ERRORS, (0, limit), labelled("distance to target", unit))
    if vertical:
        page.color_bar(lefts[0], size, HEIGHTS, paint.heights, labelled("height", unit))
    convention = "Chamfer: mean distance to the target + mean distance from it, unsquared"
    page.write(lefts[1] if vertical else gap, 42, convention, 18, FAINT)
    return page.pixels()


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
    size, gap, rows = 776, 16, 620
    paint = Paint(before, vertical=False)
    camera = fit_camera(before if len(before) else after, view_axes(30, 20, up="y"), size, rows)
    page = Page(2 * size + 3 * gap, rows + 60)
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = gap + panel * (size + gap)
        shown = "" if len(cloud) == totals[panel] else f", {len(cloud):,} of them shown"
        page.heading(left, rows + 28, name, f"{totals[panel]:,} points{shown}")
        page.paste(left, 0, paint.render(cloud, camera))
    return page.pixels()


def _distances(query: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Unsquared distance (N,) from each query to its nearest point; 0 where there are no points."""
    if len(points) == 0 or len(query) == 0:
        return np.zeros(len(query))
    return np.asarray(cKDTree(points).query(query)[0])


def _error_limit(source: np.ndarray, target: np.ndarray) -> float:
    """End of the colour scale of errors, see `evaluation_picture`."""
    distance = _distances(source, target)
    limit = max(point_spacing(target), float(np.percentile(distance, 95)) if len(distance) else 0.0)
    return limit or 1.0
