"""The parts of a run, which the functions of train.py share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.distributed.preemption import StopRequest
from pointup.training.distributed.reduction import StepReduction
from pointup.training.evaluation import Evaluation
from pointup.training.faults.non_finite_steps import NonFiniteSteps
from pointup.training.faults.watchdog import Watchdog
from pointup.training.progress import Progress, RunSchedule
from pointup.training.run_directory.checkpointing import Saver
from pointup.training.tracking.monitor import Monitor


@dataclass(frozen=True, kw_only=True)
class Run:
    """What `set_up` of train.py makes and its training loop uses."""

    config: TrainConfig
    accelerator: Accelerator
    data: TrainingData
    weights: Upsampler
    model: torch.nn.Module
    """`weights` as `Accelerator.prepare` returns them, for autocast and data parallelism."""
    forward_backward: Callable[[Batch], Tensor]
    """Losses of a micro-batch, whose gradients it leaves in the weights."""
    optimizer: AcceleratedOptimizer
    reduction: StepReduction
    token_budget: int
    """The budget that the run was started with; the sampler's is less once memory ran out."""
    sampler: TokenBudgetBatchSampler
    schedule: RunSchedule
    evaluation: Evaluation
    progress: Progress
    started: float
    """`time.monotonic()` when the run began, less the time between its continuations."""
    checkpoint: Path | None
    """The checkpoint that the run continues from."""
    saver: Saver
    monitor: Monitor
    watchdog: Watchdog
    non_finite: NonFiniteSteps
    stop: StopRequest
