"""Progress and schedule of a run: position, end, learning rate, evaluation and save intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np
import torch

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import TrainingError
from pointup.training.config import LrScaling, TrainConfig
from pointup.training.model_choice import MeasuredModel, is_better, outcome
from pointup.training.step_totals import StepTotals

STEPS_BETWEEN_EVALUATIONS = 500
"""Used if neither an option nor a known number of steps sets it."""
FEWEST_VALIDATED = 4
"""Fewer validation samples are not measured, whatever their share of the work."""
FINAL_LEARNING_RATE = 0.02
"""Share of the peak learning rate at the end of a run."""


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
    """Validation score of the model in model/: the figure that the run chooses by, divided by that
    of the midpoint baseline."""
    kept: MeasuredModel | None = None
    """The evaluation of that model."""
    initial: MeasuredModel | None = None
    """The evaluation of the initial model; None for a run from random weights."""
    validated: list[int] = field(default_factory=list)
    """Indices of the validation samples that are measured."""
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

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, also no evaluation that a stop request prevented."""
        return self.finished and not self.evaluation_due

    @property
    def keeps_initial(self) -> bool:
        """Whether no model of the run is better than the initial one by more than noise."""
        return self.initial is not None and not (self.kept and self.kept["step"])

    def budget(self, settled: int) -> int:
        """The token budget in use: `settled`, or the lowered budget if `settled` was lowered."""
        if self.lowered_budget is not None and self.budget_at_start == settled:
            return self.lowered_budget
        return settled

    def judge(self, model: MeasuredModel, config: TrainConfig) -> bool:
        """Record an evaluation; returns whether its model is the best so far.

        It must also be better than the initial model by more than noise. Finishes the run if the
        score reaches `target_chamfer`, or after `patience` evaluations without an improvement.
        """
        if not self.step:
            self.initial = model
        is_best = model["score"] < self.best
        if is_best and self.kept is not None and self.initial is not None:
            is_best = is_better(model, self.initial)
        if is_best:
            self.best, self.kept = model["score"], model
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        self.finished = self.finished or self.is_good_enough(config)
        return is_best

    def is_good_enough(self, config: TrainConfig) -> bool:
        """Whether `target_chamfer` or `patience` ends the run, after its first step."""
        if not self.step:
            return False
        target, patience = config.target_chamfer, config.patience
        is_reached = target is not None and self.best <= target
        return is_reached or (patience is not None and self.evaluations_since_best >= patience)

    def check_trained(self) -> None:
        """Raise TrainingError if the run has finished and skipped every step."""
        if self.finished and self.skipped == self.step:
            raise TrainingError(
                f"all {self.step} steps were skipped for a non-finite loss or gradient: nothing "
                "was trained; check the clouds that the log names"
            )


class RunSchedule:
    """Length of a run, its evaluation and save intervals in steps, and its learning rate.

    A continued run needs the sampler of its start, before a checkpoint is loaded: later epochs, and
    those with a lowered budget, may have other numbers of steps.

    Attributes:
        total_steps: length in optimizer steps; approximate if set in epochs, None if in hours.
        eval_every, save_every: intervals in steps.
        peak_learning_rate: at the end of the warm-up.
    """

    def __init__(self, config: TrainConfig, sampler: TokenBudgetBatchSampler) -> None:
        self.config, self.sampler = config, sampler
        self.total_steps = length_in_steps(config, sampler.num_steps)
        interval = STEPS_BETWEEN_EVALUATIONS
        if self.total_steps:
            interval = math.ceil(self.total_steps / config.defaults.evaluations)
        self.eval_every = config.eval_every or interval
        self.save_every = config.save_every or interval
        self.peak_learning_rate = scaled_learning_rate(
            config.learning_rate,
            config.lr_scaling,
            sampler.num_samples / sampler.num_steps,
            config.reference_clouds,
        )

    def share_done(self, progress: Progress) -> float:
        """Completed share of the run, from 0 to 1, by hours, epochs or steps.

        Epochs are measured in clouds, because a lowered token budget changes the steps per epoch.
        """
        config, sampler = self.config, self.sampler
        if config.hours is not None:
            share = progress.elapsed_seconds / (3600 * config.hours)
        elif config.epochs is not None:
            passes = sampler.epoch + 1 - sampler.num_left / sampler.num_samples
            share = round(passes / config.epochs, 9)
        else:
            share = progress.step / (config.steps or config.defaults.steps)
        return min(share, 1.0)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the next step, and return it."""
        rate = learning_rate_at(
            progress.step,
            self.share_done(progress),
            self.peak_learning_rate,
            self.config.warmup_steps,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def advance(self, progress: Progress, totals: StepTotals, is_taken: bool) -> None:
        """Record an optimizer step in `progress`, and move the sampler to the next one."""
        self.sampler.advance(1)
        progress.step += 1
        progress.skipped += not is_taken
        progress.elapsed_seconds = totals.elapsed_seconds
        progress.out_of_memory += totals.out_of_memory
        progress.unlogged_out_of_memory += totals.out_of_memory
        progress.unreadable += totals.num_unreadable
        counts = zip_longest(progress.seen, totals.clouds_by_dataset, fillvalue=0)
        progress.seen = [before + now for before, now in counts]
        progress.finished = self.share_done(progress) >= 1.0
        progress.evaluation_due = progress.step % self.eval_every == 0 or progress.finished

    def samples_to_validate(self, sizes: np.ndarray, bounds: Sequence[int] = ()) -> list[int]:
        """Indices of validation samples of `sizes` tokens; a token of them takes about as long as
        one in training. Dataset d has the samples bounds[d] to bounds[d + 1]."""
        sampler = self.sampler
        trained = self.eval_every * sampler.slots * sampler.fill * sampler.token_budget
        chosen = spread_samples(sizes, self.config.validation_share * trained)
        # Large pairs, few among those of other datasets, could all be missed.
        missed = [a for a, b in pairwise(bounds) if a < b and not any(a <= i < b for i in chosen)]
        return sorted(chosen + missed)

    def is_save_due(self, progress: Progress, saved_at: float) -> bool:
        """Whether to save now: after `save_every` steps, `save_minutes`, or at the end of the run.

        `saved_at` is the training time of the last attempt. It is that of the main process, so that
        all processes agree.
        """
        if not progress.step:
            return False
        is_late = progress.elapsed_seconds - saved_at >= 60 * self.config.save_minutes
        return is_late or progress.finished or progress.step % self.save_every == 0

    def has_ended(self, progress: Progress) -> bool:
        """Whether a run that is continued here has ended: patience and target may have changed."""
        return self.share_done(progress) >= 1.0 or progress.is_good_enough(self.config)

    def end_of_run(self, progress: Progress, is_stopped: bool) -> str:
        """Sentences about the end of a run or its stop: the step, the option that ended it before
        its length, and what its model is beside the initial one."""
        text = self._reason(progress)
        if is_stopped:
            text = f"Stopped at step {progress.step} and saved; run again to continue."
        if self.config.initial_model is None or progress.initial is None:
            return text
        chosen = outcome(
            self.config.initial_model, self.config.choose_by, progress.initial, progress.kept
        )
        return f"{text}\n{chosen}"

    def _reason(self, progress: Progress) -> str:
        config = self.config
        where = f"The run is complete at step {progress.step:,}"
        if self.share_done(progress) >= 1.0:
            return f"{where}."
        if config.target_chamfer is not None and progress.best <= config.target_chamfer:
            reached = f"its score {progress.best:.4g} reaches --target-chamfer"
            return f"{where}: {reached} {config.target_chamfer:g}."
        number = progress.evaluations_since_best
        plural = "s" if number != 1 else ""
        return (
            f"{where}: {number} evaluation{plural} without a better score (--patience "
            f"{config.patience})."
        )


def length_in_steps(config: TrainConfig, steps_per_epoch: int) -> int | None:
    """Length of a run in optimizer steps; approximate if set in epochs, None if set in hours."""
    if config.epochs is not None:
        return max(1, math.ceil(config.epochs * steps_per_epoch))
    return None if config.hours is not None else (config.steps or config.defaults.steps)


def learning_rate_at(step: int, share_done: float, peak: float, warmup_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 0).

    Linear warm-up over `warmup_steps`, times half a cosine in `share_done`, the completed share of
    the run from 0 to 1. The function has no state, so checkpoints store none.
    """
    warmup = min(1.0, (step + 1) / max(warmup_steps, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(share_done, 0.0), 1.0)))
    return peak * warmup * (FINAL_LEARNING_RATE + (1.0 - FINAL_LEARNING_RATE) * cosine)


def scaled_learning_rate(
    learning_rate: float, scaling: LrScaling, clouds_per_step: float, reference_clouds: float
) -> float:
    """Learning rate for `clouds_per_step`, given the learning rate for `reference_clouds`.

    `linear` follows Goyal et al. 2017; `sqrt` suits Adam (Malladi et al. 2022).
    """
    factor = clouds_per_step / reference_clouds
    exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[scaling]
    return learning_rate * factor**exponent


def spread_samples(sizes: np.ndarray, tokens: float) -> list[int]:
    """Indices of samples that together have about `tokens` tokens, at least `FEWEST_VALIDATED`,
    evenly spread over all samples."""
    # The fractional parts of multiples of the golden ratio: any first ones are evenly spread.
    order = np.argsort(np.arange(len(sizes)) * ((math.sqrt(5) - 1) / 2) % 1)
    number = np.searchsorted(np.cumsum(sizes[order], dtype=np.int64), tokens, side="right")
    return sorted(order[: max(int(number), FEWEST_VALIDATED)].tolist())
