"""Attention to the neighbours of a point, with relative positions.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R queries a point
    H heads   D channels a head   C channels   P channels of an encoded position
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativeAttention(nn.Module):
    r"""Attention of queries to the neighbours of a point, with relative positions.

    .. math::
        a_{mj} = \mathrm{softmax}_j \frac{q_m \cdot (k_j + W_k g_{mj})}{\sqrt{D}}, \qquad
        o_m = \sum_j a_{mj} (v_j + W_v g_{mj})

    per head (Shaw et al. 2018, "Self-attention with relative position representations"), where
    g encodes the position of neighbour j as query m sees it. The products with g are taken
    before the sums over channels, so that no tensor of size neighbours x channels is made for
    the positions.

    Shapes: queries (N, R, C), keys and values of all points (N, C), neighbours (N, K), g either
    (N, K, P), shared by the R queries of a point, or (N, R, K, P); result (N, R, C). With `beta`
    the result is gated by a share that each query learns to take of it.
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
        scale = position_hidden**-0.5
        self.position_key = nn.Parameter(scale * torch.randn(heads, self.head_dim, position_hidden))
        self.position_value = nn.Parameter(
            scale * torch.randn(heads, position_hidden, self.head_dim)
        )
        self.out = nn.Linear(inner if concat else dim, dim)
        self.gate = nn.Linear(2 * dim, 1) if beta else None

    def forward(
        self, x_NRC: Tensor, features_NC: Tensor, index_NK: Tensor, missing_NK: Tensor, g: Tensor
    ) -> Tensor:
        num_points, num_queries, _ = x_NRC.shape
        heads, dim = self.heads, self.head_dim
        q = self.query(x_NRC).view(num_points, num_queries, heads, dim) * dim**-0.5
        kv = self.key_value(features_NC).index_select(0, index_NK.flatten())
        k, v = kv.view(*index_NK.shape, 2, heads, dim).unbind(2)
        position = "nkp" if g.dim() == 3 else "nrkp"

        q_position = torch.einsum("nrhd,hdp->nrhp", q, self.position_key)
        logits = torch.einsum("nrhd,nkhd->nrhk", q, k)
        logits = logits + torch.einsum(f"nrhp,{position}->nrhk", q_position, g)
        logits = logits.masked_fill(missing_NK[:, None, None, :], float("-inf"))
        attention = F.dropout(logits.softmax(-1), self.dropout, self.training)
        out = torch.einsum("nrhk,nkhd->nrhd", attention, v)
        seen = torch.einsum(f"nrhk,{position}->nrhp", attention, g)
        out = out + torch.einsum("nrhp,hpd->nrhd", seen, self.position_value)

        out = out.flatten(2) if self.concat else out.mean(2)
        out = self.out(out)
        if self.gate is None:
            return out
        of_query, of_out = self.gate.weight.chunk(2, dim=1)
        return out * torch.sigmoid(F.linear(x_NRC, of_query, self.gate.bias) + F.linear(out, of_out))


class AttentionBlock(nn.Module):
    """Relative attention and, with `feed_forward`, a two-layer perceptron.

    Each is normalised before and added after. LayerNorm, since statistics of the batch would let
    one cloud see another.
    """

    def __init__(self, dim: int, attention: RelativeAttention, feed_forward: bool = True) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(dim)
        self.feature_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.feed_forward = (
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
            )
            if feed_forward
            else None
        )

    def forward(
        self, x_NRC: Tensor, features_NC: Tensor, index_NK: Tensor, missing_NK: Tensor, g: Tensor
    ) -> Tensor:
        x_NRC = x_NRC + self.attention(
            self.query_norm(x_NRC), self.feature_norm(features_NC), index_NK, missing_NK, g
        )
        return x_NRC if self.feed_forward is None else x_NRC + self.feed_forward(x_NRC)
