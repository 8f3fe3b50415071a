"""How far a run has come, and when it is over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pointup.data.sampler import TokenBudgetBatchSampler
from pointup.training.config import TrainConfig

DEFAULT_STEPS = 200


@dataclass
class Progress:
    """Position of a run; what a checkpoint keeps of it beside weights and sampler.

    All of it is the same on every process.
    """

    step: int = 0
    """Optimizer steps done."""
    elapsed_seconds: float = 0.0
    """Time trained, by the main process's clock, without the gaps between continued runs."""
    best: float = math.inf
    """Lowest validation score so far: Chamfer as a share of the midpoints'."""
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    """Whether this step's evaluation is still to be made: a stop came before its end."""
    finished: bool = False
    out_of_memory: int = 0
    """Times out of memory since the token budget was last changed."""
    budget_at_start: int | None = None
    """The token budget that the run was started with last, where it has been lowered since."""
    lowered_budget: int | None = None

    def share_done(self, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> float:
        """Share of the run that is done, from 0 to 1, by time, by passes over the data or steps.

        A pass counts by its clouds, since its number of steps may change on the way.
        """
        if config.hours is not None:
            share = self.elapsed_seconds / (3600 * config.hours)
        elif config.epochs is not None:
            passes = sampler.epoch + 1 - sampler.num_left / len(sampler.sizes)
            share = round(passes / config.epochs, 9)
        else:
            share = self.step / (config.steps or DEFAULT_STEPS)
        return min(share, 1.0)

    def budget(self, settled: int) -> int:
        """The token budget in force: as settled, unless that very number has been lowered since."""
        if self.lowered_budget is not None and self.budget_at_start == settled:
            return self.lowered_budget
        return settled

    def judge(self, score: float, patience: int | None, target: float | None) -> bool:
        """Take in an evaluation's score; returns whether it is the best so far.

        Ends the run on reaching `target`, or after `patience` evaluations without a better one.
        """
        is_best = score < self.best
        self.best = min(self.best, score)
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        if (target is not None and score <= target) or self.evaluations_since_best == patience:
            self.finished = True
        return is_best


def length_in_steps(config: TrainConfig, steps_per_epoch: int) -> int | None:
    """Length of a run in optimizer steps, about, where given in epochs; None for one in hours."""
    if config.epochs is not None:
        return max(1, math.ceil(config.epochs * steps_per_epoch))
    return None if config.hours is not None else (config.steps or DEFAULT_STEPS)
