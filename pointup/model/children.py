"""The decoder of the upsampler: the node shuffle, and the positions of children.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) of each
    C = feature_dim   P = position_hidden
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointup.geometry.local_geometry import (
    Columns,
    LocalGeometry,
    arches,
    coordinates_first,
    describe_neighbors,
    describe_neighbors_of_children,
    shortened,
)
from pointup.geometry.midpoints import depths_of_slots
from pointup.geometry.packed import to_device
from pointup.model.attention import AttentionBlock
from pointup.model.blocks import Block, children_per_block, in_blocks
from pointup.model.config import ModelConfig
from pointup.model.encoder import ChildTables, DescribedPoints, PointEncoder
from pointup.model.offsets import described_in, encode_positions, mean_offset, offset_along

SMALLEST_LOG_ERROR, LARGEST_LOG_ERROR = -2.0, 4.0
"""Bounds of the logarithm of the predicted error, in spacings of the target."""


class ChildDecoder(PointEncoder):
    """Expands the features of each point to slots, and places a child for each slot."""

    def build(self, config: ModelConfig) -> None:
        super().build(config)
        dim, hidden = config.feature_dim, config.position_hidden
        self.slot = nn.Linear(2 * dim + hidden, dim)
        self.shuffle = AttentionBlock(config, config.heads, feed_forward=False)
        # A single layer, because there are R x K of these positions per point.
        self.child_position = nn.Sequential(nn.Linear(8, hidden), nn.ReLU())
        self.refine = AttentionBlock(config, config.child_heads)
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

    def describe(
        self, geometry: LocalGeometry, columns: Columns | None, recompute: bool = True
    ) -> DescribedPoints:
        """What `place_children` needs of each point. Arguments are those of `encode`."""
        features, g = self.encode(geometry, columns, recompute)
        normals = self.turn_normals(features, g, geometry, recompute)
        return DescribedPoints(features, g, normals, self.child_tables(features))

    def child_tables(self, features: Tensor) -> ChildTables:
        """Projected features of points, from features (N, C)."""
        dim = self.config.feature_dim
        sizes = [dim, dim, self.config.position_hidden]
        of_parent, of_neighbor, of_position = self.slot.weight.split(sizes, dim=1)
        return ChildTables(
            F.linear(features, of_parent, self.slot.bias),
            F.linear(features, of_neighbor),
            self.shuffle.key_value(features),
            self.refine.key_value(features),
            of_position,
        )

    def place_children(
        self,
        pos: Tensor,
        rows: slice,
        slot_neighbor: Tensor,
        points: DescribedPoints,
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
        the offset to `arches` is added. The total offset is at most `MAX_OFFSET` s. `Anchors` says
        where children start; `drop` (N, 1) is for those that start below their parent.

        Shapes: `slot_neighbor` (n, R) the neighbour that each slot is tied to, the point itself
        first, -1 for none, `points` all N points.
        """
        whole, geometry = geometry, geometry.rows(rows)
        _, g, normals, tables = points
        num_points, num_slots = slot_neighbor.shape
        slot_neighbor = torch.where(slot_neighbor < 0, slot_neighbor[:, :1], slot_neighbor)
        anchors = anchors_of_slots(self.config, pos, rows, slot_neighbor, geometry.spacing, drop)

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
            local, start = geometry.rows(block.points), anchors.of_block(block)
            neighbor = block.of_slots(slot_neighbor)
            described = describe_neighbors(
                local, start.direction, whole.spacing[neighbor], whole.normal[neighbor]
            )
            slot_position = self.neighbor_position(described_in(x_parent_NC.dtype, described))
            x_position_NRC = F.linear(slot_position, tables.position)
            if start.is_beyond is not None:
                x_neighbor_NRC = x_neighbor_NRC + start.is_beyond * self.extrapolated
            if start.is_below is not None:
                x_neighbor_NRC = x_neighbor_NRC + start.is_below * self.descended
            x_NRC = x_parent_NC.unsqueeze(1) + x_neighbor_NRC + x_position_NRC
            x_NRC = self.shuffle(x_NRC, kv_shuffle, local.missing, g)
            arch = arches(start.direction, own_normal, normal_of_slot)
            if start.is_below is not None:
                arch = arch.masked_fill(start.is_below, 0.0)
            fitted = whole.normal[local.index]
            offset, x_normed_NRC = self.refined_offsets(
                x_NRC, kv_refine, local, start, arch, fitted, normal_of_neighbor
            )
            placed = start.pos + shortened(offset) * local.spacing.unsqueeze(1)
            if not self.config.predict_error:
                return placed
            return torch.cat([placed, self.log_error(x_normed_NRC, start)], dim=-1)

        return in_blocks(
            place,
            num_points,
            max(1, children_per_block(pos.device) // num_slots),
            gathered=[
                (tables.shuffle, geometry.index),
                (tables.refine, geometry.index),
                (normals, geometry.index),
            ],
            gathered_by_slot=[(tables.neighbor, slot_neighbor), (normals, slot_neighbor)],
            rows=[tables.parent[rows], g[rows], normals[rows]],
            parameters=[*self.weights_of_children(), tables.position],
            recompute=recompute and not self.random,
        )

    def refined_offsets(
        self,
        x_NRC: Tensor,
        kv_refine: Tensor,
        local: LocalGeometry,
        start: Anchors,
        arch: Tensor,
        fitted: Tensor,
        normal_of_neighbor: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Offsets (n, R, 3) of children from their anchors in spacings, and their features
        (n, R, C), normalised, after all refinements.

        Shapes: `arch` (n, R, 3), normals of the neighbours (n, K, 3): `fitted` to their
        surroundings, and turned by `turn_normals`.
        """
        linear = cast(nn.Linear, self.child_position[0])
        weight = torch.cat([linear.weight, linear.bias.unsqueeze(1)], dim=1).to(x_NRC.dtype)
        to_anchor = 0.5 * start.direction
        local = replace(local, relative=coordinates_first(local.relative))
        normal_of_neighbor = coordinates_first(normal_of_neighbor)
        offset: Tensor | None = None
        for _ in range(self.config.num_refinements):
            from_parent = to_anchor if offset is None else to_anchor + offset
            described = describe_neighbors_of_children(local, from_parent, start.direction, fitted)
            child_g = encode_positions(described, weight)
            x_NRC = self.refine(x_NRC, kv_refine, local.missing, child_g)
            x_normed_NRC = self.pull_norm(x_NRC)
            weights = offset_along(self.pull(x_normed_NRC), child_g)
            weights = weights.masked_fill(local.missing.unsqueeze(1), 0.0).float()
            moved = mean_offset(weights, local.relative, from_parent, normal_of_neighbor)
            moved = moved + self.arch(x_normed_NRC).float() * arch
            offset = moved if offset is None else offset + moved
        assert offset is not None
        return offset, x_normed_NRC

    def log_error(self, x_normed_NRC: Tensor, start: Anchors) -> Tensor:
        """Logarithm (n, R, 1) of the predicted errors, in spacings of the target."""
        if not self.config.chooses_by_error:
            x_normed_NRC = x_normed_NRC.detach()  # It only describes the points that others make.
        log_error: Tensor = self.error(x_normed_NRC).float()
        if start.is_below is not None and start.depth is not None:
            # Far below its parent a candidate is a guess, unless the network learns better.
            log_error = log_error + (start.depth * start.is_below).log1p()
        return F.hardtanh(log_error, SMALLEST_LOG_ERROR, LARGEST_LOG_ERROR)

    def weights_of_children(self) -> list[Tensor]:
        """The weights that `place_children` uses beside tables and positions."""
        modules = [
            self.shuffle, self.refine, self.neighbor_position, self.child_position,
            self.pull_norm, self.pull, self.arch,
        ]  # fmt: skip
        if self.config.predict_error:
            modules.append(self.error)
        weights: list[Tensor] = [weight for module in modules for weight in module.parameters()]
        if self.config.extrapolation:
            weights.append(self.extrapolated)
        if self.config.descent:
            weights.append(self.descended)
        return weights


# Anchors: where the children of a point start, before the network moves them.
#
# Legend of shape suffixes:
# N points of all clouds   n points that are processed   R slots (children) of each


@dataclass(frozen=True)
class Anchors:
    """Anchors of the R slots of n points.

    An anchor is half way to the neighbour of the slot; for extrapolated slots as far beyond the
    point, opposite to the neighbour; for slots that descend straight below the point.

    Attributes:
        pos: (n, R, 3) float32, position of the anchor.
        direction: (n, R, 3) float32, twice the vector from the point to the anchor, in spacings of
            the point: the vector to the neighbour. Compressed for slots that descend, because the
            network knows offsets of a few spacings.
        is_beyond: (n, R, 1) bool, whether the slot is extrapolated; None without `extrapolation`.
        is_below: (n, R, 1) bool, whether the slot descends; None without `descent`.
        depth: (n, R, 1) float32, depth below the point in spacings, 0 for other slots; None without
            `descent`.
    """

    pos: Tensor
    direction: Tensor
    is_beyond: Tensor | None = None
    is_below: Tensor | None = None
    depth: Tensor | None = None

    def of_block(self, block: Block) -> Anchors:
        """The anchors of a block of points and slots."""
        known = {name: values for name, values in vars(self).items() if values is not None}
        return replace(self, **{name: block.of_slots(values) for name, values in known.items()})


def anchors_of_slots(
    config: ModelConfig,
    pos: Tensor,
    rows: slice,
    slot_neighbor: Tensor,
    spacing: Tensor,
    drop: Tensor | None,
) -> Anchors:
    """Anchors of the slots of the points in `rows`.

    Shapes: `pos` (N, 3), `slot_neighbor` (n, R) the neighbour that each slot is tied to, `spacing`
    (n, 1), `drop` (N, 1) the largest depth of slots that descend, None for a model without
    `descent`.
    """
    assert (drop is not None) == config.descent
    num_points, num_slots = slot_neighbor.shape
    own, others = pos[rows].unsqueeze(1), pos[slot_neighbor]
    anchor, direction = (own + others) * 0.5, (others - own) / spacing.unsqueeze(1)
    is_beyond = is_below = depth = None
    if config.extrapolation:
        slots = torch.arange(num_slots, device="cpu")
        of_slots = to_device((slots > 0) & (slots % 2 == 0), pos.device)
        is_beyond = of_slots.view(1, -1, 1).expand(num_points, -1, 1)
        anchor = torch.where(is_beyond, 1.5 * own - 0.5 * others, anchor)
        direction = torch.where(is_beyond, -direction, direction)
    if drop is not None:
        shares = to_device(depths_of_slots(num_slots), pos.device)
        depth = (shares * (drop[rows] / spacing)).unsqueeze(2)
        is_below = (shares > 0).view(1, -1, 1).expand(num_points, -1, 1)
        down = torch.zeros_like(pos[0])
        down[2] = -1.0
        anchor = torch.where(is_below, own + depth * spacing.unsqueeze(1) * down, anchor)
        direction = torch.where(is_below, 2 * depth.asinh() * down, direction)
    return Anchors(anchor, direction, is_beyond, is_below, depth)
