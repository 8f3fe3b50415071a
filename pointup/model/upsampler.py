"""The upsampler: node shuffle with relative attention, on packed clouds.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) of each
    C = feature_dim   P = position_hidden   B clouds   M output points
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointup.errors import ModelError
from pointup.geometry.adaptive_thinning import sample_by_spacing, spacing_by_power
from pointup.geometry.gaps import without_bridges
from pointup.geometry.local_geometry import (
    LocalGeometry,
    arches,
    describe_neighbors,
    describe_neighbors_of_children,
    local_geometry,
    mean_gaps,
    shortened,
)
from pointup.geometry.midpoints import output_sizes, same_number_of_slots, slots_for_ratio
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import (
    on_host,
    ptr_from_sizes,
    rows_of_clouds,
    segment_log_softmax,
    sizes_from_ptr,
    to_device,
)
from pointup.model.attention import AttentionBlock
from pointup.model.blocks import Block, children_kept, in_blocks, points_per_block
from pointup.model.calibration import calibrate
from pointup.model.config import ModelConfig
from pointup.model.encoder import ChildTables, PointEncoder, attention_block
from pointup.model.hub import MODEL_CARD, StoredModel
from pointup.model.offsets import encode_positions, mean_offset, mean_offset_to_planes, offset_along
from pointup.model.output import UpsamplerOutput
from pointup.model.precision import autocast_dtype, in_precision
from pointup.model.slot_groups import children_per_group, padded_slots, rows_of_slots


class Upsampler(
    PointEncoder,
    StoredModel,
    library_name="pointup",
    tags=["point-cloud", "upsampling", "lidar"],
    license="apache-2.0",
    model_card_template=MODEL_CARD,
):
    """Upsample packed point clouds by any ratio.

    Each point attends to its k nearest neighbours. Relative attention then expands its features to
    R slots, one for each of its R nearest neighbours, which become R children (the node shuffle). A
    child starts at the midpoint between its parent and the neighbour of its slot, attends to its
    parent's neighbours and moves by a weighted sum of the directions to them. Thinning keeps
    exactly `round(ratio * N)` children, by farthest-point sampling in units of a spacing that is
    predicted for each point: dense places of a survey stay dense, random clusters do not.

    Before training the offsets are zero and the spacing is even, so that the model equals
    `midpoint_upsample`. Slots are tied to neighbours and share weights, so that their number can
    follow the ratio. The model is equivariant to translation and scale. The output of a cloud does
    not depend on the others. Coordinates are float32: centre a cloud (in float64) before casting.

    Keyword arguments are those of `ModelConfig`. With `recompute` the backward pass computes
    intermediate values again: more time, less memory, the same gradients. None: `children_kept`.
    """

    def __init__(self, **options: Any) -> None:
        try:
            config = ModelConfig(**options)
        except TypeError as error:
            raise ModelError(f"unknown model option: {error}") from None
        super().__init__(config)
        self.recompute: bool | None = None
        dim, hidden = config.feature_dim, config.position_hidden
        self.slot = nn.Linear(2 * dim + hidden, dim)
        self.shuffle = attention_block(config, config.heads, feed_forward=False)
        # A single layer, because there are R x K of these positions per point.
        self.child_position = nn.Sequential(nn.Linear(8, hidden), nn.ReLU())
        self.refine = attention_block(config, config.child_heads)
        self.pull_norm = nn.LayerNorm(dim)
        self.pull = nn.Linear(dim, 2 * hidden)
        self.arch = nn.Linear(dim, 1)
        for offset in (self.pull, self.arch):
            nn.init.zeros_(offset.weight)
            nn.init.zeros_(offset.bias)
        calibrate(self, self.layers_to_calibrate())

    def layers_to_calibrate(self) -> list[tuple[nn.Linear, float]]:
        """Layers that output features, in the order of `forward`, with the standard deviation of
        their output before training.

        It is smaller for layers in residual branches, so that the features before them persist.
        """
        layers = [(layer, 1.0) for layer in (*self.neighbor_position, *self.embed)]
        for block in cast(list[AttentionBlock], [*self.layers, self.shuffle, self.refine]):
            layers.append((block.attention.out, 0.5))
            if block.feed_forward is not None:
                _, widen, _, narrow = block.feed_forward
                layers += [(widen, 1.0), (narrow, 0.5)]
        return [(layer, spread) for layer, spread in layers if isinstance(layer, nn.Linear)]

    def forward(self, pos: Tensor, ptr: Tensor, ratio: Tensor | float) -> UpsamplerOutput:
        """Upsample each cloud to `round(ratio * N)` points.

        Shapes: `pos` (N, 3) float32, `ptr` (B+1,) int64, `ratio` a number or (B,), at least 1.
        The result is differentiable in the weights; the choice of children is not. Raises
        ValueError for a ratio that is below 1 or not finite, and for non-finite points.

        Under autocast features have its dtype; coordinates stay float32.
        """
        dtype = autocast_dtype(pos.device)
        if dtype is None:
            return self.upsample(pos, ptr, ratio)
        model = in_precision(self, dtype, exact=("quota_powers",))
        with torch.autocast(pos.device.type, enabled=False):
            return model.upsample(pos, ptr, ratio)

    def upsample(self, pos: Tensor, ptr: Tensor, ratio: Tensor | float) -> UpsamplerOutput:
        """`forward` in the precision of the weights."""
        num_out = output_sizes(ptr, ratio)
        sizes = sizes_from_ptr(on_host(ptr))
        slots = slots_for_ratio(ratio, self.config.slots_per_ratio).expand(sizes.shape)
        candidates_ptr = to_device(ptr_from_sizes(sizes * slots), ptr.device)
        if len(pos) == 0:
            # Connected to all weights, so that a backward pass through it is valid.
            nothing = pos.reshape(0, 3) + sum(p.sum() * 0.0 for p in self.parameters())
            shares = nothing.sum(1)
            empty = ptr.new_empty(0)
            return UpsamplerOutput(
                nothing, ptr, empty, nothing, candidates_ptr, shares, shares, shares.detach()
            )

        padded = padded_slots(slots, sizes, children_per_group(pos.device))
        by_slots = padded.argsort(stable=True)
        if len(padded.unique_consecutive()) > len(padded.unique()):
            # Clouds with the same number of slots take a fraction of the time if expanded together.
            points = to_device(rows_of_clouds(on_host(ptr), by_slots), ptr.device)
            sorted_ptr = to_device(ptr_from_sizes(sizes[by_slots]), ptr.device)
            ratios = on_host(torch.as_tensor(ratio))[by_slots]
            made = self.upsample(pos[points], sorted_ptr, ratios)
            return made.of_clouds(by_slots.argsort(), points)

        num_neighbors = self.config.k + 1
        squared, neighbors = knn(pos, ptr, max(num_neighbors, int(slots.max()), 5))
        geometry = local_geometry(
            pos, ptr, squared[:, :num_neighbors], neighbors[:, :num_neighbors]
        )
        recompute = self.recompute
        if recompute is None:
            recompute = int((sizes * padded).sum()) > children_kept(pos.device)
        features, g = self.encode(geometry, recompute)
        normals = self.turn_normals(features, g, geometry, recompute)
        tables, pieces = self.child_tables(features), []
        for num_slots, rows in same_number_of_slots(padded, on_host(ptr)):
            index = without_bridges(neighbors[rows, :num_slots], rows, pos, geometry.local_spacing)
            piece = self.place_children(pos, rows, index, tables, g, normals, geometry, recompute)
            pieces.append(piece.flatten(0, 1))
        candidates = torch.cat(pieces)
        own, place = rows_of_slots(slots, padded, ptr, candidates_ptr)
        if not torch.equal(slots, padded):
            candidates = candidates.index_select(0, place)

        power = self.density(self.density_norm(features)).float()[:, 0]
        log_spacing, shares = spacing_by_power(power, geometry, ptr)
        logits = torch.stack([shares, self.quota_logits(features, geometry)], dim=1)
        log_shares, log_quotas = segment_log_softmax(logits, ptr).unbind(1)
        picked = sample_by_spacing(
            candidates.detach(), candidates_ptr, num_out, log_spacing.detach()[own]
        )
        return UpsamplerOutput(
            candidates[picked],
            to_device(ptr_from_sizes(on_host(num_out)), ptr.device),
            own[picked],
            candidates,
            candidates_ptr,
            log_shares,
            log_quotas,
            mean_gaps(squared, neighbors),
        )

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
    ) -> Tensor:
        r"""Positions (n, R, 3) of the children of the points in `rows`.

        Child m of a point moves from its anchor by

        .. math::
            s \cdot \frac{1}{K} \sum_j (w(x_m) \cdot g_{mj}) \, r_{mj}
            + (v(x_m) \cdot g_{mj}) (r_{mj} \cdot n_j) \, n_j

        where r is the vector from the child to its parent's neighbour j in units of the spacing s,
        and n is the neighbour's normal. The first term moves the child towards or away from the
        neighbours, as the masks of subdivision surfaces do, the second towards or away from their
        planes. A chord lies on one side of a curved surface and the planes on the other: both terms
        together can reach the surface. Children of points on a plane stay on it. A learned share of
        the offset to `arches` is added. The total offset is at most `MAX_OFFSET` s.

        Shapes: `slot_neighbor` (n, R) the neighbour that each slot is tied to, the point itself
        first, -1 for none, `tables` and `g` (N, K, P) of all points.
        """
        whole, geometry, pos_of_rows = geometry, geometry.rows(rows), pos[rows]
        num_points, num_slots = slot_neighbor.shape
        slot_neighbor = torch.where(slot_neighbor < 0, slot_neighbor[:, :1], slot_neighbor)
        dim = self.config.feature_dim

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
            to_slot = (others - own) / spacing
            spacing_there, normal_there = whole.spacing[neighbor], whole.normal[neighbor]
            described = describe_neighbors(local, to_slot, spacing_there, normal_there)
            slot_position = self.neighbor_position(described.to(x_parent_NC.dtype))
            x_position_NRC = F.linear(slot_position, self.slot.weight[:, 2 * dim :])
            x_NRC = x_parent_NC.unsqueeze(1) + x_neighbor_NRC + x_position_NRC
            x_NRC = self.shuffle(x_NRC, kv_shuffle, local.missing, g)

            linear = cast(nn.Linear, self.child_position[0])
            arch = arches(to_slot, own_normal, normal_of_slot)
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
            return (own + others) * 0.5 + shortened(offsets[-1]) * spacing

        modules = (
            self.slot, self.shuffle, self.refine, self.neighbor_position, self.child_position,
            self.pull_norm, self.pull, self.arch,
        )  # fmt: skip
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
            parameters=[weight for module in modules for weight in module.parameters()],
            random=self.random,
            recompute=recompute,
        )
