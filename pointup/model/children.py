"""The decoder of the upsampler: the node shuffle, and the positions of children.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) of each
    C = feature_dim   P = position_hidden
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointup.geometry.local_geometry import (
    LocalGeometry,
    arches,
    describe_neighbors,
    describe_neighbors_of_children,
    shortened,
)
from pointup.geometry.midpoints import depths_of_slots, is_extrapolated
from pointup.geometry.packed import to_device
from pointup.model.blocks import Block, in_blocks, points_per_block
from pointup.model.config import ModelConfig
from pointup.model.encoder import ChildTables, PointEncoder, attention_block
from pointup.model.offsets import encode_positions, mean_offset, mean_offset_to_planes, offset_along

SMALLEST_LOG_ERROR, LARGEST_LOG_ERROR = -2.0, 4.0
"""Bounds of the logarithm of the predicted error, in spacings of the target."""


class ChildDecoder(PointEncoder):
    """Expands the features of each point to slots, and places a child for each slot."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        dim, hidden = config.feature_dim, config.position_hidden
        self.slot = nn.Linear(2 * dim + hidden, dim)
        self.shuffle = attention_block(config, config.heads, feed_forward=False)
        # A single layer, because there are R x K of these positions per point.
        self.child_position = nn.Sequential(nn.Linear(8, hidden), nn.ReLU())
        self.refine = attention_block(config, config.child_heads)
        self.pull_norm = nn.LayerNorm(dim)
        self.pull = nn.Linear(dim, 2 * hidden)
        self.arch = nn.Linear(dim, 1)
        first_zero = [self.pull, self.arch]
        if config.extrapolation:
            self.extrapolated = nn.Parameter(torch.zeros(dim))
        if config.descent:
            self.descended = nn.Parameter(torch.zeros(dim))
        if config.predict_error:
            self.error = nn.Linear(dim, 1)
            first_zero.append(self.error)
        for layer in first_zero:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def child_tables(self, features: Tensor) -> ChildTables:
        """Projected features of points, from features (N, C)."""
        dim = self.config.feature_dim
        of_parent, of_neighbor, _ = self.slot.weight.tensor_split([dim, 2 * dim], dim=1)
        return ChildTables(
            F.linear(features, of_parent, self.slot.bias),
            F.linear(features, of_neighbor),
            self.shuffle.key_value(features),
            self.refine.key_value(features),
        )

    def place_children(
        self,
        pos: Tensor,
        rows: slice,
        slot_neighbor: Tensor,
        tables: ChildTables,
        g: Tensor,
        normals: Tensor,
        geometry: LocalGeometry,
        recompute: bool = True,
        drop: Tensor | None = None,
    ) -> Tensor:
        r"""Positions (n, R, 3) of the children of the points in `rows`; (n, R, 4) with the
        logarithm of the predicted error for a model with `predict_error`.

        Child m of a point moves from its anchor by

        .. math::
            s \cdot \frac{1}{K} \sum_j (w(x_m) \cdot g_{mj}) \, r_{mj}
            + (v(x_m) \cdot g_{mj}) (r_{mj} \cdot n_j) \, n_j

        where r is the vector from the child to its parent's neighbour j in units of the spacing s,
        and n is the neighbour's normal. The first term moves the child towards or away from the
        neighbours, as the masks of subdivision surfaces do, the second towards or away from their
        planes. A chord lies on one side of a curved surface and the planes on the other: both terms
        together can reach the surface. Children of points on a plane stay on it. A learned share of
        the offset to `arches` is added. The total offset is at most `MAX_OFFSET` s. The anchor is
        half way to the neighbour of the slot, or, for extrapolated slots, as far beyond the point,
        or, for slots with a depth, below the point by this share of its `drop` (N, 1).

        Shapes: `slot_neighbor` (n, R) the neighbour that each slot is tied to, the point itself
        first, -1 for none, `tables` and `g` (N, K, P) of all points.
        """
        whole, geometry, pos_of_rows = geometry, geometry.rows(rows), pos[rows]
        num_points, num_slots = slot_neighbor.shape
        slot_neighbor = torch.where(slot_neighbor < 0, slot_neighbor[:, :1], slot_neighbor)
        dim = self.config.feature_dim
        extrapolation = self.config.extrapolation
        if extrapolation:
            of_slots = to_device(is_extrapolated(num_slots, extrapolation), pos.device)
            beyond = of_slots.expand(num_points, -1)
        descent = self.config.descent
        assert (drop is not None) == descent
        if drop is not None:
            shares = to_device(depths_of_slots(num_slots), pos.device)
            depth_in_spacings = shares * (drop[rows] / geometry.spacing)
            below = (shares > 0).expand(num_points, -1)
            down = torch.zeros_like(pos[0])
            down[2] = -1.0

        def place(
            block: Block,
            kv_shuffle: Tensor,
            kv_refine: Tensor,
            normal_of_neighbor: Tensor,
            x_neighbor_NRC: Tensor,
            normal_of_slot: Tensor,
            x_parent_NC: Tensor,
            g: Tensor,
            own_normal: Tensor,
        ) -> Tensor:
            local = geometry.rows(block.points)
            spacing = local.spacing.unsqueeze(1)
            neighbor = block.of_slots(slot_neighbor)
            own, others = block.of_points(pos_of_rows).unsqueeze(1), pos[neighbor]
            to_slot, anchor = (others - own) / spacing, (own + others) * 0.5
            if extrapolation:
                is_beyond = block.of_slots(beyond).unsqueeze(2)
                to_slot = torch.where(is_beyond, -to_slot, to_slot)
                anchor = torch.where(is_beyond, 1.5 * own - 0.5 * others, anchor)
                x_neighbor_NRC = x_neighbor_NRC + is_beyond * self.extrapolated
            if descent:
                depth = block.of_slots(depth_in_spacings).unsqueeze(2)
                is_below = block.of_slots(below).unsqueeze(2)
                # Compressed, because the network knows offsets of a few spacings.
                to_slot = torch.where(is_below, 2 * depth.asinh() * down, to_slot)
                anchor = torch.where(is_below, own + depth * spacing * down, anchor)
                x_neighbor_NRC = x_neighbor_NRC + is_below * self.descended
            spacing_there, normal_there = whole.spacing[neighbor], whole.normal[neighbor]
            described = describe_neighbors(local, to_slot, spacing_there, normal_there)
            slot_position = self.neighbor_position(described.to(x_parent_NC.dtype))
            x_position_NRC = F.linear(slot_position, self.slot.weight[:, 2 * dim :])
            x_NRC = x_parent_NC.unsqueeze(1) + x_neighbor_NRC + x_position_NRC
            x_NRC = self.shuffle(x_NRC, kv_shuffle, local.missing, g)

            linear = cast(nn.Linear, self.child_position[0])
            arch = arches(to_slot, own_normal, normal_of_slot)
            if descent:
                arch = arch.masked_fill(is_below, 0.0)
            fitted = whole.normal[local.index]
            offsets: list[Tensor] = []
            for _ in range(self.config.num_refinements):
                from_parent = 0.5 * to_slot + offsets[-1] if offsets else 0.5 * to_slot
                described = describe_neighbors_of_children(local, from_parent, to_slot, fitted)
                child_g = encode_positions(described, linear, x_NRC.dtype)
                x_NRC = self.refine(x_NRC, kv_refine, local.missing, child_g)
                x_normed_NRC = self.pull_norm(x_NRC)
                offset_weights = offset_along(self.pull(x_normed_NRC), child_g)
                to_points, to_planes = offset_weights.masked_fill(
                    local.missing.unsqueeze(1), 0.0
                ).float()
                moved = (
                    mean_offset(to_points, local.relative, from_parent)
                    + mean_offset_to_planes(
                        to_planes, local.relative, from_parent, normal_of_neighbor
                    )
                    + self.arch(x_normed_NRC).float() * arch
                )
                offsets.append(offsets[-1] + moved if offsets else moved)
            placed = anchor + shortened(offsets[-1]) * spacing
            if not self.config.predict_error:
                return placed
            log_error = self.error(x_normed_NRC).float()
            if descent:
                # Far below its parent a candidate is a guess, unless the network learns better.
                log_error = log_error + (depth * is_below).log1p()
            log_error = log_error.clamp(SMALLEST_LOG_ERROR, LARGEST_LOG_ERROR)
            return torch.cat([placed, log_error], dim=-1)

        modules = (
            self.slot, self.shuffle, self.refine, self.neighbor_position, self.child_position,
            self.pull_norm, self.pull, self.arch,
            *([self.error] if self.config.predict_error else []),
        )  # fmt: skip
        parameters = [weight for module in modules for weight in module.parameters()]
        if self.config.extrapolation:
            parameters.append(self.extrapolated)
        if self.config.descent:
            parameters.append(self.descended)
        return in_blocks(
            place,
            num_points,
            max(1, points_per_block(pos.device) // num_slots),
            gathered=[
                (tables.shuffle, geometry.index),
                (tables.refine, geometry.index),
                (normals, geometry.index),
            ],
            gathered_by_slot=[(tables.neighbor, slot_neighbor), (normals, slot_neighbor)],
            rows=[tables.parent[rows], g[rows], normals[rows]],
            parameters=parameters,
            random=self.random,
            recompute=recompute,
        )
