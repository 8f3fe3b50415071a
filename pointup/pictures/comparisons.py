"""Clouds side by side: before and after, and a prediction beside its target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from scipy.spatial import cKDTree

from pointup.pictures.page import FAINT, Page, labelled, number, save_picture
from pointup.pictures.rendering import (
    CLAY,
    Camera,
    fit_camera,
    point_spacing,
    render_points,
    view_axes,
)

# The ends of the maps are left out: their darkest violet swallows the shading, their brightest
# yellow melts into a white page.
_HEIGHTS = ListedColormap(colormaps["viridis"](np.linspace(0.05, 0.94, 256)))
_ERRORS = ListedColormap(colormaps["plasma"](np.linspace(0.0, 0.92, 256)))


def evaluation_picture(
    source: np.ndarray,
    prediction: np.ndarray,
    target: np.ndarray,
    error: np.ndarray | None = None,
    title: str = "",
    unit: str = "",
    vertical: bool = False,
) -> np.ndarray:
    """Four panels seen by one camera: source, prediction, target, and the prediction's error.

    source, prediction, target: (N, 3), (P, 3), (M, 3); any may be empty.
    error: (P,) plain distance of each predicted point to the target, computed where not given.
    unit: of the coordinates, as in "m"; it follows every distance.
    vertical: z is up, points are coloured by height; otherwise clay, lit, y up.

    Camera and colour ranges depend on source and target alone, so that pictures of one sample from
    different steps of a training compare: errors end at the larger of the target's spacing and the
    95th percentile of the source's own distance to it. Points that are not finite are left out and
    counted in the caption. Chamfer is the plain mean distance one way plus the other way.
    """
    everything = [np.asarray(cloud, dtype=np.float64) for cloud in (source, prediction, target)]
    finite = [np.isfinite(cloud).all(axis=1) for cloud in everything]
    source, prediction, target = clouds = [
        cloud[keep] for cloud, keep in zip(everything, finite, strict=True)
    ]
    error = _distances(prediction, target) if error is None else np.asarray(error)[finite[1]]
    known = np.concatenate([source, target])
    paint = _Paint(known, vertical)
    axes = view_axes(20, 28) if vertical else view_axes(30, 20, up="y")
    size, gap, foot = 392, 16, 84
    across, upwards, _ = np.ptp(known @ axes.T, axis=0) if len(known) else (1.0, 1.0, 1.0)
    rows = int(np.clip(size * upwards / max(across, 1e-9), 0.6 * size, size))
    camera = fit_camera(known, axes, size, rows)
    limit = _error_limit(source, target)
    # A prediction that has blown up is still drawn with balls of the target's order.
    largest = 2 * point_spacing(target) or np.inf

    page = Page(4 * size + 5 * gap, rows + foot + 128)
    page.write(gap, page.height - 38, title, 26, weight="bold")
    lefts = [gap + panel * (size + gap) for panel in range(4)]
    names = ("source", "prediction", "target")
    reaches = (_distances(source, target), error, None)
    for left, name, cloud, keep, reach in zip(lefts, names, clouds, finite, reaches, strict=False):
        notes = [f"{len(cloud):,} points"]
        if reach is not None and len(cloud) and len(target):
            chamfer = reach.mean() + _distances(target, cloud).mean()
            notes.append(f"Chamfer {number(chamfer, unit)}")
        if not keep.all():
            notes.append(f"{np.count_nonzero(~keep):,} not finite")
        page.caption(left, foot + rows + 10, name, ", ".join(notes))
        page.paste(left, foot, paint.render(cloud, camera, largest))
    note = "no points"
    if len(error):
        note = f"mean {number(error.mean(), unit)}, largest {number(error.max(), unit)}"
    page.caption(lefts[3], foot + rows + 10, "error", note)
    colors = _ERRORS(np.clip(error / limit, 0, 1))[:, :3]
    page.paste(lefts[3], foot, paint.render(prediction, camera, largest, colors))

    page.color_bar(lefts[3], size, _ERRORS, (0, limit), labelled("distance to target", unit))
    if vertical:
        page.color_bar(lefts[0], size, _HEIGHTS, paint.heights, labelled("height", unit))
    convention = "Chamfer: mean distance to the target + mean distance from it, plain"
    page.write(lefts[1] if vertical else gap, 42, convention, 18, FAINT)
    return page.pixels()


def before_after_picture(
    before: np.ndarray,
    after: np.ndarray,
    path: str | Path | None = None,
    vertical: bool = False,
    unit: str = "m",
) -> np.ndarray:
    """Two clouds side by side, 1600 pixels wide, written to `path` (PNG or JPEG) where given.

    before, after: (N, 3) and (M, 3); either may be empty. Points that are not finite are left out.
    vertical: survey data with z up, coloured by height: one row from the side, one from above, with
        a scale bar and a colour bar in `unit`. Of a large area the middle is shown, a window about
        240 spacings of `before` wide, and from the side a slice through that. Otherwise a shape
        with y up in a three-quarter view.

    Raises FileError where `path` can't be written.
    """
    before, after = (np.asarray(cloud, dtype=np.float64) for cloud in (before, after))
    before, after = (cloud[np.isfinite(cloud).all(axis=1)] for cloud in (before, after))
    picture = _survey_picture(before, after, unit) if vertical else _shape_picture(before, after)
    if path is not None:
        save_picture(picture, path)
    return picture


def _shape_picture(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    size, gap, rows = 776, 16, 620
    paint = _Paint(before, vertical=False)
    camera = fit_camera(before if len(before) else after, view_axes(30, 20, up="y"), size, rows)
    page = Page(2 * size + 3 * gap, rows + 60)
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = gap + panel * (size + gap)
        page.heading(left, rows + 28, name, f"{len(cloud):,} points")
        page.paste(left, 0, paint.render(cloud, camera))
    return page.pixels()


def _survey_picture(before: np.ndarray, after: np.ndarray, unit: str) -> np.ndarray:
    before, after, low, high = _window(before, after)
    size, gap, foot = 776, 16, 84
    extent = np.maximum(high - low, 1e-9)
    centre, paint = (low + high) / 2, _Paint(np.concatenate([before, after]), vertical=True)
    spacings = [point_spacing(before), point_spacing(after)]
    # Through a whole forest nothing is seen: the side view is a slice a tenth as deep as wide.
    depth = min(extent[1], max(0.1 * extent[0], 8 * max(spacings)))
    scale = float(np.min(np.array([size, 400, 440]) / extent))
    side_rows, above_rows = (int(np.ceil(extent[axis] * scale)) + 16 for axis in (2, 1))
    area = _occupied_area(np.concatenate([before, after]), 3 * max(spacings))
    # One size of ball for both leaves the sparse cloud hardly visible, its own spacing alone blows
    # few points up until they look like a closed surface.
    finest = min((spacing for spacing in spacings if spacing > 0), default=0.0)

    page = Page(2 * size + 3 * gap, foot + above_rows + side_rows + gap + 60)
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = gap + panel * (size + gap)
        radius = 0.45 * min(spacings[panel], 2 * finest)
        density = f", {number(len(cloud) / area)} points/{unit}\u00b2" if area > 0 else ""
        page.heading(left, page.height - 34, name, f"{len(cloud):,} points{density}")
        colors = paint.colors(cloud)
        near = np.abs(cloud[:, 1] - centre[1]) <= depth / 2
        side = Camera(view_axes(0, 0), centre, scale, size, side_rows)
        above = Camera(view_axes(0, 90), centre, scale, size, above_rows)
        picture = render_points(cloud[near], colors[near], side, radius, haze=0.25)
        page.paste(left, foot + above_rows + gap, picture)
        page.paste(left, foot, render_points(cloud, colors, above, radius, haze=0))
    end = page.scale_bar(gap, scale, unit)
    slice_note = f", a slice {number(depth, unit)} deep" if depth < extent[1] else ""
    page.write(end + 24, 42, f"top: from the side{slice_note}; bottom: from above", 18, FAINT)
    label = labelled("height", unit)
    page.color_bar(page.width - gap - 420, 420, _HEIGHTS, paint.heights, label)
    return page.pixels()


class _Paint:
    """How clouds of one picture are coloured: by height, or as lit clay."""

    def __init__(self, known: np.ndarray, vertical: bool) -> None:
        self.vertical = vertical
        low, high = np.percentile(known[:, 2], [0.5, 99.5]) if len(known) else (0.0, 1.0)
        self.heights = (float(low), float(max(high, low + 1e-6)))

    def colors(self, cloud: np.ndarray) -> np.ndarray:
        if not self.vertical:
            return np.broadcast_to(CLAY, cloud.shape)
        low, high = self.heights
        return _HEIGHTS(np.clip((cloud[:, 2] - low) / (high - low), 0, 1))[:, :3]

    def render(
        self,
        cloud: np.ndarray,
        camera: Camera,
        largest: float = np.inf,
        colors: np.ndarray | None = None,
    ) -> np.ndarray:
        colors = self.colors(cloud) if colors is None else colors
        radius = (0.5 if self.vertical else 0.65) * min(point_spacing(cloud), largest)
        return render_points(cloud, colors, camera, radius, lit=not self.vertical)


def _distances(query: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Plain distance (N,) from every query to its nearest point; 0 where there are no points."""
    if len(points) == 0 or len(query) == 0:
        return np.zeros(len(query))
    return np.asarray(cKDTree(points).query(query)[0])


def _error_limit(source: np.ndarray, target: np.ndarray) -> float:
    reach = _distances(source, target)
    limit = max(point_spacing(target), float(np.percentile(reach, 95)) if len(reach) else 0.0)
    return limit or 1.0


def _window(
    before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Both clouds cut to a legible window, their longer side along x, and the window's corners."""
    seen = before if len(before) else after
    if len(seen) == 0:
        return before, after, np.zeros(3), np.ones(3)
    if np.ptp(seen[:, 1]) > np.ptp(seen[:, 0]):
        # Seen from the east, north to the right.
        before, after = (cloud[:, [1, 0, 2]] * (1, -1, 1) for cloud in (before, after))
        seen = before if len(before) else after
    low, high = seen.min(axis=0), seen.max(axis=0)
    width = 240 * point_spacing(seen) or 1.0
    # A point of the cloud, since the medians of a bent area may lie outside it.
    middle = seen[np.abs(seen[:, :2] - np.median(seen[:, :2], axis=0)).sum(axis=1).argmin()]
    for axis, side in ((0, width), (1, width / 2)):
        if high[axis] - low[axis] > side:
            low[axis] = np.clip(middle[axis] - side / 2, low[axis], high[axis] - side)
            high[axis] = low[axis] + side
    before, after = (
        cloud[((cloud >= low) & (cloud <= high))[:, :2].all(axis=1)] for cloud in (before, after)
    )
    seen = before if len(before) else after
    # A bird or a multipath return far off the ground must not flatten the rest of the picture.
    low[2], high[2] = np.percentile(seen[:, 2], [0.02, 99.98])
    return before, after, low, high


def _occupied_area(points: np.ndarray, cell: float) -> float:
    """Ground area under the points: the square cells, `cell` wide, that hold one."""
    if cell == 0:
        return 0.0
    cells = np.floor((points[:, :2] - points[:, :2].min(axis=0)) / cell).astype(np.int64)
    return len(np.unique(cells[:, 0] * (cells[:, 1].max() + 1) + cells[:, 1])) * cell**2
