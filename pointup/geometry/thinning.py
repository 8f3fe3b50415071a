"""Evenly spaced subsets of clouds: farthest-point sampling and Poisson-disk sampling."""

from __future__ import annotations

from itertools import pairwise

import fpsample
import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.geometry import kernels
from pointup.geometry.neighbors import has_copies, in_threads
from pointup.geometry.packed import at_least_float32, batch_from_ptr, copied_ahead, on_host
from pointup.geometry.validity import check_clouds

# Above this number of picks a tree is faster than buckets, because each pick reads all buckets.
_PICKS_FROM_BUCKETS = 200_000


@torch.no_grad()
def farthest_point_sample(pos: Tensor, ptr: Tensor, num_samples: Tensor) -> Tensor:
    """Farthest-point sampling of each cloud: each pick is the point farthest from earlier picks.

    Eldar et al. 1997, on the CPU with the buckets of QuickFPS (Han et al. 2023), on CUDA with tiles
    in their place. The first pick is the cloud's first point; on the CPU it is another point that
    depends on the cloud alone. Where only duplicates of picked points are left, they follow in the
    order of their indices.

    Shapes: pos (N, 3), num_samples (B,) int64 -> index (sum(num_samples),) int64 into `pos`, cloud
    after cloud, distinct, in order of selection. Raises ValueError where a cloud has fewer points
    than `num_samples`, and for coordinates that are not finite.
    """
    pos = pos.detach()
    check_clouds((pos, ptr))
    bounds, counts = on_host(ptr).tolist(), on_host(num_samples).tolist()
    for cloud, count in enumerate(counts):
        size = bounds[cloud + 1] - bounds[cloud]
        if not 0 <= count <= size:
            raise ValueError(f"cannot pick {count} distinct points of cloud {cloud}, it has {size}")
    if pos.device.type == "cpu":
        return _sample_buckets(pos, bounds, counts)
    return _sample_elsewhere(pos, ptr, bounds, counts)


def _sample_elsewhere(pos: Tensor, ptr: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
    """Devices other than the CPU: the kernels where they are supported."""
    if kernels.take(pos, 1):
        from pointup.geometry.kernels.farthest import farthest_points

        return farthest_points(pos, ptr, bounds, counts)
    return _sample_all_clouds(pos, ptr, bounds, counts)


def _sample_buckets(pos: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
    """CPU: fpsample on each cloud, in threads (it releases the GIL).

    On one core, 5 k picks of 20 k points take 10 ms, 250 k picks of 1 M take 3 s, 1 M of 1 M 6 s.
    """
    points = at_least_float32(pos).numpy()

    def sample(cloud: int) -> np.ndarray:
        start, stop = bounds[cloud], bounds[cloud + 1]
        return _sample_one(points[start:stop], counts[cloud]) + start

    index = in_threads(sample, range(len(counts)))
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *index]))


def _sample_one(points: np.ndarray, count: int) -> np.ndarray:
    distinct = np.arange(len(points))
    if has_copies(points, 1):
        # fpsample repeats indices once all distances are 0, and buckets of equal points are slow.
        distinct = np.sort(np.unique(points, axis=0, return_index=True)[1])
    num_picks = min(count, len(distinct))
    if num_picks == 0 or len(distinct) == 1:
        return _completed(distinct[:num_picks], count, len(points))
    # fpsample works in float32; centring preserves the precision of float64 points.
    centred = (points[distinct] - points[:1]).astype(np.float32)
    # fpsample 0.3.3 counts start_idx in the order of its own tree: 0 is not the first point.
    if num_picks > _PICKS_FROM_BUCKETS:
        picks = fpsample.bucket_fps_kdtree_sampling(centred, num_picks, start_idx=0)
    else:
        # The measured optimum of the number of buckets.
        height = max(1, round(0.62 * np.log2(len(distinct)) - 3.7))
        picks = fpsample.bucket_fps_kdline_sampling(centred, num_picks, height, start_idx=0)
    return _completed(distinct[picks.astype(np.int64)], count, len(points))


def _completed(picks: np.ndarray, count: int, num_points: int) -> np.ndarray:
    """The picks without repetition, padded to `count` with the smallest indices not among them."""
    place = np.full(num_points, -1)
    # Written backwards: where an index repeats, its first place remains.
    place[picks[::-1]] = np.arange(len(picks))[::-1]
    first = picks[place[picks] == np.arange(len(picks))]
    if len(first) == count:
        return first
    return np.concatenate([first, np.flatnonzero(place < 0)[: count - len(first)]])


def _sample_all_clouds(pos: Tensor, ptr: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
    """Any device: one pick of all clouds at a time, on clouds padded to the same size."""
    num_clouds, num_steps = len(counts), max(counts, default=0)
    if num_steps == 0:
        return torch.empty(0, dtype=torch.int64, device=pos.device)
    batch = batch_from_ptr(ptr, len(pos))
    column = torch.arange(len(pos), device=pos.device) - ptr[batch]
    pos = at_least_float32(pos)
    largest = max(stop - start for start, stop in pairwise(bounds))
    padded = pos.new_zeros((num_clouds, largest, 3))
    padded[batch, column] = pos
    # Squared distance to the picked points; -1 for picked points and padding.
    distance = pos.new_full(padded.shape[:2], -1.0)
    distance[batch, column] = torch.inf
    picks = torch.zeros((num_clouds, num_steps), dtype=torch.int64, device=pos.device)
    clouds = torch.arange(num_clouds, device=pos.device)
    for step in range(num_steps):
        pick = distance.argmax(1) if step else picks[:, 0]
        picks[:, step] = pick
        squared = (padded - padded[clouds, pick, None]).square().sum(2)
        torch.minimum(distance, squared, out=distance)
        distance[clouds, pick] = -1.0
    taken = torch.cat([cloud * num_steps + torch.arange(n) for cloud, n in enumerate(counts)])
    taken = taken.to(pos.device, non_blocking=copied_ahead(pos.device))
    return (picks + ptr[:-1, None]).flatten()[taken]


def poisson_disk_subset(
    points: np.ndarray, num_samples: int, rng: np.random.Generator
) -> np.ndarray:
    """A Poisson-disk (blue-noise) subset of exactly `num_samples` points.

    Dart throwing: the points, in random order, are kept where they are farther than a radius from
    all kept ones. The radius is chosen such that nearly `num_samples` are kept; farthest points
    are added until there are `num_samples`. The result depends on the points and the generator
    alone. 8 k of 40 k points take 0.2 s, 200 k of 1 M take 7 s.

    Shapes: points (N, 3) -> ascending indices (num_samples,) int64. Raises ValueError where N is
    less than `num_samples`.
    """
    if not 0 <= num_samples <= len(points):
        raise ValueError(f"cannot pick {num_samples} distinct points of {len(points)}")
    if num_samples in (0, len(points)):
        return np.arange(num_samples)
    order = rng.permutation(len(points))
    shuffled = points[order] - points.mean(0)
    extent = float(np.ptp(shuffled, axis=0).max())
    radius, best = extent / np.sqrt(num_samples), np.zeros(1, dtype=np.int64)
    for _ in range(12):
        # A smaller radius would overflow the cell number, and underflow when squared.
        radius = max(radius, extent * 2.0**-20, 1e-100)
        darts = _throw_darts(shuffled, radius)
        if len(best) < len(darts) <= num_samples:
            best = darts
        if 0.98 * num_samples <= len(darts) <= num_samples:
            break
        # On a surface the number of darts is proportional to 1 / radius^2.
        radius *= np.sqrt(len(darts) / (0.99 * num_samples))
    return np.sort(order[_fill_up(shuffled, best, num_samples)])


def _throw_darts(points: np.ndarray, radius: float) -> np.ndarray:
    """A maximal subset with all distances above `radius`; earlier points take precedence."""
    # A cell holds at most one dart, so that each round tries only the first point of each cell:
    # this bounds the work where points are dense.
    cells = np.floor((points - points.min(0)) / (radius / np.sqrt(3))).astype(np.int64)
    shape = cells.max(0) + 1
    cell = (cells[:, 0] * shape[1] + cells[:, 1]) * shape[2] + cells[:, 2]
    left, darts = np.arange(len(points)), []
    while len(left):
        tried = left[np.sort(np.unique(cell[left], return_index=True)[1])]
        close = cKDTree(points[tried]).query_pairs(radius, output_type="ndarray")
        is_dart = np.ones(len(tried), dtype=bool)
        is_dart[close.max(1)] = False
        darts.append(tried[is_dart])
        distance = cKDTree(points[darts[-1]]).query(points[left], distance_upper_bound=radius)[0]
        left = left[np.isinf(distance)]
    return np.concatenate(darts)


def _fill_up(points: np.ndarray, chosen: np.ndarray, num_samples: int) -> np.ndarray:
    """Add farthest points to the chosen ones until there are `num_samples`."""
    tree = cKDTree(points)
    distance = np.asarray(cKDTree(points[chosen]).query(points)[0])
    distance[chosen] = -1.0
    added = np.empty(num_samples - len(chosen), dtype=np.int64)
    for step in range(len(added)):
        pick = added[step] = distance.argmax()
        if distance[pick] > 0:
            near: list[int] = tree.query_ball_point(points[pick], distance[pick])
            gap = np.linalg.norm(points[near] - points[pick], axis=1)
            distance[near] = np.minimum(distance[near], gap)
        distance[pick] = -1.0
    return np.concatenate([chosen, added])
