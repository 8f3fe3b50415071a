"""A spacing that differs from place to place, and thinning that keeps points by it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pointup.geometry.insertion import insertion_radii
from pointup.geometry.local import LocalGeometry
from pointup.geometry.packed import (
    at_least_float32,
    batch_from_ptr,
    on_host,
    ptr_from_sizes,
    segment_mean,
    sizes_from_ptr,
    to_device,
)
from pointup.geometry.thinning import farthest_point_sample

LARGEST_PIECE = 32_768
"""Points of a cloud that are put in order together on the CPU."""
SMOOTHING = 2
"""Passes of a mean over the neighbours that make the spacing of points smooth."""

# Picks at which the distance that farthest-point sampling has come down to is measured.
NUM_MEASURED = 48
# Pairs of points with measured ones that are held at a time.
PAIRS_PER_CHUNK = 1 << 23


@torch.no_grad()
def sample_by_spacing(pos: Tensor, ptr: Tensor, num_samples: Tensor, log_spacing: Tensor) -> Tensor:
    """Subset of each cloud, even in units of a spacing that may differ from place to place.

    Farthest-point sampling orders all points; whatever its start, those picked before it has come
    down to some distance are that far apart, in every place. Kept are the points whose distance at
    their pick is largest in units of their spacing. With equal spacings that is
    `farthest_point_sample`.

    On the CPU points are picked one after the other; a cloud of more than `LARGEST_PIECE` points is
    put in order piece by piece, as one order of all takes more than its share of time; across the
    border of two pieces points may be kept that are closer than others. Other devices find all
    distances at once (`insertion_radii`), as of a sampling with another start: the points differ
    from the CPU's, and are as even.

    Shapes: pos (N, 3), num_samples (B,) int64, log_spacing (N,) natural logarithm of the spacing,
    in any unit -> index (sum(num_samples),) int64 into `pos`, cloud after cloud, distinct.
    Raises ValueError as `farthest_point_sample`.
    """
    sizes, counts = sizes_from_ptr(on_host(ptr)), on_host(num_samples)
    # Elsewhere than on the CPU a look would wait for the device.
    is_even = pos.device.type == "cpu" and not log_spacing.any()
    if is_even or (counts > sizes).any():  # of which the call says which cloud is too small
        return farthest_point_sample(pos, ptr, num_samples)
    if pos.device.type == "cpu":
        order, log_distance = _pick_distances(pos, ptr)
        return order[_best_of_each(log_distance - log_spacing[order], ptr, counts)]
    log_radius = insertion_radii(pos, ptr, counts).log()
    return _best_of_each(log_radius - log_spacing, ptr, counts)


def _best_of_each(score: Tensor, ptr: Tensor, counts: Tensor) -> Tensor:
    """Index of the `counts` points of each cloud with the highest score, best first."""
    # By cloud, and within it by score; both sorts keep the order of equals.
    best = torch.argsort(score, descending=True, stable=True)
    best = best[torch.argsort(batch_from_ptr(ptr, len(score))[best], stable=True)]
    kept_ptr = to_device(ptr_from_sizes(counts), ptr.device)
    num_kept = int(counts.sum())
    skipped = (ptr - kept_ptr)[batch_from_ptr(kept_ptr, num_kept)]
    return best[torch.arange(num_kept, device=ptr.device) + skipped]


def _pick_distances(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """The points (N,) in the order of farthest-point sampling, and the logarithm of the distance
    of each at its pick, on the CPU."""
    sizes, piece_ptr = sizes_from_ptr(ptr), ptr
    if len(sizes) and int(sizes.max()) > LARGEST_PIECE:
        together, piece_ptr = _in_pieces(pos, ptr)
        order = together[farthest_point_sample(pos[together], piece_ptr, sizes_from_ptr(piece_ptr))]
    else:
        order = farthest_point_sample(pos, ptr, sizes)
    return order, log_pick_distances(at_least_float32(pos)[order], piece_ptr)


def _in_pieces(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Points (N,) piece by piece, clouds in their order, and the ptr of the pieces.

    Clouds are halved across their longest side, again and again, into pieces of at most
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
    sizes = torch.tensor([len(piece) for piece in pieces])
    return torch.from_numpy(np.concatenate(pieces)), ptr_from_sizes(sizes)


def log_pick_distances(ordered: Tensor, ptr: Tensor) -> Tensor:
    """Logarithm of the distance (N,) of each point to those before it, for packed points (N, 3) in
    the order of farthest-point sampling: it never rises, and is measured at some of each cloud's.

    0 for a point that is alone in its cloud.
    """
    num_points, sizes = len(ordered), sizes_from_ptr(on_host(ptr))
    if num_points == 0:
        return ordered.new_empty(0)
    last = (sizes - 1).clamp(min=1).float().unsqueeze(1)
    share = torch.linspace(0, 1, NUM_MEASURED // 3)
    # Where it falls quickly: at the start, and at the end if there are copies of points.
    measured = torch.cat([last**share, 1 + (last - 1) * share, last + 1 - last**share], dim=1)
    measured = measured.round().long().sort(dim=1).values
    num_measured = measured.shape[1]
    first = on_host(ptr)[:-1].unsqueeze(1)
    # Clouds one after another in one ascending sequence, to be searched at once.
    shift = (num_points + 1) * torch.arange(len(sizes)).unsqueeze(1)
    # A point that is alone has none before it.
    until = torch.minimum(measured, (sizes - 1).clamp(min=0).unsqueeze(1))
    rows = (first + until).clamp(max=num_points - 1)
    table = to_device(torch.stack([measured, until, rows, measured + shift]), ordered.device)
    measured, until, rows, sequence = table.unbind()

    batch = batch_from_ptr(ptr, num_points)
    place = torch.arange(num_points, device=ordered.device) - ptr[batch]
    squared = ordered.new_full(measured.shape, torch.inf)
    picked = ordered[rows].permute(2, 0, 1)
    chunk_size = max(1, PAIRS_PER_CHUNK // num_measured)
    for start in range(0, num_points, chunk_size):
        cloud = batch[start : start + chunk_size]
        points = ordered[start : start + chunk_size].t().unsqueeze(2)
        pairs = (picked.index_select(1, cloud) - points).square().sum(0)
        is_later = place[start : start + chunk_size].unsqueeze(1) >= until[cloud]
        pairs = pairs.masked_fill(is_later, torch.inf)
        squared.scatter_reduce_(0, cloud.unsqueeze(1).expand_as(pairs), pairs, "amin")
    distance = squared.masked_fill(squared == torch.inf, 1.0).sqrt()
    floor = 1e-6 * distance.amax(1, keepdim=True).clamp(min=1e-30)
    distance = torch.maximum(distance, floor).log().flatten()

    # Straight between the measured ones, over the logarithm of the number of points.
    place = place.clamp(min=1)
    right = torch.searchsorted(sequence.flatten(), place + (num_points + 1) * batch)
    right = torch.maximum(right, num_measured * batch + 1)
    left, log_measured = right - 1, measured.flatten().log()
    low, high = log_measured[left], log_measured[right]
    weight = (place.log() - low) / (high - low).clamp(min=1e-12)
    return torch.lerp(distance[left], distance[right], weight)


def spacing_by_power(power: Tensor, geometry: LocalGeometry, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm (N,) of the spacing that the output should have around each input point, and of the
    shares (N,) of a cloud's output that follow from it, each up to a constant of the cloud.

    The spacing is a power (N,) of the input's spacing there: 0 makes the output equally dense
    everywhere, and 1 keeps places as much denser than others as they are.
    """
    batch = batch_from_ptr(ptr, len(power))
    smooth = geometry.spacing
    for _ in range(SMOOTHING):
        smooth = smooth[geometry.index].mean(1)
    log_smooth = smooth[:, 0].log()
    log_spacing = power * (log_smooth - segment_mean(log_smooth, ptr)[batch])
    # A point's part of a surface grows with the square of its spacing.
    log_points = 2 * (geometry.spacing[:, 0].log() - log_spacing)
    return log_spacing, log_points
