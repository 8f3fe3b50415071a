"""Neighbourhoods in units of the local spacing, which makes what is built on them scale-free."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pointup.geometry.packed import batch_from_ptr, safe_sqrt, segment_mean


@dataclass(frozen=True)
class LocalGeometry:
    """Neighbourhoods of N points, computed once and shared by all layers."""

    index: Tensor
    """(N, K) int64, the point itself first; where a neighbour is missing, the point itself."""
    missing: Tensor
    """(N, K) bool."""
    relative: Tensor
    """(N, K, 3) from the point to its neighbour, in units of the point's spacing."""
    spacing: Tensor
    """(N, 1) mean distance to the neighbours, in units of the input."""
    mean: Tensor
    """(N, 3) mean of `relative`: it points to the inside of a curve and away from a border."""
    covariance: Tensor
    """(N, 3, 3) mean of the outer products of `relative`: large along a surface, small across."""

    def rows(self, rows: slice) -> LocalGeometry:
        """The neighbourhoods of some points; `index` still counts all of them."""
        return LocalGeometry(*(getattr(self, field.name)[rows] for field in fields(self)))


def local_geometry(pos: Tensor, ptr: Tensor, squared: Tensor, index: Tensor) -> LocalGeometry:
    """Neighbourhoods in units of the local spacing, from what `knn` found (the point itself first).

    The spacing is the mean distance to the neighbours; for a point all of whose neighbours
    coincide with it, that of its cloud, so that nothing is divided by zero.

    Shapes: `pos` (N, 3), `ptr` (B+1,), `squared` and `index` (N, K).
    """
    missing = index < 0
    own = torch.arange(len(pos), device=pos.device).unsqueeze(1)
    index = torch.where(missing, own, index)
    distance = squared.masked_fill(missing, 0.0).sqrt()
    found = (~missing).sum(1, keepdim=True)
    spacing = distance.sum(1, keepdim=True) / (found - 1).clamp(min=1)
    of_cloud = segment_mean(spacing, ptr)[batch_from_ptr(ptr, len(pos))]
    spacing = torch.where(spacing > 1e-3 * of_cloud, spacing, of_cloud)
    spacing = torch.where(spacing > 0.0, spacing, torch.ones_like(spacing))
    # A missing neighbour is the point itself here, and adds nothing to the sums.
    relative = (pos[index] - pos.unsqueeze(1)) / spacing.unsqueeze(2)
    mean = relative.sum(1) / found
    covariance = relative.transpose(1, 2) @ relative / found.unsqueeze(2)
    return LocalGeometry(index, missing, relative, spacing, mean, covariance)


def describe_neighbors(geometry: LocalGeometry, relative: Tensor, spacing: Tensor) -> Tensor:
    """What a point sees of neighbours: (N, S, 7).

    Their direction and distance, the logarithm of their spacing over the point's, their share in
    the mean and how far they lie along the surface rather than across it.

    Shapes: `relative` (N, S, 3) in units of the point's spacing, `spacing` (N, S, 1).
    """
    density = torch.log(spacing / geometry.spacing.unsqueeze(1)).clamp(-5, 5)
    inwards = relative @ geometry.mean.unsqueeze(2)
    along = (relative @ geometry.covariance * relative).sum(-1, keepdim=True)
    return torch.cat([relative, length(relative), density, inwards, along], dim=-1)


def describe_neighbors_of_children(
    geometry: LocalGeometry, from_parent: Tensor, to_slot: Tensor
) -> Tensor:
    """What a child sees of its parent's neighbours: (7, N, R, K).

    Direction and distance, the products with the direction of the child's slot and with the mean
    direction of the parent's neighbours, and 1.

    Shapes: `from_parent` (N, R, 3) from the parent to the child, `to_slot` (N, R, 3) from the
    parent to the neighbour of the slot, both in units of the parent's spacing.
    """
    # The coordinates come first: sums over three values that lie side by side are slow.
    x, y, z = (
        neighbors.unsqueeze(1) - child.unsqueeze(2)
        for neighbors, child in zip(geometry.relative.unbind(2), from_parent.unbind(2), strict=True)
    )
    squared = x.square() + y.square() + z.square()
    onwards = product((x, y, z), to_slot.unsqueeze(2))
    inwards = product((x, y, z), geometry.mean[:, None, None])
    return torch.stack([x, y, z, safe_sqrt(squared), onwards, inwards, torch.ones_like(x)])


def product(vectors: tuple[Tensor, Tensor, Tensor], others: Tensor) -> Tensor:
    x, y, z = vectors
    return x * others[..., 0] + y * others[..., 1] + z * others[..., 2]


def length(vectors: Tensor) -> Tensor:
    """Length (..., 1) of vectors (..., 3), with gradient zero at zero."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
