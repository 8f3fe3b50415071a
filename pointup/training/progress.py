"""How far a run has come, and when it is over."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    def share_done(self, total_steps: int | None, hours: float | None) -> float:
        """Share of the run that is done, from 0 to 1, by steps or by time."""
        if total_steps is not None:
            return min(self.step / total_steps, 1.0)
        assert hours is not None
        return min(self.elapsed_seconds / (3600 * hours), 1.0)

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


def length_in_steps(
    steps: int | None, epochs: float | None, hours: float | None, steps_per_epoch: int
) -> int | None:
    """Length of a run in optimizer steps; None where it is given in hours, 200 by default."""
    if epochs is not None:
        return max(1, math.ceil(epochs * steps_per_epoch))
    return None if hours is not None else (steps or 200)
