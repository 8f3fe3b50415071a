"""The state of a run: what training changes and a checkpoint holds; saves and continues it."""

from __future__ import annotations

import copy
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig, record_data
from pointup.training.datasets import TrainingData
from pointup.training.evaluation import EvaluationResult
from pointup.training.progress import Progress, RunSchedule
from pointup.training.run_directory.checkpoint import (
    CheckpointError,
    damaged_files,
    latest_checkpoint,
    offer_instead_of,
    save_checkpoint,
    save_model,
)

logger = logging.getLogger("pointup")


class WeightAverage:
    r"""The exponential moving average of the weights of a model, or the model without a decay.

    With the weights w after step n, the average is

    .. math:: a_n = d_n a_{n-1} + (1 - d_n) w_n, \quad d_n = \min(d, (1 + n) / (10 + n))

    with the decay d. The smaller decay of the first steps lets the average leave the initial
    weights at once. It is less noisy than the weights, above all with few clouds in a step. Polyak
    and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging.

    With an `initial_share` s, the model to evaluate and to save is s w_0 + (1 - s) a_n, which keeps
    more of what the initial model can do on other data. Wortsman et al. 2022, Robust Fine-Tuning of
    Zero-Shot Models.

    Every process has its own copy. The copies are equal, because the weights are.

    Attributes:
        average: the average. Without a decay it is `weights` itself.
        num_steps: number of steps that were averaged.
        initial_checksum: that of the initial weights; 0 without a share of them.
    """

    def __init__(self, weights: Upsampler, decay: float | None, initial_share: float = 0.0) -> None:
        self.weights, self.decay, self.num_steps = weights, decay, 0
        self.average = weights if decay is None else copy.deepcopy(weights).requires_grad_(False)
        self.initial_share = initial_share
        self.initial = [p.detach().clone() for p in weights.parameters()] if initial_share else []
        self.initial_checksum = 0
        for values in self.initial:
            self.initial_checksum = zlib.crc32(
                values.cpu().numpy().tobytes(), self.initial_checksum
            )

    @torch.no_grad()
    def model(self) -> Upsampler:
        """The model to evaluate and to save."""
        if not self.initial_share:
            return self.average
        model = copy.deepcopy(self.average)
        for weights, initial in zip(model.parameters(), self.initial, strict=True):
            weights.lerp_(initial, self.initial_share)
        return model

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        if self.decay is None:
            return
        self.num_steps += 1
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        average = get_ema_multi_avg_fn(decay)
        average(list(self.average.parameters()), list(self.weights.parameters()), None)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint stores; None without a decay, where the weights are enough."""
        if self.decay is None:
            return None
        return {"num_steps": self.num_steps, "weights": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if self.decay is None:
            return
        self.average.load_state_dict(state["weights"])
        self.num_steps = int(state["num_steps"])


class RunState:
    """What training changes and a checkpoint holds, saved for all processes by the main one.

    Every process must call each method. If the disk is full or read-only, earlier checkpoints
    remain unchanged. With `on_save_error` "end", or if the save must succeed, all processes then
    raise CheckpointError. Otherwise the log warns, and the training continues until the next save.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        data: TrainingData,
        weights: Upsampler,
        optimizer: AcceleratedOptimizer,
        sampler: TokenBudgetBatchSampler,
    ) -> None:
        self.config, self.accelerator, self.data = config, accelerator, data
        self.weights, self.optimizer, self.sampler = weights, optimizer, sampler
        self.average = WeightAverage(weights, config.ema_decay, config.initial_share)
        # A run that starts from a model measures it before the first step.
        self.progress = Progress(evaluation_due=config.initial_model is not None)
        self.saved_at = 0.0
        """Training time in seconds of the last attempt to save, or of the loaded checkpoint."""

    def load_latest(self, schedule: RunSchedule) -> Path | None:
        """Load the run's latest checkpoint, and return its path; None for a new run.

        A run that `patience` or `target_chamfer` ended goes on if other values allow it. Raises
        CheckpointError, naming the file, if the checkpoint is damaged or of another model, and
        ConfigError if the dataset has changed.
        """
        path = latest_checkpoint(self.config.output_dir / "checkpoints")
        if path is not None:
            self._load(path, schedule)
        if not self.progress.validated:
            sizes, bounds = self.data.validation.full_sizes, self.data.bounds["validation"]
            self.progress.validated = schedule.samples_to_validate(sizes, bounds)
        return path

    def _load(self, path: Path, schedule: RunSchedule) -> None:
        scaler = self.accelerator.scaler
        state = load_checkpoint(path, self.weights, self.optimizer, scaler, self.average)
        settled, known = self.sampler.token_budget, self.average.initial_checksum
        with _refusals_named(path):
            self.data.check_same(state.pop("data"))
            if state.pop("initial_weights", known) != known:
                raise ConfigError(
                    f"--initial-model {self.config.initial_model}: its weights have changed since "
                    f"{path}, and --initial-share keeps some of them; restore them, or start a new "
                    "run in another --output-dir"
                )
            sampler_state = state.pop("sampler")
            self.progress = Progress(**state)
            self.sampler.change_budget(self.progress.budget(settled))
            self.sampler.load_state_dict(sampler_state)
            self.progress.finished = schedule.has_ended(self.progress)
        self.saved_at = self.progress.elapsed_seconds
        if self.accelerator.is_main_process:
            record_data(self.config)

    def save(self, enter_phase: Callable[[str], None], must_succeed: bool) -> None:
        """Save a checkpoint; `enter_phase` is that of the watchdog."""
        is_main = self.accelerator.is_main_process
        enter_phase("saving" if is_main else "waiting for the checkpoint")
        self.saved_at = self.progress.elapsed_seconds
        scaler = self.accelerator.scaler
        state = {
            "sampler": self.sampler.state_dict(),
            "data": self.data.checksums,
            "initial_weights": self.average.initial_checksum,
            **asdict(self.progress),
        }
        write = partial(
            save_checkpoint, self.config.output_dir / "checkpoints", self.weights, self.optimizer,
            scaler, state, self.config.keep_checkpoints, self.average.state_dict(),
        )  # fmt: skip
        self._write(write, must_succeed)

    def judge(self, result: EvaluationResult) -> bool:
        """Record an evaluation, and save the model if it is the best so far; returns whether it is.

        If it can't be saved, it does not count as the best; at the end of the run CheckpointError
        is raised. The log warns at the end of a run in which no model was saved.
        """
        progress, output_dir = self.progress, self.config.output_dir
        model = self.average.model()
        before = progress.best, progress.kept
        is_best = progress.judge(result.measured(progress.step), self.config)
        if is_best and not self._write(
            lambda: save_model(model, output_dir / "model"), must_succeed=progress.finished
        ):
            (progress.best, progress.kept), is_best = before, False
        if progress.finished and math.isinf(progress.best):
            logger.warning(
                "no model was saved: no evaluation measured it on all validation clouds (see the "
                "warnings before); the last weights are in %s",
                output_dir / "checkpoints",
            )
        return is_best

    def _write(self, write: Callable[[], object], must_succeed: bool) -> bool:
        """Write on the main process; returns whether it succeeded."""
        failure: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                write()
            except CheckpointError as error:
                failure = [str(error)]
        broadcast_object_list(failure)
        if failure[0] is not None:
            if must_succeed or self.config.on_save_error == "end":
                raise CheckpointError(failure[0])
            if self.accelerator.is_main_process:
                logger.warning("%s; training continues", failure[0])
        return failure[0] is None


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into these; returns the rest of its state. Raises CheckpointError, naming
    the file, if one is damaged or of another model."""
    with _refusals_named(path):
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        damaged = damaged_files(path, state.pop("files"))
        if damaged:
            raise ValueError(f"{', '.join(damaged)} is damaged")
        del state["format"]
        model.load_state_dict(load_file(path / "model.safetensors"))
        saved = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        load_optimizer(optimizer, saved["optimizer"])
        if scaler is not None and saved["scaler"] is not None:
            scaler.load_state_dict(saved["scaler"])
        if average is not None:
            average.load_state_dict(saved["average"])
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved optimizer state; the settings, such as the implementation of the update (fused,
    foreach), remain those of this start and its device."""
    groups = [
        {**current, "params": stored["params"]}
        for current, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})


@contextmanager
def _refusals_named(path: Path) -> Iterator[None]:
    """Raise a CheckpointError that names `path` for any error but a ConfigError: libraries raise
    errors of many types for a file that is damaged or of another model."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
        reason = (kind + " ".join(lines[:2]))[:200]
        raise CheckpointError(
            f"{path}: can't be continued from ({reason}); {offer_instead_of(path)}"
        ) from error
