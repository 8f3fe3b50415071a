"""Which files are parts of one survey: those whose extents border on each other.

Tiles lie side by side, with or without a strip that they share; at the edge of a survey, a tile may
have points in that strip alone. Files that lie over each other are several surveys of one place, or
shapes that all stand around the origin.
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
"""Most that bordering files are apart, in mean distances between points."""
MIN_APART, MIN_APART_SHAPES = 1 / 4, 1 / 2
"""Least distance between the middles of bordering files, across the border, in longer sides of the
two: of LAS and LAZ files, and of others, among which there are shapes."""


@dataclass(frozen=True)
class Surveys:
    """Files grouped: each of `groups` is one survey, the numbers of its files ascending.

    `stacked` are those that lie over another one and so are surveys of their own; `by_folder`, if
    files of different folders do, so that each folder was looked at by itself; `unlike` the first
    pair of files that border on each other and differ in `difference`.
    """

    groups: list[list[int]]
    stacked: list[int]
    by_folder: bool
    unlike: tuple[int, int] | None
    difference: str


def find_surveys(extents: Sequence[FileExtent], kinds: Sequence[str]) -> Surveys:
    """Group files that border on each other into surveys.

    Files of one survey have the same kind, attributes and coordinate system. Where files lie over
    each other, those of one folder are looked at together, so that each of several folders can hold
    a survey of the same place. Those that still lie over another one are surveys of their own.
    """
    likes = [_number(extents, key) for key in (lambda e: e.crs, lambda e: e.attributes)]
    like = np.column_stack([_number(kinds, str), *likes])
    bordering, stacked = _neighbours(extents)
    unlike, difference = None, ""
    for i, j in bordering:
        differs = like[i] != like[j]
        if differs[1:].any() and not differs[0] and unlike is None:
            unlike, difference = (i, j), ("coordinate system" if differs[1] else "attributes")
    bordering = [(i, j) for i, j in bordering if (like[i] == like[j]).all()]
    stacked = [(i, j) for i, j in stacked if (like[i] == like[j]).all()]
    num_stacked = len(stacked)
    if stacked:
        folder = [extent.path.parent for extent in extents]
        bordering, stacked = (
            [(i, j) for i, j in pairs if folder[i] == folder[j]] for pairs in (bordering, stacked)
        )
    alone = {number for pair in stacked for number in pair}
    joined = [pair for pair in bordering if not alone & set(pair)]
    rows, columns = np.array(joined, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(extents), len(extents)))
    num_groups, group = connected_components(graph, directed=False)
    groups = [np.flatnonzero(group == number).tolist() for number in range(num_groups)]
    by_folder = len(stacked) < num_stacked
    return Surveys(sorted(groups), sorted(alone), by_folder, unlike, difference)


def _neighbours(
    extents: Sequence[FileExtent],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of files that border on each other, and pairs that lie over each other."""
    low = np.array([extent.low for extent in extents]).reshape(-1, 2)
    high = np.array([extent.high for extent in extents]).reshape(-1, 2)
    gap = MAX_GAP * np.array([extent.spacing for extent in extents])
    is_las = np.array([extent.path.suffix.lower() in LAS_EXTENSIONS for extent in extents])
    least = np.where(is_las, MIN_APART, MIN_APART_SHAPES)[:, None] * (high - low)
    middle = (low + high) / 2
    bordering, stacked = [], []
    for i in range(len(extents)):
        others = slice(i + 1, None)
        shared = np.minimum(high[i], high[others]) - np.maximum(low[i], low[others])
        near = (shared >= -np.maximum(gap[i], gap[others])[:, None]).all(axis=1)
        apart = np.abs(middle[i] - middle[others])
        beside = (apart >= np.maximum(least[i], least[others])).any(axis=1)
        bordering += [(i, i + 1 + int(j)) for j in np.flatnonzero(near & beside)]
        stacked += [(i, i + 1 + int(j)) for j in np.flatnonzero(near & ~beside)]
    return bordering, stacked


def _number(items: Sequence, key: Callable) -> np.ndarray:
    """Numbers (N,) that are equal for items with equal keys."""
    numbers: dict = {}
    return np.array([numbers.setdefault(key(item), len(numbers)) for item in items])
