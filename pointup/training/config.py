"""The options of train.py, as one typed config."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig, with_current_names
from pointup.training.objective import LossConfig
from pointup.training.run_directory.checkpoint import has_checkpoints
from pointup.training.run_directory.checkpointing import OnSaveError
from pointup.training.schedule import LrScaling

logger = logging.getLogger(__name__)

GradientCheckpointing = Literal["auto", "on", "off"]
DEFAULT_TOKEN_BUDGET = 20480
"""Where the user gives none, unless a single pair is larger."""

MAY_CHANGE = frozenset(
    {
        "output_dir", "num_workers", "worker_timeout", "log_every", "eval_every", "save_every",
        "keep_checkpoints", "log_with", "num_pictures", "patience", "target_chamfer",
        "collective_timeout", "hang_timeout", "on_save_error", "accumulation_steps", "debug",
        "quick", "gradient_checkpointing", "found_token_budget",
    }
)  # fmt: skip
"""Fields that a continued run may change freely: they don't alter what is learned.

Accumulation steps count as slots, their product with the number of processes.
"""
MAY_CHANGE_SAID = {"slots", "token_budget", "max_clouds", "mixed_precision", "cpu_threads"}
"""Fields that a continued run may change, with a warning: hardware may change under a run. The
clouds that remain of the epoch are planned anew, each still seen exactly once. Sums depend in their
last digits on the number of threads."""
AT_MOST = {
    "token_budget": 2**31 - 1, "max_clouds": 2**31 - 1, "accumulation_steps": 10_000,
    "ratio": 1000, "max_ratio": 1000, "seed": 2**63 - 1, "num_workers": 1024, "num_pictures": 1000,
    "worker_timeout": 1e7, "hang_timeout": 1e7, "collective_timeout": 1e5,
}  # fmt: skip
"""Values beyond which an option can't be honoured: by integers, timers, or any machine."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a point cloud upsampler."""

    data: str | None = None
    """Pair dataset: a directory made by `pointup prepare`, or a Hub dataset with its columns.
    Without one, procedural shapes and scenes are made on first use and cached."""
    output_dir: Path = Path("runs/default")
    """Directory of the run. The same command again continues the run in it."""
    initial_model: str | None = None
    """Model to start from, in place of random weights: shapes, lidar, a directory, or a repository
    on the Hub. Its options are those of the run."""
    train_only: tuple[str, ...] = ()
    """Train the weights alone whose names begin with one of these, as quota; the others stay."""
    steps: int | None = None
    """Length of the run in optimizer steps (200 when neither epochs nor hours are given)."""
    epochs: float | None = None
    """Length of the run in passes over the data."""
    hours: float | None = None
    """Length of the run in hours of training."""
    token_budget: int | Literal["auto"] | None = None
    """Most points (source and target) that a process holds at a time. By default 20,480, or the
    largest pair where that has more; "auto" tries out, before the first step, how many fit into the
    memory, and keeps that number for the run."""
    max_clouds: int | None = None
    """Most clouds in a micro-batch."""
    accumulation_steps: int = 1
    """Micro-batches of each process in one optimizer step."""
    crop: bool = False
    """Crop pairs larger than the token budget to a random neighbourhood, instead of refusing."""
    ratio: float | None = None
    """Upsampling ratio to train; by default each pair's own."""
    max_ratio: float = 16.0
    """Largest ratio that is trained; pairs beyond it are upsampled by this much."""
    augment: bool = True
    """Rotate, mirror, scale and jitter the training pairs."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW, for `reference_clouds` clouds a step."""
    lr_scaling: LrScaling = "none"
    """How the learning rate grows with the clouds in a step."""
    reference_clouds: float = 16.0
    """Clouds a step at which the learning rate is what it says."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    clip_norm: float = 1.0
    """Largest norm of a step's gradient; larger ones are scaled down to it."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Compute intermediate values again in the backward pass instead of keeping them: less memory
    and more time, the same gradients. "auto" does so for batches with many children."""
    seed: int = 0
    """Everything random follows from it: weights, order, augmentation, dropout."""
    num_workers: int = 1
    """Processes that read and augment data, for each training process."""
    worker_timeout: float = 120.0
    """Seconds after which a data worker that delivers nothing is an error."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl and points in TensorBoard."""
    eval_every: int | None = None
    """Steps between evaluations (a quarter of the run, if its steps are known; else 500)."""
    save_every: int | None = None
    """Steps between checkpoints (as eval_every)."""
    keep_checkpoints: int = 3
    """Checkpoints to keep; the oldest are deleted."""
    num_pictures: int = 3
    """Validation samples drawn at each evaluation."""
    log_with: tuple[str, ...] = ("tensorboard",)
    """Trackers of Accelerate to log to; metrics.jsonl is always written."""
    patience: int | None = None
    """Stop after this many evaluations without a better one."""
    target_chamfer: float | None = None
    """Stop when the validation Chamfer distance, as a share of the midpoints', is this low."""
    collective_timeout: float = 20.0
    """Minutes after which a process that doesn't hear from the others gives up."""
    hang_timeout: float = 300.0
    """Seconds without progress of a process after which the run ends, telling where all stood;
    10000000 is never."""
    on_save_error: OnSaveError = "go-on"
    """What to do when the disk is full or read-only while saving."""
    debug: bool = False
    """Look closer, slowly: anomaly detection in the backward pass, distributed checks, and every
    process's log in full on the console."""
    quick: bool = False
    """Check the setup: a few steps, an evaluation, a checkpoint, and continuing from it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        if any("\ud800" <= char <= "\udfff" for char in str(self.output_dir)):
            raise ConfigError(
                f"--output-dir {self.output_dir}: this locale can't tell the letters of its name; "
                "set LC_ALL to C.UTF-8"
            )
        lengths = [n for n in ("steps", "epochs", "hours") if getattr(self, n) is not None]
        if len(lengths) > 1:
            raise ConfigError(f"--{' and --'.join(lengths)} exclude each other; give one")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{option(name)} is {value}; it must be a finite number")
            if name in AT_MOST and value not in (None, "auto") and value > AT_MOST[name]:
                raise ConfigError(f"{option(name)} is {value}; it can be at most {AT_MOST[name]:g}")
        positive = (
            "steps", "epochs", "hours", "token_budget", "max_clouds", "accumulation_steps",
            "learning_rate", "reference_clouds", "clip_norm", "worker_timeout", "log_every",
            "eval_every", "save_every", "keep_checkpoints", "patience", "target_chamfer",
            "collective_timeout", "hang_timeout",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value != "auto" and not value > 0:
                raise ConfigError(f"{option(name)} is {value}; it must be greater than 0")
        for name in ("warmup_steps", "weight_decay", "num_workers", "num_pictures", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{option(name)} is {getattr(self, name)}; it can't be negative")
        least = 2 * self.model.k
        budget = self.token_budget
        if self.crop and budget is not None and budget != "auto" and budget < least:
            raise ConfigError(
                f"--token-budget is {self.token_budget}; with --crop it must be at least {least}, "
                "for --model.k neighbours in source and target"
            )
        for name in ("ratio", "max_ratio"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(
                    f"{option(name)} is {value}; upsampling needs a ratio of at least 1"
                )


def option(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The config as plain JSON values, nested as the dataclasses are."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def claim_output_dir(config: TrainConfig, accelerator: Accelerator) -> None:
    """Save the config in the run's directory, or check that the run there has the same one.

    A run is what has saved a checkpoint: options that a start without one left there are replaced.
    Raises ConfigError, on every process, naming the first field that differs.
    """
    path = config.output_dir / "config.json"
    slots = accelerator.num_processes * config.accumulation_steps
    now = {**as_dict(config), "slots": slots, "mixed_precision": accelerator.mixed_precision}
    if accelerator.device.type == "cpu":
        now["cpu_threads"] = torch.get_num_threads()
    is_run = has_checkpoints(config.output_dir / "checkpoints")
    try:
        saved = read_config(path)
        if saved is not None:
            check_same_run(saved, now, path)
        elif is_run:
            logger.warning("%s is missing: options are not compared with the run's", path)
    except ConfigError as error:
        if is_run or path.is_dir():
            raise
        saved = None
        logger.warning("%s; no checkpoint was saved with these options: replaced", error)
    if saved is not None and config.token_budget == "auto" and "found_token_budget" in saved:
        now["found_token_budget"] = saved["found_token_budget"]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_config(path, now)
    accelerator.wait_for_everyone()


def read_config(path: Path) -> dict[str, Any] | None:
    """The options that a run was started with; None where there is no such file.

    Raises ConfigError, naming it, for a file that holds something else.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if isinstance(saved, dict):
            if isinstance(saved.get("model"), dict):
                saved["model"] = with_current_names(saved["model"])
            return saved
        reason = f"it holds {json.dumps(saved):.40}"
    raise ConfigError(
        f"{path}: holds no options of a run ({reason}); remove it to go on with those of this "
        "command"
    )


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a run's config.json, which holds the old values or the new ones at any moment.

    Raises ConfigError, naming it, when the disk is full or read-only.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be written ({error.strerror}); free the disk, or give another "
            "--output-dir"
        ) from error


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue a run with other options, naming the first that differs.

    A run of another version of pointup may lack an option, and then had its default, or have one
    that is not known here, which the log says.
    """
    before, after = flattened(saved), flattened(now)
    defaults = flattened(as_dict(TrainConfig()))
    for name in sorted(before.keys() | after.keys()):
        if name in MAY_CHANGE:
            continue
        if name not in after:
            if name not in MAY_CHANGE_SAID:
                logger.warning("%s: %s is no option of this version: left out", path, name)
            continue
        was = before.get(name, defaults.get(name, after[name]))
        if was == after[name]:
            continue
        if name in MAY_CHANGE_SAID:
            logger.warning("%s changed from %s to %s", name, was, after[name])
        else:
            default = "" if name in before else " by default"
            raise ConfigError(
                f"{path}: the run there has {name} {was}{default}, not {after[name]}; "
                "give the same to continue it, or another --output-dir"
            )
