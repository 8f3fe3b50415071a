"""Benchmark of training steps against the reference implementation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import psutil
import torch
from torch import Tensor

from pointup.benchmark.clouds import RATIO, training_batch
from pointup.benchmark.optimizer_steps import SingleProcess, TrainingWork
from pointup.benchmark.peak_memory import PeakMemory
from pointup.benchmark.reference_implementation import (
    reference_chamfer_distance,
    reference_upsample,
)
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort, compare
from pointup.benchmark.training_speed import token_budget
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import device_module
from pointup.training.objective import LossConfig

QUICK_SIZES = (500, 2000)
SIZES = (500, 2000, 5000, 20_000)
SHARE_OF_MEMORY = 0.8
LONGEST = 15.0
"""Seconds for all rounds of one size; a single round may take longer."""


class ReferenceWork:
    """The default model, its optimizer and a training step of the reference implementation."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Upsampler().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, pos: Tensor, target: Tensor, recompute: bool = False) -> None:
        output, _ = reference_upsample(self.model, pos, RATIO)
        self.optimizer.zero_grad()
        reference_chamfer_distance(output, target, recompute).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    device = effort.device
    # Without a learned density thinning is even, as in the reference.
    work = TrainingWork(SingleProcess(device), loss=LossConfig(density=0.0))
    reference = ReferenceWork(device)
    seconds = bytes_per_token = 0.0
    measured = 1
    for size in QUICK_SIZES if effort.quick else SIZES:
        tokens = round((1 + RATIO) * size)
        row: Row = {"size": size}
        # Bytes of the distance matrices between output and target, both directions.
        matrices = 2 * 4 * round(RATIO * size) ** 2
        room = SHARE_OF_MEMORY * free_memory(device) - bytes_per_token * tokens
        recompute = matrices > room
        # The time of brute force is quadratic in the size.
        expected = seconds * (size / measured) ** 2 * (1 + recompute / 3)
        if refusal := bound.refusal(expected):
            yield row | {"left_out": refusal}
            continue
        if room < 0:
            needed = bytes_per_token * tokens / 1e9
            yield row | {"left_out": f"the plain PyTorch step would need {needed:.0f} GB"}
            continue
        num_clouds = max(1, token_budget(device) // (2 if effort.quick else 1) // tokens)
        batch = training_batch([size] * num_clouds).to(device)
        single = training_batch([size]).to(device)
        with PeakMemory(device) as memory:
            work.step(batch)
        plain_step = partial(reference.step, single.pos, single.target, recompute)
        # Outside of the comparison: measuring the memory takes time, too.
        with PeakMemory(device) as plain_memory:
            plain_step()
        ours, theirs = compare(
            partial(work.step, batch), plain_step, min(bound.left, LONGEST), device
        )
        seconds, measured = theirs, size
        bytes_per_token = max(0, plain_memory.bytes - matrices * (not recompute)) / tokens
        rate, reference_rate = num_clouds * tokens / ours, tokens / theirs
        yield row | {
            "step": rate,
            "plain": reference_rate,
            "ratio": rate / reference_rate,
            "memory": memory.bytes / (num_clouds * tokens),
            "plain_memory": plain_memory.bytes / tokens,
            "matrices": "again" if recompute else "kept",
        }


def free_memory(device: torch.device) -> int:
    module = device_module(device)
    if module is not None:
        return int(module.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


SECTION = Section(
    "reference",
    "Training steps against plain PyTorch, tokens/s",
    (
        Column("size", "points", ",", is_key=True),
        Column("step", "pointup", ",.0f", "higher"),
        Column("plain", "plain PyTorch", ",.0f"),
        Column("ratio", "times as fast", ".1f", "higher"),
        Column("memory", "bytes/token", ",.0f", "lower"),
        Column("plain_memory", "plain bytes/token", ",.0f"),
        Column("matrices", "plain matrices"),
    ),
    measure,
    note="Plain PyTorch: the same network on one cloud per step, each tensor whole, derivatives\n"
    "by autograd, Chamfer distance and neighbours by torch.cdist in chunks, the same thinning.\n"
    "Both without the density loss, which section `step` includes. Distance matrices that do not\n"
    "fit in memory are computed again in the backward pass.",
)
