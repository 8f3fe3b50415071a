"""Gaps between points: what lies beyond one is no neighbour, and nothing is built across."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

GAP = 3.0
"""A neighbour is beyond a gap where it is so many times as far away as the one before it."""
BRIDGE = 4.0
"""No child is tied to a neighbour farther off than so many local spacings on both sides."""

# So many neighbours on this side of a gap are enough.
_MANY = 6
# So many are enough where the farthest beyond it is less than twice as far away as the nearest.
_SOME, _WIDTH = 4, 2.0
# Fewer are where, besides, the mean of the unit vectors to all beyond the gap is at least so long:
# they lie in one direction. Around a close pair they lie everywhere.
_ONE_DIRECTION, _WIDTH_OF_FEW = 0.95, 1.5
# Width of the others as a point sees them that has no neighbour of its own.
_WIDTH_ALONE = 1.25


def beyond_gap(to_nearest: Tensor, distance: Tensor, not_found: Tensor) -> Tensor:
    """Which of the K nearest points (N, K) lie beyond a gap.

    A gap follows the nearest j where the next one is more than `GAP` times as far away. Six must be
    on this side of it; or at least four, and the rest close together beyond it; or fewer, and the
    rest also in one direction. So the neighbours of two returns of one pulse, which lie all around
    them, stay neighbours. A point that sees all others in one place far off is alone: all of them
    are beyond the gap.

    Shapes: `to_nearest` (N, K, 3) from the point to its nearest, the point itself first, `distance`
    (N, K) ascending, `not_found` (N, K) bool, true only after all that are found; `to_nearest` and
    `distance` are 0 there.
    """
    away, distance, found = to_nearest[:, 1:], distance[:, 1:], ~not_found[:, 1:]
    num_nearest = distance.shape[1]
    if num_nearest == 0:
        return not_found
    farthest = distance.amax(1, keepdim=True)
    # Of each neighbour and those after it: how many, and the length of their mean direction.
    unit = away / torch.linalg.vector_norm(away, dim=2, keepdim=True).clamp(min=1e-12)
    rank, width = _by_rank(num_nearest, distance.dtype, distance.device)
    num_from_here = found.sum(1, keepdim=True) - rank
    sums = unit.flip(1).cumsum(1).flip(1)
    one_way = torch.linalg.vector_norm(sums, dim=2) > _ONE_DIRECTION * num_from_here
    before, after = distance[:, :-1], distance[:, 1:]
    # Copies of a point are no neighbourhood.
    is_gap = (after > GAP * before) & (before > 0)
    is_far_off = one_way[:, 1:] & (farthest < _WIDTH_OF_FEW * after)
    starts = is_gap & ((farthest < width * after) | is_far_off) & found[:, 1:]
    if num_nearest > 2:
        alone = (farthest < _WIDTH_ALONE * distance[:, :1]) & one_way[:, :1] & found[:, -1:]
    else:
        alone = torch.zeros_like(found[:, :1])
    return torch.cat([not_found[:, :1], alone, starts], dim=1).cumsum(1) > 0


@functools.lru_cache(maxsize=64)
def _by_rank(num_nearest: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks (K,) of the nearest, and how much farther away than each but the first the farthest may
    be, (K - 1,), for a gap before it."""
    # Made once, and for any use: tensors of inference can't be part of a graph later.
    with torch.inference_mode(False):
        rank = torch.arange(num_nearest, device=device)
        width = torch.zeros(num_nearest, dtype=dtype, device=device)
        width[_SOME:] = _WIDTH
        width[_MANY:] = torch.inf
        return rank, width[1:]


def without_bridges(index: Tensor, rows: slice, pos: Tensor, local_spacing: Tensor) -> Tensor:
    """Neighbours (n, R) of the points in `rows`, -1 for those across a gap.

    That is one wider than `BRIDGE` local spacings on both of its sides.

    Shapes: `index` (n, R) of all points, the point itself first, `pos` (N, 3), `local_spacing`
    (N, 1).
    """
    other = torch.where(index < 0, index[:, :1], index)
    distance = torch.linalg.vector_norm(pos[other] - pos[rows].unsqueeze(1), dim=-1)
    wider = torch.maximum(local_spacing[rows], local_spacing[other].squeeze(2))
    return index.masked_fill(distance > BRIDGE * wider, -1)
