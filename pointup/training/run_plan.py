"""Makes the table at the start of a run: data, device, token budget, steps, learning rate."""

from __future__ import annotations

import os
import platform

import torch

from pointup.training.faults.token_budget import describe_budget
from pointup.training.run import Run
from pointup.training.tracking.tables import plan_table

MAX_NAMED = 20
"""Excluded samples that are printed; `pointup inspect` lists all."""


def plan_of_run(run: Run) -> str:
    """The table at the start of a run, followed by excluded samples and the checkpoint, if any."""
    config, data, accelerator, sampler = run.config, run.data, run.accelerator, run.sampler
    fill = sampler.statistics().fill
    table = {
        "data": data.description,
        "device": f"{accelerator.device}, precision {accelerator.mixed_precision}",
        "machine": f"{platform.machine()}, {os.cpu_count()} processors"
        + (f", {torch.cuda.get_device_name()}" if accelerator.device.type == "cuda" else ""),
        "weights": f"{run.reduction.num_weights:,}",
        "processes": f"{accelerator.num_processes}, of "
        f"{config.accumulation_steps} micro-batches per step",
        "token budget": describe_budget(config, data, sampler.token_budget, fill),
        "clouds per step": f"{sampler.num_samples / sampler.num_steps:.1f}",
        "steps": f"{run.schedule.total_steps or '?'}, {sampler.num_steps} per epoch",
        "learning rate": f"{run.schedule.peak_learning_rate:.3g}, scaling {config.lr_scaling}",
    }
    continued = [f"Continuing from {run.checkpoint}."] if run.checkpoint else []
    left_out = [f"Left out: {line}" for line in data.left_out[:MAX_NAMED]]
    if len(data.left_out) > MAX_NAMED:
        left_out.append(f"Left out: {len(data.left_out) - MAX_NAMED:,} more samples")
    return "\n".join([plan_table(table), *left_out, *continued])
