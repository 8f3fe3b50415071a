"""Local geometry of each point in units of its spacing, the scale-invariant input of the model.

Vectors are multiplied and summed element by element: where the user or the environment allows it,
torch computes matrix products of float32 in TF32, with 10 bits of precision.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointup.geometry.neighbors import knn
from pointup.geometry.packed import batch_from_ptr, copied_ahead, segment_mean

MAX_OFFSET = 1.0
"""Largest distance of a child from its anchor, in spacings of its parent."""

# Distances are clipped to this many medians in the mean that is the spacing.
_MOST_DISTANCE = 2.0


@dataclass(frozen=True)
class LocalGeometry:
    """Neighbourhoods of N points, computed once for all layers."""

    index: Tensor
    """(N, K) int64, the point itself first, and in place of missing neighbours."""
    missing: Tensor
    """(N, K) bool: the cloud has fewer points, or the neighbour lies beyond a gap."""
    relative: Tensor
    """(N, K, 3) from the point to its neighbour, in units of the point's spacing."""
    spacing: Tensor
    """(N, 1) mean distance to the neighbours, each clipped to twice their median, in units of the
    input."""
    local_spacing: Tensor
    """(N, 1) the spacing, or the median spacing of the K nearest points where that is smaller: for
    an isolated point, the spacing of the others."""
    mean: Tensor
    """(N, 3) mean of `relative`: it points to the inside of a curve and away from a border."""
    covariance: Tensor
    """(N, 3, 3) mean outer product of `relative`: large along a surface, small across it."""
    normal: Tensor
    """(N, 3) unit normal of the plane fitted to them, of either sign; 0 where none is defined."""
    needed: tuple[int, ...] = ()
    """Of how many first points an encoder must know the features, before its layers and after each;
    empty for all points."""

    def rows(self, rows: slice | Tensor) -> LocalGeometry:
        """The neighbourhoods of some points; `index` still refers to all points."""
        *names, _ = (field.name for field in fields(self))
        return LocalGeometry(*(getattr(self, name)[rows] for name in names))


def local_geometry(pos: Tensor, ptr: Tensor, squared: Tensor, index: Tensor) -> LocalGeometry:
    """Neighbourhoods in units of the spacing, from the result of `knn` (the point itself first).

    Neighbours beyond a gap (`beyond_gap`) are missing, so that a gap does not count as spacing. The
    spacing is the mean distance to the others, each clipped to twice their median. A point without
    neighbours, or whose neighbours all coincide with it, has the mean spacing of its cloud, which
    avoids division by zero.

    Shapes: `pos` (N, 3), `ptr` (B+1,), `squared` and `index` (N, K), ascending.
    """
    not_found, own = index < 0, index[:, :1]
    nearest = torch.where(not_found, own, index)
    distance = squared.masked_fill(not_found, 0.0).sqrt()
    to_nearest = pos[nearest] - pos.unsqueeze(1)
    missing = not_found | beyond_gap(to_nearest, distance, not_found)
    index = torch.where(missing, own, nearest)
    found = (~missing).sum(1, keepdim=True)
    # The median: distances ascend, with the point itself first.
    most = _MOST_DISTANCE * distance.gather(1, found // 2)
    near = torch.minimum(distance.masked_fill(missing, 0.0), most)
    spacing = near.sum(1, keepdim=True) / (found - 1).clamp(min=1)
    of_cloud = segment_mean(spacing, ptr)[batch_from_ptr(ptr, len(pos))]
    spacing = torch.where(spacing > 1e-3 * of_cloud, spacing, of_cloud)
    spacing = spacing.masked_fill(spacing <= 0.0, 1.0)
    around = spacing[nearest].squeeze(2).masked_fill(not_found, torch.inf)
    local_spacing = torch.minimum(spacing, around[:, 1:].median(1, keepdim=True).values)
    # A missing neighbour is the point itself here, and adds nothing to the sums.
    relative = to_nearest.masked_fill(missing.unsqueeze(2), 0.0) / spacing.unsqueeze(2)
    mean = relative.sum(1) / found
    # Points last: other orders take four times as long.
    by_axis = relative.permute(2, 1, 0).contiguous()
    covariance = (by_axis * by_axis.unsqueeze(1)).sum(2).permute(2, 0, 1) / found.unsqueeze(2)
    normal = plane_normals(covariance - mean.unsqueeze(2) * mean.unsqueeze(1))
    return LocalGeometry(index, missing, relative, spacing, local_spacing, mean, covariance, normal)


def nearest_gaps(geometry: LocalGeometry) -> Tensor:
    """Mean distance (N,) to the four nearest others, in units of the input.

    It is the spacing of the point where all of them are missing, and a thousandth of it where they
    coincide with the point.
    """
    distance = torch.linalg.vector_norm(geometry.relative[:, 1:5], dim=-1)
    found = (~geometry.missing[:, 1:5]).sum(1)
    mean = torch.where(found > 0, distance.sum(1) / found.clamp(min=1), 1.0)
    return mean.clamp(min=1e-3) * geometry.spacing[:, 0]


def mean_gaps(squared: Tensor, index: Tensor) -> Tensor:
    """Mean distance (N,) to the four nearest others, from the result of `knn`; 0 without others.

    Shapes: `squared` and `index` (N, K) with the point itself first, K at least 5.
    """
    missing = index[:, 1:5] < 0
    distance = squared[:, 1:5].sqrt().masked_fill(missing, 0.0).sum(1)
    return distance / (4 - missing.sum(1)).clamp(min=1)


def plane_normals(covariance: Tensor) -> Tensor:
    """Unit eigenvectors (N, 3) of the smallest eigenvalue of positive semidefinite (N, 3, 3).

    0 where the two smallest eigenvalues are equal up to rounding: points on a line or in one place
    have no plane. The eigenvalue farthest from the others is computed first, which separates nearly
    equal ones in float32 (Eberly 2014, "A robust eigensolver for 3 x 3 symmetric matrices").
    """
    scale = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    identity, third = _identity(covariance.dtype, covariance.device)
    unit = torch.where(scale > 0, covariance / scale.clamp(min=1e-30), third)
    deviation = unit - third
    radius = (deviation.square().sum((1, 2)) / 6).sqrt()
    x, y, z = deviation.unbind(1)
    determinant = (torch.linalg.cross(x, y) * z).sum(1)
    skew = (determinant / (2 * radius.pow(3)).clamp(min=1e-18)).clamp(-1, 1)
    largest_first = skew > 0
    angle = torch.acos(skew) / 3
    angle = torch.where(largest_first, angle, angle + 2 * torch.pi / 3)
    value = 1 / 3 + 2 * radius * torch.cos(angle)
    first = perpendicular_to_all(unit - value[:, None, None] * identity)

    # The other two eigenvectors lie in the plane perpendicular to the first.
    axis = identity[first.abs().argmin(1)]
    u = directions(torch.linalg.cross(first, axis))
    v = torch.linalg.cross(first, u)
    in_plane = torch.stack([u.T, v.T])
    image = (in_plane.unsqueeze(1) * unit.permute(1, 2, 0).contiguous()).sum(2)
    (uu, uv), (_, vv) = (row.unbind() for row in (image.unsqueeze(1) * in_plane).sum(2).unbind())
    across, along = 2 * uv, uu - vv
    angle = torch.atan2(across, along)[:, None] / 2
    second = torch.cos(angle) * v - torch.sin(angle) * u
    apart = along.square() + across.square() > 1e-12
    second = second.masked_fill(~apart[:, None], 0.0)
    return torch.where(largest_first[:, None], second, first)


@functools.lru_cache(maxsize=64)
def _identity(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The identity matrix (3, 3) and a third of it, cached."""
    with torch.inference_mode(False):
        identity = torch.eye(3, dtype=dtype, device=device)
        return identity, identity / 3


def perpendicular_to_all(rows: Tensor) -> Tensor:
    """Unit vectors (N, 3) perpendicular to all rows of matrices (N, 3, 3) of rank 2; 0 for a lower
    rank."""
    products = torch.linalg.cross(rows, rows.roll(-1, dims=1))
    # All are parallel; the longest has the smallest rounding error.
    longest = length(products).argmax(1, keepdim=True).expand(-1, 1, 3)
    return directions(products.gather(1, longest).squeeze(1))


def arches(to_slot: Tensor, own: Tensor, normal: Tensor) -> Tensor:
    """Offsets (N, R, 3) from midpoints between points and neighbours to the arch over both.

    The arch is the middle of the cubic that is tangent to the planes of both points (the edges of
    Vlachos et al. 2001, "Curved PN triangles"): an estimate of a smooth surface through both.

    Shapes: `to_slot` (N, R, 3) from the point to the neighbour, the unit normals `own` (N, 3) of
    the point and `normal` (N, R, 3) of the neighbour, of either sign.
    """
    own = own.unsqueeze(1)
    rise, fall = (to_slot * own).sum(-1, keepdim=True), (to_slot * normal).sum(-1, keepdim=True)
    return (fall * normal - rise * own) / 8


def describe_neighbors(
    geometry: LocalGeometry, relative: Tensor, spacing: Tensor, normal: Tensor
) -> Tensor:
    """Description of neighbours relative to a point, input of the position encoding: (N, S, 10).

    Relative position (3) and distance, logarithm of the neighbour's spacing over the point's,
    product with the mean direction of the neighbours, quadratic form of their covariance (large
    along the surface, small across it), height over the point's plane, height of the point over the
    neighbour's plane, and absolute cosine between both normals.

    Shapes: `relative` (N, S, 3) in units of the point's spacing, `spacing` (N, S, 1), `normal`
    (N, S, 3).
    """
    own = geometry.normal.unsqueeze(2)
    factors = torch.cat([geometry.covariance, geometry.mean.unsqueeze(2), own], dim=2)
    *image, inwards, above = product(
        relative.unbind(2), factors.permute(2, 0, 1).unsqueeze(2)
    ).unbind()
    along = product(image, relative)
    below = (relative * normal).sum(-1, keepdim=True)
    cosine = (normal * geometry.normal.unsqueeze(1)).sum(-1, keepdim=True)
    density = torch.log(spacing / geometry.spacing.unsqueeze(1)).clamp(-5, 5)
    inwards, along, above = (values.unsqueeze(2) for values in (inwards, along, above))
    described = torch.cat(
        [relative, length(relative), density, inwards, along, above, below, cosine], dim=-1
    )
    described[..., -3:].abs_()
    return described


def describe_neighbors_of_children(
    geometry: LocalGeometry, from_parent: Tensor, to_slot: Tensor, normal: Tensor
) -> Tensor:
    """Description of a parent's neighbours relative to its child: (9, N, R, K).

    Relative position (3) and distance, products with the direction of the child's slot and with the
    mean direction of the parent's neighbours, distances from child to neighbour along the parent's
    normal and along the neighbour's normal, and 1.

    Shapes: `from_parent` (N, R, 3) from the parent to the child, `to_slot` (N, R, 3) from the
    parent to the neighbour of the slot, both in units of the parent's spacing, `normal` (N, K, 3)
    of the neighbours.
    """
    return _DescribeFromChildren.apply(
        from_parent, geometry.relative, to_slot, geometry.mean, geometry.normal, normal
    )


class _DescribeFromChildren(torch.autograd.Function):
    """`describe_neighbors_of_children`, differentiable in the positions of the children.

    The derivative is written by hand: autograd takes three times as many operations, and keeps each
    of their results. Coordinates are the first dimension: sums over three adjacent values are slow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        from_parent: Tensor,
        relative: Tensor,
        to_slot: Tensor,
        mean: Tensor,
        own_normal: Tensor,
        normal: Tensor,
    ) -> Tensor:
        axes = relative.permute(2, 0, 1).contiguous().unsqueeze(2)
        described = axes.new_empty((9, *from_parent.shape[:2], relative.shape[1]))
        to_neighbor = described[:3]
        torch.sub(axes, from_parent.permute(2, 0, 1).unsqueeze(3), out=to_neighbor)
        x, y, z = to_neighbor
        squared = torch.addcmul(torch.addcmul(x * x, y, y), z, z)
        torch.sqrt(squared, out=described[3])
        others = (
            to_slot.unsqueeze(2),
            mean[:, None, None],
            own_normal[:, None, None],
            normal[:, None],
        )
        for row, vectors in enumerate(others, start=4):
            product(to_neighbor, vectors, out=described[row])
        described[6:8].abs_()
        described[8] = 1.0
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(described, to_slot, mean, own_normal, normal)
        return described

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        described, to_slot, mean, own_normal, normal = ctx.saved_tensors
        to_neighbor, distance = described[:3], described[3]
        # The gradient of a distance is 0 (not NaN) at 0.
        shares = (grad[3] / distance).masked_fill_(distance == 0, 0.0)
        total = torch.addcmul(grad[:3], to_neighbor, shares)
        total.addcmul_(grad[4], to_slot.permute(2, 0, 1).unsqueeze(3))
        total.addcmul_(grad[5], mean.T[:, :, None, None])
        for row, vectors in (6, own_normal[:, None, None]), (7, normal.unsqueeze(1)):
            signed = product(to_neighbor, vectors).sign_().mul_(grad[row])
            total.addcmul_(signed, vectors.permute(3, 0, 1, 2))
        return total.sum(-1).neg_().permute(1, 2, 0), *[None] * 5


def coordinates_first(vectors: Tensor) -> Tensor:
    """The same vectors (N, K, 3), with coordinates as the first dimension in memory."""
    return vectors.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def product(
    vectors: Sequence[Tensor] | Tensor, others: Tensor, out: Tensor | None = None
) -> Tensor:
    """Scalar products of vectors, given as x, y and z, with others (..., 3)."""
    x, y, z = vectors
    along = torch.addcmul(x * others[..., 0], y, others[..., 1])
    return torch.addcmul(along, z, others[..., 2], out=out)


def directions(vectors: Tensor) -> Tensor:
    """Vectors (..., 3) normalized to length 1; 0 stays 0."""
    divisor = length(vectors.detach()).clamp(min=1e-12)
    return _Scaled.apply(vectors, vectors.detach() / divisor, divisor, None)


def shortened(offset: Tensor) -> Tensor:
    """Offsets (..., 3) shortened to at most `MAX_OFFSET`."""
    divisor = (length(offset.detach()) / MAX_OFFSET).clamp(min=1.0)
    short = offset.detach() * divisor.reciprocal()
    return _Scaled.apply(offset, short, divisor, MAX_OFFSET)


class _Scaled(torch.autograd.Function):
    """`scaled`: the vectors (..., 3) over their `divisor` (..., 1). All have the length 1; with
    `most`, those with a divisor above 1 have this length, and the others are unchanged.

    The derivative is written by hand: that of the length takes autograd twice as many operations.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, scaled: Tensor, divisor: Tensor, most: float | None
    ) -> Tensor:
        ctx.most = most
        ctx.save_for_backward(scaled, divisor)
        return scaled.view_as(scaled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaled, divisor = ctx.saved_tensors
        # Along its direction a vector of fixed length does not change.
        along = (grad * scaled).sum(-1, keepdim=True)
        if ctx.most is not None:
            along = along.masked_fill_(divisor <= 1, 0.0) / ctx.most**2
        return torch.addcmul(grad, scaled, along, value=-1).div_(divisor), None, None, None


def length(vectors: Tensor) -> Tensor:
    """Length (..., 1) of vectors (..., 3), with gradient zero at zero."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


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


# Columns: the points around each point in the horizontal plane, at any height.
#
# For surveys: the third coordinate is a height. A neighbourhood of a point in a crown holds no
# ground and one of a ground point no crown; its column holds both.

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
    shares = torch.tensor(QUANTILES, dtype=pos.dtype, device="cpu")
    shares = shares.to(pos.device, non_blocking=copied_ahead(pos.device))
    profile = ordered.gather(1, (last * shares).round().long())
    index = nearest[:, ::stride]
    relative = pos[index] - pos[: len(nearest)].unsqueeze(1)
    return Columns(index, not_found[:, ::stride], relative, profile)


def drops(columns: Columns, most: Tensor) -> Tensor:
    """Drop (n, 1) from points to the lowest point of their column, at most `most` (n, 1)."""
    return torch.minimum(-columns.profile[:, :1], most)


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


def describe_profiles(columns: Columns, spacing: Tensor) -> Tensor:
    """The inverse hyperbolic sine (n, len(QUANTILES)) of the profiles in units of `spacing`."""
    return (columns.profile / spacing).asinh()
