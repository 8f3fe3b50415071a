"""Groups of clouds with similar numbers of slots, whose points are expanded together.

Each group runs through the operations of `Upsampler.place_children` separately. Where launching
them takes longer than the work, it is faster to expand clouds with fewer slots to more slots than
needed, and to discard the surplus afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pointup.geometry.packed import (
    batch_from_ptr,
    on_host,
    ptr_from_sizes,
    sizes_from_ptr,
    to_device,
)


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
) -> tuple[Tensor, Tensor]:
    """The parent of each candidate, and its row among all children.

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
    # Surplus slots of the preceding points.
    skipped = point * num_left_out
    return first_point + point, first_child + within + skipped
