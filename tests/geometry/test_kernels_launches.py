"""Launches of the insertion kernel by concurrent programs, simulated pass by pass."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import needs_triton
from torch import Tensor

from pointup.geometry import thinning as insertion
from pointup.geometry.thinning import insertion_radii

pytestmark = needs_triton


class Concurrent:
    """The kernel, all of whose programs advance together; records the points before each launch."""

    def __init__(self) -> None:
        self.left: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor, state: Tensor,
            *numbers: Any, BLOCK: int, **constants: Any,
        ) -> None:  # fmt: skip
            radius, is_settled = (state & 0x7FFFFFFF).view(torch.float32), state < 0
            self.left.append((grid[0], int((~is_settled).sum())))
            other, has_parent = neighbor.long().clamp(min=0), parent >= 0
            parent = parent.long().clamp(min=0)
            number = torch.arange(len(state), dtype=torch.int32)
            first = number * -1640531535
            goes_first = first[other] > first[:, None]
            program = number.long() // BLOCK % grid[0]
            most = numbers[-1]
            patience = torch.full(grid, most)
            while patience.any():
                theirs, own = radius[other], radius[:, None]
                is_before = (theirs > own) | ((theirs == own) & goes_first)
                is_before &= (neighbor >= 0) & (squared < own)
                lowered = squared.masked_fill(~(is_before & is_settled[other]), torch.inf).amin(1)
                waits = has_parent & ~is_settled[parent]
                bound = torch.maximum(radius[parent], limit)
                bound = bound.masked_fill(~has_parent | waits, torch.inf)
                acts = ~is_settled & (patience > 0)[program]
                settles = acts & ~is_before.any(1) & ~waits & (bound >= radius)
                new = torch.minimum(radius, torch.minimum(lowered, bound))
                new = torch.where(acts & ~settles, new, radius)
                changes = torch.zeros(grid, dtype=torch.bool)
                changes[program[settles | (new != radius)]] = True
                radius, is_settled = new, is_settled | settles
                has_left = torch.zeros(grid, dtype=torch.bool)
                has_left[program[~is_settled]] = True
                rest = torch.where(changes, most, patience - 1)
                patience = torch.where(has_left & (patience > 0), rest, 0)
            bits = radius.view(torch.int32)
            state.copy_(torch.where(is_settled, bits | -(2**31), bits))

        return launch


@pytest.mark.parametrize("share", [2, 10, 50, 150])
@pytest.mark.parametrize("num_programs", [24, 1024])
def test_concurrent_programs_settle_all_points_in_the_first_launch(
    share: int, num_programs: int
) -> None:
    from pointup.geometry.kernels import insertion as kernel

    size = 3000
    pos = torch.rand(size, 3, generator=torch.Generator().manual_seed(0))
    pos[:, 2] *= 0.01
    clouds = pos, torch.tensor([0, size]), torch.tensor([size // share])
    expected = insertion_radii(*clouds)
    programs, rounds_to_wait = Concurrent(), kernel.rounds_to_wait

    def as_on_cuda(device: torch.device, num_levels: int) -> int:
        return rounds_to_wait(torch.device("cuda"), num_levels)

    with (
        mock.patch.object(insertion.kernels, "take", lambda pos, k: True),
        mock.patch.object(kernel, "insertion_kernel", programs),
        mock.patch.object(kernel, "programs_at_once", lambda device: num_programs),
        mock.patch.object(kernel, "rounds_to_wait", as_on_cuda),
    ):
        assert torch.equal(insertion_radii(*clouds), expected)
    # The second launch and the one of a single program end at once.
    assert [left for _, left in programs.left][1:] == [0, 0], programs.left
