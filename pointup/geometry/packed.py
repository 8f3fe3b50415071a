"""Packed clouds: `pos` (N, ...) holds B clouds one after another, `ptr` (B + 1,) their bounds.

Conversions between sizes, ptr and batch, sums over clouds, and bounds known to host and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from pointup.errors import NonFiniteError

_host_copies = WeakTensorKeyDictionary()
_batches = WeakTensorKeyDictionary()
_kept_counts = WeakTensorKeyDictionary()

COPIED_AHEAD = ("cuda", "xpu")
"""Devices whose backend keeps the host's memory, or a copy of it, until a copy from it is done."""


def is_on(values: Tensor, device: torch.device) -> bool:
    """Whether the values are on a device; one without an index, as `cuda`, is the current one.

    Devices of tensors have an index: compared for equality, `cuda:0` and `cuda` would differ.
    """
    own = values.device
    if own.type != device.type:
        return False
    if own.index in (None, device.index):
        return True
    return device.index is None and own.index == torch.accelerator.current_device_index()


def copied_ahead(device: torch.device) -> bool:
    """Whether copies from the host to the device may be `non_blocking`.

    Elsewhere a released source may be overwritten before it is read: on MPS that gives wrong values
    without an error.
    """
    return device.type in COPIED_AHEAD


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy bounds, sizes or ratios to the device; `on_host` then returns the host's copy at once.

    Values already on the device are returned as they are. Do not change the result in place: the
    host's copy would no longer agree.
    """
    if is_on(values, device):
        return values
    dtype = widest_float(device) if values.dtype == torch.float64 else values.dtype
    moved = values.to(device, dtype, non_blocking=copied_ahead(device))
    _host_copies[moved] = values
    return moved


def on_host(values: Tensor) -> Tensor:
    """The values on the CPU. Waits for the device unless `to_device` copied them there."""
    if values.device.type == "cpu":
        return values
    copy = _host_copies.get(values)
    return values.cpu() if copy is None else copy


def sizes_from_ptr(ptr: Tensor) -> Tensor:
    """Number of points of each cloud, (B,) int64."""
    return ptr[1:] - ptr[:-1]


def has_empty(ptr: Tensor) -> bool:
    """Whether a cloud has no points."""
    return bool((sizes_from_ptr(on_host(ptr)) == 0).any())


def ptr_from_sizes(sizes: Tensor) -> Tensor:
    """Bounds (B + 1,) int64 of clouds of the given sizes (B,); `[0]` for no cloud."""
    return torch.nn.functional.pad(sizes.long().cumsum(0), (1, 0))


def batch_from_ptr(ptr: Tensor, num_points: int | None = None) -> Tensor:
    """Number of the cloud of each point, (N,) int64.

    Pass `num_points` where N is known: it avoids a wait for the device. Do not change the result
    in place: it is cached for a `ptr` that `to_device` copied to a device.
    """
    found = _batches.get(ptr)
    if found is None or len(found) != num_points:
        found = torch.repeat_interleave(sizes_from_ptr(ptr), output_size=num_points)
        if ptr in _host_copies:
            # Needed many times in a step, at several launches each.
            _batches[ptr] = found
    return found


def rows_of_clouds(ptr: Tensor, clouds: Tensor) -> Tensor:
    """Rows of the points of the given clouds, one cloud after another, int64.

    `clouds`: (C,) int64, numbers of clouds in any order.
    """
    sizes = sizes_from_ptr(ptr)[clouds]
    first = ptr[clouds] - ptr_from_sizes(sizes)[:-1]
    num_points = int(sizes.sum())
    shift = first.repeat_interleave(sizes, output_size=num_points)
    return shift + torch.arange(num_points, device=ptr.device)


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sum over each cloud, (N, ...) -> (B, ...), in the dtype of `values`; differentiable.

    Sums are accumulated in float64 (float32 on devices without it), so that a cloud's sum does not
    depend on the rest of the batch.
    """
    batch = batch_from_ptr(ptr, len(values))
    total = _accumulator(values)
    zeros = total.new_zeros((len(ptr) - 1, *values.shape[1:]))
    return zeros.index_add(0, batch, total).to(values.dtype)


def segment_mean(values: Tensor, ptr: Tensor) -> Tensor:
    """Mean over each cloud, (N, ...) -> (B, ...); 0 for an empty cloud; differentiable.

    Accumulated as by `segment_sum`.
    """
    return _SegmentMean.apply(values, batch_from_ptr(ptr, len(values)), segment_counts(ptr))


class _SegmentMean(torch.autograd.Function):
    """The derivative is written by hand: autograd casts the gradient of each point to float64."""

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
    """Number of points of each cloud (B,), at least 1; cached for a `ptr` from `to_device`."""
    found = _kept_counts.get(ptr)
    if found is None:
        found = sizes_from_ptr(ptr).clamp(min=1)
        if ptr in _host_copies:
            _kept_counts[ptr] = found
    return found


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """Largest value of each cloud, (N, ...) -> (B, ...); 0 for an empty cloud; differentiable.

    Equal maxima share the gradient.
    """
    batch = batch_from_ptr(ptr, len(values)).reshape(-1, *[1] * (values.dim() - 1))
    zeros = values.new_zeros((len(ptr) - 1, *values.shape[1:]))
    return zeros.scatter_reduce(0, batch.expand_as(values), values, "amax", include_self=False)


def segment_rank(values: Tensor, ptr: Tensor) -> Tensor:
    """Rank of each value (N,) within its cloud, 0 for the smallest, (N,) int64."""
    batch = batch_from_ptr(ptr, len(values))
    by_value = values.argsort()
    order = by_value[batch[by_value].argsort(stable=True)]
    rank = torch.empty_like(batch)
    rank[order] = torch.arange(len(values), device=values.device) - ptr[batch]
    return rank


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 values are returned as they are."""
    return values if values.dtype == torch.float64 else values.float()


def segment_log_softmax(values: Tensor, ptr: Tensor) -> Tensor:
    """Logarithm of the softmax over each cloud, (N, ...) -> (N, ...)."""
    batch = batch_from_ptr(ptr, len(values))
    shifted = values - segment_max(values.detach(), ptr)[batch]
    return shifted - segment_sum(shifted.exp(), ptr).log()[batch]


def safe_sqrt(squared: Tensor) -> Tensor:
    """Square root, with the gradient 0 (not NaN or infinity) at 0."""
    return _SafeSqrt.apply(squared)


class _SafeSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, squared: Tensor) -> Tensor:
        root = squared.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (grad / (2 * root)).masked_fill_(root == 0, 0.0)


def exact_sqrt(values: Tensor) -> Tensor:
    """Square root, correctly rounded on all devices; that of torch on the CPU (MKL) is not."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sqrt(values.numpy()))
    return values.sqrt()


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype of accumulators on a device: float64, or float32 on MPS, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _accumulator(values: Tensor) -> Tensor:
    return values.to(widest_float(values.device))


_is_assumed = ContextVar("validity is assumed", default=False)


@contextmanager
def assume_valid() -> Iterator[None]:
    """Context: searches on devices other than the CPU do not check their input.

    A check waits for the device, once per search. Without it, a point that is not finite gets no
    neighbours from `knn` and the distance NaN from `nearest`; a ptr that does not fit the points
    causes out-of-bounds reads.
    """
    token = _is_assumed.set(True)
    try:
        yield
    finally:
        _is_assumed.reset(token)


def check_clouds(*clouds: tuple[Tensor, Tensor]) -> None:
    """Check each pair of points (N, 3) and ptr (B + 1,), with one read from the device for all.

    Raises NonFiniteError for points that are not finite (naming the cloud), ValueError for a ptr
    that is not int64, decreases or does not fit the points, and for sets with different numbers of
    clouds.
    """
    (_, query_ptr), (pos, ptr) = clouds[0], clouds[-1]
    if len(query_ptr) != len(ptr):
        raise ValueError(
            f"{len(query_ptr) - 1} clouds of queries for {len(ptr) - 1} clouds of points; "
            "give one query cloud, empty if need be, for every cloud"
        )
    if _is_assumed.get() and pos.device.type != "cpu":
        return
    # The points are often their own queries.
    distinct = clouds[:1] if clouds[0][0] is pos else clouds
    for pos, ptr in distinct:
        if not (isinstance(pos, Tensor) and isinstance(ptr, Tensor)):
            kinds = f"{type(pos).__name__} and {type(ptr).__name__}"
            raise ValueError(f"points and ptr are {kinds}: make tensors, as by torch.as_tensor")
        _check_kind(ptr)
    answers = [
        torch.stack([*_summary(ptr), torch.isfinite(pos).all().to(ptr.dtype)])
        for pos, ptr in distinct
    ]
    for (pos, ptr), (*summary, is_finite) in zip(
        distinct, torch.stack(answers).tolist(), strict=True
    ):
        _check_bounds(pos, *summary)
        if not is_finite:
            bad = ~torch.isfinite(pos).all(1)
            cloud = int(batch_from_ptr(ptr, len(pos))[bad][0])
            raise NonFiniteError(
                f"cloud {cloud} has coordinates that are not finite; drop those points"
            )


def check_ptr(pos: Tensor, ptr: Tensor) -> None:
    """Raise ValueError for a ptr on the CPU that is not int64, decreases or does not fit the points
    (N, 3) on any device."""
    _check_kind(ptr)
    _check_bounds(pos, *torch.stack(_summary(ptr)).tolist())


def _summary(ptr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First bound, last bound and number of clouds that end before they start."""
    return ptr[0], ptr[-1], (ptr[1:] < ptr[:-1]).sum()


def _check_kind(ptr: Tensor) -> None:
    if ptr.dtype != torch.int64 or ptr.dim() != 1 or not len(ptr):
        raise ValueError(f"ptr of shape {tuple(ptr.shape)} and {ptr.dtype}: must be (B + 1,) int64")


def _check_bounds(pos: Tensor, first: int, last: int, num_reversed: int) -> None:
    if first != 0 or last != len(pos) or pos.shape[1:] != (3,):
        raise ValueError(
            f"ptr runs from {first} to {last} for points of shape {tuple(pos.shape)}; "
            "expected (N, 3) points and a ptr from 0 to N"
        )
    if num_reversed:
        raise ValueError("ptr decreases; it must hold the bounds of one cloud after another")
