"""Progress and schedule of a run: position, end, learning rate, evaluation and save intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, get_type_hints

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import TrainingError
from pointup.training.config import TrainConfig, default_evaluations, default_steps
from pointup.training.distributed.reduction import StepTotals
from pointup.training.schedule import learning_rate_at, scaled_learning_rate

STEPS_BETWEEN_EVALUATIONS = 500
"""Used if neither an option nor a known number of steps sets it."""


@dataclass
class Progress:
    """Position of a run, which checkpoints store beside weights, optimizer and sampler.

    It is the same on every process.
    """

    step: int = 0
    """Optimizer steps done."""
    elapsed_seconds: float = 0.0
    """Training time by the clock of the main process, without the time between continuations."""
    best: float = math.inf
    """Lowest validation score so far: Chamfer distance divided by that of the midpoint baseline."""
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    """Whether the evaluation of this step is pending, for example after a stop request."""
    finished: bool = False
    skipped: int = 0
    """Steps without an update, for a non-finite loss or gradient."""
    unreadable: int = 0
    """Samples that were left out of their step because they couldn't be read."""
    seen: list[int] = field(default_factory=list)
    """Clouds of the run so far, of each dataset."""
    out_of_memory: int = 0
    """Out-of-memory errors since the token budget last changed."""
    unlogged_out_of_memory: int = 0
    """Out-of-memory errors since the last line of a training step in metrics.jsonl."""
    budget_at_start: int | None = None
    """The token budget at the last start of the run, if it has been lowered since."""
    lowered_budget: int | None = None
    """The token budget after it was lowered; None if it was not."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The progress stored in a checkpoint; missing fields have their defaults.

        Raises ValueError, naming the field, for an invalid value.
        """
        hints = get_type_hints(cls)
        values = {each.name: state[each.name] for each in fields(cls) if each.name in state}
        for name, value in values.items():
            if name == "seen":
                if type(value) is not list or not all(type(n) is int and n >= 0 for n in value):
                    raise ValueError(f"{name} is {value!r}")
                continue
            # JSON may hold an integer for a float.
            kinds = (int, float) if hints[name] is float else hints[name]
            is_flag = isinstance(value, bool)
            if not isinstance(value, kinds) or is_flag != (hints[name] is bool):
                raise ValueError(f"{name} is {value!r}")
            if not is_flag and value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}")
        return cls(**values)

    def check_trained(self) -> None:
        """Raise TrainingError if the run has finished and skipped every step."""
        if self.finished and self.skipped == self.step:
            raise TrainingError(
                f"all {self.step} steps were skipped for a non-finite loss or gradient: nothing "
                "was trained; check the clouds that the log names"
            )

    def share_done(self, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> float:
        """Completed share of the run, from 0 to 1, by hours, epochs or steps.

        Epochs are measured in clouds, because a lowered token budget changes the steps per epoch.
        """
        if config.hours is not None:
            share = self.elapsed_seconds / (3600 * config.hours)
        elif config.epochs is not None:
            passes = sampler.epoch + 1 - sampler.num_left / sampler.num_samples
            share = round(passes / config.epochs, 9)
        else:
            share = self.step / (config.steps or default_steps(config))
        return min(share, 1.0)

    def advance(
        self,
        totals: StepTotals,
        config: TrainConfig,
        sampler: TokenBudgetBatchSampler,
        eval_every: int,
    ) -> float:
        """Record an optimizer step, after the sampler has advanced; returns the completed share."""
        self.step += 1
        self.elapsed_seconds = totals.elapsed_seconds
        self.out_of_memory += totals.out_of_memory
        self.unlogged_out_of_memory += totals.out_of_memory
        self.unreadable += totals.num_unreadable
        counts = zip_longest(self.seen, totals.clouds_by_dataset, fillvalue=0)
        self.seen = [before + now for before, now in counts]
        share_done = self.share_done(config, sampler)
        self.finished = share_done >= 1.0
        self.evaluation_due = self.step % eval_every == 0 or self.finished
        return share_done

    def budget(self, settled: int) -> int:
        """The token budget in use: `settled`, or the lowered budget if `settled` was lowered."""
        if self.lowered_budget is not None and self.budget_at_start == settled:
            return self.lowered_budget
        return settled

    def judge(self, score: float, patience: int | None, target: float | None) -> bool:
        """Record the score of an evaluation; returns whether it is the best so far.

        Finishes the run if the score reaches `target`, or after `patience` evaluations without an
        improvement.
        """
        is_best = score < self.best
        self.best = min(self.best, score)
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        self.finished = self.finished or self._is_good_enough(patience, target)
        return is_best

    def has_ended(self, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> bool:
        """Whether a run that is continued here has ended: patience and target may have changed."""
        return self.share_done(config, sampler) >= 1.0 or self._is_good_enough(
            config.patience, config.target_chamfer
        )

    def end_of_run(self, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> str:
        """The step at which a finished run ended, and the option that ended it before its length,
        as a sentence."""
        where = f"The run is complete at step {self.step:,}"
        if self.share_done(config, sampler) >= 1.0:
            return f"{where}."
        if config.target_chamfer is not None and self.best <= config.target_chamfer:
            reached = f"its score {self.best:.4g} reaches --target-chamfer"
            return f"{where}: {reached} {config.target_chamfer:g}."
        number = self.evaluations_since_best
        plural = "s" if number != 1 else ""
        return (
            f"{where}: {number} evaluation{plural} without a better score (--patience "
            f"{config.patience})."
        )

    def _is_good_enough(self, patience: int | None, target: float | None) -> bool:
        is_reached = target is not None and self.best <= target
        return is_reached or (patience is not None and self.evaluations_since_best >= patience)


@dataclass(frozen=True)
class RunSchedule:
    """Length of a run, its evaluation and save intervals in steps, and its learning rate.

    A continued run needs the sampler of its start, before a checkpoint is loaded: later epochs, and
    those with a lowered budget, may have other numbers of steps.
    """

    total_steps: int | None
    """Length in optimizer steps; approximate if set in epochs, None if set in hours."""
    eval_every: int
    save_every: int
    peak_learning_rate: float
    warmup_steps: int

    @classmethod
    def of(cls, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> RunSchedule:
        """The schedule that `config` defines, with defaults for the intervals."""
        total_steps = length_in_steps(config, sampler.num_steps)
        interval = (
            math.ceil(total_steps / default_evaluations(config))
            if total_steps
            else STEPS_BETWEEN_EVALUATIONS
        )
        return cls(
            total_steps,
            config.eval_every or interval,
            config.save_every or interval,
            scaled_learning_rate(
                config.learning_rate,
                config.lr_scaling,
                sampler.num_samples / sampler.num_steps,
                config.reference_clouds,
            ),
            config.warmup_steps,
        )

    def learning_rate(self, step: int, share_done: float) -> float:
        return learning_rate_at(step, share_done, self.peak_learning_rate, self.warmup_steps)


def length_in_steps(config: TrainConfig, steps_per_epoch: int) -> int | None:
    """Length of a run in optimizer steps; approximate if set in epochs, None if set in hours."""
    if config.epochs is not None:
        return max(1, math.ceil(config.epochs * steps_per_epoch))
    return None if config.hours is not None else (config.steps or default_steps(config))
