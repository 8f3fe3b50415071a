"""Validates packed clouds before a search: the ptr fits the points, coordinates are finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pointup.errors import NonFiniteError
from pointup.geometry.packed import batch_from_ptr

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
    for _, ptr in distinct:
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
    if first != 0 or last != len(pos) or pos.dim() != 2:
        raise ValueError(
            f"ptr runs from {first} to {last} for points of shape {tuple(pos.shape)}; "
            "expected (N, 3) points and a ptr from 0 to N"
        )
    if num_reversed:
        raise ValueError("ptr decreases; it must hold the bounds of one cloud after another")
