"""Thins candidates evenly and locally, by Poisson-disk sampling with a shrinking radius.

Farthest-point sampling looks at the whole cloud before each pick. Here each level picks a maximal
set of points that are farther than a radius from each other and from all points picked before; then
the radius shrinks. Every cell stops at its quota. So the picked points of a place depend on its
surroundings only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.geometry.packed import exact_sqrt
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
# Bits of the height of a cell in its number, and rows whose cells are searched at a time.
_HEIGHT_BITS, _ROWS_IN_CELLS = 24, 1 << 17
_CPU = torch.device("cpu")


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


@torch.no_grad()
def select_evenly(
    blocks: Sequence[tuple[Any, ...]], copies: bool = True, device: torch.device = _CPU
) -> list[np.ndarray]:
    """Indices, ascending, of an even subset of the points of each block, as if it were alone.

    A block is a tuple of `points` (M, 3), `scale` (M,), `distance` (M,), `cell` (M,), `quota` (C,),
    `priority` (M,) and `radius`. It gets `quota` points in each cell. Distances are in units of
    `scale`, the local spacing, so that relative densities are kept. `distance`, in these units, is
    the distance to the nearest point that is picked already: inf for none, negative for a point
    that must not be picked. `cell` is the number of each point's cell; a cell with fewer points
    than its quota gives all of them. `priority`, all different, breaks ties: the higher one is
    picked. `radius` is the radius of the first level. Without `copies`, no point is picked in the
    place of one that is picked already, and only one of several in the same place.

    The choice is the same on all devices.
    """
    points, scale, distance, cell, quota, priority, radius = zip(*blocks, strict=True)
    ends = np.cumsum([0, *map(len, points)])
    # Each block has cells of its own.
    first = np.cumsum([0, *map(len, quota)])[:-1]
    cell = tuple(own + number for own, number in zip(cell, first, strict=True))
    median = [np.median(values) if len(values) else 1.0 for values in scale]
    columns = map(np.concatenate, (points, scale, distance, cell, quota, priority))
    of_blocks = (np.repeat(of, np.diff(ends)) for of in (radius, median, np.arange(len(blocks))))
    packed = (torch.from_numpy(values).to(device) for values in (*columns, *of_blocks))
    picked = _select(copies, *packed)
    chosen = picked.cpu().numpy()
    parts = np.split(chosen, np.searchsorted(chosen, ends[1:-1]))
    return [part - start for part, start in zip(parts, ends, strict=False)]


def _select(copies: bool, *packed: Tensor) -> Tensor:
    """`select_evenly` of packed blocks; radius, median scale and number of the block are (M,)."""
    points, scale, distance, cell, left, priority, radius, median, block = packed
    is_open = (distance >= 0) & _at(cell, left > 0)
    if not copies:
        is_open &= distance >= _COPY * radius
        alone = _rows(is_open)
        # The same cubes for all: copies of a point may differ in scale.
        size = _COPY / _SAME_PLACE * median
        is_open = torch.zeros_like(is_open)
        is_open[_distinct_places(points, size, alone, radius, priority, block)] = True
    apart = _rows(is_open & (distance >= _SAME_PLACE * radius))
    distinct = _distinct_places(points, scale, apart, radius, priority, block)
    one, other, gap = _close_pairs(points, scale, distinct, radius, block)
    is_distinct = torch.zeros_like(is_open)
    is_distinct[distinct] = True
    # It has the higher priority.
    first = torch.where(_at(one, priority) < _at(other, priority), other, one)
    second = one + other - first
    picked = torch.zeros_like(is_open)

    def pick(chosen: Tensor) -> None:
        """Pick the `chosen` points farthest from picked ones, in each cell up to its quota."""
        nonlocal is_open
        for key in (priority, distance):
            chosen = chosen[key[chosen].argsort(descending=True, stable=True)]
        cells, order = cell[chosen].sort(stable=True)
        chosen = chosen[order]
        rank = torch.arange(len(cells), device=cells.device) - torch.searchsorted(cells, cells)
        chosen = chosen[rank < left[cells]]
        picked[chosen] = True
        left.index_add_(0, cell[chosen], torch.full_like(chosen, -1))
        is_open &= ~picked & _at(cell, left > 0)

    for _ in range(_NUM_LEVELS):
        eligible = is_open & is_distinct & (distance >= radius)
        close = _rows(gap < _at(first, radius))
        before = picked.clone()
        pick(_independent(eligible, *_at(close, first, second)))
        if not is_open.count_nonzero():
            break
        new = picked & ~before
        for one, other in ((first, second), (second, first)):
            affected = _rows(_at(one, new) & _at(other, is_open))
            there, near = _at(affected, other, gap)
            distance.scatter_reduce_(0, there, near, "amin")
        both = _rows(_at(first, is_open) & _at(second, is_open))
        first, second, gap = _at(both, first, second, gap)
        radius = radius * _SHRINK
    # Cells with too few distinct candidates are filled up with the others, copies last.
    distance = torch.where(is_distinct, distance, (distance > 0.0).to(distance) - 1.0)
    pick(_rows(is_open))
    return _rows(picked)


def _rows(mask: Tensor) -> Tensor:
    """The rows where a mask (M,) is true: several tensors are indexed faster by them."""
    return mask.nonzero()[:, 0]


def _at(rows: Tensor, *columns: Tensor) -> Any:
    """The values of columns at some rows, on the CPU four times as fast as `column[rows]`."""
    values = [column.index_select(0, rows) for column in columns]
    return values if len(values) > 1 else values[0]


def _independent(eligible: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A maximal set of eligible points without both of any pair; `first` has precedence."""
    chosen = torch.zeros_like(eligible)
    undecided = eligible.clone()
    while True:
        both = _rows(_at(first, undecided) & _at(second, undecided))
        first, second = _at(both, first, second)
        if not len(first):
            return _rows(chosen | undecided)
        beaten = torch.zeros_like(eligible)
        beaten[second] = True
        best = undecided & ~beaten
        chosen |= best
        undecided &= beaten
        undecided[_at(_rows(_at(first, best)), second)] = False


def _distinct_places(
    points: Tensor, scale: Tensor, index: Tensor, radius: Tensor, priority: Tensor, block: Tensor
) -> Tensor:
    """One point in each small cube, so that many duplicates do not give a huge number of pairs."""
    classes = scale[index].log2().floor()
    cubes = points[index] / (_SAME_PLACE * radius[index] * classes.exp2())[:, None]
    x, y, z = cubes.floor().long().unbind(1)
    order = priority[index].argsort(descending=True, stable=True)
    key = _hashed([_hashed([block[index]]) ^ classes.long() ^ x, y, z])
    key, by_key = key[order].sort(stable=True)
    is_first = torch.ones_like(key, dtype=torch.bool)
    is_first[1:] = key[1:] != key[:-1]
    return index[order[by_key[is_first]]]


def _hashed(numbers: Sequence[Tensor]) -> Tensor:
    """A hash (M,) int64 of several numbers (M,) int64."""
    key = torch.zeros_like(numbers[0])
    for number in numbers:
        key = (key ^ number) * -0x61C8864680B583EB
        # A logical shift: an arithmetic one maps numbers of both signs to nearly the same.
        key ^= (key >> 32) & 0xFFFFFFFF
    return key


def _close_pairs(
    points: Tensor, scale: Tensor, index: Tensor, radius: Tensor, block: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of points of `index` in one block that are closer than its `radius`, and their
    distances.

    Distances are in units of the smaller scale of the two.
    """
    # One search for each class of scales: a single radius for all would give far too many pairs
    # where the points are dense.
    classes = (2 * scale.log2()).floor().long()
    search = _pairs_in_trees if points.device.type == "cpu" else _pairs_in_cells
    axes, found = points.T.contiguous(), [(index[:0], index[:0], scale[:0])]
    for first, second in search(points, index, radius, block, classes):
        squared = sum((_at(first, axis) - _at(second, axis)).square() for axis in axes)
        gap = exact_sqrt(squared)
        gap /= torch.minimum(_at(first, scale), _at(second, scale))
        found.append(_at(_rows(gap < _at(first, radius)), first, second, gap))
    first, second, gap = (torch.cat(parts) for parts in zip(*found, strict=True))
    return first, second, gap


def _pairs_in_trees(
    points: Tensor, index: Tensor, radius: Tensor, block: Tensor, classes: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of `index` that may be close, for each block and class, by a k-d tree."""
    positions, of_block = points.numpy(), block[index]
    for number in of_block.unique().tolist():
        rows = index[of_block == number]
        for lowest in classes[rows].unique().tolist():
            members = rows[classes[rows] >= lowest]
            reach = float(radius[members[0]]) * 2 ** ((lowest + 1) / 2)
            tree = cKDTree(positions[members.numpy()], balanced_tree=False, compact_nodes=False)
            pairs = tree.query_pairs(reach, output_type="ndarray").T
            one, other = (
                _at(torch.from_numpy(np.ascontiguousarray(row)), members) for row in pairs
            )
            is_lowest = classes == lowest
            yield _at(_rows(_at(one, is_lowest) | _at(other, is_lowest)), one, other)


def _pairs_in_cells(
    points: Tensor, index: Tensor, radius: Tensor, block: Tensor, classes: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of `index` that may be close, by cells as wide as the reach of each class.

    Each point is in the cells of its own class and of all lower ones of its block, and looks in
    those of its own class for points of this class and higher ones.
    """
    if not len(index):
        return
    points, radius, block, own = points[index], radius[index], block[index], classes[index]
    lowest = own.new_full((int(block.max()) + 1,), int(own.max())).scatter_reduce(
        0, block, own, "amin"
    )
    row = torch.arange(len(index), device=index.device)
    row = row.repeat_interleave(own - lowest[block] + 1)
    level = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    level += lowest[block][row]
    # Slightly wider, because quotients are rounded.
    side = radius[row] * ((level + 1.001) / 2).exp2()
    x, y, z = ((points - points.amin(0))[row] / side[:, None]).floor().long().unbind(1)
    # Cells above each other are adjacent in number, whatever the column.
    z = z.clamp(max=2**_HEIGHT_BITS - 3) + 1
    in_order, place = (_hashed([block[row], level, x, y]) << _HEIGHT_BITS | z).sort()
    beside = torch.arange(9, device=row.device)
    for rows in _rows(level == own[row]).split(_ROWS_IN_CELLS):
        columns = x[rows, None] + beside // 3 - 1, y[rows, None] + beside % 3 - 1
        key = _hashed([block[row[rows], None], level[rows, None], *columns]) << _HEIGHT_BITS
        start = torch.searchsorted(in_order, key | z[rows, None] - 1).flatten()
        count = torch.searchsorted(in_order, key | z[rows, None] + 1, right=True).flatten() - start
        number = torch.arange(len(start), device=row.device).repeat_interleave(count)
        start -= count.cumsum(0) - count
        other = row[place[start[number] + torch.arange(len(number), device=row.device)]]
        one = row[rows[number // 9]]
        is_after = (own[other] > own[one]) | ((own[other] == own[one]) & (other > one))
        kept = _rows(is_after & (block[other] == block[one]))
        yield index[one[kept]], index[other[kept]]


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
        saved = self._first.files.load(block, "points")
        parts = [[saved[name] for name in ("row", "position", "distance", "uncertainty")]]
        for number in self._sources[block]:
            saved = self._second.files.load(number, "points")
            own = (saved["parent"] >= start) & (saved["parent"] < stop)
            points = self._second.store.frame.to_file(saved["position"][own])
            of_points = saved["distance"][own], saved["uncertainty"][own]
            parts.append([saved["parent"][own] - start, points, *of_points])
        row, points, distance, uncertainty = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(row, kind="stable")
        row = row[order]
        of_row = self._first.store.read_block(block)["position"][row]
        return Candidates(
            np.bincount(row, minlength=stop - start),
            (points[order] - of_row).astype(np.float32),
            distance[order],
            np.ones(len(row), dtype=np.float32),
            uncertainty[order],
            spacing,
            reach,
            quota,
        )
