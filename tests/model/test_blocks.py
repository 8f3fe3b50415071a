from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from forest_options import FOREST
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pointup.geometry.packed import ptr_from_sizes
from pointup.model.blocks import Block, in_blocks
from pointup.model.upsampler import Upsampler

OPTIONS = FOREST | {"column_stride": 2, "slots_per_ratio": 3.0}


def gradients(model: Upsampler, recompute: bool) -> list[Tensor]:
    model.recompute = recompute
    model.zero_grad()
    pos = torch.rand(28, 3, generator=torch.Generator().manual_seed(2))
    output = model(pos, ptr_from_sizes(torch.tensor([20, 8])), 3.0)
    loss = output.pos.square().sum()
    if output.log_error is not None:
        loss = loss + output.log_error.sum()
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def model_of(**options: Any) -> Upsampler:
    torch.manual_seed(0)
    options = {"num_layers": 1, "num_refinements": 2, **options}
    model = Upsampler(feature_dim=8, k=4, **options)
    for weight in model.parameters():  # Weights of offsets are zero before training.
        if not weight.any() and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_recomputed_and_kept_blocks_give_the_gradients_of_the_whole(options):
    model = model_of(**options)
    whole = gradients(model, recompute=False)
    with (
        mock.patch("pointup.model.encoder.points_per_block", lambda device: 12),
        mock.patch("pointup.model.children.children_per_block", lambda device: 40),
    ):
        again, kept = gradients(model, recompute=True), gradients(model, recompute=False)
    assert len(again) == len(kept) == len(whole) > 10
    for one, other, all_at_once in zip(again, kept, whole, strict=True):
        # Up to the rounding of the largest terms.
        limits = {"rtol": 1e-5, "atol": 1e-6 * max(1, float(other.abs().max()))}
        torch.testing.assert_close(one, other, **limits)
        torch.testing.assert_close(one, all_at_once, **limits)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.floats(0, 1), st.integers())
def test_gradients_are_right_for_any_slots_with_a_gradient(
    num_points, num_slots, block_size, share, seed
):
    random = torch.Generator().manual_seed(seed % 2**31)
    table, by_slot = torch.randn(2, 6, 3, generator=random).requires_grad_().unbind(0)
    rows = torch.randn(num_points, 3, generator=random).requires_grad_()
    weight = torch.randn(3, generator=random).requires_grad_()
    index = torch.randint(6, (num_points, 2), generator=random)
    index_by_slot = torch.randint(6, (num_points, num_slots), generator=random)
    constant = torch.randn(num_points, num_slots, 1, generator=random)
    has_gradient = torch.rand(num_points, num_slots, generator=random) < share
    computed: list[int] = []

    def work(block: Block, near: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        computed.append(slots[..., 0].numel())
        together = (near.prod(1) + rows).unsqueeze(1)
        return (together * slots * weight + block.of_slots(constant)).sin()

    joined = in_blocks(
        work,
        num_points,
        block_size,
        gathered=[(table, index)],
        gathered_by_slot=[(by_slot, index_by_slot)],
        rows=[rows],
        parameters=[weight],
    )
    assert sum(computed) == has_gradient.numel()
    computed.clear()
    leaves = [table, by_slot, rows, weight]
    found = torch.autograd.grad(joined[has_gradient].sum(), leaves)
    assert has_gradient.sum() <= sum(computed) <= has_gradient.numel()
    assert has_gradient.any() or not computed
    assert max(computed, default=0) <= block_size * num_slots

    together = (table[index].prod(1) + rows).unsqueeze(1)
    at_once = (together * by_slot[index_by_slot] * weight + constant).sin()
    torch.testing.assert_close(joined, at_once)
    expected = torch.autograd.grad(at_once[has_gradient].sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_slots_with_a_gradient_are_recomputed():
    computed: list[int] = []

    def work(block: Block, slots: Tensor) -> Tensor:
        computed.append(slots[..., 0].numel())
        return slots * 2

    random = torch.Generator().manual_seed(0)
    # These numbers of points fill blocks of 100 points times 6 slots exactly.
    num_with_gradient = torch.tensor(900 * [4] + 1200 * [2] + 300 * [0])
    num_with_gradient = num_with_gradient[torch.randperm(2400, generator=random)]
    has_gradient = (
        torch.rand(2400, 6, generator=random).argsort(1).argsort(1) < num_with_gradient[:, None]
    )
    index = torch.randint(9, (2400, 6), generator=random)
    table = torch.randn(9, 3, requires_grad=True)
    joined = in_blocks(work, 2400, 100, gathered_by_slot=[(table, index)])
    computed.clear()
    joined[has_gradient].sum().backward()
    assert computed == 10 * [600]
    assert table.grad is not None
    expected = 2.0 * torch.bincount(index[has_gradient], minlength=9)
    torch.testing.assert_close(table.grad, expected[:, None].expand(9, 3))


class SumsOfRows(TorchDispatchMode):
    """Notes the dtype of everything that rows are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_a_table_in_16_bits_is_summed_in_float32():
    # The CPU does so even where it adds to 16 bits, so that no value tells.
    table = torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(5, (4, 2))
    with SumsOfRows() as sums:
        joined = in_blocks(lambda block, rows: rows.sum(1), 4, 4, gathered=[(table, index)])
        joined.float().sum().backward()
    assert sums.dtypes == [torch.float32]
    assert table.grad is not None and table.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_backward_pass_can_follow(mode):
    weight, is_recorded = torch.ones(3, requires_grad=True), []

    def work(block: Block, rows: Tensor) -> Tensor:
        is_recorded.append(torch.is_grad_enabled())
        return rows * weight

    def run() -> None:
        in_blocks(work, 4, 2, rows=[torch.ones(4, 3)], parameters=[weight], recompute=False)

    with mode():
        run()
    run()
    assert is_recorded == [False, False, True, True]
