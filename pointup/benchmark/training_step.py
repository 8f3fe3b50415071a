"""The optimizer step of `train.py` with the time of each part, and batches of any size for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pointup.datasets.batch import collate, move
from pointup.datasets.pair_dataset import in_spatial_order
from pointup.geometry.packed import assume_valid
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import make_optimizer, now, sum_in_float32
from pointup.training.distributed.reduction import StepReduction
from pointup.training.objective import LossConfig, cloud_losses, target_spacing, training_ratio

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("forward", "loss", "backward", "update")
RATIO = 4.0
"""Points of a target for each point of its source."""
MAX_RATIO = 16.0


def sheet(num_points: int, seed: int, noise: float = 0.0) -> Tensor:
    """Random points (N, 3) float32 on a hilly surface over the unit square."""
    random = torch.Generator().manual_seed(seed)
    x, y = torch.rand(2, num_points, generator=random)
    z = 0.15 * (7 * x).sin() * (5 * y).cos() + 0.03 * (31 * x + 17 * y).sin()
    return torch.stack([x, y, z], dim=1) + noise * torch.randn(num_points, 3, generator=random)


def training_batch(sizes: Sequence[int]) -> Batch:
    """A batch of pairs with sources of the given sizes and targets of `RATIO` times as many points.

    Points are in the order of `PairDataset`.
    """
    pairs = []
    for number, size in enumerate(sizes):
        clouds = {
            "source": sheet(size, 2 * number).numpy(),
            "target": sheet(round(RATIO * size), 2 * number + 1).numpy(),
        }
        source, target = map(torch.from_numpy, in_spatial_order(clouds).values())
        pairs.append(Data(pos=source, target=target, name=f"sheet {number}", index=number))
    return collate(pairs)


@dataclass(frozen=True)
class OneProcessGroup:
    """The part of an Accelerator's interface that `StepReduction` needs, for a single process."""

    device: torch.device
    num_processes: int = 1
    process_index: int = 0
    scaler: None = None

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


class TrainingWork:
    """A model, the default one if none is given, its optimizer and its training step.

    `group` is an Accelerator or `OneProcessGroup`. fp16 is timed without loss scaling.
    """

    def __init__(self, group: Any, precision: str = "fp32", model: Upsampler | None = None) -> None:
        sum_in_float32()
        torch.manual_seed(0)
        self.device: torch.device = group.device
        self.dtype = PRECISIONS[precision]
        self.model = (model or Upsampler()).train().to(self.device)
        self.optimizer = make_optimizer(self.model.parameters(), self.device)
        self.reduction = StepReduction(group, self.model.parameters())
        self.seconds: dict[str, float] = {}
        """Seconds of each part of the last step."""

    def step(self, batch: Batch) -> float:
        """Forward, loss, backward, reduction and update on one micro-batch; returns its loss."""
        batch = move(batch, self.device)
        self.optimizer.zero_grad()
        ticks = [now(self.device)]
        with assume_valid():
            ratio = training_ratio(batch, None, MAX_RATIO)
            autocast = torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()
            with autocast:
                output = self.model(batch.pos, batch.ptr, ratio)
            ticks.append(now(self.device))
            spacing = target_spacing(output.gaps, batch.ptr, ratio)
            losses = cloud_losses(output, batch, spacing, LossConfig())
            ticks.append(now(self.device))
            losses.sum().backward()
            self.reduction.add(losses)
            ticks.append(now(self.device))
        loss, num_clouds = self.reduction.reduce(torch.tensor([float(len(losses))]))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        ticks.append(now(self.device))
        durations = [after - before for before, after in pairwise(ticks)]
        self.seconds = dict(zip(PARTS, durations, strict=True))
        return loss / num_clouds
