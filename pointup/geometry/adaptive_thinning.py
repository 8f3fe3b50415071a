"""Adaptive thinning: farthest-point sampling in units of a spacing that varies across the cloud."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pointup.geometry.insertion_radii import insertion_radii
from pointup.geometry.local_geometry import LocalGeometry
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
    sizes = torch.tensor([len(piece) for piece in pieces])
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
    last = torch.tensor(num_points - 1.0, dtype=torch.float32)
    share = torch.linspace(0, 1, NUM_MEASURED // 3, dtype=torch.float32)
    # More often where distances fall quickly: at the start, and at the end if there are duplicates.
    measured = torch.cat([last**share, 1 + (last - 1) * share, last + 1 - last**share])
    measured = measured.round().long().unique()
    # The expanded dot product, the default, is wrong by whole spacings far from the origin.
    mode = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(ordered[measured], ordered, compute_mode=mode)
    earlier = torch.arange(num_points) < measured[:, None]
    distance = distance.masked_fill(~earlier, torch.inf).amin(1)
    distance = torch.maximum(distance, 1e-6 * distance.max().clamp(min=1e-30)).log()
    # Linear between measured values, over the logarithm of the number of points.
    at = torch.arange(1, num_points)
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
