"""Continues a run: loads model, optimizer, scaler, sampler and progress from a checkpoint."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.progress import Progress
from pointup.training.run_directory.checkpoint import (
    CheckpointError,
    damaged_files,
    latest_checkpoint,
    offer_instead_of,
)
from pointup.training.training_state import TrainingState, WeightAverage

PREFIXES = ("module.", "_orig_mod.")
LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    RuntimeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
OF_THIS_RUN = frozenset({"lr", "fused", "foreach"})
"""Optimizer settings that a continued run does not take from the checkpoint."""


def continue_run(
    config: TrainConfig,
    trained: TrainingState,
    sampler: TokenBudgetBatchSampler,
    data: TrainingData,
) -> tuple[Progress, Path | None]:
    """Load the run's latest checkpoint, if any, into the training state and the sampler.

    Returns the progress of the run and the checkpoint, None for a new run. A run that `patience` or
    `target_chamfer` ended goes on if other values allow it. Raises CheckpointError, naming the
    file, if the checkpoint is damaged or of another model, and ConfigError if the dataset has
    changed.
    """
    path = latest_checkpoint(config.output_dir / "checkpoints")
    if path is None:
        return Progress(), None
    state = load_checkpoint(
        path, trained.weights, trained.optimizer, trained.scaler, trained.average
    )
    settled = sampler.token_budget
    try:
        data.check_same(state.pop("data"))
        sampler_state = state.pop("sampler")
        progress = Progress.from_state(state)
        sampler.change_budget(progress.budget(settled))
        sampler.load_state_dict(sampler_state)
        progress.finished = progress.has_ended(config, sampler)
    except ConfigError:
        raise
    except LOAD_ERRORS as error:
        raise refusal(path, error) from error
    return progress, path


def state_of_run(
    progress: Progress, sampler: TokenBudgetBatchSampler, data: TrainingData
) -> dict[str, Any]:
    """The state that a checkpoint stores for `continue_run` beside model, optimizer and scaler."""
    return {"sampler": sampler.state_dict(), "data": data.checksums, **asdict(progress)}


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Load the checkpoint `path` into model, optimizer, scaler and average of the weights; returns
    the rest of its state.

    Weights of a wrapped model (prefix `module.` or `_orig_mod.`) load as well. Raises
    CheckpointError, naming the file, if a file is damaged or of another model.
    """
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        damaged = damaged_files(path, state.pop("files"))
        if damaged:
            raise ValueError(f"{', '.join(damaged)} is damaged")
        del state["format"]
        weights = {unwrapped(k): v for k, v in load_file(path / "model.safetensors").items()}
        model.load_state_dict(weights)
        saved = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        load_optimizer(optimizer, saved["optimizer"])
        if scaler is not None and saved["scaler"] is not None:
            scaler.load_state_dict(saved["scaler"])
        if average is not None:
            average.load_state_dict(saved.get("average"))
    except LOAD_ERRORS as error:
        raise refusal(path, error) from error
    return state


def refusal(path: Path, error: Exception) -> CheckpointError:
    """A CheckpointError for `path` whose reason is `error`."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    reason = (kind + " ".join(lines[:2]))[:200]
    return CheckpointError(f"{path}: can't be continued from ({reason}); {offer_instead_of(path)}")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved optimizer state, after a check that it fits the weights and the settings.

    Torch itself loads states of any shape, and the first step then fails. The implementation of
    the update (fused, foreach) is that of this device, not of the device that saved the state.
    Raises ValueError, naming the mismatch.
    """
    groups = []
    for current, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        settings = {name: value for name, value in current.items() if name != "params"}
        for name in settings.keys() & stored.keys() - OF_THIS_RUN:
            if stored[name] != settings[name]:
                raise ValueError(f"optimizer.pt has {name} {stored[name]}, not {settings[name]}")
        groups.append({**settings, "params": stored["params"]})
    optimizer.load_state_dict({**saved, "param_groups": groups})
    parameters = [weights for group in optimizer.param_groups for weights in group["params"]]
    known = [set(optimizer.state[weights]) for weights in parameters if weights in optimizer.state]
    names = set().union(*known)
    for weights in parameters:
        values = optimizer.state.get(weights, {})
        if values and values.keys() != names:
            lacking = ", ".join(sorted(names - values.keys()))
            raise ValueError(f"optimizer.pt lacks {lacking} of a weight")
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.shape not in ((), weights.shape):
                raise ValueError(f"optimizer.pt has a {name} that does not fit its weight")
            if not value.isfinite().all():
                raise ValueError(f"optimizer.pt has a {name} that is not finite")


def unwrapped(name: str) -> str:
    """The name of a weight without the prefixes of model wrappers."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name
