"""Makes the table at the start of a run: data, device, token budget, steps, learning rate."""

from __future__ import annotations

import os
import platform

import torch

from pointup.training.config import TrainConfig
from pointup.training.faults.token_budget import describe_budget
from pointup.training.progress import RunSchedule
from pointup.training.run import Run
from pointup.training.tracking.tables import plan_table

MAX_NAMED = 20
"""Excluded samples that are printed; `pointup inspect` lists all."""

PRECISIONS = {"no": "fp32"}
"""The precision by Accelerate's name of mixed precision, where that does not say it."""


def plan_of_run(run: Run) -> str:
    """The table at the start of a run, followed by excluded samples and the checkpoint, if any."""
    config, data, accelerator, sampler = run.config, run.data, run.accelerator, run.sampler
    fill = sampler.statistics().fill
    mixed = accelerator.mixed_precision
    scaling = f", scaling {config.lr_scaling}" if config.lr_scaling != "none" else ""
    table = {
        "data": data.description,
        "device": f"{accelerator.device}, precision {PRECISIONS.get(mixed, mixed)}",
        "machine": f"{platform.machine()}, {os.cpu_count()} processors"
        + (f", {torch.cuda.get_device_name()}" if accelerator.device.type == "cuda" else ""),
        "weights": f"{run.reduction.num_weights:,}",
        "initial model": config.initial_model or "none, random weights",
        "processes": f"{accelerator.num_processes}, of "
        f"{config.accumulation_steps} micro-batch"
        f"{'es' if config.accumulation_steps > 1 else ''} per step",
        "token budget": describe_budget(config, data, sampler.token_budget, fill),
        "clouds per step": f"{sampler.num_samples / sampler.num_steps:.1f}",
        "steps": length_of_run(config, run.schedule, sampler.num_steps),
        "learning rate": f"{run.schedule.peak_learning_rate:.3g}{scaling}",
    }
    continued = [f"Continuing from {run.checkpoint}."] if run.checkpoint else []
    left_out = [f"Left out: {line}" for line in data.left_out[:MAX_NAMED]]
    if len(data.left_out) > MAX_NAMED:
        left_out.append(f"Left out: {len(data.left_out) - MAX_NAMED:,} more samples")
    return "\n".join([plan_table(table), *left_out, *continued])


def length_of_run(config: TrainConfig, schedule: RunSchedule, steps_per_epoch: int) -> str:
    """The length of a run as text; with the intervals for hours, from which they don't follow."""
    if config.hours is None:
        return f"{schedule.total_steps}, {steps_per_epoch} per epoch"
    return (
        f"as many as fit into {config.hours:g} h, {steps_per_epoch} per epoch; evaluated every "
        f"{schedule.eval_every}, saved every {schedule.save_every} or {config.save_minutes:g} min"
    )
