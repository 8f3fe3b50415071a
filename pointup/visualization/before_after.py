"""Pictures of clouds before and after upsampling, and cross-sections of surveys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.geometry.grids import in_box
from pointup.visualization.page import FAINT, Page, labelled, number, save_picture
from pointup.visualization.rendering import (
    HEIGHTS,
    Camera,
    Paint,
    finite,
    fit_camera,
    point_spacing,
    render_points,
    view_axes,
)

SIZE, GAP, FOOT = 776, 16, 84
SHAPE_ROWS = 620
WINDOW_SPACINGS = 240
SECTION_SPACINGS, SECTION_ASPECT = 70, 1.9
DEPTH_SPACINGS, LEAST_DEPTH = 4, 0.03


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
    before, after = finite(before), finite(after)
    totals = totals or (len(before), len(after))
    if vertical:
        picture = _survey_picture(before, after, unit, totals)
    else:
        picture = _shape_picture(before, after, totals)
    if path is not None:
        save_picture(picture, path)
    return picture


def _shape_picture(before: np.ndarray, after: np.ndarray, totals: tuple[int, int]) -> np.ndarray:
    paint, seen = Paint(before, vertical=False), before if len(before) else after
    camera = fit_camera(seen, view_axes(30, 20, up="y"), SIZE, SHAPE_ROWS)
    page = Page(2 * SIZE + 3 * GAP, SHAPE_ROWS + 60)
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = GAP + panel * (SIZE + GAP)
        shown = "" if len(cloud) == totals[panel] else f", {len(cloud):,} of them shown"
        page.heading(left, SHAPE_ROWS + 28, name, f"{totals[panel]:,} points{shown}")
        page.paste(left, 0, paint.render(cloud, camera))
    return page.pixels()


def _survey_picture(
    before: np.ndarray, after: np.ndarray, unit: str, totals: tuple[int, int]
) -> np.ndarray:
    before, after, low, high = _window(before, after)
    extent = np.maximum(high - low, 1e-9)
    centre, paint = (low + high) / 2, Paint(np.concatenate([before, after]), vertical=True)
    spacings = [point_spacing(before), point_spacing(after)]
    seen = before if len(before) else after
    section = find_section(seen) if len(seen) else CrossSection(low, high)
    scale = float(np.min(np.array([SIZE, 400]) / extent[:2]))
    above_rows = int(np.ceil(extent[1] * scale)) + 16
    above = Camera(view_axes(0, 90), centre, scale, SIZE, above_rows)
    side = section.camera(SIZE, 440)
    area = _occupied_area(np.concatenate([before, after]), 3 * max(spacings))
    # With one ball size for both, the sparse cloud is hardly visible. Sized by its own spacing
    # alone, few points look like a closed surface.
    finest = min((spacing for spacing in spacings if spacing > 0), default=0.0)

    page = Page(2 * SIZE + 3 * GAP, FOOT + above_rows + 40 + side.height + GAP + 60)
    upper = FOOT + above_rows + 40
    for panel, (name, cloud) in enumerate((("before", before), ("after", after))):
        left = GAP + panel * (SIZE + GAP)
        cut = section.cut(cloud)
        radius = 0.45 * min(spacings[panel], 2 * finest)
        density = f"{number(len(cloud) / area)} points/{unit or 'unit'}\u00b2" if area > 0 else ""
        is_all = len(cloud) == totals[panel]
        shown = "" if is_all else f"shown: {len(cloud):,} points"
        page.heading(left, page.height - 34, name, f"{totals[panel]:,} points")
        note = ", ".join(filter(None, (shown, density)))
        page.write(left, FOOT + above_rows + 10, f"from above; {note}", 18, FAINT)
        page.paste(left, FOOT, render_points(cloud, paint.colors(cloud), above, radius, haze=0))
        # In cross-sections balls have one size, so that only their number differs.
        picture = render_points(cut, paint.colors(cut), side, 0.4 * finest, haze=0.15)
        page.paste(left, upper, picture)
        wide = f"{number(float(section.high[0] - section.low[0]), unit)} wide"
        deep = f"{number(section.depth, unit)} deep"
        note = f"cross-section: {len(cut):,} points, {wide}, {deep}"
        page.write(left, page.height - 58, note, 18, FAINT)
        corner = (section.low - centre)[:2] * scale + [SIZE / 2, above_rows / 2]
        size = (section.high - section.low)[:2] * scale
        page.frame(left + corner[0], FOOT + corner[1], size[0], size[1])
    end = page.scale_bar(GAP, scale, unit, "from above")
    page.scale_bar(int(end) + 40, side.scale, unit, "cross-section")
    page.color_bar(page.width - GAP - 420, 420, HEIGHTS, paint.heights, labelled("height", unit))
    return page.pixels()


def _window(
    before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Both clouds `turned` and cut to a window, and the corners of the window."""
    before, after = turned({"before": before, "after": after}).values()
    seen = before if len(before) else after
    if len(seen) == 0:
        return before, after, np.zeros(3), np.ones(3)
    low, high = seen.min(axis=0), seen.max(axis=0)
    width = WINDOW_SPACINGS * point_spacing(seen) or 1.0
    # A point of the cloud, since the medians of a bent area may lie outside it.
    middle = seen[np.abs(seen[:, :2] - np.median(seen[:, :2], axis=0)).sum(axis=1).argmin()]
    for axis, side in ((0, width), (1, width / 2)):
        if high[axis] - low[axis] > side:
            low[axis] = np.clip(middle[axis] - side / 2, low[axis], high[axis] - side)
            high[axis] = low[axis] + side
    before, after = (cloud[in_box(cloud, low[:2], high[:2])] for cloud in (before, after))
    seen = before if len(before) else after
    # Outliers (birds, multipath returns) must not compress the range of heights.
    low[2], high[2] = np.percentile(seen[:, 2], [0.02, 99.98])
    return before, after, low, high


def _occupied_area(points: np.ndarray, cell: float) -> float:
    """Ground area covered by points: the area of all square cells, `cell` wide, with a point."""
    if cell == 0:
        return 0.0
    cells = np.floor((points[:, :2] - points[:, :2].min(axis=0)) / cell).astype(np.int64)
    return len(np.unique(cells[:, 0] * (cells[:, 1].max() + 1) + cells[:, 1])) * cell**2


@dataclass(frozen=True)
class CrossSection:
    """An upright box, much wider (x) than deep (y), by its lowest and highest corner (3,)."""

    low: np.ndarray
    high: np.ndarray

    @property
    def depth(self) -> float:
        return float(self.high[1] - self.low[1])

    def cut(self, cloud: np.ndarray) -> np.ndarray:
        """Points (N, 3) of the cloud within the box, at any height."""
        return cloud[in_box(cloud, self.low[:2], self.high[:2])]

    def camera(self, width: int, height: int) -> Camera:
        """Camera that shows the box from the side, within `width` x `height` pixels."""
        extent = np.maximum(self.high - self.low, 1e-9)
        scale = float(min(width / extent[0], (height - 16) / extent[2]))
        rows = int(np.ceil(extent[2] * scale)) + 16
        return Camera(view_axes(0, 0), (self.low + self.high) / 2, scale, width, rows)


def find_section(
    cloud: np.ndarray, aspect: float = SECTION_ASPECT, spacing: float | None = None
) -> CrossSection:
    """The cross-section of a cloud (N, 3), N > 0, along x where heights differ most.

    At least 70 spacings wide, `aspect` times as wide as tall objects are high, and at least four
    spacings deep, but no larger than the cloud. `spacing`: by default that of the cloud.
    """
    low, high = cloud.min(axis=0), cloud.max(axis=0)
    spacing = spacing or point_spacing(cloud) or 1.0
    tall = float(np.subtract(*np.percentile(cloud[:, 2], [99.9, 0.1])))
    width = min(max(SECTION_SPACINGS * spacing, aspect * tall), float(high[0] - low[0]))
    depth = min(max(DEPTH_SPACINGS * spacing, LEAST_DEPTH * width), float(high[1] - low[1]))
    # Candidates are adjacent boxes of half the width, so that one contains the main object.
    step = np.maximum([width / 2, depth], 1e-9)
    place = np.floor((cloud[:, :2] - low[:2]) / step).astype(np.int64)
    _, box, count = np.unique(place, axis=0, return_inverse=True, return_counts=True)
    order = np.lexsort((cloud[:, 2], box.reshape(-1)))
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    heights = cloud[order, 2]
    # Without the highest and lowest 5 %, so that outliers (birds) do not attract the section.
    trim = count // 20
    spread = heights[first + count - 1 - trim] - heights[first + trim]
    # Boxes with few points, at the border of the survey, are excluded.
    spread = np.where(count >= np.median(count) / 2, spread, -1.0)
    best = int(spread.argmax())
    middle = cloud[order[first[best] : first[best] + count[best]]].mean(axis=0)
    half = np.array([width, depth]) / 2
    corner = np.clip(middle[:2] - half, low[:2], np.maximum(high[:2] - 2 * half, low[:2]))
    bottom, top = corner, corner + 2 * half
    inside = cloud[in_box(cloud, bottom, top)]
    lowest, highest = np.percentile(inside[:, 2], [0.1, 99.9])
    return CrossSection(np.append(bottom, lowest), np.append(top, max(highest, lowest + 1e-9)))


def turned(surveys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Surveys (N, 3), turned such that their longer side lies along x: seen from the east then,
    with north to the right."""
    extents = [np.ptp(cloud[:, :2], axis=0) for cloud in surveys.values() if len(cloud)]
    across, along = np.max(extents, axis=0) if extents else (0.0, 0.0)
    if along <= across:
        return dict(surveys)
    return {name: cloud[:, [1, 0, 2]] * (1, -1, 1) for name, cloud in surveys.items()}
