"""Attention to the neighbours of a point, with relative positions.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R queries per point
    H heads   D channels per head   C channels   P channels of an encoded position
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pointup.geometry.packed import at_least_float32
from pointup.model.config import ModelConfig


class RelativeAttention(nn.Module):
    r"""Multi-head attention of queries to the neighbours of a point, with relative positions.

    .. math::
        a_{mj} = \mathrm{softmax}_j \frac{q_m \cdot (k_j + W_k g_{mj})}{\sqrt{D}}, \qquad
        o_m = \sum_j a_{mj} (v_j + W_v g_{mj})

    per head (Shaw et al. 2018, "Self-attention with relative position representations"), where
    g encodes the position of neighbour j relative to query m. W_k and W_v are applied to the
    queries and to the sums over neighbours, so that positions need no tensor of size
    neighbours x channels.

    Shapes: queries (N, R, C), keys and values of the neighbours (N, K, 2 heads D) from the layer
    `key_value`, missing (N, K) bool, g either (N, K, P), shared by the R queries of a point, or
    (N, R, K, P); result (N, R, C). With `beta` a learned gate in (0, 1) per query multiplies the
    result.
    """

    def __init__(
        self, dim: int, heads: int, position_hidden: int, concat: bool, beta: bool, dropout: float
    ) -> None:
        super().__init__()
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.head_dim = dim // heads if concat else dim
        inner = heads * self.head_dim
        self.query = nn.Linear(dim, inner)
        self.key_value = nn.Linear(dim, 2 * inner)
        self.position_key = nn.Parameter(torch.empty(heads, self.head_dim, position_hidden))
        self.position_value = nn.Parameter(torch.empty(heads, position_hidden, self.head_dim))
        for weight in (self.position_key, self.position_value):
            # There torch would import its compiler, for a second.
            if weight.device.type != "meta":
                nn.init.normal_(weight, std=position_hidden**-0.5)
        self.out = nn.Linear(inner if concat else dim, dim)
        self.gate = nn.Linear(2 * dim, 1) if beta else None

    def forward(self, x_NRC: Tensor, kv_NK2C: Tensor, missing_NK: Tensor, g: Tensor) -> Tensor:
        q = self.query(x_NRC) * self.head_dim**-0.5
        dropout = self.dropout if self.training else 0.0
        q_position = q @ block_diagonal(self.position_key.to(q.dtype))
        out, out_position = _Attend.apply(
            q, q_position, kv_NK2C.to(q.dtype), g.to(q.dtype), missing_NK, self.heads, dropout
        )
        values = block_diagonal(self.position_value.to(q.dtype))
        out = torch.addmm(out.flatten(0, 1), out_position.flatten(0, 1), values).view_as(out)
        out = out if self.concat else out.unflatten(-1, (self.heads, -1)).mean(2)
        out = self.out(out)
        if self.gate is None:
            return out
        of_query, of_out = self.gate.weight.chunk(2, dim=1)
        gate = F.linear(x_NRC, of_query, self.gate.bias)
        gate = torch.addmm(gate.flatten(0, 1), out.flatten(0, 1), of_out.t())
        return out * torch.sigmoid(gate.view(*out.shape[:2], 1))


class _Attend(torch.autograd.Function):
    """Attention weights a, and the sums over neighbours of a v, (N, R, H D), and a g, (N, R, H P).

    Inputs: q (N, R, H D) and its product with the position keys, (N, R, H P). The derivatives are
    written by hand, because autograd spends most of its time on copies for products of so many
    small matrices. The queries of all heads of a point are the rows of one matrix, each with zeros
    in the channels of other heads: fewer products of larger matrices take less time here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        q_position: Tensor,
        kv: Tensor,
        g: Tensor,
        missing: Tensor,
        heads: int,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        k, v = kv.chunk(2, dim=-1)
        # A group is the queries that share positions: those of a point, or those of a child.
        positions = g.flatten(0, -3)
        num_groups, num_neighbors, _ = positions.shape

        logits = torch.bmm(spread_heads(q, heads), k.transpose(1, 2))
        grouped = logits.view(num_groups, -1, num_neighbors)
        of_position = q_position.reshape(num_groups, grouped.shape[1], -1)
        grouped.baddbmm_(of_position, positions.transpose(1, 2))
        if missing.device.type != "cpu" or missing.any():
            logits.masked_fill_(missing.unsqueeze(1), float("-inf"))
        attention = softmax(logits)
        kept = F.dropout(torch.ones_like(attention), dropout) if dropout else None
        used = attention if kept is None else attention * kept
        out = join_heads(torch.bmm(used, v), heads)
        out_position = torch.bmm(used.view(num_groups, -1, num_neighbors), positions)
        ctx.heads = heads
        ctx.save_for_backward(q, q_position, kv, g, attention, kept)
        return out, out_position.view(*q.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_out_position: Tensor) -> Any:
        q, q_position, kv, g, attention, kept = ctx.saved_tensors
        k, v = kv.chunk(2, dim=-1)
        positions = g.flatten(0, -3)
        num_groups, num_neighbors, num_channels = positions.shape
        used = attention if kept is None else attention * kept
        grad_out = spread_heads(grad_out, ctx.heads)
        grad_out_position = grad_out_position.reshape(num_groups, -1, num_channels)

        grad_logits = torch.bmm(grad_out, v.transpose(1, 2))
        grouped = grad_logits.view(num_groups, -1, num_neighbors)
        grouped.baddbmm_(grad_out_position, positions.transpose(1, 2))
        if kept is not None:
            grad_logits *= kept
        grad_logits = softmax_backward(grad_logits, attention)
        grouped = grad_logits.view(grouped.shape)

        grad_q = join_heads(torch.bmm(grad_logits, k), ctx.heads)
        grad_q_position = torch.bmm(grouped, positions).view_as(q_position)
        grad_kv = products_side_by_side(grad_logits, spread_heads(q, ctx.heads), used, grad_out)
        of_position = q_position.reshape(grad_out_position.shape)
        by_query = used.view_as(grouped), grad_out_position, grouped, of_position
        grad_g = sum_of_products(*by_query).view_as(g)
        return grad_q, grad_q_position, grad_kv, grad_g, None, None, None


def sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Sum of the products of a^T with b and of c^T with d, matrices (N, M, ...) each."""
    if a.device.type != "cpu":
        return torch.baddbmm(torch.bmm(a.transpose(1, 2), b), c.transpose(1, 2), d)
    # One product of longer matrices is faster than two with small ones.
    return torch.bmm(torch.cat([a, c], dim=1).transpose(1, 2), torch.cat([b, d], dim=1))


def products_side_by_side(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The products of a^T with b and of c^T with d, matrices (N, M, ...) each, side by side."""
    a, c, width = a.transpose(1, 2), c.transpose(1, 2), b.shape[2]
    if a.device.type == "cpu":
        # Products with rows that are not adjacent in memory take five times as long.
        return torch.cat([torch.bmm(a, b), torch.bmm(c, d)], dim=2)
    joined = b.new_empty((*a.shape[:2], width + d.shape[2]))
    torch.bmm(a, b, out=joined[:, :, :width])
    torch.bmm(c, d, out=joined[:, :, width:])
    return joined


def block_diagonal(weights: Tensor) -> Tensor:
    """(H, A, B) to (H A, H B). One product with it is faster than many with small matrices."""
    return torch.block_diag(*weights) if len(weights) > 1 else weights[0]


def spread_heads(values: Tensor, heads: int) -> Tensor:
    """(N, R, H D) to (N, R H, H D): one row per head, zero outside the channels of the head."""
    if heads == 1:
        return values
    width = values.shape[-1] // heads
    mask = head_mask(heads, width, values.dtype, values.device)
    return (values.unsqueeze(2) * mask).flatten(1, 2)


@functools.lru_cache(maxsize=64)
def head_mask(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(H, H D) for heads of `width` channels: one row per head, 1 in its own channels."""
    # Cached across calls: a tensor created in inference mode could not join a graph later.
    with torch.inference_mode(False):
        return torch.eye(heads, dtype=dtype, device=device).repeat_interleave(width, dim=1)


def join_heads(values: Tensor, heads: int) -> Tensor:
    """(N, R H, H D) to (N, R, H D): the row of each head gives the channels of the head."""
    by_head = values.unflatten(2, (heads, -1)).unflatten(1, (-1, heads))
    return by_head.diagonal(dim1=2, dim2=3).transpose(2, 3).flatten(2)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, computed in float32, returned in the dtype of `logits`.

    On the CPU `torch.softmax` takes seven times as long for rows this short.
    """
    if logits.device.type != "cpu":
        return logits.softmax(-1)  # Accumulates in float32.
    weights = at_least_float32(logits)
    weights = (weights - weights.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True)).to(logits.dtype)


def softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the logits, from that of the weights that `softmax` returned; overwrites
    `grad`."""
    if grad.device.type != "cpu":
        # Accumulates in float32.
        return torch._softmax_backward_data(grad, weights, -1, grad.dtype)
    grad *= weights
    return grad.addcmul_(weights, grad.sum(-1, keepdim=True), value=-1)


class AttentionBlock(nn.Module):
    """A pre-norm residual block with the sizes of `config`: relative attention and, with
    `feed_forward`, a two-layer MLP.

    It uses LayerNorm, because with batch statistics a cloud's output would depend on the others.
    """

    def __init__(self, config: ModelConfig, heads: int, feed_forward: bool = True) -> None:
        super().__init__()
        dim = config.feature_dim
        self.query_norm = nn.LayerNorm(dim)
        self.feature_norm = nn.LayerNorm(dim)
        self.attention = RelativeAttention(
            dim, heads, config.position_hidden, config.concat, config.beta, config.dropout
        )
        self.feed_forward = (
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
            )
            if feed_forward
            else None
        )

    def key_value(self, features_NC: Tensor) -> Tensor:
        """Keys and values (N, 2 heads D) of all points, which `forward` takes gathered."""
        return self.attention.key_value(self.feature_norm(features_NC))

    def forward(self, x_NRC: Tensor, kv_NK2C: Tensor, missing_NK: Tensor, g: Tensor) -> Tensor:
        x_NRC = x_NRC + self.attention(self.query_norm(x_NRC), kv_NK2C, missing_NK, g)
        return x_NRC if self.feed_forward is None else x_NRC + self.feed_forward(x_NRC)
