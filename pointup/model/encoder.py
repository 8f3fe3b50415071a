"""What the upsampler sees of each measured point: features, a normal, a quota of the output.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them
    C = feature_dim   P = position_hidden
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pointup.geometry.local_geometry import (
    LocalGeometry,
    describe_neighbors,
    directions,
    nearest_gaps,
)
from pointup.model.attention import AttentionBlock, RelativeAttention
from pointup.model.blocks import Block, in_blocks, points_per_block
from pointup.model.config import ModelConfig
from pointup.model.offsets import offset_along


def attention_block(config: ModelConfig, heads: int, feed_forward: bool = True) -> AttentionBlock:
    """A layer of relative attention between features as wide as `config` says."""
    dim = config.feature_dim
    attention = RelativeAttention(
        dim, heads, config.position_hidden, config.concat, config.beta, config.dropout
    )
    return AttentionBlock(dim, attention, feed_forward)


class ChildTables(NamedTuple):
    """What children take from the features of points, computed once for all children.

    The layer `slot` sees [features of the parent, features of the slot's neighbour, position].
    """

    parent: Tensor
    """(N, C) part of `slot` that a child takes from its parent."""
    neighbor: Tensor
    """(N, C) part of `slot` that it takes from the neighbour of its slot."""
    shuffle: Tensor
    """(N, 2 heads D) keys and values of the node shuffle."""
    refine: Tensor
    """(N, 2 heads D) keys and values of the refinement."""


class PointEncoder(nn.Module):
    """Features of points, which attend to their k nearest neighbours, and what is read off them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, hidden = config.feature_dim, config.position_hidden
        self.neighbor_position = nn.Sequential(
            nn.Linear(10, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )
        self.embed = nn.Sequential(nn.Linear(2 * hidden, dim), nn.GELU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(
            [attention_block(config, config.heads) for _ in range(config.num_layers)]
        )
        self.normal_norm = nn.LayerNorm(dim)
        self.normal = nn.Linear(dim, 2 * hidden)
        self.density_norm = nn.LayerNorm(dim)
        self.density = nn.Linear(dim, 1)
        self.quota_norm = nn.LayerNorm(dim)
        self.quota = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        # Powers of the spacing and of the gaps to the nearest: a little more where there is less.
        self.quota_powers = nn.Parameter(torch.tensor([0.0, 0.5]))
        for last in (self.normal, self.density, cast(nn.Linear, self.quota[-1])):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def encode(self, geometry: LocalGeometry, recompute: bool = True) -> tuple[Tensor, Tensor]:
        """Features (N, C) of the input points, and the encoded neighbour positions (N, K, P).

        `recompute` trades time for memory in training, see `in_blocks`.
        """
        num_points = len(geometry.index)
        block_size = points_per_block(geometry.index.device)

        def encode(block: Block) -> Tensor:
            local = geometry.rows(block.points)
            neighbors = local.index
            described = describe_neighbors(
                local, local.relative, geometry.spacing[neighbors], geometry.normal[neighbors]
            )
            return cast(Tensor, self.neighbor_position(described.to(self.dtype)))

        def embed(block: Block, g: Tensor) -> Tensor:
            missing = block.of_points(geometry.missing).unsqueeze(-1)
            seen = ~missing
            mean = (g * seen).sum(1) / seen.sum(1)
            highest = g.masked_fill(missing, float("-inf")).amax(1)
            return cast(Tensor, self.embed(torch.cat([mean, highest], dim=-1)))

        weights = self.neighbor_position.parameters()
        g = in_blocks(encode, num_points, block_size, parameters=weights, recompute=recompute)
        weights = self.embed.parameters()
        features = in_blocks(
            embed, num_points, block_size, rows=[g], parameters=weights, recompute=recompute
        )
        for layer in self.layers:
            block_layer = cast(AttentionBlock, layer)
            features = self.attend_to_neighbors(block_layer, features, g, geometry, recompute)
        return features, g

    def attend_to_neighbors(
        self,
        layer: AttentionBlock,
        features: Tensor,
        g: Tensor,
        geometry: LocalGeometry,
        recompute: bool = True,
    ) -> Tensor:
        """Features (N, C) after one layer, of features (N, C) and positions `g` (N, K, P)."""

        def attend(block: Block, kv: Tensor, x: Tensor, g: Tensor) -> Tensor:
            x_NRC, g_NRKP = x.unsqueeze(1), g.unsqueeze(1)
            return layer(x_NRC, kv, block.of_points(geometry.missing), g_NRKP).squeeze(1)

        return in_blocks(
            attend,
            len(features),
            points_per_block(features.device),
            gathered=[(layer.key_value(features), geometry.index)],
            rows=[features, g],
            parameters=layer.parameters(),
            random=self.random,
            recompute=recompute,
        )

    def turn_normals(
        self, features: Tensor, g: Tensor, geometry: LocalGeometry, recompute: bool = True
    ) -> Tensor:
        r"""Unit normals (N, 3) of the surface at the input points, of either sign.

        From the normal n of the plane fitted to all neighbours alike, by

        .. math:: n - \frac{1}{K} \sum_j (w_j (n \cdot r_j) r_j - u_j \pm n_j)

        one step towards the plane fitted with weights w, and towards the mean of the neighbours'
        normals with weights u: which of them lie on the same face the features say.
        """

        def turn(block: Block, x: Tensor, g: Tensor) -> Tensor:
            local = geometry.rows(block.points)
            fit, follow = offset_along(self.normal(self.normal_norm(x)), g).masked_fill(
                local.missing, 0.0
            )
            own, others = local.normal.unsqueeze(2), geometry.normal[local.index]
            with torch.autocast(x.device.type, enabled=False):
                fit = fit.float() * (local.relative @ own).squeeze(2)
                follow = follow.float() * (others @ own).squeeze(2).sign()
                turned = follow.unsqueeze(1) @ others - fit.unsqueeze(1) @ local.relative
            return directions(local.normal + turned.squeeze(1) / g.shape[1])

        modules = (self.normal_norm, self.normal)
        return in_blocks(
            turn,
            len(features),
            points_per_block(features.device),
            rows=[features, g],
            parameters=[weight for module in modules for weight in module.parameters()],
            recompute=recompute,
        )

    def quota_logits(self, features: Tensor, geometry: LocalGeometry) -> Tensor:
        """Logarithm (N,) of the quota of a cloud's output that each input point is to stand for,
        up to a constant of the cloud.

        Learned from the features as they are: nothing else learns from it.
        """
        logits = self.quota(self.quota_norm(features.detach())).float()[:, 0]
        gaps = torch.stack([geometry.spacing[:, 0], nearest_gaps(geometry)], dim=1).log()
        return logits + (gaps * self.quota_powers).sum(1)

    @property
    def dtype(self) -> torch.dtype:
        """What features are computed in."""
        return self.quota_norm.weight.dtype

    @property
    def random(self) -> bool:
        return self.training and self.config.dropout > 0
