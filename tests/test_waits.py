from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from pointup.bench.clouds import training_batch
from pointup.bench.work import Alone
from pointup.data.batch import move
from pointup.geometry.packed import on_host, to_device
from pointup.geometry.validity import assume_valid
from pointup.model import Upsampler
from pointup.training.memory import num_tokens
from pointup.training.objective import LossConfig, cloud_losses, target_spacing, training_ratio
from pointup.training.reduction import StepReduction

# Tensors there have shapes but no values: whatever would wait for a device to read one fails.
UNREADABLE = torch.device("meta")
LOSSES = [
    LossConfig(repulsion=0.1),
    LossConfig(chamfer="density-aware", trim=0.1),
    LossConfig(chamfer="squared", density=0.0),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.chamfer)
@pytest.mark.parametrize(("recompute", "ratio"), [(True, None), (False, 2.5)])
def test_a_step_reads_nothing_from_the_device(
    loss: LossConfig, recompute: bool, ratio: float | None
) -> None:
    model = Upsampler(feature_dim=8, k=4, num_layers=1, dropout=0.1).to(UNREADABLE)
    model.recompute = recompute
    batch = training_batch([12, 8, 0, 3])
    batch.target_normals = torch.rand(len(batch.target), 3)
    batch = move(batch, UNREADABLE)
    reduction = StepReduction(Alone(UNREADABLE), model.parameters())
    # The pretended device has no autocast.
    with (
        mock.patch("torch.get_autocast_dtype", lambda device: torch.bfloat16),
        mock.patch("torch.is_autocast_enabled", lambda device: False),
        mock.patch("torch.autocast", lambda *args, **options: nullcontext()),
        assume_valid(),
    ):
        reduction.start()
        ratios = training_ratio(batch, ratio, 16.0)
        output = model(batch.pos, batch.ptr, ratios)
        losses = cloud_losses(output, batch, target_spacing(batch.pos, batch.ptr, ratios), loss)
        losses.sum().backward()
        reduction.add(losses, num_tokens(batch), batch.name)
    assert losses.device == UNREADABLE and losses.shape == (4,)
    assert len(output.pos) == sum(round((ratio or 4) * size) for size in (12, 8, 3))


def test_what_the_host_knew_it_still_knows_on_the_device() -> None:
    ptr = torch.tensor([0, 3, 8])
    moved = to_device(ptr, UNREADABLE)
    assert moved.device == UNREADABLE and torch.equal(on_host(moved), ptr)
    with pytest.raises(NotImplementedError):
        on_host(moved + 1)
