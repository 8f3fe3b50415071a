"""Neighbourhoods in units of the local spacing, which makes what is built on them scale-free."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pointup.geometry.packed import batch_from_ptr, segment_mean


class LocalGeometry(NamedTuple):
    """Neighbourhoods of the input points, computed once and shared by all layers."""

    index: Tensor
    """(N, K) int64, the point itself first; where a neighbour is missing, the point itself."""
    missing: Tensor
    """(N, K) bool."""
    relative: Tensor
    """(N, K, 3) from the point to its neighbour, in units of the point's spacing."""
    spacing: Tensor
    """(N, 1) mean distance to the neighbours, in units of the input."""


def local_geometry(pos: Tensor, ptr: Tensor, squared: Tensor, index: Tensor) -> LocalGeometry:
    """Relative positions of the neighbours that `knn` found, in units of the local spacing.

    The spacing is the mean distance to the neighbours; for a point all of whose neighbours
    coincide with it, that of its cloud, so that nothing is divided by zero.
    """
    missing = index < 0
    own = torch.arange(len(pos), device=pos.device).unsqueeze(1)
    index = torch.where(missing, own, index)
    distance = squared.masked_fill(missing, 0.0).sqrt()
    count = (~missing).sum(1, keepdim=True) - 1
    spacing = distance.sum(1, keepdim=True) / count.clamp(min=1)
    of_cloud = segment_mean(spacing, ptr)[batch_from_ptr(ptr)]
    spacing = torch.where(spacing > 1e-3 * of_cloud, spacing, of_cloud)
    spacing = torch.where(spacing > 0.0, spacing, torch.ones_like(spacing))
    relative = (pos[index] - pos.unsqueeze(1)) / spacing.unsqueeze(2)
    return LocalGeometry(index, missing, relative, spacing)


def with_length(relative: Tensor) -> Tensor:
    """Append the length to vectors (..., 3), giving (..., 4)."""
    return torch.cat([relative, torch.linalg.vector_norm(relative, dim=-1, keepdim=True)], dim=-1)
