"""`TrainConfig`: the options of train.py, from the command line and files; config.json of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
import yaml
from accelerate import Accelerator
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from pointup.datasets.pair_dataset import JITTER
from pointup.disk import os_errors, written_whole
from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.option_help import with_option_help
from pointup.shipped import shipped_options
from pointup.training.model_choice import ChosenBy
from pointup.training.objective import LossConfig
from pointup.training.run_directory.checkpoint import has_checkpoints

logger = logging.getLogger("pointup")

LrScaling = Literal["none", "sqrt", "linear"]


class Defaults(NamedTuple):
    """Used where an option is not given; a token budget unless a single pair is larger."""

    token_budget: int
    steps: int
    evaluations: int


DEFAULTS = Defaults(20480, 200, 4)
PROCEDURAL_DEFAULTS = Defaults(8192, 120, 2)
"""Without `--data`: on a CPU, many small steps train more than a few large ones, and a first run
should end within minutes on two cores."""

NOT_OPTIONS = frozenset({"slots", "mixed_precision", "cpu_threads", "found_token_budget"})
"""Keys of config.json that are not options of train.py."""

# A file may name a single item without brackets.
Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
# YAML reads the words on and off as booleans.
GradientCheckpointing = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]


def _number(value: Any) -> Any:
    """The number that a text stands for; YAML reads 1e-9, without a point, as text."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


# Strict: else a yes in a file would be the number 1, and the word "true" a switch.
Float = Annotated[float, Field(strict=True), BeforeValidator(_number)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Ratio = Annotated[Float, Field(ge=1, le=1000)]
Timeout = Annotated[Float, Field(gt=0, le=1e7)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(allow_inf_nan=False, extra="forbid"))
class TrainConfig:
    """Train a point cloud upsampler."""

    RARELY_SET = (
        "accumulation_steps clip_norm collective_timeout debug ema_decay gradient_checkpointing "
        "hang_timeout keep_checkpoints log_every loss lr_scaling max_clouds max_ratio "
        "max_unreadable model network num_pictures on_save_error patience ratio reference_clouds "
        "save_every save_minutes target_chamfer train_only validation_share warmup_steps "
        "weight_decay worker_timeout"
    )

    data: tyro.conf.UseAppendAction[Names] = ()
    """Pair dataset: a directory from `pointup prepare`, or a Hub dataset with the same columns.
    Given several times, with a weight if wanted (`--data a --data b=2`): an epoch has each sample
    of b twice; of a weight of 0.5, half of the samples, and the others in the next epoch.
    By default, procedural shapes and scenes, which are generated on first use and cached."""
    output_dir: Path = Path("runs/default")
    """Directory of the run. The same command again continues the run in it."""
    initial_model: str | None = None
    """Model to start from instead of random weights: an included one (shapes, noisy, lidar or
    forest), a directory, or a repository on the Hub. The run uses the options of this model. Of the
    model options only those may be given that keep its weights, such as --model.column-layers,
    which adds others; a value equal to the default of its option counts as not given."""
    network: str | None = None
    """Class of another network, MODULE:CLASS, a subclass of pointup.Upsampler whose module is on
    PYTHONPATH. An initial model brings its own."""
    train_only: Names = ()
    """Train only weights whose names start with one of these, such as quota; freeze the others."""
    steps: PositiveInt | None = None
    """Length of the run in optimizer steps (when neither epochs nor hours are given: 200, or 120
    without --data)."""
    epochs: PositiveFloat | None = None
    """Length of the run in passes over the data."""
    hours: PositiveFloat | None = None
    """Length of the run in hours of training."""
    token_budget: PositiveInt | Literal["auto"] | None = None
    """Most tokens (points of source and target) in a micro-batch. By default 20,480 (8,192
    without --data), or the size of the largest pair if that is more; "auto" measures, before the
    first step, how many fit into memory, and keeps that number for the whole run."""
    max_clouds: PositiveInt | None = None
    """Most clouds in a micro-batch."""
    accumulation_steps: Annotated[int, Field(gt=0, le=10_000, strict=True)] = 1
    """Micro-batches of each process in one optimizer step."""
    crop: Switch = False
    """Crop pairs larger than the token budget to a random neighbourhood; otherwise refuse them."""
    ratio: Ratio | None = None
    """Upsampling ratio in training; by default that of each pair."""
    max_ratio: Ratio = 16.0
    """Largest upsampling ratio in training; pairs with a larger one are upsampled by this ratio."""
    augment: Switch = True
    """Rotate, mirror, scale and jitter the training pairs."""
    noise_spacings: NonNegativeFloat = 0.0
    """Largest standard deviation of Gaussian noise on the sources, in spacings of the source. For
    each training pair it is drawn anew from 0.01 to this number, for each validation pair once. Not
    with --no-augment."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of AdamW; with `lr_scaling`, at `reference_clouds` clouds per step."""
    lr_scaling: LrScaling = "none"
    """How the learning rate scales with the number of clouds per step."""
    reference_clouds: PositiveFloat = 16.0
    """Clouds per step at which `lr_scaling` leaves the learning rate unchanged."""
    warmup_steps: NonNegativeInt = 20
    """Steps of linear learning rate warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW."""
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Decay of the exponential moving average of the weights, such as 0.999. With it, the average
    is evaluated and saved as the model, and checkpoints hold both. By default no average."""
    initial_share: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the initial model in the weights that are evaluated and saved; the rest are those
    that were trained, or their average. A model with such a share gains less on the pairs, and
    loses much less on other data."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm of a step; larger gradients are scaled down to it."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Recompute activations in the backward pass instead of storing them: less memory, more time,
    the same gradients. "auto" does so for batches with many children; dropout needs them stored."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Seed of everything random: weights, order of samples, augmentation, dropout."""
    num_workers: Annotated[int, Field(ge=0, le=1024, strict=True)] = 1
    """Data workers per training process, which read and augment samples."""
    worker_timeout: Timeout = 120.0
    """Seconds without a batch from a data worker after which the run ends with an error."""
    max_unreadable: NonNegativeFloat = 0.01
    """Share of the training samples that may turn out damaged when they are read; such samples are
    left out of their steps. More end the run."""
    log_every: PositiveInt = 10
    """Steps between lines in metrics.jsonl and points in TensorBoard. A step with an evaluation has
    a line too."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations (by default a quarter of the run, half of it without --data, or 500
    if its length in steps is unknown)."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints (the same default as eval_every)."""
    save_minutes: PositiveFloat = 10.0
    """Longest time between checkpoints in minutes, where save_every steps take longer; a run that
    is killed loses about as much."""
    keep_checkpoints: PositiveInt = 3
    """Number of checkpoints to keep; older ones are deleted."""
    num_pictures: Annotated[int, Field(ge=0, le=1000, strict=True)] = 3
    """Validation samples that each evaluation renders as pictures."""
    log_with: Names = ("tensorboard",)
    """Trackers of Accelerate to log to; metrics.jsonl is always written."""
    choose_by: ChosenBy = "chamfer"
    """Figure of the validation pairs by which a run chooses its model, divided by that of the
    midpoint baseline. A run with an initial model keeps that one until another is better by more
    than noise: by a paired t-test over the pairs, with fewer than 16 over equal parts of them."""
    validation_share: Annotated[Float, Field(gt=0)] = 0.2
    """Largest work of an evaluation as a share of that of the training before it, estimated from
    numbers of points. If the validation pairs are more, some evenly spread ones are measured, at
    least 4, and one of each dataset."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations without an improvement."""
    target_chamfer: PositiveFloat | None = None
    """Stop once the validation score, the Chamfer distance divided by that of the midpoint
    baseline, is this low. Not with another --choose-by."""
    collective_timeout: Annotated[Float, Field(gt=0, le=1e5)] = 20.0
    """Minutes after which a collective operation of the process group fails."""
    hang_timeout: Timeout = 300.0
    """Seconds without progress of a process after which the run ends and reports what every process
    was doing; waiting for others that make progress counts as progress. 10000000 disables this."""
    on_save_error: Literal["go-on", "end"] = "go-on"
    """What to do if the disk is full or read-only when a checkpoint is saved."""
    debug: Switch = False
    """Enable slow checks: anomaly detection in the backward pass, distributed checks, and the full
    log of every process on the console."""
    quick: Switch = False
    """Check the setup: a few steps, an evaluation, a checkpoint, and continuing from it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def defaults(self) -> Defaults:
        return DEFAULTS if self.data else PROCEDURAL_DEFAULTS

    @model_validator(mode="wrap")
    @classmethod
    def _raise_in_one_line(cls, values: Any, validated: Any) -> Any:
        try:
            return validated(values)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from None

    def __post_init__(self) -> None:
        if any("\ud800" <= char <= "\udfff" for char in str(self.output_dir)):
            raise ConfigError(
                f"--output-dir {self.output_dir}: this locale can't decode the name; "
                "set LC_ALL to C.UTF-8"
            )
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise ConfigError(f"--{' and --'.join(lengths)} exclude each other; give one")
        data_sources(self.data)
        least = 2 * self.model.k
        if self.crop and isinstance(self.token_budget, int) and self.token_budget < least:
            raise ConfigError(
                f"--token-budget is {self.token_budget}; with --crop it must be at least {least}, "
                "for --model.k neighbours in source and target"
            )
        if self.network and self.initial_model:
            raise ConfigError("--network: the initial model brings its own; leave one of them out")
        if self.initial_share and self.initial_model is None:
            raise ConfigError("--initial-share needs --initial-model")
        if self.target_chamfer is not None and self.choose_by != "chamfer":
            raise ConfigError(f"--target-chamfer excludes --choose-by {self.choose_by}")
        if self.noise_spacings and not self.augment:
            raise ConfigError("--noise-spacings needs --augment")
        if 0 < self.noise_spacings <= JITTER:
            raise ConfigError(
                f"--noise-spacings is {self.noise_spacings}; augmentation adds {JITTER} in any "
                "case; give more, or 0"
            )


LENGTHS = ("steps", "epochs", "hours")


def one_line(error: ValidationError) -> str:
    """What is wrong with the first invalid option, such as "--steps is 0; it must be greater than
    0"."""
    first, *others = error.errors(include_url=False)
    depth = 2 if first["loc"][0] in ("model", "loss") else 1
    name = ".".join(map(str, first["loc"][:depth]))
    if first["type"] == "unexpected_keyword_argument":
        return f"{name} is no option of train.py; see `train.py --help`"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # An option of several types has an error for each.
    wanted = [
        each["msg"] for each in (first, *others) if each["loc"][:depth] == first["loc"][:depth]
    ]
    begin = "Input should be "
    texts = [text.removeprefix(begin) for text in wanted if text.startswith(begin)] or wanted
    return f"{option(name)} is {first['input']!r:.40}; it must be {' or '.join(texts)}"


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
    """The config as JSON values, nested like the dataclasses."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one level of keys, joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value  # YAML has keys that are no strings, such as `yes`.
    return flat


def options_of_file(path: Path, overridden: Sequence[str] = ()) -> TrainConfig:
    """The options in a YAML or JSON file, such as the config.json of a run, without `overridden`.

    Null means that an option is not given. Raises ConfigError, naming the file, if it can't be
    read, has an unknown option, or a value of another type or out of range.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = "`pointup config` lists the presets"
        raise ConfigError(f"--config {path}: no such file or preset; {presets}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--config {path}: can't be read as YAML ({reason})") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: holds no options; write one per line, such as `steps: 2000`"
        )
    try:
        return TrainConfig(**_given(values, NOT_OPTIONS | {*overridden}))
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _given(values: Mapping[Any, Any], left_out: frozenset[str]) -> dict[str, Any]:
    given = {str(key).replace("-", "_"): value for key, value in values.items()}
    return {
        name: _given(value, frozenset()) if isinstance(value, dict) else value
        for name, value in given.items()
        if value is not None and name not in left_out
    }


OPTIONS_FILE = """

--config reads options from a YAML or JSON file, such as the config.json of a run, or from a preset
by its name, such as airborne_to_drone (`pointup config` lists them); flags
override them. A value of null means that the option is not given. --help-all lists all options."""


def parse_command_line(
    args: Sequence[str] | None, description: str, prog: str = "train.py"
) -> TrainConfig:
    """The options of a run: flags override `--config FILE`, which overrides the defaults.

    `prog` is the name of the program in the usage. Exits with status 0 after `--help` and 2 for
    wrong usage. Raises ConfigError for a flag out of range and for what `options_of_file` refuses.
    """
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    known, flags = parser.parse_known_args(sys.argv[1:] if args is None else args)
    default = TrainConfig()
    if known.config is not None:
        given = {flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")}
        # `--data` collects its values, and a run takes one length only.
        replaced = LENGTHS if given & {*LENGTHS} else ()
        path = known.config
        if not path.exists():
            path = shipped_options().get(str(path), path)
        default = options_of_file(path, (*replaced, *(given & {"data"})))
    command, flags = with_option_help(TrainConfig, flags)
    return tyro.cli(
        command, prog=prog, description=description + OPTIONS_FILE, args=flags, default=default
    )


MAX_WEIGHT = 10_000.0


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A dataset of a run.

    Attributes:
        name: directory of the dataset, or its name on the Hub.
        weight: number of times that an epoch has each training sample.
        label: the name in metrics and curves, before the names of its samples.
    """

    name: str
    weight: float
    label: str


def data_sources(data: Sequence[str]) -> list[DataSource]:
    """The datasets that `--data` names, as NAME or NAME=WEIGHT.

    A directory whose whole name is given is that directory, also if the name ends like a weight.
    The label is the last part of the name, with as many folders before it as make it unique. Raises
    ConfigError for an impossible weight and for a dataset that is given twice.
    """
    pairs = [_name_and_weight(text) for text in data]
    places = Counter(str(Path(name).resolve()) for name, _ in pairs)
    for name, weight in pairs:
        if not 0 < weight <= MAX_WEIGHT:
            raise ConfigError(
                f"--data {name}={weight:g}: the weight must be greater than 0 and at most "
                f"{MAX_WEIGHT:g}"
            )
        if places[str(Path(name).resolve())] > 1:
            raise ConfigError(f"--data {name}: is given twice; give it once, as {name}=2")
    labels = _labels([name for name, _ in pairs])
    return [DataSource(name, weight, labels[i]) for i, (name, weight) in enumerate(pairs)]


def _name_and_weight(text: str) -> tuple[str, float]:
    name, found, number = text.rpartition("=")
    if not found or not name or Path(text).is_dir():
        return text, 1.0
    try:
        return name, float(number)
    except ValueError:
        return text, 1.0


def _labels(names: Sequence[str]) -> list[str]:
    parts = [Path(name).resolve().parts[1:] or (name,) for name in names]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return list(names)


MAY_CHANGE = frozenset(
    {
        "output_dir", "num_workers", "worker_timeout", "log_every", "eval_every", "save_every",
        "save_minutes", "keep_checkpoints", "log_with", "num_pictures", "patience",
        "target_chamfer", "collective_timeout", "hang_timeout", "on_save_error",
        "accumulation_steps", "debug", "quick", "gradient_checkpointing", "max_unreadable",
    }
)  # fmt: skip
"""Options that a continued run may change silently, because they don't alter what is learned.

Accumulation steps are compared as `slots`: accumulation steps times processes.
"""
MAY_CHANGE_WITH_WARNING = {"slots", "token_budget", "max_clouds", "mixed_precision", "cpu_threads"}
"""Values that a continued run may change, with a warning, because it may move to other hardware.
The rest of the epoch is planned again, and each cloud is still seen exactly once. The number of
threads changes the last digits of sums."""


def claim_output_dir(config: TrainConfig, accelerator: Accelerator) -> None:
    """Write config.json into the run directory, or check that it fits the run to be continued.

    Only a directory with checkpoints counts as a run. Raises ConfigError, on every process, naming
    the first option that differs.
    """
    path = config.output_dir / "config.json"
    slots = accelerator.num_processes * config.accumulation_steps
    now = {**as_dict(config), "slots": slots, "mixed_precision": accelerator.mixed_precision}
    if accelerator.device.type == "cpu":
        now["cpu_threads"] = torch.get_num_threads()
    if has_checkpoints(config.output_dir / "checkpoints"):
        saved = read_config(path)
        check_same_run(saved, now, path)
        # The new place of a dataset is recorded when it is known to be the same, see `record_data`.
        now["data"] = saved.get("data", now["data"])
        if config.token_budget == "auto" and "found_token_budget" in saved:
            now["found_token_budget"] = saved["found_token_budget"]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_config(path, now)
    accelerator.wait_for_everyone()


def record_data(config: TrainConfig) -> None:
    """Write into config.json where the datasets of a continued run are now."""
    path = config.output_dir / "config.json"
    write_config(path, {**read_config(path), "data": list(config.data)})


def read_config(path: Path) -> dict[str, Any]:
    """The values in config.json of a run; raises ConfigError, with the path, for anything else."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        saved = getattr(error, "strerror", None) or str(error)
    if not isinstance(saved, dict):
        raise ConfigError(
            f"{path}: holds no options of a run ({saved!s:.100}); restore it, or give another "
            "--output-dir"
        )
    return saved


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Replace config.json of a run as a whole; raises FileError if it can't be written."""
    with os_errors(path, "written"), written_whole(path, is_sole_writer=True, flushed=True) as part:
        part.write_text(json.dumps(values, indent=2) + "\n")


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError, naming the first difference, if a run would go on with other options."""
    before = flattened(saved)
    for name, value in sorted(flattened(now).items()):
        was = before.get(name, value)
        if name in MAY_CHANGE or was == value or (name == "data" and same_weights(was, value)):
            continue
        if name not in MAY_CHANGE_WITH_WARNING:
            raise ConfigError(
                f"{path}: the run there has {name} {was}, not {value}; "
                "give the same value to continue it, or another --output-dir"
            )
        logger.warning("%s changed from %s to %s", name, was, value)


def same_weights(data: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two values of `--data` name as many datasets, with the same weights. They may
    have moved: `TrainingData.check_same` compares their pairs."""
    first, second = ([source.weight for source in data_sources(names)] for names in (data, other))
    return first == second
