"""Exact neighbour search in a part of a stored cloud: neighbours are those in the whole cloud."""

from __future__ import annotations

from typing import Any

import numpy as np

from pointup.geometry.grids import box_of
from pointup.geometry.neighbors import TreeMaker, host_tree
from pointup.upsampling.store.point_store import Store, joined

# Number of further neighbours in a search, to find where equal distances end.
_LOOK_AHEAD = 3


class Region:
    """Some blocks of a store, and the blocks around them that contain neighbours of their points.

    Neighbours are exact in the whole cloud: if the sphere around a query touches a block that is
    not loaded, the block is loaded. Neighbours are sorted by distance, and at equal distances in
    the order of the store, so that they do not depend on the first blocks of a region.

    `rows` are the points loaded so far; they keep their places when more are loaded. With `dims` 2,
    distances are horizontal; a single search can have other `dims` than the region. Trees of the
    loaded points are made by `make_tree`.
    """

    def __init__(
        self, store: Store, start: int, stop: int, dims: int = 3, make_tree: TreeMaker = host_tree
    ) -> None:
        self._make_tree = make_tree
        self.rows = np.empty(0, store.dtype)
        self._ids = np.empty(0, dtype=np.int64)
        self._store, self._dims = store, dims
        self._place = np.full(store.num_blocks, -1, dtype=np.int64)
        self._trees: dict[int, Any] = {}
        self._low, self._high = store.low, store.high
        self._bounds = store.low[start:stop].min(axis=0), store.high[start:stop].max(axis=0)
        self._load(np.arange(start, stop))

    @classmethod
    def around(
        cls, store: Store, positions: np.ndarray, make_tree: TreeMaker = host_tree
    ) -> Region:
        """A region that starts with the block nearest to the middle of positions (Q, 3), Q > 0."""
        low, high = box_of(positions)
        middle = (low + high) / 2
        gaps = np.maximum(store.low - middle, middle - store.high).clip(min=0)
        nearest = int(np.square(gaps).sum(axis=1).argmin())
        return cls(store, nearest, nearest + 1, make_tree=make_tree)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def resolution(self) -> float:
        """Step of the grid that positions are rounded to."""
        return self._store.resolution

    def places(self, block: int) -> np.ndarray:
        """Places in `rows` of the points of a loaded block."""
        size = self._store.block_ptr[block + 1] - self._store.block_ptr[block]
        return self._place[block] + np.arange(size)

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Row numbers in the store of the points at places in `rows`; -1 for -1."""
        return np.where(places < 0, -1, self._ids[places])

    def neighbors(
        self, query: np.ndarray, k: int, dims: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest points of the cloud, for queries (Q, 3) in the coordinates of the store.

        Returns distances (Q, k) float64, ascending, and places (Q, k) int64 in `rows`. If the cloud
        has fewer than k points, the rest is inf and -1.
        """
        dims = dims or self._dims
        self._load_nearest(k, dims)
        query = query[:, :dims]
        distance = np.full((len(query), k), np.inf)
        place = np.full((len(query), k), -1, dtype=np.int64)
        left = np.arange(len(query))
        while len(left):
            distance[left], place[left] = self._search(query[left], k)
            needed = self._blocks_in_reach(query[left], distance[left, -1])
            if not needed.any():
                break
            left = left[needed.any(axis=1)]
            self._load(np.flatnonzero(self._place < 0)[needed.any(axis=0)])
        return distance, place

    def neighbors_of(
        self, places: np.ndarray, k: int, dims: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest points of those at `places` of `rows`; each is its own first neighbour."""
        distance, found = self.neighbors(self.rows["position"][places], k, dims)
        # A point that is not among its own neighbours has k duplicates there, and replaces the
        # last.
        itself = found == places[:, None]
        itself[~itself.any(axis=1), -1] = True
        order = np.argsort(~itself, axis=1, kind="stable")
        found = np.take_along_axis(found, order, axis=1)
        found[:, 0] = places
        return distance, found

    def _load(self, blocks: np.ndarray) -> None:
        blocks = blocks[self._place[blocks] < 0]
        loaded = [self.rows]
        size = len(self.rows)
        ids = [self._ids]
        for block in blocks.tolist():
            rows = self._store.read_block(block)
            self._place[block] = size
            size += len(rows)
            loaded.append(rows)
            ids.append(np.arange(*self._store.block_ptr[block : block + 2]))
        self.rows, self._ids = joined(loaded), np.concatenate(ids)
        self._trees.clear()

    def _tree(self, dims: int) -> Any:
        """The tree of the loaded points in the first `dims` coordinates."""
        if dims not in self._trees:
            self._trees[dims] = self._make_tree(self.rows["position"][:, :dims])
        return self._trees[dims]

    def _load_nearest(self, k: int, dims: int) -> None:
        """Load blocks near the first ones until k neighbours can be found."""
        if len(self.rows) >= k + _LOOK_AHEAD:
            return
        gaps = np.maximum(self._low - self._bounds[1], self._bounds[0] - self._high)[:, :dims]
        order = np.argsort(np.square(gaps.clip(min=0)).sum(axis=1), kind="stable")
        reached = np.cumsum(np.diff(self._store.block_ptr)[order])
        self._load(order[: np.searchsorted(reached, k + _LOOK_AHEAD) + 1])

    def _blocks_in_reach(self, query: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """Whether the sphere of each query touches each of the blocks not loaded: (Q, U)."""
        absent = np.flatnonzero(self._place < 0)
        touched = np.zeros((len(query), len(absent)), dtype=bool)
        if not len(absent):
            return touched
        # Few blocks lie within the longest reach of all queries; only those are tested for each
        # query.
        dims = query.shape[1]
        lows, highs = self._low[:, :dims], self._high[:, :dims]
        low, high = box_of(query)
        low, high = low - reach.max(), high + reach.max()
        near = ((lows[absent] <= high) & (highs[absent] >= low)).all(axis=1)
        for i in np.flatnonzero(near).tolist():
            block = absent[i]
            gap = np.maximum(lows[block] - query, query - highs[block]).clip(min=0)
            touched[:, i] = np.square(gap).sum(axis=1) <= np.square(reach)
        return touched

    def _search(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest loaded points; of equally distant ones, those first in the store."""
        num_seen = min(k + _LOOK_AHEAD, len(self.rows))
        ranks = np.arange(1, num_seen + 1)
        tree = self._tree(query.shape[1])
        seen, place = tree.query(query, k=ranks)
        # They ascend already; only the order of equal ones is the tree's.
        tied = np.flatnonzero((seen[:, 1:] == seen[:, :-1]).any(axis=1))
        order = np.lexsort((self._ids[place[tied]], seen[tied]))
        place[tied] = np.take_along_axis(place[tied], order, axis=1)
        if num_seen < len(self.rows):
            self._break_ties(query, seen, place, k)
        missing = max(k - num_seen, 0)
        distance = np.pad(seen[:, :k], ((0, 0), (0, missing)), constant_values=np.inf)
        return distance, np.pad(place[:, :k], ((0, 0), (0, missing)), constant_values=-1)

    def _break_ties(self, query: np.ndarray, seen: np.ndarray, place: np.ndarray, k: int) -> None:
        """Fix the rows of `_search` whose last distance may occur more often than was seen."""
        rows = np.flatnonzero(seen[:, k - 1] == seen[:, -1])
        # Duplicates share their neighbours, so that each distinct query is searched once.
        distinct, of_row = np.unique(query[rows], axis=0, return_inverse=True)
        for i, position in enumerate(distinct):
            same = rows[of_row.ravel() == i]
            limit = seen[same[0], k - 1]
            num_closer = np.count_nonzero(seen[same[0]] < limit)
            tree = self._tree(query.shape[1])
            ball = tree.query_ball_point(position, np.nextafter(limit, np.inf))
            tied = np.setdiff1d(ball, place[same[0], :num_closer])
            tied = tied[np.argsort(self._ids[tied])][: seen.shape[1] - num_closer]
            place[same, num_closer : num_closer + len(tied)] = tied
