"""The options of train.py, as one typed config."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.training.objective import LossConfig
from pointup.training.run_directory.checkpointing import OnSaveError
from pointup.training.schedule import LrScaling

GradientCheckpointing = Literal["auto", "on", "off"]
DEFAULT_TOKEN_BUDGET = 20480
"""Where the user gives none, unless a single pair is larger."""

NOT_OPTIONS = frozenset({"slots", "mixed_precision", "cpu_threads", "found_token_budget"})
"""What config.json holds beside the options of the run."""

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


def quick_config(config: TrainConfig) -> TrainConfig:
    """The config of `--quick`: a few steps, with an evaluation and checkpoints."""
    return replace(
        config,
        output_dir=config.output_dir / "quick",
        steps=4,
        epochs=None,
        hours=None,
        warmup_steps=1,
        log_every=1,
        eval_every=4,
        save_every=2,
    )


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
