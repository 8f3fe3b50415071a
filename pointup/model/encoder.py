"""The encoder of the upsampler: features, normal and quota of the output for each input point.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them
    C = feature_dim   P = position_hidden
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pointup.geometry.local_geometry import (
    NUM_FEATURES,
    QUANTILES,
    Columns,
    LocalGeometry,
    describe_columns,
    describe_neighbors,
    describe_profiles,
    directions,
    nearest_gaps,
)
from pointup.model.attention import AttentionBlock
from pointup.model.blocks import Block, in_blocks, points_per_block
from pointup.model.config import ModelConfig
from pointup.model.offsets import described_in, offset_along


class ChildTables(NamedTuple):
    """Projected features of points that children gather, computed once for all children.

    The layer `slot` maps [features of the parent, features of the slot's neighbour, position].
    """

    parent: Tensor
    """(N, C) product with the part of `slot` for the parent, plus its bias."""
    neighbor: Tensor
    """(N, C) product with the part of `slot` for the slot's neighbour."""
    shuffle: Tensor
    """(N, 2 heads D) keys and values of the node shuffle."""
    refine: Tensor
    """(N, 2 heads D) keys and values of the refinement."""
    position: Tensor
    """(C, P) the part of `slot` for the position."""


class DescribedPoints(NamedTuple):
    """What children need of the points around them, computed once for all children."""

    features: Tensor
    """(N, C) features of the points."""
    g: Tensor
    """(N, K, P) encoded positions of their neighbours."""
    normals: Tensor
    """(N, 3) unit normals of the surface, turned by `turn_normals`."""
    tables: ChildTables
    """Projected features."""


class PointEncoder(nn.Module):
    """Features of points, by attention to their k nearest neighbours, and heads for normals,
    spacing exponents and quotas."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.build(config)

    def build(self, config: ModelConfig) -> None:
        """Make all layers. The weights are random, from torch's generator."""
        dim, hidden = config.feature_dim, config.position_hidden
        self.neighbor_position = nn.Sequential(
            nn.Linear(10, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )
        self.embed = nn.Sequential(nn.Linear(2 * hidden, dim), nn.GELU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(
            [AttentionBlock(config, config.heads) for _ in range(config.num_layers)]
        )
        self.normal_norm = nn.LayerNorm(dim)
        self.normal = nn.Linear(dim, 2 * hidden)
        self.density_norm = nn.LayerNorm(dim)
        self.density = nn.Linear(dim, 1)
        self.quota_norm = nn.LayerNorm(dim)
        self.quota = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        # Exponents of the spacing and of the nearest gaps: sparse places get a larger quota.
        self.quota_powers = nn.Parameter(torch.tensor([0.0, 0.5]))
        last_layers: list[Any] = [self.normal, self.density, self.quota[-1]]
        if config.column_layers:
            self.profile = nn.Sequential(
                nn.Linear(len(QUANTILES), dim), nn.GELU(), nn.Linear(dim, dim)
            )
            self.column_position = nn.Sequential(
                nn.Linear(NUM_FEATURES, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
            )
            layers: list[Any] = [
                AttentionBlock(config, config.heads) for _ in range(config.column_layers)
            ]
            self.column_layers = nn.ModuleList(layers)
            # A network without these layers and one where they are new compute the same.
            last_layers.append(self.profile[-1])
            for layer in layers:
                last_layers += [layer.attention.out, layer.feed_forward[-1]]
        for last in last_layers:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def encode(
        self, geometry: LocalGeometry, columns: Columns | None, recompute: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Features (N, C) of the input points, and encoded neighbour positions (N, K, P); those of
        the first points where `geometry` says how many are needed.

        `columns` are None for a model without column layers.
        `recompute` saves memory at the cost of time in training, see `in_blocks`.
        """
        num_points, *left = geometry.needed or [len(geometry.index)]
        block_size = points_per_block(geometry.index.device)

        def encode(block: Block) -> Tensor:
            local = geometry.rows(block.points)
            neighbors = local.index
            described = describe_neighbors(
                local, local.relative, geometry.spacing[neighbors], geometry.normal[neighbors]
            )
            return self.neighbor_position(described_in(self.dtype, described))

        def embed(block: Block, g: Tensor) -> Tensor:
            missing = block.of_points(geometry.missing).unsqueeze(-1)
            seen = ~missing
            mean = (g * seen).sum(1) / seen.sum(1)
            highest = g.masked_fill(missing, float("-inf")).amax(1)
            return self.embed(torch.cat([mean, highest], dim=-1))

        weights = self.neighbor_position.parameters()
        g = in_blocks(encode, num_points, block_size, parameters=weights, recompute=recompute)
        weights = self.embed.parameters()
        features = in_blocks(
            embed, num_points, block_size, rows=[g], parameters=weights, recompute=recompute
        )
        steps: list[tuple[Any, ...]] = [
            (layer, g, geometry.index, geometry.missing) for layer in self.layers
        ]
        if columns is not None:
            spacing = geometry.spacing[: len(columns.index)]
            described = describe_profiles(columns, spacing).to(self.dtype)
            features = features + self.profile(described[:num_points])
            described = describe_columns(columns, spacing).to(self.dtype)
            of_columns = self.column_position(described[: left[0] if left else num_points])
            steps[:0] = [
                (layer, of_columns, columns.index, columns.missing) for layer in self.column_layers
            ]
        for (layer, positions, index, missing), number in zip(
            steps, left or [num_points] * len(steps), strict=True
        ):
            features = self.attend(layer, features, positions, index, missing, number, recompute)
        return features, g

    def attend(
        self,
        layer: AttentionBlock,
        features: Tensor,
        g: Tensor,
        index: Tensor,
        missing: Tensor,
        num_points: int,
        recompute: bool = True,
    ) -> Tensor:
        """Features (n, C) of the first n points after a layer: they attend to their neighbours.

        Shapes: features (N, C), encoded positions `g` (N, K, P), `index` and `missing` (N, K).
        """
        # No operation where all points attend.
        features_of, g, index = (
            values if len(values) == num_points else values[:num_points]
            for values in (features, g, index)
        )

        def attend(block: Block, kv: Tensor, x: Tensor, g: Tensor) -> Tensor:
            x_NRC, g_NRKP = x.unsqueeze(1), g.unsqueeze(1)
            return layer(x_NRC, kv, block.of_points(missing), g_NRKP).squeeze(1)

        return in_blocks(
            attend,
            num_points,
            points_per_block(features.device),
            gathered=[(layer.key_value(features), index)],
            rows=[features_of, g],
            parameters=layer.parameters(),
            recompute=recompute and not self.random,
        )

    def turn_normals(
        self, features: Tensor, g: Tensor, geometry: LocalGeometry, recompute: bool = True
    ) -> Tensor:
        r"""Unit normals (N, 3) of the surface at the input points, of either sign.

        From the normal n of the plane fitted to all neighbours with equal weights, by

        .. math:: n - \frac{1}{K} \sum_j (w_j (n \cdot r_j) r_j - u_j \pm n_j)

        which is a step towards the plane fitted with weights w, and towards the mean of the
        neighbours' normals with weights u. The weights depend on the features, which can tell the
        neighbours on the same face from others.
        """

        def turn(block: Block, x: Tensor, g: Tensor) -> Tensor:
            local = geometry.rows(block.points)
            weights = offset_along(self.normal(self.normal_norm(x)), g).masked_fill(
                local.missing, 0.0
            )
            vectors = torch.stack([local.relative, geometry.normal[local.index]])
            along = (vectors * local.normal.unsqueeze(1)).sum(-1, keepdim=True)
            along[0].neg_()
            along[1].sign_()
            turned = (weights.float().unsqueeze(-1) * (along * vectors)).sum((0, 2))
            return directions(local.normal + turned / g.shape[1])

        return in_blocks(
            turn,
            len(features),
            points_per_block(features.device),
            rows=[features, g],
            parameters=[*self.normal_norm.parameters(), *self.normal.parameters()],
            recompute=recompute,
        )

    def spacing_power(self, points: DescribedPoints) -> Tensor:
        """Exponent (N,) of the spacing around each input point, see `spacing_by_power`."""
        return self.density(self.density_norm(points.features))[:, 0]

    def quota_logits(self, points: DescribedPoints, geometry: LocalGeometry) -> Tensor:
        """Logarithm (N,) of the quota of each input point, the share of its cloud's output that
        belongs to it, up to a constant per cloud.

        The features are detached: quotas do not change what other weights learn.
        """
        features = points.features.detach()
        if geometry.needed:
            geometry = geometry.rows(slice(len(features)))
        logits = self.quota(self.quota_norm(features)).float()[:, 0]
        gaps = torch.stack([geometry.spacing[:, 0], nearest_gaps(geometry)], dim=1).log()
        return logits + (gaps * self.quota_powers).sum(1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features, that of the weights of all layers."""
        return next(p.dtype for layer in self.children() for p in layer.parameters())

    @property
    def random(self) -> bool:
        """Whether attention draws random numbers: its intermediate values are kept then."""
        return self.training and self.config.dropout > 0
