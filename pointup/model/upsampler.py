"""The upsampler: node shuffle with relative attention, on packed clouds.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) of each
    C = feature_dim   P = position_hidden   B clouds   M output points
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from pointup.errors import ModelError
from pointup.geometry.local_geometry import (
    columns_of,
    drops,
    local_geometry,
    mean_gaps,
    nearest_in_plane,
    without_bridges,
)
from pointup.geometry.midpoints import (
    in_float64,
    output_sizes,
    same_number_of_slots,
    slot_ranks,
    slots_for_ratio,
)
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import (
    batch_from_ptr,
    check_ptr,
    on_host,
    ptr_from_sizes,
    rows_of_clouds,
    segment_log_softmax,
    sizes_from_ptr,
    to_device,
)
from pointup.geometry.thinning import sample_by_spacing, spacing_by_power
from pointup.model.attention import AttentionBlock
from pointup.model.blocks import children_kept
from pointup.model.children import ChildDecoder
from pointup.model.config import ModelConfig
from pointup.model.stored_model import StoredModel

Module = TypeVar("Module", bound=nn.Module)


class Upsampler(ChildDecoder, StoredModel):
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

    Another network is a subclass that replaces or extends `build`, `describe`, `place_children`,
    `spacing_power` and `quota_logits`: docs/guides/networks.md.

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
        if self.calibrates:  # After `build`, which may be that of a subclass with more layers.
            calibrate(self, self.layers_to_calibrate())

    recompute: bool | None = None
    calibrates = False
    """Whether a new model calibrates its layers; another network has others."""

    def build(self, config: ModelConfig) -> None:
        super().build(config)
        # On the meta device there are only shapes: stored weights follow.
        self.calibrates = self.embed[0].weight.device.type != "meta"

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

    def _check(self, method: str, result: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ModelError for a result of a method, of another network, that has another shape."""
        if result.shape != shape:
            where = f"{type(self).__module__}:{type(self).__qualname__}.{method}"
            raise ModelError(f"{where} returns a tensor {tuple(result.shape)}, not {shape}")

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
        if not isinstance(pos, Tensor):
            raise ValueError(
                f"points are {type(pos).__name__}: make a tensor of them (N, 3) float32"
            )
        if pos.ndim != 2 or pos.shape[1] != 3 or not pos.is_floating_point():
            raise ValueError(
                f"points {tuple(pos.shape)} of {pos.dtype}: must be (N, 3) float32; leave out "
                "columns that are no coordinates, and convert integers"
            )
        pos = pos.float()
        kind = pos.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return self.upsample(pos, ptr, ratio)
        model = in_precision(self, torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
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
                nothing, ptr, empty, nothing, candidates_ptr, shares, shares, shares.detach(),
                error, empty,
            )  # fmt: skip

        padded = padded_slots(slots, sizes, children_per_group(pos.device))
        by_slots = padded.argsort(stable=True)
        if len(padded.unique_consecutive()) > len(padded.unique()):
            # Clouds with the same number of slots take a fraction of the time if expanded together.
            order = to_device(rows_of_clouds(on_host(ptr), by_slots), ptr.device)
            sorted_ptr = to_device(ptr_from_sizes(sizes[by_slots]), ptr.device)
            ratios = in_float64(ratio)[by_slots]
            made = self.upsample(pos[order], sorted_ptr, ratios)
            return made.of_clouds(by_slots.argsort(), order)

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
        points, pieces = self.describe(geometry, columns, recompute), []
        for num_slots, rows in same_number_of_slots(padded, on_host(ptr)):
            if config.extrapolation:
                index = neighbors[rows][:, to_device(ranks[:num_slots], ptr.device)]
            else:
                index = neighbors[rows, :num_slots]
            index = without_bridges(index, rows, pos, geometry.local_spacing)
            piece = self.place_children(pos, rows, index, points, geometry, recompute, drop)
            size = 4 if config.predict_error else 3
            self._check("place_children", piece, (*index.shape, size))
            pieces.append(piece.flatten(0, 1))
        candidates, log_error = torch.cat(pieces), None
        own, place = rows_of_slots(slots, padded, ptr, candidates_ptr)
        if place is not None:
            candidates = candidates.index_select(0, place)

        power = self.spacing_power(points).float()
        self._check("spacing_power", power, (len(pos),))
        log_spacing, shares = spacing_by_power(power, geometry, ptr)
        quota = self.quota_logits(points, geometry)
        self._check("quota_logits", quota, (len(pos),))
        logits = torch.stack([shares, quota], dim=1)
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
            picked,
        )


# Weights of 16 bits begin at multiples of 16 bytes: elsewhere cuBLAS takes slower kernels, and some
# of its kernels fail with "misaligned address" on a bias.
_ALIGNED = 8


def in_precision(model: Upsampler, dtype: torch.dtype) -> Upsampler:
    """A copy of the model with its weights in `dtype`, except `quota_powers`.

    Autocast would cast each weight at each use, its gradient in the backward pass, and features to
    float32 and back around each normalisation: more than half of the operations of a step. Layers
    of the copy normalise and multiply in `dtype` and accumulate in float32. Gradients reach the
    weights of the model. Use the copy for one forward pass and its backward pass.
    """
    weights: list[Tensor] = [p for n, p in model.named_parameters() if n != "quota_powers"]
    gap = weights[0].detach().new_zeros(_ALIGNED - 1)
    weights = [p for w in weights for p in (w, gap[: -w.numel() % _ALIGNED]) if p.numel()]
    flat = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = flat.split([weight.numel() for weight in weights])
    cast = {id(weight): part.view_as(weight) for weight, part in zip(weights, parts, strict=True)}
    return cast_module(model, cast)


def cast_module(module: Module, weights: dict[int, Tensor]) -> Module:
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = {
        name: weight if weight is None else weights.get(id(weight), weight)
        for name, weight in module._parameters.items()
    }
    copy.__dict__["_modules"] = {
        name: child if child is None else cast_module(child, weights)
        for name, child in module._modules.items()
    }
    return copy


# Groups of clouds with similar numbers of slots, whose points are expanded together.
#
# Each group runs through the operations of `Upsampler.place_children` separately. Where launching
# them takes longer than the work, it is faster to expand clouds with fewer slots to more slots than
# needed, and to discard the surplus afterwards.


def children_per_group(device: torch.device) -> int:
    """Number of children whose work takes as long as launching the operations of one more group.

    0 on the CPU, where a launch costs almost nothing. Elsewhere an estimate: about 300 launches of
    8 us against 40 ns per child.
    """
    return 0 if device.type == "cpu" else 1 << 16


def padded_slots(slots: Tensor, sizes: Tensor, group_cost: int) -> Tensor:
    """Slots (B,) to which each cloud is expanded: its own number, or that of a cloud with more.

    Minimizes the number of children plus `group_cost` per distinct number of slots.

    Shapes: `slots` and `sizes` (points of each cloud), (B,) int64, on the CPU.
    """
    values, place = slots.unique(return_inverse=True)
    if group_cost == 0 or len(values) < 2:
        return slots
    num_points = torch.zeros_like(values).index_add_(0, place, sizes).tolist()
    numbers = values.tolist()
    # least[i]: the cost of the i smallest numbers; start[i]: the first number of their last group.
    least, start = [0], [0]
    for stop in range(1, len(numbers) + 1):
        points, costs = 0, []
        for first in range(stop - 1, -1, -1):
            points += num_points[first]
            costs.append((least[first] + group_cost + points * numbers[stop - 1], first))
        cost, first = min(costs)
        least.append(cost)
        start.append(first)
    padded = values.clone()
    stop = len(numbers)
    while stop:
        padded[start[stop] : stop] = values[stop - 1]
        stop = start[stop]
    return padded[place]


def rows_of_slots(
    slots: Tensor, padded: Tensor, ptr: Tensor, candidates_ptr: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The parent of each candidate, and its row among all children; None for the rows where all
    children are candidates.

    Children are ordered by point, `padded` of each; the first `slots` of them are candidates.

    Shapes: `slots` and `padded` (B,) int64 on the CPU, `ptr` and `candidates_ptr` (B + 1,) of the
    points and of the candidates; both results (M,) int64 on the device.
    """
    sizes = sizes_from_ptr(on_host(ptr))
    num_candidates = int(on_host(candidates_ptr)[-1])
    first_child = ptr_from_sizes(sizes * padded)[:-1]
    cloud = batch_from_ptr(candidates_ptr, num_candidates)
    table = torch.stack(
        [slots, padded - slots, first_child, on_host(candidates_ptr)[:-1], on_host(ptr)[:-1]]
    )
    table = to_device(table, ptr.device).index_select(1, cloud)
    num_slots, num_left_out, first_child, first_candidate, first_point = table.unbind()
    within = torch.arange(num_candidates, device=ptr.device) - first_candidate
    point = torch.div(within, num_slots, rounding_mode="floor")
    if torch.equal(slots, padded):
        return first_point + point, None
    # Surplus slots of the preceding points.
    skipped = point * num_left_out
    return first_point + point, first_child + within + skipped


SEED = 0
# Few enough for one block, so that statistics cover all children of all points.
POINTS_PER_SURFACE = 80


@torch.no_grad()
def calibrate(model: nn.Module, layers: Iterable[tuple[nn.Linear, float]]) -> None:
    """Centre and scale the output of each layer on reference clouds.

    Neighbourhoods are similar, so that with random weights their features are nearly constant, a
    few per cent apart, and a network learns constants first. This sets weight and bias of each
    layer such that each output channel has mean 0 and the standard deviation given for the layer,
    in the order in which the model calls the layers (Mishkin and Matas 2016, "All you need is a
    good init"; centred per channel as by Kingma and Dhariwal 2018, "Glow").
    """

    def standardize(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        std, handle = hooks.pop(layer)
        handle.remove()  # The first output of the layer decides.
        values = output.flatten(0, -2)
        scale = std / values.std(0).clamp(min=1e-6)
        layer.weight.mul_(scale.unsqueeze(1))
        layer.bias.copy_((layer.bias - values.mean(0)) * scale)
        return (output - values.mean(0)) * scale

    hooks = {layer: (std, layer.register_forward_hook(standardize)) for layer, std in layers}
    device = next(model.parameters()).device  # The default one of torch, such as a GPU.
    pos, ptr = (to_device(values, device) for values in reference_clouds())
    training = model.training
    model.eval()(pos, ptr, 2.0)
    model.train(training)
    for _, handle in hooks.values():
        handle.remove()


def reference_clouds() -> tuple[Tensor, Tensor]:
    """Points (N, 3) and ptr (B+1,) of a plane, a sphere, a crease, a noisy wave, a curve and a
    Gaussian cloud; the same at each call."""
    generator = torch.Generator("cpu").manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    n = POINTS_PER_SURFACE
    flat, wave, ramp = random(n, 2), random(n, 2), random(n, 2)
    sphere = noise(n, 3)
    along = random(n, 1) * 6
    clouds = [
        torch.cat([flat, 0 * flat[:, :1]], dim=1),
        sphere / sphere.norm(dim=1, keepdim=True),
        torch.cat([ramp, ramp[:, :1].abs()], dim=1),
        torch.cat([wave, 0.2 * torch.sin(5 * wave[:, :1]) + 0.02 * noise(n, 1)], dim=1),
        torch.cat([along, torch.sin(along), torch.cos(along)], dim=1),
        noise(n, 3),
    ]
    return torch.cat(clouds), ptr_from_sizes(torch.tensor([n] * len(clouds), device="cpu"))


# The output of the model on packed clouds.
#
# Legend of shape suffixes:
# N points of all clouds   R candidates of a point   B clouds   M output points


class UpsamplerOutput(NamedTuple):
    """Output of `Upsampler`; all tensors are packed, with clouds in the order of the input."""

    pos: Tensor
    """(M, 3) float32: exactly `round(ratio * N)` points per cloud."""
    ptr: Tensor
    """(B+1,) bounds of the clouds in `pos`."""
    parent: Tensor
    """(M,) int64: the input point that each output point was generated from."""
    candidates: Tensor
    """(sum of N * R, 3) float32: all children, before thinning."""
    candidates_ptr: Tensor
    """(B+1,) bounds of the clouds in `candidates`."""
    log_shares: Tensor
    """(N,) float32: logarithm of the predicted share of the cloud's output that has each input
    point as its nearest. Thinning in `Upsampler` follows it."""
    log_quotas: Tensor
    """(N,) float32: a second, more accurate prediction of these shares, which thinning in
    `Upsampler` does not use. `pointup upsample` distributes its new points by it."""

    gaps: Tensor
    """(N,) float32: mean distance of each input point to its four nearest others, 0 for none."""
    log_error: Tensor | None = None
    """(M,) float32: logarithm of the predicted distance of each output point to the target, in
    spacings of the target; None for a model without `predict_error`."""
    picked: Tensor | None = None
    """(M,) int64: the candidate that each output point is."""

    def of_clouds(self, clouds: Tensor, points: Tensor) -> UpsamplerOutput:
        """The output with its clouds in another order.

        clouds: (B,) int64 on the CPU, numbers of this output's clouds in the new order. points:
        (N,) int64 on the device, the new row of each of this output's input points.
        """
        device = self.pos.device

        def of_points(values: Tensor) -> Tensor:
            return torch.empty_like(values).index_copy(0, points, values)

        def reordered(ptr: Tensor) -> tuple[Tensor, Tensor]:
            ptr = on_host(ptr)
            new = to_device(ptr_from_sizes(sizes_from_ptr(ptr)[clouds]), device)
            return new, to_device(rows_of_clouds(ptr, clouds), device)

        ptr, rows = reordered(self.ptr)
        candidates_ptr, candidate_rows = reordered(self.candidates_ptr)
        assert self.picked is not None
        place = torch.empty_like(candidate_rows)
        place[candidate_rows] = torch.arange(len(place), device=device)
        return UpsamplerOutput(
            self.pos[rows],
            ptr,
            points[self.parent[rows]],
            self.candidates[candidate_rows],
            candidates_ptr,
            of_points(self.log_shares),
            of_points(self.log_quotas),
            of_points(self.gaps),
            None if self.log_error is None else self.log_error[rows],
            place[self.picked[rows]],
        )
