"""Columns: the points around each point in the horizontal plane, at any height.

For surveys: the third coordinate is a height. A neighbourhood of a point in a crown holds no ground
and one of a ground point no crown; its column holds both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pointup.geometry.neighbors import knn
from pointup.geometry.packed import copied_ahead, outside_autocast

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of the points of a column that lie below the heights of its profile."""
NUM_FEATURES = 5
"""Features that `describe_columns` gives for each point of a column."""


@dataclass(frozen=True)
class Columns:
    """The columns of N points."""

    index: Tensor
    """(N, K) int64, some points of the column, the point itself first and in place of missing."""
    missing: Tensor
    """(N, K) bool: the cloud has fewer points."""
    relative: Tensor
    """(N, K, 3) float32 from the point to them, in the unit of the input."""
    profile: Tensor
    """(N, len(QUANTILES)) float32, quantiles of the heights of all points of the column over the
    point, in the unit of the input."""


def nearest_in_plane(pos: Tensor, ptr: Tensor, size: int) -> Tensor:
    """The `size` horizontally nearest points (N, size) int64 of each point, itself first.

    Shapes: `pos` (N, 3), `ptr` (B+1,). Where a cloud has fewer points, rows end with -1.
    """
    flat = torch.cat([pos[:, :2], torch.zeros_like(pos[:, 2:])], dim=1)
    return knn(flat, ptr, size)[1]


@outside_autocast
def columns_of(pos: Tensor, nearest: Tensor, stride: int) -> Columns:
    """The columns of points, of which every `stride`-th of the nearest in the plane is kept.

    Shapes: `pos` (N, 3); `nearest` (n, S) int64 as from `nearest_in_plane`, of all points or of the
    first n of them.
    """
    not_found, own = nearest < 0, nearest[:, :1]
    nearest = torch.where(not_found, own, nearest)
    heights = pos[:, 2][nearest] - pos[: len(nearest), 2:]
    ordered = heights.masked_fill(not_found, torch.inf).sort(1).values
    last = (~not_found).sum(1, keepdim=True) - 1
    shares = torch.tensor(QUANTILES, dtype=pos.dtype)
    shares = shares.to(pos.device, non_blocking=copied_ahead(pos.device))
    profile = ordered.gather(1, (last * shares).round().long())
    index = nearest[:, ::stride]
    relative = pos[index] - pos[: len(nearest)].unsqueeze(1)
    return Columns(index, not_found[:, ::stride], relative, profile)


@outside_autocast
def drops(columns: Columns, most: Tensor) -> Tensor:
    """Drop (n, 1) from points to the lowest point of their column, at most `most` (n, 1)."""
    return torch.minimum(-columns.profile[:, :1], most)


@outside_autocast
def describe_columns(columns: Columns, spacing: Tensor) -> Tensor:
    """Description (n, K, 5) of the points of columns relative to their point.

    The inverse hyperbolic sine of the relative position (3) and of the horizontal distance, in
    units of the point's spacing (n, 1): linear near the point, logarithmic far above and below it.
    Then the sign of the height, smoothed.
    """
    relative = columns.relative / spacing.unsqueeze(2)
    across = torch.linalg.vector_norm(relative[..., :2], dim=-1, keepdim=True)
    described = torch.cat([relative, across], dim=-1).asinh()
    return torch.cat([described, relative[..., 2:].tanh()], dim=-1)


@outside_autocast
def describe_profiles(columns: Columns, spacing: Tensor) -> Tensor:
    """The inverse hyperbolic sine (n, len(QUANTILES)) of the profiles in units of `spacing`."""
    return (columns.profile / spacing).asinh()
