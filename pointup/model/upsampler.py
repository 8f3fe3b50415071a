"""The upsampler: node shuffle with relative attention, on packed clouds.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) of each
    C = feature_dim   P = position_hidden   B clouds   M output points
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from pointup.errors import ModelError
from pointup.geometry.adaptive_thinning import sample_by_spacing, spacing_by_power
from pointup.geometry.columns import columns_of, drops, nearest_in_plane
from pointup.geometry.gaps import without_bridges
from pointup.geometry.local_geometry import (
    local_geometry,
    mean_gaps,
)
from pointup.geometry.midpoints import (
    output_sizes,
    same_number_of_slots,
    slot_ranks,
    slots_for_ratio,
)
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import (
    on_host,
    ptr_from_sizes,
    rows_of_clouds,
    segment_log_softmax,
    sizes_from_ptr,
    to_device,
)
from pointup.geometry.validity import check_ptr
from pointup.model.attention import AttentionBlock
from pointup.model.blocks import children_kept
from pointup.model.calibration import calibrate
from pointup.model.children import ChildDecoder
from pointup.model.config import ModelConfig
from pointup.model.hub import MODEL_CARD, StoredModel
from pointup.model.output import UpsamplerOutput
from pointup.model.precision import autocast_dtype, in_precision
from pointup.model.slot_groups import children_per_group, padded_slots, rows_of_slots


class Upsampler(
    ChildDecoder,
    StoredModel,
    library_name="pointup",
    tags=["point-cloud", "upsampling", "lidar"],
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
        # With `--initial-model` the option alone is valid, because that model may have columns.
        if config.descent and not config.column_layers:
            raise ModelError("model.descent needs columns: set model.column_layers to at least 1")
        super().__init__(config)
        self.float()  # Whatever the default dtype of torch is, as coordinates are.
        self.recompute: bool | None = None
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
        ValueError for a ratio that is below 1, not finite or no number, for another number of
        ratios than of clouds, for non-finite points, for points that are not (N, 3) or no floats,
        and for a `ptr` that is not int64, decreases or does not run from 0 to N.

        Under autocast features have its dtype; coordinates stay float32. Points of another floating
        dtype are cast to float32.
        """
        if pos.ndim != 2 or pos.shape[1] != 3 or not pos.is_floating_point():
            raise ValueError(
                f"points {tuple(pos.shape)} of {pos.dtype}: must be (N, 3) float32; leave out "
                "columns that are no coordinates, and convert integers"
            )
        pos = pos.float()
        dtype = autocast_dtype(pos.device)
        if dtype is None:
            return self.upsample(pos, ptr, ratio)
        model = in_precision(self, dtype, exact=("quota_powers",))
        with torch.autocast(pos.device.type, enabled=False):
            return model.upsample(pos, ptr, ratio)

    def upsample(self, pos: Tensor, ptr: Tensor, ratio: Tensor | float) -> UpsamplerOutput:
        """`forward` in the precision of the weights."""
        if not isinstance(ptr, Tensor):
            raise ValueError(f"ptr is a {type(ptr).__name__}: must be a tensor (B + 1,) int64")
        bounds = on_host(ptr)
        check_ptr(pos, bounds)
        num_out = output_sizes(ptr, ratio)
        sizes = sizes_from_ptr(bounds)
        slots = slots_for_ratio(ratio, self.config.slots_per_ratio).expand(sizes.shape)
        candidates_ptr = to_device(ptr_from_sizes(sizes * slots), ptr.device)
        if len(pos) == 0:
            # Connected to all weights, so that a backward pass through it is valid.
            nothing = pos.reshape(0, 3) + sum(p.sum() * 0.0 for p in self.parameters())
            shares = nothing.sum(1)
            empty = ptr.new_empty(0)
            error = shares if self.config.predict_error else None
            return UpsamplerOutput(
                nothing, ptr, empty, nothing, candidates_ptr, shares, shares, shares.detach(), error
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

        config, num_neighbors = self.config, self.config.k + 1
        ranks = slot_ranks(int(padded.max()), config.extrapolation)
        squared, neighbors = knn(pos, ptr, max(num_neighbors, int(ranks.max()) + 1, 5))
        geometry = local_geometry(
            pos, ptr, squared[:, :num_neighbors], neighbors[:, :num_neighbors]
        )
        recompute = self.recompute
        if recompute is None:
            recompute = int((sizes * padded).sum()) > children_kept(pos.device)
        columns = drop = None
        if config.column_layers:
            in_plane = nearest_in_plane(pos, ptr, config.column_size)
            columns = columns_of(pos, in_plane, config.column_stride)
            if config.descent:
                drop = drops(columns, config.reach * geometry.local_spacing)
        features, g = self.encode(geometry, columns, recompute)
        normals = self.turn_normals(features, g, geometry, recompute)
        tables, pieces = self.child_tables(features), []
        for num_slots, rows in same_number_of_slots(padded, on_host(ptr)):
            if config.extrapolation:
                index = neighbors[rows][:, to_device(ranks[:num_slots], ptr.device)]
            else:
                index = neighbors[rows, :num_slots]
            index = without_bridges(index, rows, pos, geometry.local_spacing)
            piece = self.place_children(
                pos, rows, index, tables, g, normals, geometry, recompute, drop
            )
            pieces.append(piece.flatten(0, 1))
        candidates, log_error = torch.cat(pieces), None
        own, place = rows_of_slots(slots, padded, ptr, candidates_ptr)
        if not torch.equal(slots, padded):
            candidates = candidates.index_select(0, place)

        power = self.density(self.density_norm(features)).float()[:, 0]
        log_spacing, shares = spacing_by_power(power, geometry, ptr)
        logits = torch.stack([shares, self.quota_logits(features, geometry)], dim=1)
        log_shares, log_quotas = segment_log_softmax(logits, ptr).unbind(1)
        log_spacing = log_spacing.detach()[own]
        if config.predict_error:
            candidates, log_error = candidates[:, :3], candidates[:, 3]
            log_spacing = log_spacing + config.error_exponent * log_error.detach()
        picked = sample_by_spacing(candidates.detach(), candidates_ptr, num_out, log_spacing)
        return UpsamplerOutput(
            candidates[picked],
            to_device(ptr_from_sizes(on_host(num_out)), ptr.device),
            own[picked],
            candidates,
            candidates_ptr,
            log_shares,
            log_quotas,
            mean_gaps(squared, neighbors),
            None if log_error is None else log_error[picked],
        )
