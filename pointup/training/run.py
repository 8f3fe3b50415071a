"""`Run`: the objects of a training run, shared by the functions of train.py."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.distributed.preemption import StopRequest
from pointup.training.distributed.reduction import StepReduction
from pointup.training.evaluation import Evaluation
from pointup.training.faults.non_finite_steps import NonFiniteSteps
from pointup.training.faults.watchdog import Watchdog
from pointup.training.progress import Progress, RunSchedule
from pointup.training.run_directory.checkpoint import Saver
from pointup.training.tracking.monitor import Monitor
from pointup.training.training_state import TrainingState

logger = logging.getLogger("pointup")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that `set_up` in train.py makes and the training loop uses."""

    config: TrainConfig
    accelerator: Accelerator
    data: TrainingData
    model: torch.nn.Module
    """The weights after `Accelerator.prepare`, with autocast and data parallelism."""
    forward_backward: Callable[..., Tensor]
    """Returns the losses (B,) of a micro-batch at a `share` of the run, and adds its gradients to
    the weights."""
    trained: TrainingState
    reduction: StepReduction
    token_budget: int
    """The budget at the start of the run; the sampler's is lower after it was lowered."""
    sampler: TokenBudgetBatchSampler
    schedule: RunSchedule
    evaluation: Evaluation
    progress: Progress
    started: float
    """`time.monotonic()` at this start, minus the training time of earlier starts."""
    checkpoint: Path | None
    """The checkpoint that the run continues from; None for a new run."""
    saver: Saver
    monitor: Monitor
    watchdog: Watchdog
    non_finite: NonFiniteSteps
    stop: StopRequest

    @property
    def is_save_due(self) -> bool:
        """Whether to save now: after `save_every` steps, `save_minutes`, or at the end of the run.

        The training time is that of process 0, so that all processes agree.
        """
        progress = self.progress
        is_late = progress.elapsed_seconds - self.saver.saved_at >= 60 * self.config.save_minutes
        return is_late or progress.finished or progress.step % self.schedule.save_every == 0

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint; every process must call this."""
        self.saver.saved_at = self.progress.elapsed_seconds
        self.watchdog.enter_phase(self.saver.phase)
        self.monitor.flush()
        self.saver.save(must_succeed)

    def judge(self, score: float) -> None:
        """Record the score of an evaluation, and save the model if it is the best so far; every
        process must call this.

        If it can't be saved, the score does not count as the best, so that a later evaluation that
        is better than the saved model is saved. At the end of the run CheckpointError is raised.
        The log warns at the end of a run in which no model was saved.
        """
        progress, config, best_before = self.progress, self.config, self.progress.best
        is_best = progress.judge(score, config.patience, config.target_chamfer)
        if is_best and not self.saver.save_best(must_succeed=progress.finished):
            progress.best = best_before
        if progress.finished and math.isinf(progress.best):
            logger.warning(
                "no model was saved: no evaluation measured it on all validation clouds (see the "
                "warnings before); the last weights are in %s",
                config.output_dir / "checkpoints",
            )
