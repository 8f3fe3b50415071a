"""Packed clouds: `pos` (N, ...) of B clouds one after another, `ptr` (B + 1,) with their bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

_host_copies = WeakTensorKeyDictionary()
_batches = WeakTensorKeyDictionary()
_kept_counts = WeakTensorKeyDictionary()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Coordinates are never rounded to 16 bits: the function runs as if autocast were off.

    Its tensors, at least one of which it is given by place, must be of the same device.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        kind = next(value.device.type for value in args if isinstance(value, Tensor))
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return run


def is_on(values: Tensor, device: torch.device) -> bool:
    """Whether the values are on a device; one without an index, as `cuda`, is the current one.

    Tensors always have an index: to compare devices for equality would take `cuda:0` for another
    than `cuda`.
    """
    own = values.device
    if own.type != device.type:
        return False
    if own.index in (None, device.index):
        return True
    return device.index is None and own.index == torch.accelerator.current_device_index()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Bounds, sizes or ratios that the host knows, on the device; `on_host` then knows them too.

    Values that are on the device already stay what they are. To be used as they are: changed in
    place, they would not be what the host takes them for.
    """
    if is_on(values, device):
        return values
    dtype = widest_float(device) if values.dtype == torch.float64 else values.dtype
    moved = values.to(device, dtype, non_blocking=True)
    _host_copies[moved] = values
    return moved


def on_host(values: Tensor) -> Tensor:
    """The values on the CPU; waits for the device, unless they came there by `to_device`."""
    if values.device.type == "cpu":
        return values
    copy = _host_copies.get(values)
    return values.cpu() if copy is None else copy


def sizes_from_ptr(ptr: Tensor) -> Tensor:
    """Number of points of every cloud, (B,) int64."""
    return ptr[1:] - ptr[:-1]


def ptr_from_sizes(sizes: Tensor) -> Tensor:
    """Bounds (B + 1,) int64 of clouds of the given sizes (B,); `[0]` for no cloud."""
    return torch.nn.functional.pad(sizes.long().cumsum(0), (1, 0))


def batch_from_ptr(ptr: Tensor, num_points: int | None = None) -> Tensor:
    """Number of its cloud for every point, (N,) int64.

    `num_points`, where the caller knows N, spares a wait for the device. Not to be changed in
    place: of bounds that came to a device by `to_device` it is kept.
    """
    found = _batches.get(ptr)
    if found is None or len(found) != num_points:
        found = torch.repeat_interleave(sizes_from_ptr(ptr), output_size=num_points)
        if ptr in _host_copies:
            # Asked for again and again in a step, each time in several launches.
            _batches[ptr] = found
    return found


def rows_of_clouds(ptr: Tensor, clouds: Tensor) -> Tensor:
    """Rows of the points of some clouds, one cloud after another, int64.

    `clouds`: (C,) int64, their numbers in any order.
    """
    sizes = sizes_from_ptr(ptr)[clouds]
    first = ptr[clouds] - ptr_from_sizes(sizes)[:-1]
    num_points = int(sizes.sum())
    shift = first.repeat_interleave(sizes, output_size=num_points)
    return shift + torch.arange(num_points, device=ptr.device)


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sum over every cloud, (N, ...) -> (B, ...), in the dtype of `values`; differentiable.

    Sums run in float64 (float32 on devices without it), so that a cloud's sum is the same
    whatever else is in the batch.
    """
    batch = batch_from_ptr(ptr, len(values))
    total = _accumulator(values)
    zeros = total.new_zeros((len(ptr) - 1, *values.shape[1:]))
    return zeros.index_add(0, batch, total).to(values.dtype)


def segment_mean(values: Tensor, ptr: Tensor) -> Tensor:
    """Mean over every cloud, (N, ...) -> (B, ...); 0 for an empty cloud; differentiable.

    Same accumulation as `segment_sum`.
    """
    mean: Tensor = _SegmentMean.apply(values, batch_from_ptr(ptr, len(values)), segment_counts(ptr))
    return mean


class _SegmentMean(torch.autograd.Function):
    """By hand, since automatic differentiation casts the gradient of every point to float64."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(batch, counts)
        total = _accumulator(values)
        count = counts.view(-1, *[1] * (values.dim() - 1))
        zeros = total.new_zeros((len(counts), *values.shape[1:]))
        return (zeros.index_add_(0, batch, total) / count).to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        batch, counts = ctx.saved_tensors
        share = grad / counts.view(-1, *[1] * (grad.dim() - 1))
        return share.index_select(0, batch), None, None


def segment_counts(ptr: Tensor) -> Tensor:
    """Number of points of every cloud (B,), at least 1; of bounds from `to_device` it is kept."""
    found = _kept_counts.get(ptr)
    if found is None:
        found = sizes_from_ptr(ptr).clamp(min=1)
        if ptr in _host_copies:
            _kept_counts[ptr] = found
    return found


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """Largest value of every cloud, (N, ...) -> (B, ...); 0 for an empty cloud; differentiable.

    The gradient of several equal maxima is shared among them.
    """
    batch = batch_from_ptr(ptr, len(values)).reshape(-1, *[1] * (values.dim() - 1))
    zeros = values.new_zeros((len(ptr) - 1, *values.shape[1:]))
    return zeros.scatter_reduce(0, batch.expand_as(values), values, "amax", include_self=False)


def segment_rank(values: Tensor, ptr: Tensor) -> Tensor:
    """Rank of every value (N,) among those of its cloud, 0 for the smallest, (N,) int64."""
    batch = batch_from_ptr(ptr, len(values))
    by_value = values.argsort()
    order = by_value[batch[by_value].argsort(stable=True)]
    rank = torch.empty_like(batch)
    rank[order] = torch.arange(len(values), device=values.device) - ptr[batch]
    return rank


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def segment_log_softmax(values: Tensor, ptr: Tensor) -> Tensor:
    """Log of the softmax (N, ...) of values (N, ...) over each cloud."""
    batch = batch_from_ptr(ptr, len(values))
    shifted = values - segment_max(values.detach(), ptr)[batch]
    return shifted - segment_sum(shifted.exp(), ptr).log()[batch]


def safe_sqrt(squared: Tensor) -> Tensor:
    """Square root with gradient 0, in place of NaN or infinity, at 0."""
    is_zero = squared <= 0
    return squared.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def widest_float(device: torch.device) -> torch.dtype:
    """What sums are kept in on a device: float64, but float32 on MPS, which has no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def _accumulator(values: Tensor) -> Tensor:
    return values.to(widest_float(values.device))
