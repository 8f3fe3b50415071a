"""Gaps in a cloud: points beyond a gap are not neighbours, and no child is placed across one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

GAP = 3.0
"""A gap lies before a neighbour that is more than this many times as far away as the previous."""
BRIDGE = 4.0
"""A slot is tied only to neighbours within this many local spacings of one of both points."""

# With this many neighbours on the near side, a gap needs no further condition.
_MANY = 6
# With this many, the farthest beyond the gap must be less than _WIDTH times as far as the nearest.
_SOME, _WIDTH = 4, 2.0
# With fewer, less than _WIDTH_OF_FEW times; and the mean unit vector to all beyond the gap must be
# longer than _ONE_DIRECTION: they lie in one direction. Around a close pair they lie everywhere.
_ONE_DIRECTION, _WIDTH_OF_FEW = 0.95, 1.5
# The same ratio for a point that is alone: all others must be less than so many times as far.
_WIDTH_ALONE = 1.25


def beyond_gap(to_nearest: Tensor, distance: Tensor, not_found: Tensor) -> Tensor:
    """Which of the K nearest points (N, K) lie beyond a gap.

    A gap follows the nearest j where the next is more than `GAP` times as far away. On the near
    side there must be six; or at least four, with the rest close together beyond the gap; or fewer,
    with the rest also in one direction. Thus the neighbours of two returns of one pulse, which
    surround them, stay neighbours. A point is alone if all others are far away in one place: all of
    them are beyond the gap.

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
    # Duplicates of the point itself are no near side of a gap.
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
    """Ranks (K,) of the nearest, and (K - 1,) for a gap before each but the first: the limit of the
    ratio of the farthest distance to its own."""
    # Cached across calls: a tensor created in inference mode could not join a graph later.
    with torch.inference_mode(False):
        rank = torch.arange(num_nearest, device=device)
        width = torch.zeros(num_nearest, dtype=dtype, device=device)
        width[_SOME:] = _WIDTH
        width[_MANY:] = torch.inf
        return rank, width[1:]


def without_bridges(index: Tensor, rows: slice, pos: Tensor, local_spacing: Tensor) -> Tensor:
    """Neighbours (n, R) of the points in `rows`, -1 for those across a gap.

    A gap is wider than `BRIDGE` times the local spacing of both points.

    Shapes: `index` (n, R) of all points, the point itself first, `pos` (N, 3), `local_spacing`
    (N, 1).
    """
    other = torch.where(index < 0, index[:, :1], index)
    distance = torch.linalg.vector_norm(pos[other] - pos[rows].unsqueeze(1), dim=-1)
    wider = torch.maximum(local_spacing[rows], local_spacing[other].squeeze(2))
    return index.masked_fill(distance > BRIDGE * wider, -1)
