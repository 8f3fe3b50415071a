"""Steps on a real accelerator against the CPU: `pytest -m gpu`; skipped without one."""

from __future__ import annotations

import pytest
import torch

from pointup.benchmark.training_step import OneProcessGroup, TrainingWork, training_batch
from pointup.geometry.local_geometry import local_geometry
from pointup.geometry.neighbors import knn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch sees no accelerator"),
]


def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_has_a_loss_like_that_of_the_cpu(precision):
    batch = training_batch([300, 200, 400])
    there = TrainingWork(OneProcessGroup(device()), precision).step(batch.clone())
    here = TrainingWork(OneProcessGroup(torch.device("cpu")), "fp32").step(batch)
    # Other points are kept there, as even as those of the CPU.
    assert there == pytest.approx(here, rel=0.05)


def test_steps_on_the_accelerator_reduce_the_loss():
    batch = training_batch([300, 200, 400])
    work = TrainingWork(OneProcessGroup(device()), "bf16")
    losses = [work.step(batch) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_normals_are_those_of_the_cpu():
    pos = torch.rand(2000, 3) * torch.tensor([1.0, 1.0, 0.02])
    ptr = torch.tensor([0, 2000])
    here = local_geometry(pos, ptr, *knn(pos, ptr, 13))
    pos, ptr = pos.to(device()), ptr.to(device())
    there = local_geometry(pos, ptr, *knn(pos, ptr, 13))
    cosine = (there.normal.cpu() * here.normal).sum(1).abs()
    assert (cosine > 0.9999).float().mean() > 0.99
