"""Midpoints between neighbours: the anchors of the model, and the midpoint baseline."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pointup.geometry.neighbors import knn
from pointup.geometry.packed import on_host, ptr_from_sizes, sizes_from_ptr, to_device
from pointup.geometry.thinning import farthest_point_sample

# Multiples of it, modulo 1, are spread evenly, however many there are.
_GOLDEN = 0.618034


def output_sizes(ptr: Tensor, ratio: Tensor | float) -> Tensor:
    """Number of points of each cloud after upsampling, `round(ratio * N)`.

    Shapes: `ptr` (B+1,), `ratio` a number or (B,), result (B,) int64.
    Raises ValueError for a ratio that is no number, below 1 or not finite, and for another number
    of ratios than of clouds.
    """
    sizes = sizes_from_ptr(on_host(ptr))
    ratios = in_float64(ratio)
    if ratios.shape not in ((), (1,), sizes.shape):
        raise ValueError(
            f"upsampling ratio of shape {tuple(ratios.shape)} for {len(sizes)} clouds; give a "
            "number, or one for each cloud"
        )
    ratios = ratios.expand(sizes.shape)
    invalid = ~(torch.isfinite(ratios) & (ratios >= 1.0))
    if invalid.any():
        raise ValueError(
            f"upsampling ratio {ratios[invalid][0].item():g} is not a finite number of at least 1; "
            "thin the cloud to get fewer points"
        )
    return to_device((ratios * sizes).round().long(), ptr.device)


def in_float64(ratio: Tensor | float) -> Tensor:
    """The ratio on the CPU; a number would become float32, in which 1.05 x 30 is below 31.5."""
    if isinstance(ratio, Tensor):
        return on_host(ratio).double()
    try:
        return torch.tensor(ratio, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"upsampling ratio {ratio!r:.40} is no number; give one, or a tensor with one for each "
            "cloud"
        ) from None


def slots_for_ratio(ratio: Tensor | float, slots_per_ratio: float = 2.0) -> Tensor:
    """Number of slots (candidates) of each point: `ceil(slots_per_ratio * ratio)`, on the CPU.

    With the default of 2 there are twice as many candidates as output points, so that thinning
    has a choice.
    """
    ratios = in_float64(ratio)
    # The rounding error of a ratio computed as M / N must not add a slot.
    return (slots_per_ratio * ratios - 1e-9).ceil().clamp(min=1).long()


def slot_ranks(num_slots: int, extrapolation: bool) -> Tensor:
    """Ranks (num_slots,) int64 of the neighbours that the slots of a point are tied to, 0 for the
    point itself.

    With `extrapolation` every second slot extrapolates from the neighbour of the slot before it:
    ranks 0, 1, 1, 2, 2, ...
    """
    slots = torch.arange(num_slots, device="cpu")
    return (slots + 1) // 2 if extrapolation else slots


def depths_of_slots(num_slots: int) -> Tensor:
    """Depths (num_slots,) float32 of the anchors below the point, as a share of the drop to the
    lowest point of its column: for every eighth slot, evenly spread over (0, 1); for others 0."""
    order = torch.arange(num_slots, dtype=torch.float32, device="cpu").sub(7).div(8)
    descends = (order >= 0) & (order == order.floor())
    return torch.where(descends, (0.5 + _GOLDEN * order) % 1.0, 0.0)


def same_number_of_slots(slots: Tensor, ptr: Tensor) -> list[tuple[int, slice]]:
    """Runs of consecutive clouds with equal numbers of slots, as (slots, slice of their points).

    Shapes: `slots` (B,), `ptr` (B+1,). Runs without points are left out.
    """
    values, lengths = torch.unique_consecutive(slots, return_counts=True)
    borders = ptr[ptr_from_sizes(lengths)].tolist()
    return [
        (num_slots, slice(start, stop))
        for num_slots, (start, stop) in zip(values.tolist(), pairwise(borders), strict=True)
        if stop > start
    ]


def midpoints(pos: Tensor, index: Tensor) -> Tensor:
    """Midpoints between each point and its neighbours.

    Shapes: `pos` (N, 3), `index` (N, R) neighbours as `knn` returns them, result (N, R, 3).
    For a missing neighbour (index -1) the midpoint is the point itself.
    """
    own = torch.arange(len(pos), device=pos.device).unsqueeze(1)
    neighbor = torch.where(index < 0, own, index)
    return (pos.unsqueeze(1) + pos[neighbor]) * 0.5


def midpoint_upsample(pos: Tensor, ptr: Tensor, ratio: Tensor | float) -> tuple[Tensor, Tensor]:
    """The midpoint baseline: upsample without a network.

    Takes the midpoints between each point and its 2r nearest points, the point itself among them.
    Farthest-point sampling thins them to exactly `round(ratio * N)` points per cloud.

    Shapes: `pos` (N, 3) float32, `ptr` (B+1,), `ratio` a number or (B,); returns packed points
    (M, 3) and their ptr (B+1,). Raises ValueError as `output_sizes` does.
    """
    num_out = output_sizes(ptr, ratio)
    sizes = sizes_from_ptr(on_host(ptr))
    slots = slots_for_ratio(ratio).expand(sizes.shape)
    if len(pos) == 0:
        return pos, ptr
    _, index = knn(pos, ptr, int(slots.max()))
    rank = torch.arange(index.shape[1], device="cpu")
    is_slot = rank < slots.repeat_interleave(sizes).unsqueeze(1)
    candidates = midpoints(pos, index)[is_slot.to(pos.device)]
    candidates_ptr = to_device(ptr_from_sizes(sizes * slots), ptr.device)
    picked = farthest_point_sample(candidates, candidates_ptr, num_out)
    return candidates[picked], to_device(ptr_from_sizes(on_host(num_out)), ptr.device)
