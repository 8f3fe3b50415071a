"""Offsets of children: weighted sums of directions to their parents' neighbours.

Legend of shape suffixes:
    n parents   R children of each   K neighbours of a parent, itself among them
    P channels of an encoded position   F features that describe a position
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pointup.model.precision import described_in


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


def encode_positions(described: Tensor, layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """relu of `layer`, (N, R, K, P), applied to described positions (F + 1, N, R, K).

    The last feature is 1 and multiplies the bias.
    """
    weight = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1).to(dtype)
    encoded: Tensor = _Encode.apply(described_in(dtype, described.flatten(1)), weight)
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


def mean_offset(weight: Tensor, relative: Tensor, from_parent: Tensor) -> Tensor:
    """Mean over a parent's neighbours of `weight` times the vector from the child to the neighbour.

    Shapes: `weight` (n, R, K), `relative` (n, K, 3) from the parent to its neighbours,
    `from_parent` (n, R, 3) from the parent to the child; result (n, R, 3) float32.
    """
    with torch.autocast(weight.device.type, enabled=False):
        to_neighbors = weight @ relative - weight.sum(-1, keepdim=True) * from_parent
    return to_neighbors / weight.shape[2]


def mean_offset_to_planes(
    weight: Tensor, relative: Tensor, from_parent: Tensor, normal: Tensor
) -> Tensor:
    """Mean over a parent's neighbours of `weight` times the vector from the child to the plane
    through the neighbour.

    Shapes as for `mean_offset`; `normal` (n, K, 3) are unit normals of the planes, of either sign.
    """
    with torch.autocast(weight.device.type, enabled=False):
        height = (relative * normal).sum(-1).unsqueeze(1) - from_parent @ normal.transpose(1, 2)
        to_planes: Tensor = (weight * height) @ normal
    return to_planes / weight.shape[2]
