"""Thins candidates evenly and locally, by Poisson-disk sampling with a shrinking radius.

Farthest-point sampling looks at the whole cloud before each pick. Here each level picks a maximal
set of points that are farther than a radius from each other and from all points picked before; then
the radius shrinks. Every cell stops at its quota. So the picked points of a place depend on its
surroundings only.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from pointup.upsampling.attributes import PARENT
from pointup.upsampling.single_pass.candidates import Candidates
from pointup.upsampling.single_pass.pass_output import PassOutput

NUM_WITHIN = 8
"""Median number of candidates within the first radius around a candidate."""
_NUM_SAMPLED = 512
_SHRINK = 0.87
_NUM_LEVELS = 24
# Of points closer together than this share of the first radius only one is picked on any level.
_SAME_PLACE = 0.1
# Points closer together than this share of it are copies.
_COPY = 0.01


def first_radius(points: np.ndarray, scale: np.ndarray, num_within: int = NUM_WITHIN) -> float:
    """First radius of thinning, in units of `scale`; too large to reach the quotas on that level.

    points: (M, 3), scale: (M,).
    """
    sample = slice(None, None, max(1, len(points) // _NUM_SAMPLED))
    rank = min(num_within + 1, len(points))
    tree = cKDTree(points, balanced_tree=False, compact_nodes=False)
    distance = np.asarray(tree.query(points[sample], k=[rank])[0])[:, 0]
    # Duplicates are left out.
    apart = distance > 0
    return float(np.median((distance / scale[sample])[apart])) if apart.any() else 1.0


def select_evenly(
    points: np.ndarray,
    scale: np.ndarray,
    distance: np.ndarray,
    cell: np.ndarray,
    quota: np.ndarray,
    priority: np.ndarray,
    radius: float,
    copies: bool = True,
) -> np.ndarray:
    """Indices, ascending, of an even subset of points (M, 3) with `quota` (C,) points in each cell.

    Distances are in units of `scale` (M,), the local spacing, so that relative densities are kept.
    `distance` (M,), in these units, is the distance to the nearest point that is picked already:
    inf for none, negative for a point that must not be picked. `cell` (M,) is the number of each
    point's cell; a cell with fewer points than its quota gives all of them. `priority` (M,), all
    different, breaks ties: the higher one is picked. `radius` is the radius of the first level.
    Without `copies`, no point is picked in the place of one that is picked already, and only one of
    several in the same place.
    """
    distance, left = distance.copy(), quota.copy()
    is_open = (distance >= 0) & (left > 0)[cell]
    if not copies:
        is_open &= distance >= _COPY * radius
        alone = np.flatnonzero(is_open)
        # The same cubes for all: copies of a point may differ in scale.
        size = np.full(len(points), _COPY / _SAME_PLACE * np.median(scale))
        is_open[:] = False
        is_open[_distinct_places(points, size, alone, radius, priority)] = True
    apart = np.flatnonzero(is_open & (distance >= _SAME_PLACE * radius))
    distinct = _distinct_places(points, scale, apart, radius, priority)
    one, other, gap = _close_pairs(points, scale, distinct, radius)
    is_distinct = np.zeros(len(points), dtype=bool)
    is_distinct[distinct] = True
    # `first` has the higher priority.
    swap = priority[one] < priority[other]
    first, second = np.where(swap, other, one), np.where(swap, one, other)
    picked = np.zeros(len(points), dtype=bool)

    def pick(chosen: np.ndarray) -> None:
        """Pick the `chosen` points farthest from picked ones, in each cell up to its quota."""
        nonlocal is_open
        chosen = chosen[np.lexsort((-priority[chosen], -distance[chosen], cell[chosen]))]
        cells = cell[chosen]
        rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
        chosen = chosen[rank < left[cells]]
        picked[chosen] = True
        np.subtract.at(left, cell[chosen], 1)
        is_open &= ~picked & (left > 0)[cell]

    for _ in range(_NUM_LEVELS):
        eligible = is_open & is_distinct & (distance >= radius)
        close = gap < radius
        before = picked.copy()
        pick(_independent(eligible, first[close], second[close]))
        if not is_open.any():
            break
        new = picked & ~before
        for one, other in ((first, second), (second, first)):
            affected = new[one] & is_open[other]
            np.minimum.at(distance, other[affected], gap[affected])
        both = is_open[first] & is_open[second]
        first, second, gap = first[both], second[both], gap[both]
        radius *= _SHRINK
    # Cells with too few distinct candidates are filled up with the others.
    distance[~is_distinct] = np.minimum(distance[~is_distinct], 0.0)
    pick(np.flatnonzero(is_open))
    return np.flatnonzero(picked)


def _independent(eligible: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """A maximal set of eligible points without both of any pair; `first` has precedence."""
    chosen = np.zeros(len(eligible), dtype=bool)
    undecided = eligible.copy()
    while True:
        both = undecided[first] & undecided[second]
        first, second = first[both], second[both]
        if not len(first):
            return np.flatnonzero(chosen | undecided)
        beaten = np.zeros(len(eligible), dtype=bool)
        beaten[second] = True
        best = undecided & ~beaten
        chosen |= best
        undecided &= beaten
        undecided[second[best[first]]] = False


def _distinct_places(
    points: np.ndarray,
    scale: np.ndarray,
    index: np.ndarray,
    radius: float,
    priority: np.ndarray,
) -> np.ndarray:
    """One point in each small cube, so that many duplicates do not give a huge number of pairs."""
    classes = np.floor(np.log2(scale[index]))
    cubes = np.floor(points[index] / (_SAME_PLACE * radius * 2**classes)[:, None])
    key = classes.astype(np.int64).astype(np.uint64)
    for numbers in cubes.T:
        key = (key ^ numbers.astype(np.int64).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(32)
    order = np.argsort(-priority[index], kind="stable")
    return index[order[np.unique(key[order], return_index=True)[1]]]


def _close_pairs(
    points: np.ndarray, scale: np.ndarray, index: np.ndarray, radius: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of points of `index` closer than `radius`, and their distances.

    Distances are in units of the smaller scale of the two.
    """
    # One search for each class of scales: a single radius for all would give far too many pairs
    # where the points are dense.
    classes = np.floor(2 * np.log2(scale)).astype(np.int64)
    axes, found = np.ascontiguousarray(points.T), []
    for number in np.unique(classes[index]).tolist():
        members = index[classes[index] >= number]
        reach = radius * 2 ** ((number + 1) / 2)
        tree = cKDTree(points[members], balanced_tree=False, compact_nodes=False)
        pairs = np.ascontiguousarray(tree.query_pairs(reach, output_type="ndarray").T)
        is_lowest = classes[members] == number
        first, second = members[pairs[:, is_lowest[pairs[0]] | is_lowest[pairs[1]]]]
        gap = np.sqrt(sum(np.square(axis[first] - axis[second]) for axis in axes))
        gap /= np.minimum(scale[first], scale[second])
        close = gap < radius
        found.append((first[close], second[close], gap[close]))
    if not found:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing.astype(np.float64)
    first, second, gap = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return first, second, gap


def shuffled(seed: int, row: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """Pseudo-random priorities (M,) int64, all different, for child `slot` (M,) of `row` (M,)."""
    # The finalizer of MurmurHash3, a bijection.
    mixed = (row.astype(np.uint64) << np.uint64(16)) + slot.astype(np.uint64)
    mixed += np.uint64(seed % 2**32) << np.uint64(32)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(33))).view(np.int64)


# Second-pass candidates: the output of a pass over the output of the first pass.
#
# The first pass selects among children of measured points only. A child of a new point can fill a
# place that no child of a measured point reaches, and has more points of the surface around it.


class OversampledCandidates:
    """Candidates from the outputs of two passes, block by block of the first pass's store.

    The measured cloud of `second` is the store of `first`, and its `PARENT` are rows of that store.
    """

    def __init__(self, first: PassOutput, second: PassOutput) -> None:
        self._first, self._second = first, second
        self._ptr = first.store.block_ptr
        # For each block of the first pass: blocks of the second one with children of its rows.
        self._sources: list[list[int]] = [[] for _ in range(first.store.num_blocks)]
        for number in range(second.store.num_blocks):
            parent = second.store.read_block(number)["attributes"][PARENT]
            for block in np.unique(np.searchsorted(self._ptr, parent, side="right") - 1).tolist():
                self._sources[block].append(number)

    def candidates(
        self, block: int, spacing: np.ndarray, reach: np.ndarray, quota: np.ndarray
    ) -> Candidates:
        """All points of both passes whose parents are the rows of a block.

        spacing, reach, quota: (N,) values of the rows, see `Candidates`.
        """
        start, stop = self._ptr[block], self._ptr[block + 1]
        with self._first.files.load(block, "points") as saved:
            rows, points, distances = [saved["row"]], [saved["position"]], [saved["distance"]]
            uncertainties = [saved["uncertainty"]]
        for number in self._sources[block]:
            with self._second.files.load(number, "points") as saved:
                names = ("parent", "position", "distance", "uncertainty")
                parent, position, distance, uncertainty = (saved[name] for name in names)
            in_block = (parent >= start) & (parent < stop)
            rows.append(parent[in_block] - start)
            points.append(self._second.store.frame.to_file(position[in_block]))
            distances.append(distance[in_block])
            uncertainties.append(uncertainty[in_block])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        row = row[order]
        of_row = self._first.store.read_block(block)["position"][row]
        return Candidates(
            np.bincount(row, minlength=stop - start),
            (np.concatenate(points)[order] - of_row).astype(np.float32),
            np.concatenate(distances)[order],
            np.ones(len(row), dtype=np.float32),
            np.concatenate(uncertainties)[order],
            spacing,
            reach,
            quota,
        )
