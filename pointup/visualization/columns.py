"""Pictures of clouds in columns, and maps of surveys below each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from matplotlib.colors import Colormap

from pointup.visualization.before_after import CrossSection, find_section, turned
from pointup.visualization.page import FAINT, LABEL, Page, labelled, number
from pointup.visualization.rendering import (
    ERRORS,
    HEIGHTS,
    Camera,
    Paint,
    distances,
    error_limit,
    finite,
    fit_camera,
    point_spacing,
    render_points,
    view_axes,
)

SIZE, GAP, FOOT, HEAD = 392, 16, 84, 64
SECTION_ASPECT, SECTION_ROWS, CLOSE_ROWS = 1.3, 300, 250
CLOSE_SPACINGS = 36
"""Width of a close-up in spacings of the first cloud: wide enough to see what the points are of,
and narrow enough to see single points."""
OVERVIEW_POINTS = 500_000
ERROR_PERCENTILE = 98


def columns_picture(
    clouds: Mapping[str, np.ndarray],
    reference: np.ndarray,
    *,
    of: str = "reference",
    unit: str = "",
    vertical: bool = True,
    title: str = "",
    subtitle: str = "",
    notes: Mapping[str, str] | None = None,
    errors: bool = True,
    largest_error: float | None = None,
) -> np.ndarray:
    """Clouds beside a reference, one column each, in rows with the same camera.

    clouds: by name, (N, 3); the first one is the sparse cloud that the others were made from.
    reference: (M, 3), the last column, named `of`.
    unit: of the coordinates, such as "m".
    vertical: z is up and height gives the colour. The rows are an overview, a cross-section where
        heights differ most, and a close-up of it. Otherwise y is up, points are lit clay, and the
        rows are an overview and a close-up.
    title, subtitle: one line above the columns.
    notes: one line for the head of a column, by name.
    errors: add a row of the close-up in the colours of the unsquared distance to the reference;
        in the column of the reference, of its distance to the cloud before it.
    largest_error: end of the scale of errors; by default the 98th percentile of the errors that are
        shown, the first cloud's left out.

    The close-up lies where the reference is dense and far from the first cloud. In close-ups and
    cross-sections all balls have the same size, so that columns differ by their points alone.
    Camera and size of the balls depend on the first cloud and the reference alone. Points that are
    not finite are left out. Returns (height, width, 3) uint8.
    """
    columns = {name: finite(cloud) for name, cloud in (*clouds.items(), (of, reference))}
    if vertical:
        columns = turned(columns)
    first = next((name for name, cloud in columns.items() if len(cloud)), of)
    rows = _Rows(columns, first, of, vertical, largest_error)
    return rows.page((title, subtitle), unit, notes or {}, errors)


def evaluation_picture(
    source: np.ndarray,
    prediction: np.ndarray,
    target: np.ndarray,
    title: str = "",
    unit: str = "",
    vertical: bool = False,
    baseline: np.ndarray | None = None,
) -> np.ndarray:
    """`columns_picture` of a sample: source, midpoint baseline if given, prediction and target.

    source, prediction, target: (N, 3), (P, 3), (M, 3); each may be empty.
    baseline: (B, 3) output of the midpoint baseline.

    The scale of errors ends at `error_limit`, so that pictures of one sample at different training
    steps are comparable. Captions state the Chamfer distance and how many points are not finite.
    """
    clouds = {"source": source, "midpoint baseline": baseline, "prediction": prediction}
    given = {name: np.asarray(cloud) for name, cloud in clouds.items() if cloud is not None}
    known, notes = finite(target), {}
    for name, cloud in given.items():
        points, parts = finite(cloud), []
        if len(points) and len(known):
            chamfer = distances(points, known).mean() + distances(known, points).mean()
            parts.append(f"Chamfer {number(chamfer, unit)}")
        if len(points) < len(cloud):
            parts.append(f"{len(cloud) - len(points):,} not finite")
        notes[name] = ", ".join(parts)
    return columns_picture(
        given,
        target,
        of="target",
        unit=unit,
        vertical=vertical,
        title=title,
        subtitle="Chamfer: mean distance to the target + mean distance from it, unsquared",
        notes=notes,
        largest_error=error_limit(finite(source), known),
    )


class _Rows:
    """The cameras and colours that all columns of a picture share."""

    def __init__(
        self,
        columns: dict[str, np.ndarray],
        first: str,
        of: str,
        vertical: bool,
        largest_error: float | None = None,
    ) -> None:
        self.columns, self.of, self.vertical = columns, of, vertical
        self.largest_error = largest_error
        known = np.concatenate([columns[first], columns[of]])
        self.paint = Paint(known, vertical)
        spacings = [point_spacing(columns[name]) for name in {first, of} if len(columns[name]) > 1]
        self.finest, self.largest = min(spacings, default=1.0), 2 * max(spacings, default=1.0)
        spacing = point_spacing(columns[first]) or 1.0
        axes = view_axes(20, 28) if vertical else view_axes(30, 20, up="y")
        across, upwards, _ = np.ptp(known @ axes.T, axis=0) if len(known) else (1.0, 1.0, 1.0)
        rows = int(np.clip(SIZE * upwards / max(across, 1e-9), 0.3 * SIZE, SIZE))
        self.overview = fit_camera(known, axes, SIZE, rows)
        self.section: CrossSection | None = None
        wide = self.overview
        near = columns[of] if len(columns[of]) else known
        if vertical and len(known):
            self.section = find_section(near, SECTION_ASPECT, spacing)
            wide = self.section.camera(SIZE, SECTION_ROWS)
            near = self.section.cut(near)
        self.wide = wide
        scale = max(SIZE / (CLOSE_SPACINGS * spacing), 1.5 * wide.scale)
        centre = _badly_covered(near, columns[first], wide, SIZE / scale)
        close = replace(wide, centre=centre, scale=scale, height=CLOSE_ROWS)
        self.close = _kept_within(close, wide)

    def cut(self, cloud: np.ndarray) -> np.ndarray:
        """The points of a cloud that cross-section and close-up show."""
        return self.section.cut(cloud) if self.section else cloud

    def errors(self) -> tuple[dict[str, np.ndarray], float]:
        """Distances of the points in the close-up by column, and the end of the colour scale."""
        found, shown = {}, []
        for name, cloud in self.columns.items():
            cut = self.cut(cloud)
            found[name] = distances(cut, self.columns[self._against(name)])
            inside = found[name][_within(cut, self.close)]
            if name != next(iter(self.columns)) or len(self.columns) == 2:
                shown.append(inside)
        if self.largest_error is not None:
            return found, self.largest_error
        values = np.concatenate(shown)
        limit = float(np.percentile(values, ERROR_PERCENTILE)) if len(values) else 0.0
        return found, limit or 1.0

    def page(
        self, title: tuple[str, str], unit: str, notes: Mapping[str, str], errors: bool
    ) -> np.ndarray:
        heights = [self.close.height + LABEL] * (2 if errors else 1)
        heights += [self.wide.height + LABEL] * (self.section is not None)
        heights += [self.overview.height + LABEL]
        top = HEAD + (44 if any(title) else 0)
        page = Page(len(self.columns) * (SIZE + GAP) + GAP, FOOT + sum(heights) + top)
        if any(title):
            end = page.write(GAP, page.height - 34, title[0], 26, weight="bold")
            page.write(end + 14, page.height - 34, title[1], 20, FAINT)
        found, limit = self.errors() if errors else ({}, 1.0)
        for column, (name, cloud) in enumerate(self.columns.items()):
            left, bottom = GAP + column * (SIZE + GAP), FOOT
            if errors:
                picture = self._drawn(cloud, self.close, found[name] / limit)
                bottom = page.stack(left, bottom, picture, f"distance to {self._against(name)}")
            picture = self._drawn(cloud, self.close)
            num_shown = int(_within(self.cut(cloud), self.close).sum())
            bottom = page.stack(left, bottom, picture, f"close-up: {num_shown:,} points")
            if self.section is not None:
                page.outline(left, bottom, self.wide, self.close)
                label = f"cross-section, {number(self.section.depth, unit)} deep"
                bottom = page.stack(left, bottom, self._drawn(cloud, self.wide), label)
            thinned = cloud[:: -(-len(cloud) // OVERVIEW_POINTS) or 1]
            page.paste(left, bottom, self.paint.render(thinned, self.overview, self.largest))
            if self.section is None:
                page.outline(left, bottom, self.overview, self.close)
            note = "; ".join(filter(None, (f"{len(cloud):,} points", notes.get(name, ""))))
            page.caption(left, page.height - top + 6, name, note)
        self._legends(page, unit, limit, errors)
        return page.pixels()

    def _drawn(
        self, cloud: np.ndarray, camera: Camera, share: np.ndarray | None = None
    ) -> np.ndarray:
        cut = self.cut(cloud)
        colors = self.paint.colors(cut) if share is None else ERRORS(np.clip(share, 0, 1))[:, :3]
        factor, haze = (0.45, 0.15) if self.vertical else (0.65, 0.4)
        radius = factor * self.finest
        return render_points(cut, colors, camera, radius, lit=not self.vertical, haze=haze)

    def _against(self, name: str) -> str:
        """The column that the distances of a column are measured to."""
        *_, last = (other for other in self.columns if other != self.of)
        return last if name == self.of else self.of

    def _legends(self, page: Page, unit: str, limit: float, errors: bool) -> None:
        longest = 180 if len(self.columns) > 2 else 90
        end = page.scale_bar(GAP, self.close.scale, unit, "close-up", longest)
        if self.section is not None:
            left = int(end) + 28
            end = page.scale_bar(left, self.wide.scale, unit, "cross-section", longest)
        right = page.width - GAP
        if errors:
            label = labelled("distance", unit)
            page.color_bar(right - SIZE, SIZE, ERRORS, (0, limit), label)
            right -= SIZE + GAP
        width = min(SIZE, right - int(end) - 28)
        if self.vertical and width >= 200:
            label = labelled("height", unit)
            page.color_bar(right - width, width, HEIGHTS, self.paint.heights, label)


def _within(cloud: np.ndarray, camera: Camera) -> np.ndarray:
    """Mask (N,) of the points that a camera shows, hidden ones too."""
    place = np.abs((cloud - camera.centre) @ camera.axes[:2].T * camera.scale)
    return np.asarray((place <= np.array([camera.width, camera.height]) / 2).all(axis=1))


def _kept_within(close: Camera, wide: Camera) -> Camera:
    """The camera moved so far that it shows only what `wide` shows, where it is not larger."""
    room = np.array([wide.width, wide.height]) / wide.scale
    room = np.maximum(room - np.array([close.width, close.height]) / close.scale, 0) / 2
    place = (close.centre - wide.centre) @ close.axes.T
    place[:2] = np.clip(place[:2], -room, room)
    return replace(close, centre=wide.centre + place @ close.axes)


def _badly_covered(
    points: np.ndarray, source: np.ndarray, camera: Camera, width: float
) -> np.ndarray:
    """Centre (3,) of the square of `width` on the picture with the greatest sum of distances from
    its points to the source; outliers count as the 95th percentile."""
    if not len(points):
        return camera.centre
    distance = distances(points, source)
    # A surface that is seen from behind would be hidden in the picture.
    depth = points @ camera.axes[2]
    weight = np.minimum(distance, np.percentile(distance, 95)) * (depth >= np.median(depth))
    weight = weight if weight.any() else np.ones(len(points))
    place = points @ camera.axes[:2].T
    # Diverged points would overflow an integer.
    cells = np.minimum((place - place.min(axis=0)) / max(width, 1e-12) * 2, 2**31).astype(np.int64)
    _, cell = np.unique(cells, axis=0, return_inverse=True)
    cell = cell.reshape(-1)
    best = int(np.bincount(cell, weight).argmax())
    return np.asarray(points[(cell == best) & (weight > 0)].mean(axis=0))


CELL_SPACINGS, MOST_CELLS = 2.5, 98
MEASURED_POINTS = 200_000
DENSITY_PERCENTILE, ERROR_PERCENTILE_OF_MAPS = 99, 95


def maps_picture(clouds: Mapping[str, np.ndarray], reference: np.ndarray, unit: str) -> np.ndarray:
    """Maps below the columns of `columns_picture`, with the same arguments and the same width.

    The upper row shows the point density, the lower row the mean unsquared distance of the points
    of each cell to the reference; in the column of the reference, that of its points to the cloud
    before it. Cells have a side of 2.5 spacings of the first cloud, or more in large areas; cells
    without points are white. The scales end at the 99th percentile of the densities, and at the
    95th percentile of the distances without those of the first cloud. Of more than 200,000 points,
    as many at equal intervals are measured. Returns (height, width, 3) uint8.
    """
    of = "reference"
    columns = turned({**clouds, of: reference})
    (first, *_), (*_, last) = columns, clouds
    cell, edges = _cells(columns, first)
    densities, errors, means = {}, {}, {}
    for name, cloud in columns.items():
        some = cloud[:: -(-len(cloud) // MEASURED_POINTS) or 1]
        against = columns[last if name == of else of]
        distance = distances(some, against)
        densities[name] = _mapped(cloud, edges) / cell**2
        errors[name] = _mapped(some, edges, distance) / _mapped(some, edges)
        means[name] = number(float(distance.mean()), unit) if len(some) else "-"
    densest = _percentile(list(densities.values()), DENSITY_PERCENTILE)
    shown = [error for name, error in errors.items() if name != first or len(columns) == 2]
    largest = _percentile(shown, ERROR_PERCENTILE_OF_MAPS)

    num_across, num_along = (len(ends) - 1 for ends in edges)
    side = SIZE / max(num_across, num_along)
    height = max(8, round(num_along * side))
    page = Page(len(columns) * (SIZE + GAP) + GAP, FOOT + 2 * (height + LABEL))
    for column, name in enumerate(columns):
        left, bottom = GAP + column * (SIZE + GAP), FOOT
        text = f"distance to {last if name == of else of}, mean {means[name]}"
        picture = _drawn(errors[name] / largest, ERRORS, side, height)
        bottom = page.stack(left, bottom, picture, text)
        middle = number(float(np.nanmedian(densities[name]))) if len(columns[name]) else "0"
        text = f"density, median {middle} points/{unit or 'unit'}²"
        page.stack(left, bottom, _drawn(densities[name] / densest, HEIGHTS, side, height), text)
    page.scale_bar(GAP, side / cell, unit, "from above")
    right = page.width - GAP - SIZE
    page.color_bar(right, SIZE, ERRORS, (0, largest), labelled("distance", unit))
    if len(columns) > 2:
        label = f"points/{unit or 'unit'}²"
        page.color_bar(right - SIZE - GAP, SIZE, HEIGHTS, (0, densest), label)
    return page.pixels()


def _cells(columns: Mapping[str, np.ndarray], first: str) -> tuple[float, list[np.ndarray]]:
    """Side of the square cells that cover all surveys, and their edges along x and y."""
    places = np.concatenate([cloud[:, :2] for cloud in columns.values()])
    low, extent = places.min(axis=0), np.ptp(places, axis=0)
    longest = max(float(extent.max()), 1e-9)
    cell = max(CELL_SPACINGS * point_spacing(columns[first]), longest / MOST_CELLS)
    numbers = np.ceil(extent / cell).clip(1).astype(int)
    return cell, [low[i] + cell * np.arange(numbers[i] + 1) for i in (0, 1)]


def _mapped(
    cloud: np.ndarray, edges: list[np.ndarray], values: np.ndarray | None = None
) -> np.ndarray:
    """Number of points in each cell (X, Y), or the sum of their values; NaN without points."""
    sums = np.histogram2d(cloud[:, 0], cloud[:, 1], edges, weights=values)[0]
    if values is None:
        sums[sums == 0] = np.nan
    return sums


def _percentile(maps: list[np.ndarray], percent: float) -> float:
    values = np.concatenate([grid[np.isfinite(grid)] for grid in maps])
    return float(np.percentile(values, percent)) if len(values) and values.any() else 1.0


def _drawn(share: np.ndarray, colors: Colormap, side: float, height: int) -> np.ndarray:
    """Picture of a map (X, Y) of values 0 to 1, with cells `side` pixels wide; NaN is white."""
    column = np.minimum((np.arange(SIZE) / side).astype(int), share.shape[0])
    row = np.minimum((np.arange(height)[::-1] / side).astype(int), share.shape[1] - 1)
    padded = np.concatenate([share, np.full((1, share.shape[1]), np.nan)])
    values = padded[column][:, row].T
    rgb = colors(np.clip(np.nan_to_num(values), 0, 1))[..., :3]
    rgb[np.isnan(values)] = 1.0
    return np.round(rgb * 255).astype(np.uint8)
