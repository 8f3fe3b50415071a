"""Nearest neighbours in a part of the cloud, the same as in the whole of it."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from pointup.upsampling.store.point_store import Store

# Further neighbours that are looked at, to see where equal distances end.
_LOOK_AHEAD = 3


class Region:
    """Some blocks of a store, and as many around them as their points' neighbours are found in.

    Neighbours are exact in the whole cloud: where a sphere around a query reaches into a block that
    isn't there, the block is loaded. They are in the order of their distance, and equally distant
    ones in that of the store, so that they don't depend on the blocks a region began with.

    `rows` are the points loaded so far; they keep their places when more are loaded. With `dims` 2,
    distances are horizontal.
    """

    def __init__(self, store: Store, start: int, stop: int, dims: int = 3) -> None:
        self.rows = np.empty(0, store.dtype)
        self._ids = np.empty(0, dtype=np.int64)
        self._store, self._dims = store, dims
        self._place = np.full(store.num_blocks, -1, dtype=np.int64)
        self._low, self._high = store.low[:, :dims], store.high[:, :dims]
        self._bounds = self._low[start:stop].min(axis=0), self._high[start:stop].max(axis=0)
        self._load(np.arange(start, stop))

    @classmethod
    def around(cls, store: Store, positions: np.ndarray) -> Region:
        """A region that begins with the block nearest to the middle of positions (Q, 3), Q > 0."""
        middle = (positions.min(axis=0) + positions.max(axis=0)) / 2
        gaps = np.maximum(store.low - middle, middle - store.high).clip(min=0)
        nearest = int(np.square(gaps).sum(axis=1).argmin())
        return cls(store, nearest, nearest + 1)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_points(self) -> int:
        """Points of the whole cloud."""
        return len(self._store)

    def places(self, block: int) -> np.ndarray:
        """Places in `rows` of the points of a loaded block."""
        size = self._store.block_ptr[block + 1] - self._store.block_ptr[block]
        return self._place[block] + np.arange(size)

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Numbers of the rows at places in `rows` among all rows of the store; -1 for -1."""
        return np.where(places < 0, -1, self._ids[places])

    def neighbors(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest points of the cloud, for queries (Q, 3) in the coordinates of the store.

        Distances (Q, k) float64, ascending, and places (Q, k) int64 in `rows`; where the cloud has
        fewer than k points the rest is inf and -1.
        """
        self._load_nearest(k)
        query = query[:, : self._dims]
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

    def neighbors_of(self, places: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest points of points in `rows`, each of them its own first neighbour."""
        distance, found = self.neighbors(self.rows["position"][places], k)
        # A point missing from its own row has k duplicates there, and takes the place of the last.
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
            start = self._store.block_ptr[block]
            ids.append(np.arange(start, start + len(rows)))
        self.rows, self._ids = np.concatenate(loaded), np.concatenate(ids)
        points = self.rows["position"][:, : self._dims]
        self._tree = cKDTree(points, balanced_tree=False, compact_nodes=False)

    def _load_nearest(self, k: int) -> None:
        """Blocks near the first ones, until there are k points to measure a reach with."""
        if len(self.rows) >= k + _LOOK_AHEAD:
            return
        gaps = np.maximum(self._low - self._bounds[1], self._bounds[0] - self._high)
        order = np.argsort(np.square(gaps.clip(min=0)).sum(axis=1), kind="stable")
        reached = np.cumsum(np.diff(self._store.block_ptr)[order])
        self._load(order[: np.searchsorted(reached, k + _LOOK_AHEAD) + 1])

    def _blocks_in_reach(self, query: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """Whether the sphere of each query touches each of the blocks not loaded: (Q, U)."""
        absent = np.flatnonzero(self._place < 0)
        touched = np.zeros((len(query), len(absent)), dtype=bool)
        if not len(absent):
            return touched
        # Few blocks lie within the longest reach of all queries; only those are looked at closely.
        low, high = query.min(axis=0) - reach.max(), query.max(axis=0) + reach.max()
        near = ((self._low[absent] <= high) & (self._high[absent] >= low)).all(axis=1)
        for i in np.flatnonzero(near).tolist():
            block = absent[i]
            gap = np.maximum(self._low[block] - query, query - self._high[block]).clip(min=0)
            touched[:, i] = np.square(gap).sum(axis=1) <= np.square(reach)
        return touched

    def _search(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of the points loaded; of equally distant ones, those first in the store."""
        num_seen = min(k + _LOOK_AHEAD, len(self.rows))
        ranks = np.arange(1, num_seen + 1)
        seen, place = (np.asarray(found) for found in self._tree.query(query, k=ranks))
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
        """Mends the rows of `_search` whose last distance may occur more often than was seen."""
        rows = np.flatnonzero(seen[:, k - 1] == seen[:, -1])
        # Duplicates share their neighbours; a mass of them is looked at once.
        distinct, of_row = np.unique(query[rows], axis=0, return_inverse=True)
        for i, position in enumerate(distinct):
            same = rows[of_row.ravel() == i]
            limit = seen[same[0], k - 1]
            num_closer = np.count_nonzero(seen[same[0]] < limit)
            ball = self._tree.query_ball_point(position, np.nextafter(limit, np.inf))
            tied = np.setdiff1d(ball, place[same[0], :num_closer])
            tied = tied[np.argsort(self._ids[tied])][: seen.shape[1] - num_closer]
            place[same, num_closer : num_closer + len(tied)] = tied
