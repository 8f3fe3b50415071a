from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from pointup import attention, blocks
from pointup.blocks import in_blocks
from pointup.geometry.packed import ptr_from_sizes
from pointup.model import Upsampler


def gradients(model: Upsampler, recompute: bool) -> list[Tensor]:
    torch.manual_seed(1)  # Of dropout.
    model.recompute = recompute
    model.zero_grad()
    pos = torch.rand(28, 3, generator=torch.Generator().manual_seed(2))
    output = model(pos, ptr_from_sizes(torch.tensor([20, 8])), 3.0)
    output.pos.square().sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def model_of(dropout: float) -> Upsampler:
    torch.manual_seed(0)
    model = Upsampler(feature_dim=8, k=4, num_layers=1, num_refinements=2, dropout=dropout)
    for weight in model.parameters():  # Zero before training are those that move the children.
        if not weight.any() and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_computed_again_or_kept(dropout: float) -> None:
    model = model_of(dropout)
    with mock.patch("pointup.model.points_per_block", lambda device: 40):
        again, kept = gradients(model, recompute=True), gradients(model, recompute=False)
    assert len(again) == len(kept) > 10
    for one, other in zip(again, kept, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_attention_is_not_computed_again() -> None:
    model = model_of(0.0)
    counts = []
    for recompute in (True, False):
        with mock.patch.object(attention, "softmax", side_effect=attention.softmax) as softmax:
            gradients(model, recompute)
        counts.append(softmax.call_count)
    assert counts[0] == counts[1] > 0
    assert blocks._remember.get() is None


def test_what_fails_in_a_block_leaves_nothing_remembered() -> None:
    def fail(block: slice, rows: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        in_blocks(fail, 4, 2, rows=[torch.ones(4, 1, requires_grad=True)])
    assert blocks._remember.get() is None
