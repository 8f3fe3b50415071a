"""Nearest neighbours within packed clouds: one interface, one search function per kind of device.

CPU: a scipy k-d tree per cloud, in threads. CUDA: Triton kernels, for up to `kernels.MAX_K`
neighbours. Other devices, and searches that the kernels do not support: all differences, in chunks.
A search function takes (query, query_ptr, pos, ptr, k) and returns squared distances and flat
indices (Q, k), nearest first, padded with inf and -1. To add a backend, add such a function and
a line in `_search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.geometry import kernels
from pointup.geometry.packed import (
    assume_valid,
    at_least_float32,
    check_clouds,
    exact_sqrt,
    has_empty,
    on_host,
    to_device,
)

# Queries per task on the CPU: small enough to spread one large cloud over the threads.
_QUERIES_PER_TASK = 16_384
# Pairs that the chunked search holds at a time: about 200 MB of float32.
_PAIRS_PER_CHUNK = 1 << 24
# Copies of one position that a leaf of a k-d tree can hold without slowing down.
_MAX_COPIES = 64


@torch.no_grad()
def knn(pos: Tensor, ptr: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest points of the same cloud, for each point, which is its own first neighbour,
    even among duplicates. Neighbours at equal distance are in no particular order.

    Shapes: pos (N, 3) -> squared_distance (N, k), index (N, k) int64, nearest first. Where a cloud
    has fewer than k points, rows are padded with inf and -1. Distances are float32 (float64 for
    float64 points), outside autograd. Raises ValueError for k below 1, for coordinates that are not
    finite (naming the cloud) and for a ptr that does not fit the points.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    squared_distance, index = _search(pos, ptr, pos, ptr, k)
    if not kernels.take(pos, k):
        put_own_first(index)
    return squared_distance, index


def put_own_first(index: Tensor) -> None:
    """Make each point its own first neighbour in `index` (N, k), in place, as the kernels do."""
    own = torch.arange(len(index), device=index.device)
    # A point missing from its own row has k duplicates in it: it replaces the first of them.
    place = (index == own[:, None]).int().argmax(1, keepdim=True)
    index.scatter_(1, place, index[:, :1].clone())
    index[:, 0] = own


def nearest(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest point of the same cloud in `pos`, for each query point.

    Shapes: query (Q, 3), pos (N, 3) -> squared_distance (Q,), index (Q,) int64 into `pos`; inf and
    -1 where the cloud of `pos` is empty, NaN where the square overflows. Squared distances are
    float32 (float64 for float64 points) under autocast too. They are differentiable in `query` and
    `pos`; the choice of the neighbour is not. Raises ValueError as `knn` does.
    """
    index = nearest_point(query, query_ptr, pos, ptr)
    return squared_distance(query, pos, ptr, index), index


@torch.no_grad()
def nearest_point(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> Tensor:
    """The index (Q,) that `nearest` returns, without the cost of the differentiable distance."""
    return _search(query, query_ptr, pos, ptr, 1)[1].squeeze(1)


def nearest_both(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`nearest` from `pos` into `target` and from `target` into `pos`: ((squared, index), ...)."""
    return nearest(pos, ptr, target, target_ptr), nearest(target, target_ptr, pos, ptr)


def squared_distance(query: Tensor, pos: Tensor, ptr: Tensor, index: Tensor) -> Tensor:
    """Squared distance (Q,) from each query point to the point `index` (Q,) that `nearest_point`
    found; as `nearest` returns it."""
    # Where there is no neighbour, -1 stands for the last point: its distance is replaced below.
    neighbor = at_least_float32(pos)[index] if len(pos) else query.detach()
    # By differences: |a|2 + |b|2 - 2ab suffers from cancellation far from the origin.
    squared = (at_least_float32(query) - neighbor).square().sum(1)
    # inf marks a point without neighbour: an overflow must not look like one.
    squared = squared.masked_fill(squared == torch.inf, torch.nan)
    if not has_empty(ptr):
        return squared
    # The kernel finds no neighbour of a point that is not finite: its distance stays NaN.
    return squared.masked_fill((index < 0) & ~squared.isnan(), torch.inf)


def _search(
    query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    check_clouds((query, query_ptr), (pos, ptr))
    search = _search_trees if pos.device.type == "cpu" else _search_accelerator
    # Detached, in the wider of their dtypes, at least float32; identical stay identical.
    dtype = torch.promote_types(torch.promote_types(query.dtype, pos.dtype), torch.float32)
    points = pos.detach().to(dtype)
    queries = points if query is pos else query.detach().to(dtype)
    return search(queries, query_ptr, points, ptr, k)


def _search_trees(
    query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """CPU: float64 inside, so that distant queries and large coordinates keep their precision."""
    queries, points = query.numpy(), pos.numpy()
    query_bounds, bounds = query_ptr.tolist(), ptr.tolist()
    squared_distance = np.full((len(queries), k), np.inf, dtype=queries.dtype)
    index = np.full((len(queries), k), -1, dtype=np.int64)

    def build(cloud: int) -> tuple[cKDTree, np.ndarray | None]:
        return _tree(points[bounds[cloud] : bounds[cloud + 1]], k)

    def answer(task: tuple[int, int, int]) -> None:
        cloud, start, stop = task
        tree, kept = trees[cloud]
        # A list of ranks keeps the result two-dimensional for k = 1 and without padding.
        ranks = list(range(1, min(k, tree.n) + 1))
        distance, local = tree.query(queries[start:stop], k=ranks)
        squared_distance[start:stop, : len(ranks)] = np.square(distance)
        local = local if kept is None else kept[local]
        index[start:stop, : len(ranks)] = local + bounds[cloud]

    clouds = [
        cloud
        for cloud in range(len(bounds) - 1)
        if bounds[cloud] < bounds[cloud + 1] and query_bounds[cloud] < query_bounds[cloud + 1]
    ]
    trees = dict(zip(clouds, in_threads(build, clouds), strict=True))
    tasks = [
        (cloud, start, min(start + _QUERIES_PER_TASK, query_bounds[cloud + 1]))
        for cloud in clouds
        for start in range(query_bounds[cloud], query_bounds[cloud + 1], _QUERIES_PER_TASK)
    ]
    in_threads(answer, tasks)
    return torch.from_numpy(squared_distance), torch.from_numpy(index)


def _tree(points: np.ndarray, k: int) -> tuple[cKDTree, np.ndarray | None]:
    """A k-d tree, and the indices of the points it holds, or None where it holds all.

    A leaf of equal points is searched point by point, so that many duplicates (a cloud padded with
    zeros) take quadratic time. No query needs more than k copies of a position: the tree leaves
    out the others.
    """
    kept = None
    num_copies = max(k, _MAX_COPIES)
    if has_copies(points, num_copies):
        _, position = np.unique(points, axis=0, return_inverse=True)
        order = np.argsort(position.ravel(), kind="stable")
        ordered = position.ravel()[order]
        copy = np.arange(len(points)) - np.searchsorted(ordered, ordered)
        kept = np.sort(order[copy < num_copies])
        points = points[kept]
    # Half the build time of scipy's defaults. Distant queries, as those of an untrained model, are
    # 3 to 10 times as fast; near ones are up to a tenth slower.
    return cKDTree(points, leafsize=32, balanced_tree=False, compact_nodes=False), kept


def has_copies(points: np.ndarray, num_copies: int) -> bool:
    """Whether a position may occur more than `num_copies` times in points (N, 3).

    Fast. False positives occur only where distinct points have the same float64 projection.
    """
    x, y, z = points.T.astype(np.float64)
    key = np.sort(x + np.sqrt(2) * y + np.sqrt(3) * z)
    return bool((key[num_copies:] == key[:-num_copies]).any())


def host_tree(points: np.ndarray) -> cKDTree:
    """The k-d tree of points (N, D), built quickly."""
    return cKDTree(points, balanced_tree=False, compact_nodes=False)


@dataclass
class DeviceTree:
    """A k-d tree of points (N, D) float64, D at most 3, whose queries a device answers.

    Distances are those of the tree, bit for bit, so that equal ones are equal. `use` gives a
    context for each use of the device.
    """

    points: np.ndarray
    device: torch.device
    use: Callable[[int], AbstractContextManager[object]]

    @cached_property
    def _on_host(self) -> cKDTree:
        return host_tree(self.points)

    @cached_property
    def _there(self) -> Tensor:
        return self._moved(self.points)

    @torch.no_grad()
    def query(self, queries: np.ndarray, k: Sequence[int]) -> Any:
        """Distances and indices (Q, K) of the K nearest points of queries (Q, D), as of the tree
        for `k` from 1 to K."""
        if len(k) > kernels.MAX_K:
            return self._on_host.query(queries, k=k)
        with self.use(len(queries)), assume_valid():
            query, pos = self._moved(queries), self._there
            query_ptr, ptr = (
                to_device(torch.tensor([0, len(of)], device="cpu"), self.device)
                for of in (query, pos)
            )
            found = _search(query, query_ptr, pos, ptr, len(k))[1]
            # Rounded as on the host, one axis after the other.
            squared = torch.zeros_like(found, dtype=torch.float64)
            for mine, theirs in zip(query.unbind(1), pos.unbind(1), strict=True):
                squared += (mine[:, None] - theirs[found]).square()
            distance, order = exact_sqrt(squared).sort(dim=1, stable=True)
            return distance.cpu().numpy(), found.gather(1, order).cpu().numpy()

    def query_ball_point(self, position: np.ndarray, radius: float) -> Any:
        """As of the tree."""
        return self._on_host.query_ball_point(position, radius)

    def _moved(self, points: np.ndarray) -> Tensor:
        """Points (N, D) on the device, with coordinates 0 for the axes that they lack."""
        padded = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
        return to_device(torch.from_numpy(padded), self.device)


TreeMaker: TypeAlias = Callable[[np.ndarray], Any]
"""Makes a k-d tree of points (N, D)."""


def _search_accelerator(
    query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    if not kernels.take(pos, k):
        return _search_chunks(query, query_ptr, pos, ptr, k)
    from pointup.geometry.kernels.knn import knn_search

    return knn_search(query, query_ptr, pos, ptr, k)


def _search_chunks(
    query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Any device: all differences within a cloud, in chunks of queries that bound the memory."""
    query_bounds, bounds = on_host(query_ptr).tolist(), on_host(ptr).tolist()
    squared_distance = query.new_full((len(query), k), torch.inf)
    index = torch.full((len(query), k), -1, dtype=torch.int64, device=query.device)
    for cloud in range(len(bounds) - 1):
        points = pos[bounds[cloud] : bounds[cloud + 1]]
        if len(points) == 0:
            continue
        num_found = min(k, len(points))
        chunk_size = max(1, _PAIRS_PER_CHUNK // len(points))
        for start in range(query_bounds[cloud], query_bounds[cloud + 1], chunk_size):
            stop = min(start + chunk_size, query_bounds[cloud + 1])
            pairs = query.new_zeros((stop - start, len(points)))
            for axis in range(query.shape[1]):
                difference = query[start:stop, axis, None] - points[None, :, axis]
                pairs.addcmul_(difference, difference)
            if num_found == 1:
                found, local = pairs.min(1, keepdim=True)
            else:
                found, local = pairs.topk(num_found, largest=False)
            squared_distance[start:stop, :num_found] = found
            index[start:stop, :num_found] = local + bounds[cloud]
    return squared_distance, index


def in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`[function(item) for item in items]`, in as many threads as torch uses, in order.

    For functions that release the GIL. Serial inside DataLoader workers, which already use all
    cores.
    """
    tasks = list(items)
    num_threads = min(len(tasks), torch.get_num_threads())
    if num_threads <= 1 or torch.utils.data.get_worker_info() is not None:
        return [function(task) for task in tasks]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, tasks))
