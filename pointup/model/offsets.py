"""Offsets of children: weighted sums of directions to their parents' neighbours.

Legend of shape suffixes:
    n parents   R children of each   K neighbours of a parent, itself among them
    P channels of an encoded position   F features that describe a position
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST, LARGEST_IN_FP16 = 1e9, 1e3
"""Bounds of described positions. Of two points much closer to each other than to all others,
products of positions in units of their spacing are larger: with them the variance of features
overflows in float32, the features themselves in float16, which ends at 65,504."""


def described_in(dtype: torch.dtype, described: Tensor) -> Tensor:
    """Described positions in the dtype of features, within its bound."""
    most = LARGEST_IN_FP16 if dtype == torch.float16 else LARGEST
    # As `clamp`, with a derivative of one operation.
    return F.hardtanh(described, -most, most).to(dtype)


class _Encode(torch.autograd.Function):
    """relu(W d), (M, P), for d (F, M) with one column for each of very many positions.

    The derivative is written by hand, because the products that autograd chooses for matrices this
    long and thin take four times as long.
    """

    @staticmethod
    def forward(ctx: Any, described: Tensor, weight: Tensor) -> Tensor:
        encoded = torch.mm(described.t(), weight.t()).relu_()
        ctx.save_for_backward(described, weight, encoded)
        return encoded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        described, weight, encoded = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad, encoded, 0)
        grad_described = None
        if ctx.needs_input_grad[0]:
            grad_described = torch.mm(grad, weight).t().contiguous()
        return grad_described, torch.mm(described, grad).t()


def encode_positions(described: Tensor, weight: Tensor) -> Tensor:
    """relu of a linear layer, (N, R, K, P), applied to described positions (F + 1, N, R, K).

    `weight` (P, F + 1): its last column is the bias, since the last feature is 1.
    """
    encoded: Tensor = _Encode.apply(described_in(weight.dtype, described.flatten(1)), weight)
    return encoded.view(*described.shape[1:], -1)


class _Offset(torch.autograd.Function):
    """Products (M, K, D) of positions (M, K, P) with directions (M, D, P).

    The derivative is written by hand, because autograd returns the gradient of the positions
    transposed in memory.
    """

    @staticmethod
    def forward(ctx: Any, directions: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(directions, positions)
        return torch.bmm(positions, directions.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        directions, positions = ctx.saved_tensors
        grad_directions = torch.bmm(grad.transpose(1, 2), positions)
        return grad_directions, torch.bmm(grad, directions)


def offset_along(directions: Tensor, positions: Tensor) -> Tensor:
    """Products (D, ..., K) of directions (..., D P) with encoded positions (..., K, P)."""
    *shape, num_neighbors, hidden = positions.shape
    directions = directions.reshape(-1, directions.shape[-1] // hidden, hidden)
    products: Tensor = _Offset.apply(directions, positions.to(directions.dtype).flatten(0, -3))
    return products.view(*shape, num_neighbors, -1).movedim(-1, 0)


class _MeanOffset(torch.autograd.Function):
    """`mean_offset`.

    The derivative is written by hand, because autograd would keep the vectors from all children to
    all neighbours, and takes twice as many operations. Coordinates are the first dimension.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, relative: Tensor, from_parent: Tensor, normal: Tensor
    ) -> Tensor:
        # Neighbours of one point are adjacent in memory, which halves the time on the CPU.
        relative, normal = (values.permute(2, 0, 1).contiguous() for values in (relative, normal))
        ctx.save_for_backward(weights, relative, from_parent, normal)
        to_points, to_planes = weights
        to_neighbor = _from_children(relative, from_parent)
        lifted = _product(to_neighbor, normal.unsqueeze(2)).mul_(to_planes)
        moved = to_neighbor.mul_(to_points).addcmul_(lifted, normal.unsqueeze(2))
        return moved.mean(-1).permute(1, 2, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor]:
        weights, relative, from_parent, normal = ctx.saved_tensors
        to_points, to_planes = weights
        grad = (grad / weights.shape[-1]).permute(2, 0, 1).unsqueeze(3)
        to_neighbor = _from_children(relative, from_parent)
        height = _product(to_neighbor, normal.unsqueeze(2))
        along = _product(grad, normal.unsqueeze(2))
        grad_weights = torch.stack([_product(grad, to_neighbor), along * height])
        lifted = along.mul_(to_planes)
        grad_from_parent = None
        if ctx.needs_input_grad[2]:
            away = (grad * to_points).addcmul_(lifted, normal.unsqueeze(2))
            grad_from_parent = away.sum(-1).neg_().permute(1, 2, 0)
        grad_normal = to_neighbor.mul_(lifted).addcmul_(grad, height.mul_(to_planes))
        return grad_weights, None, grad_from_parent, grad_normal.sum(2).permute(1, 2, 0)


def _from_children(relative: Tensor, from_parent: Tensor) -> Tensor:
    """Vectors (3, n, R, K) from children to neighbours, from `relative` (3, n, K)."""
    return relative.unsqueeze(2) - from_parent.permute(2, 0, 1).unsqueeze(3)


def _product(vectors: Tensor, others: Tensor) -> Tensor:
    """Scalar products of vectors (3, ...)."""
    x, y, z = vectors
    return torch.addcmul(torch.addcmul(x * others[0], y, others[1]), z, others[2])


def mean_offset(weights: Tensor, relative: Tensor, from_parent: Tensor, normal: Tensor) -> Tensor:
    """Mean over a parent's neighbours of the vector from the child to the neighbour, and of the
    vector from the child to the plane through the neighbour, each times its weight.

    Vectors are multiplied and summed element by element, as in `local_geometry`.

    Shapes: float32 `weights` (2, n, R, K), for neighbours and for planes, `relative` (n, K, 3) from
    the parent to its neighbours, `from_parent` (n, R, 3) from the parent to the child, and unit
    normals `normal` (n, K, 3) of the planes, of either sign; result (n, R, 3). Differentiable in
    all but `relative`.
    """
    return _MeanOffset.apply(weights, relative, from_parent, normal)
