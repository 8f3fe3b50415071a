"""Evenly spaced subsets: farthest-point and Poisson-disk sampling, thinning to a given spacing."""

from __future__ import annotations

import math
from itertools import pairwise

import fpsample
import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.geometry import kernels
from pointup.geometry.local_geometry import LocalGeometry
from pointup.geometry.neighbors import has_copies, in_threads, knn
from pointup.geometry.packed import (
    assume_valid,
    at_least_float32,
    batch_from_ptr,
    check_clouds,
    on_host,
    ptr_from_sizes,
    segment_mean,
    sizes_from_ptr,
    to_device,
)

# Above this number of picks a tree is faster than buckets, because each pick reads all buckets.
_PICKS_FROM_BUCKETS = 200_000


@torch.no_grad()
def farthest_point_sample(pos: Tensor, ptr: Tensor, num_samples: Tensor) -> Tensor:
    """Farthest-point sampling of each cloud: each pick is the point farthest from earlier picks.

    Eldar et al. 1997, with the buckets of QuickFPS (Han et al. 2023), on the host for points on any
    device. The first pick depends on the cloud alone. Where only duplicates of picked points are
    left, they follow in the order of their indices.

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
    points = at_least_float32(pos).cpu().numpy()

    def sample(cloud: int) -> np.ndarray:
        start, stop = bounds[cloud], bounds[cloud + 1]
        return _sample_one(points[start:stop], counts[cloud]) + start

    # fpsample releases the GIL. On one core, 5 k picks of 20 k points take 10 ms, 250 k picks of
    # 1 M take 3 s, 1 M of 1 M 6 s.
    index = in_threads(sample, range(len(counts)))
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *index])).to(pos.device)


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
        height = max(1, round(0.62 * math.log2(len(distinct)) - 3.7))
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


LARGEST_PIECE = 32_768
"""Most points of a cloud that are sampled together on the CPU."""
SMOOTHING = 2
"""Passes of a mean over neighbours that smooth the spacing of points."""

# Picks at which the pick distance of farthest-point sampling is measured.
NUM_MEASURED = 48


@torch.no_grad()
def sample_by_spacing(pos: Tensor, ptr: Tensor, num_samples: Tensor, log_spacing: Tensor) -> Tensor:
    """Subset of each cloud, even in units of a spacing that may vary across the cloud.

    Farthest-point sampling orders all points. A point's pick distance is its distance to all
    earlier picks: points picked down to some distance are that far apart everywhere, whatever the
    first pick. The function keeps the points whose pick distance is largest in units of their
    spacing. With equal spacings this is `farthest_point_sample`.

    On the CPU points are picked one after the other. A cloud of more than `LARGEST_PIECE` points is
    ordered piece by piece, because the time of one order for all grows faster than their number;
    points kept across the border of two pieces may be closer than others. Other devices compute all
    distances at once (`insertion_radii`), as if sampling had another first pick: the points differ
    from those of the CPU, and are as even.

    Shapes: pos (N, 3), num_samples (B,) int64, log_spacing (N,) natural logarithm of the spacing,
    in any unit -> index (sum(num_samples),) int64 into `pos`, cloud after cloud, distinct.
    Raises ValueError as `farthest_point_sample`.
    """
    sizes, counts = sizes_from_ptr(on_host(ptr)), on_host(num_samples)
    # On other devices reading the values would wait for the device.
    is_even = pos.device.type == "cpu" and not log_spacing.any()
    if is_even or (counts > sizes).any():  # of which the call says which cloud is too small
        return farthest_point_sample(pos, ptr, num_samples)
    if pos.device.type == "cpu":
        order, log_distance = _pick_distances(pos, ptr)
        return order[_best_of_each(log_distance - log_spacing[order], ptr, num_samples)]
    log_radius = insertion_radii(pos, ptr, counts).log()
    return _best_of_each(log_radius - log_spacing, ptr, num_samples)


def _best_of_each(score: Tensor, ptr: Tensor, num_kept: Tensor) -> Tensor:
    """Index of the `num_kept` (B,) points of each cloud with the highest score, best first."""
    # By cloud, and within it by score; both sorts keep the order of equals.
    best = torch.argsort(score, descending=True, stable=True)
    best = best[torch.argsort(batch_from_ptr(ptr, len(score))[best], stable=True)]
    # Where the points of each cloud begin, less where those kept of it do.
    kept_ptr = ptr_from_sizes(on_host(num_kept))
    skipped = to_device((on_host(ptr) - kept_ptr)[:-1], ptr.device)
    total = int(kept_ptr[-1])
    skipped = skipped.repeat_interleave(num_kept, output_size=total)
    return best[torch.arange(total, device=ptr.device) + skipped]


def _pick_distances(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """The points (N,) in the order of farthest-point sampling, and the logarithms of their pick
    distances, on the CPU."""
    sizes, piece_ptr = sizes_from_ptr(ptr), ptr
    if len(sizes) and int(sizes.max()) > LARGEST_PIECE:
        together, piece_ptr = _in_pieces(pos, ptr)
        order = together[farthest_point_sample(pos[together], piece_ptr, sizes_from_ptr(piece_ptr))]
    else:
        order = farthest_point_sample(pos, ptr, sizes)
    return order, log_pick_distances(at_least_float32(pos)[order], piece_ptr)


def _in_pieces(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Points (N,) piece by piece, clouds in their order, and the ptr of the pieces.

    Each cloud is bisected across its longest side, recursively, into pieces of at most
    `LARGEST_PIECE` points.
    """
    points, pieces = pos.numpy(), []
    for start, stop in pairwise(ptr.tolist()):
        left = [np.arange(start, stop)]
        while left:
            index = left.pop()
            if len(index) <= LARGEST_PIECE:
                pieces.append(index)
                continue
            axis = int(np.ptp(points[index], axis=0).argmax())
            half = np.argpartition(points[index, axis], len(index) // 2)
            left += [index[half[: len(index) // 2]], index[half[len(index) // 2 :]]]
    sizes = torch.tensor([len(piece) for piece in pieces], device="cpu")
    return torch.from_numpy(np.concatenate(pieces)), ptr_from_sizes(sizes)


def log_pick_distances(ordered: Tensor, ptr: Tensor) -> Tensor:
    """Logarithms (N,) of pick distances, for packed points (N, 3) in the order of farthest-point
    sampling, on the CPU.

    Pick distances never rise. They are measured at some points of each cloud and interpolated
    between. 0 for a cloud of one point.
    """
    bounds = pairwise(ptr.tolist())
    distances = [_log_pick_distances_of_one(ordered[start:stop]) for start, stop in bounds]
    return torch.cat([ordered.new_zeros(0), *distances])


def _log_pick_distances_of_one(ordered: Tensor) -> Tensor:
    num_points = len(ordered)
    if num_points < 2:
        return ordered.new_zeros(num_points)
    last = torch.tensor(num_points - 1.0, dtype=torch.float32, device="cpu")
    share = torch.linspace(0, 1, NUM_MEASURED // 3, dtype=torch.float32, device="cpu")
    # More often where distances fall quickly: at the start, and at the end if there are duplicates.
    measured = torch.cat([last**share, 1 + (last - 1) * share, last + 1 - last**share])
    measured = measured.round().long().unique()
    # The expanded dot product, the default, is wrong by whole spacings far from the origin.
    mode = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(ordered[measured], ordered, compute_mode=mode)
    earlier = torch.arange(num_points, device="cpu") < measured[:, None]
    distance = distance.masked_fill(~earlier, torch.inf).amin(1)
    distance = torch.maximum(distance, 1e-6 * distance.max().clamp(min=1e-30)).log()
    # Linear between measured values, over the logarithm of the number of points.
    at = torch.arange(1, num_points, device="cpu")
    right = torch.searchsorted(measured, at).clamp(min=1, max=max(1, len(measured) - 1))
    if len(measured) == 1:
        between = distance.expand(num_points - 1)
    else:
        low, high = (measured[index].float().log() for index in (right - 1, right))
        weight = ((at.float().log() - low) / (high - low)).to(distance.dtype)
        between = torch.lerp(distance[right - 1], distance[right], weight)
    return torch.cat([between[:1], between])


def spacing_by_power(power: Tensor, geometry: LocalGeometry, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm (N,) of the output spacing around each input point, and of the resulting shares
    (N,) of the cloud's output, each up to a constant per cloud.

    The output spacing is the smoothed spacing of the input to the exponent `power` (N,): 0 makes
    the output equally dense everywhere, 1 keeps the relative differences in spacing.
    """
    batch = batch_from_ptr(ptr, len(power))
    smooth = geometry.spacing
    for _ in range(SMOOTHING):
        smooth = smooth[geometry.index].mean(1)
    log_smooth = smooth[:, 0].log()
    log_spacing = power * (log_smooth - segment_mean(log_smooth, ptr)[batch])
    # The surface area per point is proportional to the square of its spacing.
    log_points = 2 * (geometry.spacing[:, 0].log() - log_spacing)
    return log_spacing, log_points


# Insertion radii, in parallel: the distance of each point to earlier farthest-point picks.
#
# Farthest-point sampling picks one point after the other. But a point whose distance to the picks
# is the largest within that distance is picked at that distance, independently of picks elsewhere:
# all such points can be settled at once (Blelloch et al. 2012, "Greedy sequential maximal
# independent set and matching are parallel on average").

NUM_NEIGHBORS = 32
"""Neighbours a point, itself among them, that decide when it is picked."""
STRIDE = 2
"""Points of a cloud for each point of its coarser sample."""
SHARE = 4
"""The coarsest sample of a cloud has at most 1 / SHARE of the points that are kept of it."""
# Passes between checks whether all points are settled, on devices without kernels.
_PASSES = 8


@torch.no_grad()
def insertion_radii(pos: Tensor, ptr: Tensor, counts: Tensor) -> Tensor:
    """Distance of each point to the points that farthest-point sampling picks before it.

    Points are compared with their nearest `NUM_NEIGHBORS` only, themselves among them. Larger radii
    come from a sample of one in `STRIDE` points, from a sample of this sample, and so on; `counts`,
    the number of points that the caller keeps of each cloud, determines the coarsest sample. No
    radius exceeds the distance to the last neighbour in the point's coarsest sample; it is infinite
    for the first pick of fewer than `NUM_NEIGHBORS` points. All duplicates of a point but the first
    have the radius 0.

    Shapes: pos (N, 3), ptr (B + 1,), counts (B,) -> (N,) float32. Raises ValueError for
    coordinates that are not finite (naming the cloud).
    """
    check_clouds((pos, ptr))
    if len(pos) == 0:
        return pos.new_zeros(0, dtype=torch.float32)
    pos = at_least_float32(pos)
    row, parent, node_ptr = coarser_samples(ptr, counts)
    # Duplicates would fill the neighbourhood of a point: they form a separate cloud.
    is_copy = copies(pos, ptr)
    cloud = 2 * batch_from_ptr(node_ptr, len(row)) + is_copy[row]
    cloud, order = cloud.sort(stable=True)
    borders = torch.arange(2 * len(node_ptr) - 1, device=pos.device)
    rank = torch.empty_like(order)
    rank.index_copy_(0, order, torch.arange(len(order), device=pos.device))
    parent = torch.where(parent < 0, parent, rank[parent])[order]

    with assume_valid():
        squared, index = knn(pos[row[order]], torch.searchsorted(cloud, borders), NUM_NEIGHBORS)
    squared = squared.float()
    # Only pairs of which each point is among the neighbours of the other.
    reach = squared[:, -1].contiguous()
    is_far = squared >= torch.minimum(reach[:, None], reach[index])
    neighbor = index.int().masked_fill_(is_far, -1)
    neighbor[:, 0] = -1  # the point itself
    if kernels.take(pos, NUM_NEIGHBORS):
        from pointup.geometry.kernels.insertion import settle as settle_there

        num_levels = (len(node_ptr) - 1) // (len(ptr) - 1)
        squared = settle_there(neighbor, squared, parent.int(), reach, num_levels)
    else:
        squared = settle(neighbor, squared, parent, reach)
    return squared[rank[: len(pos)]].masked_fill(is_copy, 0.0).sqrt()


def coarser_samples(ptr: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (M) of a hierarchy of samples: the points, samples of them, samples of those and so on.

    Returns the point of each node, (M,) int64; the node of the same point in the next coarser
    sample, (M,) int64, -1 for none; and the ptr of all clouds of all samples, finest first: the
    points themselves.
    """
    sizes, device = [sizes_from_ptr(on_host(ptr))], ptr.device
    enough = (on_host(counts) // SHARE).clamp(min=NUM_NEIGHBORS)
    while (sizes[-1] > enough).any():
        sizes.append((sizes[-1] + STRIDE - 1) // STRIDE)
    bounds = ptr_from_sizes(torch.cat(sizes))
    node_ptr = to_device(bounds, device)
    num_points, num_nodes = int(sizes[0].sum()), int(bounds[-1])
    rows = [torch.arange(num_points, device=device)]
    parent = torch.full((num_nodes,), -1, device=device)
    if len(sizes) > 1:
        # Of each node of a sample, where its segment begins, and that of the next finer one.
        first = torch.stack([bounds[len(sizes[0]) : -1], bounds[: -1 - len(sizes[0])]])
        last = first[1] + torch.cat(sizes[:-1]) - 1
        of_level = ptr_from_sizes(torch.stack([of_clouds.sum() for of_clouds in sizes]))
        begins = of_level[:-2].repeat_interleave(len(sizes[0]))
        table = to_device(torch.stack([*first, last, begins]), device)
        segment = batch_from_ptr(node_ptr, num_nodes)[num_points:] - len(sizes[0])
        start, finer_start, finer_last, finer_begins = table.index_select(1, segment).unbind()
        node = torch.arange(num_points, num_nodes, device=device)
        place = node - start
        # Any of the points that it stands for: no raster of the input repeats in the sample.
        finer = finer_start + STRIDE * place + (place * 2654435761 >> 16) % STRIDE
        finer = torch.minimum(finer, finer_last)
        parent = parent.index_copy_(0, finer, node)
        for picked in (finer - finer_begins).split(sizes_from_ptr(of_level)[1:].tolist()):
            rows.append(rows[-1][picked])
    return torch.cat(rows), parent, node_ptr


def copies(pos: Tensor, ptr: Tensor) -> Tensor:
    """Whether an earlier point of the cloud has the same coordinates, (N,) bool.

    A duplicate can be missed where different points have the same hash of 64 bits.
    """
    # Adding zero turns negative zero into zero: the same coordinate has the same bits.
    bits = (pos + 0.0).contiguous().view(torch.int64 if pos.dtype == torch.float64 else torch.int32)
    key = batch_from_ptr(ptr, len(pos))
    for axis in bits.long().unbind(1):
        key = (key * -7046029254386353131) ^ axis
    key, order = key.sort(stable=True)
    place = pos[order]
    is_same = (key[1:] == key[:-1]) & (place[1:] == place[:-1]).all(1)
    return torch.zeros(len(pos), dtype=torch.bool, device=pos.device).index_copy(
        0, order[1:], is_same
    )


def settle(neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor) -> Tensor:
    """Squared insertion radii (M,) on any device, at most the larger of `limit` (M,) and the
    parent's radius.

    Of two neighbours closer to each other than both radii, the one with the larger radius is picked
    first and lowers the radius of the other to their distance. A point is settled when no neighbour
    precedes it any more and its parent is settled. Its initial radius is the larger of its parent's
    radius and its own limit.

    Shapes: `neighbor` (M, K) int32, symmetric, -1 for none; `squared` (M, K) float32, squared
    distances to them; `parent` (M,), -1 for none; `limit` (M,) float32, squared.
    """
    other, has_parent = neighbor.long().clamp(min=0), parent >= 0
    parent = parent.long().clamp(min=0)
    radius = torch.where(has_parent, torch.inf, limit)
    number = torch.arange(len(radius), device=radius.device, dtype=torch.int32)
    first = number * -1640531535
    goes_first = first[other] > first[:, None]
    is_near = neighbor >= 0
    is_settled = torch.zeros_like(has_parent)
    while True:
        for _ in range(_PASSES):
            theirs, own = radius[other], radius[:, None]
            is_before = (theirs > own) | ((theirs == own) & goes_first)
            is_before &= is_near & (squared < own)
            lowered = squared.masked_fill(~(is_before & is_settled[other]), torch.inf).amin(1)
            must_wait = has_parent & ~is_settled[parent]
            bound = torch.maximum(radius[parent], limit)
            bound = bound.masked_fill(~has_parent | must_wait, torch.inf)
            settles = ~is_settled & ~is_before.any(1) & ~must_wait & (bound >= radius)
            lowered = torch.minimum(radius, torch.minimum(lowered, bound))
            radius = torch.where(is_settled | settles, radius, lowered)
            is_settled = is_settled | settles
        if is_settled.all():
            return radius
