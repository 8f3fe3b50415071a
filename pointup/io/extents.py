"""The horizontal extents of files, and the surveys that adjacent files form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import laspy
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pointup.errors import FileError
from pointup.geometry.grids import box_of
from pointup.io.cloud import LAS_EXTENSIONS, PointCloud
from pointup.io.files import TEXT_EXTENSIONS, read_first, read_points

CRS_OWNER, WKT, GEO_KEYS = "LASF_Projection", 2112, (34735, 34736, 34737)


@dataclass(frozen=True)
class FileExtent:
    """The extent of a file in x and y, its coordinate system and its attributes.

    Attributes:
        path: the file.
        low, high: (2,) float64, the smallest and largest x and y.
        num_points: number of points.
        crs: contents of the records that define the coordinate system; empty if there are none.
        attributes: name, NumPy type and shape of a value for each attribute, sorted by name.
        scale, offset: (2,) float64, the LAS scale, without sign, and offset of x and y; 0 for
            other formats.
    """

    path: Path
    low: np.ndarray
    high: np.ndarray
    num_points: int
    crs: tuple[bytes, ...]
    attributes: tuple[tuple[str, str, tuple[int, ...]], ...]
    scale: np.ndarray
    offset: np.ndarray = field(default_factory=lambda: np.zeros(2))

    @property
    def spacing(self) -> float:
        """Mean point spacing, for points spread uniformly over the extent."""
        sides = self.high - self.low
        # The points of a file may lie on a line along an axis, or all in one place.
        return float(max(np.sqrt(sides.prod() / self.num_points), sides.max() / self.num_points))

    def holds(self, positions: np.ndarray) -> bool:
        """Whether all points (N, 3) lie in the extent, within the rounding of coordinates."""
        margin = np.maximum(self.scale, 1e-9 * np.abs(self.high).max(initial=1.0))
        low, high = positions[:, :2].min(axis=0), positions[:, :2].max(axis=0)
        return bool((low >= self.low - margin).all() and (high <= self.high + margin).all())


def read_extent(path: Path) -> FileExtent:
    """The extent of a file: from the header of LAS and LAZ, from the points of other formats.

    Raises FileError for a header without a valid extent, and the errors of `read_points`.
    """
    if path.suffix.lower() not in LAS_EXTENSIONS:
        cloud = read_points(path)
        low, high = box_of(cloud.positions[:, :2])
        return FileExtent(path, low, high, len(cloud), (), _attributes(cloud), np.zeros(2))
    first = read_first(path, 2)
    header = first.header
    assert isinstance(header, laspy.LasHeader)
    low, high = np.array(header.mins[:2]), np.array(header.maxs[:2])
    if not (np.isfinite([low, high]).all() and (low <= high).all()):
        raise FileError(
            f"{path}: its header gives x from {low[0]} to {high[0]}, y from {low[1]} to {high[1]}; "
            "repair it, or upsample it with --separate and without --bounds"
        )
    # Values of one file may not fit the scale of another.
    scaled = tuple(
        (f"{d.name} {d.scales} {d.offsets}", str(d.dtype), ())
        for d in header.point_format.extra_dimensions
        if d.is_scaled
    )
    records = {
        record.record_id: record.record_data_bytes().rstrip(b"\0 \n")
        for record in (*header.vlrs, *(header.evlrs or []))
        if record.user_id == CRS_OWNER
    }
    ids = (WKT,) if WKT in records else GEO_KEYS
    crs = tuple(records[number] for number in ids if number in records)
    attributes = _attributes(first) + scaled
    scale, offset = np.abs(header.scales[:2]), np.array(header.offsets[:2])
    return FileExtent(path, low, high, header.point_count, crs, attributes, scale, offset)


def _attributes(cloud: PointCloud) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    found = ((name, v.dtype.str, v.shape[1:]) for name, v in cloud.attributes.items())
    return tuple(sorted(found))


# Groups files into surveys by their extents, for `pointup upsample`.
#
# Files of one survey are tiles that lie side by side, with or without a shared overlap. At the edge
# of a survey, all points of a tile may lie in that overlap. Files that lie on top of each other are
# several surveys of one place, or shapes that are all centred on the origin.

MAX_GAP = 10.0
"""Largest gap between adjacent files, as a multiple of the larger of their point spacings."""
MIN_CENTRE_DISTANCE, MIN_CENTRE_DISTANCE_SHAPES = 1 / 4, 1 / 2
"""Smallest distance between the centres of adjacent files along x or y, as a fraction of the longer
of their two sides. The first value is for LAS and LAZ files. The second is for all other formats,
because these also hold shapes."""


@dataclass(frozen=True)
class Surveys:
    """Files grouped into surveys. Files are given by their index.

    Attributes:
        groups: one list of ascending file indices for each survey.
        stacked: files that lie on top of another file of their folder. Each is a survey alone.
        by_folder: True if files of different folders lie on top of each other. Each folder is then
            grouped separately.
        unlike: the first pair of adjacent files of one format that are not joined.
        difference: the reason for `unlike`: "coordinate system" or "attributes".
        num_unlike: the number of such pairs.
        rescaled: the first pair of overlapping files of one survey with different scales, or with
            offsets that are not whole steps apart: common points are not at equal coordinates.
    """

    groups: list[list[int]]
    stacked: list[int]
    by_folder: bool
    unlike: tuple[int, int] | None
    difference: str
    num_unlike: int
    rescaled: tuple[int, int] | None


def find_surveys(extents: Sequence[FileExtent]) -> Surveys:
    """Group adjacent files into surveys.

    Files of one survey have the same format, attributes and coordinate system. If files of
    different folders lie on top of each other, each folder is grouped separately, so that several
    folders can hold surveys of the same place. A file that lies on top of another file of its own
    folder is a survey alone.
    """
    kinds = [(_format(each), each.crs, each.attributes) for each in extents]
    adjacent, stacked = _adjacent_and_stacked(extents)
    unlike, difference, num_unlike = None, "", 0
    for i, j in adjacent:
        if kinds[i] != kinds[j] and kinds[i][0] == kinds[j][0]:
            num_unlike += 1
            if unlike is None:
                is_one_system = extents[i].crs == extents[j].crs
                unlike, difference = (i, j), "attributes" if is_one_system else "coordinate system"
    adjacent = [(i, j) for i, j in adjacent if kinds[i] == kinds[j]]
    stacked = [(i, j) for i, j in stacked if kinds[i] == kinds[j]]
    folder = [extent.path.parent for extent in extents]
    by_folder = any(folder[i] != folder[j] for i, j in stacked)
    if by_folder:
        adjacent, stacked = (
            [(i, j) for i, j in pairs if folder[i] == folder[j]] for pairs in (adjacent, stacked)
        )
    alone = {number for pair in stacked for number in pair}
    joined = [pair for pair in adjacent if not alone & set(pair)]
    rescaled = next((pair for pair in joined if _overlap_rescaled(extents, *pair)), None)
    rows, columns = np.array(joined, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(extents), len(extents)))
    num_groups, group = connected_components(graph, directed=False)
    groups = [np.flatnonzero(group == number).tolist() for number in range(num_groups)]
    return Surveys(
        sorted(groups), sorted(alone), by_folder, unlike, difference, num_unlike, rescaled
    )


def _overlap_rescaled(extents: Sequence[FileExtent], i: int, j: int) -> bool:
    one, other = extents[i], extents[j]
    shared = np.minimum(one.high, other.high) - np.maximum(one.low, other.low)
    is_wide = (shared > max(one.spacing, other.spacing)).all()
    steps = (one.offset - other.offset) / np.where(one.scale, one.scale, 1.0)
    is_one_grid = np.allclose(one.scale, other.scale, rtol=1e-6, atol=0)
    is_one_grid = is_one_grid and np.allclose(steps, np.rint(steps), rtol=0, atol=0.01)
    return bool(is_wide and not is_one_grid)


def _adjacent_and_stacked(
    extents: Sequence[FileExtent],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of files that lie side by side, and pairs that lie on top of each other."""
    low = np.array([extent.low for extent in extents]).reshape(-1, 2)
    high = np.array([extent.high for extent in extents]).reshape(-1, 2)
    gap = MAX_GAP * np.array([extent.spacing for extent in extents])
    is_las = np.array([extent.path.suffix.lower() in LAS_EXTENSIONS for extent in extents])
    fraction = np.where(is_las, MIN_CENTRE_DISTANCE, MIN_CENTRE_DISTANCE_SHAPES)
    min_distance = fraction[:, None] * (high - low)
    centre = (low + high) / 2
    adjacent, stacked = [], []
    for i in range(len(extents)):
        others = slice(i + 1, None)
        overlap = np.minimum(high[i], high[others]) - np.maximum(low[i], low[others])
        near = (overlap >= -np.maximum(gap[i], gap[others])[:, None]).all(axis=1)
        distance = np.abs(centre[i] - centre[others])
        beside = (distance >= np.maximum(min_distance[i], min_distance[others])).any(axis=1)
        adjacent += [(i, i + 1 + int(j)) for j in np.flatnonzero(near & beside)]
        stacked += [(i, i + 1 + int(j)) for j in np.flatnonzero(near & ~beside)]
    return adjacent, stacked


def _format(extent: FileExtent) -> str:
    suffix = extent.path.suffix.lower()
    return next((of[0] for of in (LAS_EXTENSIONS, TEXT_EXTENSIONS) if suffix in of), suffix)
