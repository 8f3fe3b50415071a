"""The flight passes of a survey: its points by the strips in which they were flown.

Strips overlap. One pass beside the others is a real pair of one sensor, with its scan lines,
shadows and noise on the same leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pointup.datasets.survey_tiles import first_occurrences, split_tiles
from pointup.errors import DataError
from pointup.geometry.grids import without_holes
from pointup.io.cloud import PointCloud, attribute

GPS_TIME, POINT_SOURCE_ID = "gps_time", "point_source_id"
LARGEST_GAP = 3.0
"""A longer pause in gps_time, in seconds, ends a pass."""
MOST_PER_TIME = 1000
"""gps_time is not that of the pulses if more points have the same one on average."""
LEAST_SHARE = 0.05
"""A pass on a smaller share of the ground is too small."""
MOST_REPEATED = 0.5
"""A pass with a larger share of its points at positions of other passes is a copy of them."""
LEAST_FIT = 0.05
"""The flying direction is seen if it explains this share of the variance of gps_time."""
POINTS_PER_CELL = 16
MOST_CELLS = 20_000_000


@dataclass(frozen=True)
class FlightPass:
    """A pass over some ground.

    Attributes:
        ids: its point source ids, ascending. A scanner may give each of its channels an own id.
        start, end: its gps_time in seconds; 0 where the file has none.
        num_points: the number of its points.
        area: the ground that it covers, in square units of the file.
        course: (x, y), its flying direction times its number of points; zeros if it is not seen.
        left_out: why it is not used; "" if it is.
    """

    ids: tuple[int, ...]
    start: float
    end: float
    num_points: int
    area: float
    course: tuple[float, float] = (0.0, 0.0)
    left_out: str = ""

    @property
    def density(self) -> float:
        """Points for each square unit of the ground that it covers."""
        return self.num_points / self.area if self.area else 0.0

    @property
    def azimuth(self) -> float | None:
        """The flying direction in degrees, clockwise from the y axis (north); None if not seen."""
        return float(np.degrees(np.arctan2(*self.course))) % 360 if any(self.course) else None


@dataclass(frozen=True)
class FlightPasses:
    """The passes of a cloud.

    Attributes:
        label: (N,) int64, the position in `passes` of the pass of each point; -1 for the points of
            passes that are left out, and for points at the position of another point.
        passes: in the order of their time, or of their ids in files without one.
        area: the ground that all points cover, in square units of the file.
    """

    label: np.ndarray
    passes: list[FlightPass]
    area: float


def find_passes(
    gps_time: np.ndarray, point_source_id: np.ndarray, positions: np.ndarray
) -> FlightPasses:
    """Find the passes of points in any order.

    `gps_time` (N,) are seconds, `point_source_id` (N,) integers, `positions` (N, 3) float64. Arrays
    of zeros stand for missing ones. A pass ends where gps_time pauses for more than `LARGEST_GAP`,
    and where the id changes. Ids whose times overlap are the channels of one scanner, and one pass.
    Passes on less than `LEAST_SHARE` of the ground, and copies of other passes, are left out.

    The ground should be so small that the platform leaves it between two passes, such as a block of
    tiles, unless the recording pauses between strips.
    """
    number, label = _numbered(gps_time, point_source_id)
    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], np.arange(number + 1))
    is_first = np.empty(len(label), dtype=bool)
    is_first[order] = first_occurrences(positions[order])
    xy = positions[:, :2]
    side = _cell_side(xy)
    area = _area(xy, side)
    passes = []
    for k in range(number):
        own = order[starts[k] : starts[k + 1]]
        once = own[is_first[own]]
        covered = _area(xy[once], side)
        left_out = ""
        if len(once) < (1 - MOST_REPEATED) * len(own):
            left_out = "copy"
        elif covered < LEAST_SHARE * area:
            left_out = "too small"
        found = FlightPass(
            tuple(np.unique(point_source_id[own]).tolist()),
            float(gps_time[own].min()),
            float(gps_time[own].max()),
            len(own) if left_out == "copy" else len(once),
            covered,
            _course(gps_time[own], xy[own]),
            left_out,
        )
        passes.append(found)
    is_used = np.array([not each.left_out for each in passes], dtype=bool)
    return FlightPasses(np.where(is_first & is_used[label], label, -1), passes, area)


def merged(passes: Iterable[FlightPass]) -> list[FlightPass]:
    """The passes over all ground, from those of separate parts of it, in the order of time."""
    found: list[FlightPass] = []
    for each in sorted(passes, key=lambda each: (each.start, each.ids)):
        for row in range(len(found) - 1, -1, -1):
            before = found[row]
            if set(before.ids) & set(each.ids) and each.start - before.end <= LARGEST_GAP:
                found[row] = FlightPass(
                    tuple(sorted({*before.ids, *each.ids})),
                    before.start,
                    max(before.end, each.end),
                    before.num_points + each.num_points,
                    before.area + each.area,
                    (before.course[0] + each.course[0], before.course[1] + each.course[1]),
                    before.left_out and each.left_out,
                )
                break
        else:
            found.append(each)
    return found


def table_of(passes: Sequence[FlightPass], area: float) -> list[str]:
    """The lines of a table of passes over ground of this area."""
    first = min((each.start for each in passes), default=0.0)
    lines = ["pass  ids           seconds     points  density  area  flown"]
    for number, each in enumerate(passes, 1):
        ids = f"{each.ids[0]}-{each.ids[-1]}" if len(each.ids) > 1 else f"{each.ids[0]}"
        seconds = f"{each.start - first:.0f}-{each.end - first:.0f}"
        flown = "" if each.azimuth is None else f"{round(each.azimuth) % 360}°"
        left_out = f"  left out: {each.left_out}" if each.left_out else ""
        lines.append(
            f"{number:>4}  {ids:<9}{seconds:>12}{each.num_points:>11,}{each.density:>9.3g}"
            f"{min(each.area / max(area, 1e-300), 1):>6.0%}{flown:>7}{left_out}"
        )
    return lines


def _numbered(time: np.ndarray, ids: np.ndarray) -> tuple[int, np.ndarray]:
    """The number of passes, and that of each point (N,) int64, in the order of their times."""
    if len(time) > MOST_PER_TIME * len(np.unique(time)):
        known, label = np.unique(ids, return_inverse=True)
        return len(known), label.reshape(-1)
    order = np.argsort(time, kind="stable")
    stretch = np.empty(len(time), dtype=np.int64)
    stretch[order] = np.cumsum(np.diff(time[order], prepend=time[order[:1]]) > LARGEST_GAP)
    known, of_id = np.unique(ids, return_inverse=True)
    groups, of_point = np.unique(stretch * len(known) + of_id.reshape(-1), return_inverse=True)
    of_point = of_point.reshape(-1)
    start, end = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(start, of_point, time)
    np.maximum.at(end, of_point, time)
    # Within a stretch of time, groups that overlap with those before are channels of one scanner.
    in_order = np.lexsort((start, groups // max(len(known), 1)))
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end[in_order])[:-1]])
    label = np.empty(len(groups), dtype=np.int64)
    label[in_order] = np.cumsum(start[in_order] >= before) - 1
    return int(label.max(initial=-1)) + 1, label[of_point]


def covered_area(xy: np.ndarray, tile: float) -> float:
    """The ground that points (N, 2) of a tile cover, holes between them included."""
    # Cells that fit into the tile, so that none reaches beyond it.
    return _area(xy, tile / max(1, int(tile / _cell_side(xy))))


def _cell_side(xy: np.ndarray) -> float:
    """The side of square cells that hold about `POINTS_PER_CELL` of the points (N, 2) each."""
    extent = np.ptp(xy, axis=0).clip(1e-9) if len(xy) else np.ones(2)
    area = float(extent.prod())
    # Corridors and ragged borders fill a part of their bounding box.
    for _ in range(3):
        least = max(np.sqrt(extent.prod() / MOST_CELLS), extent.max() / MOST_CELLS)
        side = max(float(np.sqrt(area * POINTS_PER_CELL / max(len(xy), 1))), float(least))
        area = len(split_tiles(xy, side)) * side**2
    return side


def _area(xy: np.ndarray, side: float) -> float:
    """The area of the cells of width `side` with points (N, 2), and of holes between them."""
    if not len(xy):
        return 0.0
    cells = split_tiles(xy, side).xy
    cells = cells - cells.min(axis=0)
    occupied = np.zeros(cells.max(axis=0) + 1, dtype=bool)
    occupied[tuple(cells.T)] = True
    return float(without_holes(occupied).sum() * side**2)


def _course(time: np.ndarray, xy: np.ndarray) -> tuple[float, float]:
    """The flying direction of a pass, the gradient of time over the ground, times its points.

    A gradient is right on ground of any outline, which the drift of the mean position is not.
    """
    time, xy = time - time.mean(), xy - xy.mean(axis=0)
    gradient = np.linalg.lstsq(xy, time, rcond=None)[0]
    length = float(np.hypot(*gradient))
    explained = 1 - np.square(time - xy @ gradient).sum() / max(
        float(np.square(time).sum()), 1e-300
    )
    if not length > 0 or explained < LEAST_FIT:
        return 0.0, 0.0
    x, y = gradient / length * len(time)
    return float(x), float(y)


def passes_of(cloud: PointCloud) -> FlightPasses:
    """`find_passes` of a cloud with attributes. Raises DataError for one without two passes."""
    found = find_passes(*time_and_id(cloud), cloud.positions)
    check_passes(found.passes, f"{cloud.path}")
    return found


def check_passes(passes: Sequence[FlightPass], what: str) -> None:
    """Raise DataError unless two passes are used; its message begins with `what`."""
    used = [each for each in passes if not each.left_out]
    if len(used) >= 2:
        return
    others = "".join(f", another is {each.left_out}" for each in passes if each.left_out)
    ids = ", ".join(map(str, used[0].ids)) if used else "none"
    raise DataError(
        f"{what}: only one flight pass{others}: gps_time has no pause of {LARGEST_GAP:g} s, and "
        f"the point source id is {ids}; give a survey of overlapping strips"
    )


def time_and_id(cloud: PointCloud) -> tuple[np.ndarray, np.ndarray]:
    """gps_time (N,) float64 and point source id (N,) int64 of a cloud; zeros for a missing one.

    Raises DataError for a cloud with neither.
    """
    time, ids = (
        next(
            (v for n in (name, name.replace("_", "")) if (v := attribute(cloud, n)) is not None),
            None,
        )
        for name in (GPS_TIME, POINT_SOURCE_ID)
    )
    if time is None and ids is None:
        raise DataError(
            f"{cloud.path}: has neither {GPS_TIME} nor {POINT_SOURCE_ID}, which tell the flight "
            "passes of its points; export it again with them"
        )
    none = np.zeros(len(cloud))
    return (
        (none if time is None else time).astype(np.float64),
        (none if ids is None else ids).astype(np.int64),
    )
