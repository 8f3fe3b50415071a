"""Groups files into surveys by their extents, for `pointup upsample`.

Files of one survey are tiles that lie side by side, with or without a shared overlap. At the edge
of a survey, all points of a tile may lie in that overlap. Files that lie on top of each other are
several surveys of one place, or shapes that are all centred on the origin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pointup.io.extents import FileExtent
from pointup.io.files import LAS_EXTENSIONS

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
    """

    groups: list[list[int]]
    stacked: list[int]
    by_folder: bool
    unlike: tuple[int, int] | None
    difference: str


def find_surveys(extents: Sequence[FileExtent], kinds: Sequence[str]) -> Surveys:
    """Group adjacent files into surveys.

    `kinds` holds a name of each file's format. Files of one survey have the same format, attributes
    and coordinate system. If files of different folders lie on top of each other, each folder is
    grouped separately, so that several folders can hold surveys of the same place. A file that lies
    on top of another file of its own folder is a survey alone.
    """
    labels = [_label(extents, key) for key in (lambda e: e.crs, lambda e: e.attributes)]
    label = np.column_stack([_label(kinds, str), *labels])
    adjacent, stacked = _adjacent_and_stacked(extents)
    unlike, difference = None, ""
    for i, j in adjacent:
        differs = label[i] != label[j]
        if differs[1:].any() and not differs[0] and unlike is None:
            unlike, difference = (i, j), ("coordinate system" if differs[1] else "attributes")
    adjacent = [(i, j) for i, j in adjacent if (label[i] == label[j]).all()]
    stacked = [(i, j) for i, j in stacked if (label[i] == label[j]).all()]
    folder = [extent.path.parent for extent in extents]
    by_folder = any(folder[i] != folder[j] for i, j in stacked)
    if by_folder:
        adjacent, stacked = (
            [(i, j) for i, j in pairs if folder[i] == folder[j]] for pairs in (adjacent, stacked)
        )
    alone = {number for pair in stacked for number in pair}
    joined = [pair for pair in adjacent if not alone & set(pair)]
    rows, columns = np.array(joined, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(extents), len(extents)))
    num_groups, group = connected_components(graph, directed=False)
    groups = [np.flatnonzero(group == number).tolist() for number in range(num_groups)]
    return Surveys(sorted(groups), sorted(alone), by_folder, unlike, difference)


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


def _label(items: Sequence, key: Callable) -> np.ndarray:
    """Integer labels (N,), equal for items with equal keys."""
    numbers: dict = {}
    return np.array([numbers.setdefault(key(item), len(numbers)) for item in items])
