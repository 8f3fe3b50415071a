"""`TrainConfig`: the options of train.py, from the command line and files, and their checks."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, is_dataclass, replace
from io import StringIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from pointup.datasets.pair_dataset import JITTER
from pointup.errors import ConfigError, PointupError
from pointup.model.config import RENAMED, ModelConfig, with_current_names
from pointup.option_help import with_option_help
from pointup.training.objective import LossConfig
from pointup.training.run_directory.checkpoint import OnSaveError
from pointup.training.schedule import LrScaling

GradientCheckpointing = Literal["auto", "on", "off"]
DEFAULT_TOKEN_BUDGET = 20480
"""Used if `--token-budget` is not given, unless a single pair is larger."""
DEFAULT_STEPS, DEFAULT_EVALUATIONS = 200, 4
PROCEDURAL_TOKEN_BUDGET = 8192
"""Without `--data`: on a CPU, many small steps train more than a few large ones."""
PROCEDURAL_STEPS, PROCEDURAL_EVALUATIONS = 120, 2
"""Without `--data`: a first run should end within minutes on two CPU cores."""

NOT_OPTIONS = frozenset({"slots", "mixed_precision", "cpu_threads", "found_token_budget"})
"""Keys of config.json that are not options of train.py."""

AT_MOST = {
    "token_budget": 2**31 - 1, "max_clouds": 2**31 - 1, "accumulation_steps": 10_000,
    "ratio": 1000, "max_ratio": 1000, "seed": 2**63 - 1, "num_workers": 1024, "num_pictures": 1000,
    "worker_timeout": 1e7, "hang_timeout": 1e7, "collective_timeout": 1e5,
}  # fmt: skip
"""Largest value of each option that integers, timers and machines can handle."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a point cloud upsampler."""

    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
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
    train_only: tuple[str, ...] = ()
    """Train only weights whose names start with one of these, such as quota; freeze the others."""
    steps: int | None = None
    """Length of the run in optimizer steps (when neither epochs nor hours are given: 200, or 120
    without --data)."""
    epochs: float | None = None
    """Length of the run in passes over the data."""
    hours: float | None = None
    """Length of the run in hours of training."""
    token_budget: int | Literal["auto"] | None = None
    """Most tokens (points of source and target) in a micro-batch. By default 20,480 (8,192
    without --data), or the size of the largest pair if that is more; "auto" measures, before the
    first step, how many fit into memory, and keeps that number for the whole run."""
    max_clouds: int | None = None
    """Most clouds in a micro-batch."""
    accumulation_steps: int = 1
    """Micro-batches of each process in one optimizer step."""
    crop: bool = False
    """Crop pairs larger than the token budget to a random neighbourhood; otherwise refuse them."""
    ratio: float | None = None
    """Upsampling ratio in training; by default that of each pair."""
    max_ratio: float = 16.0
    """Largest upsampling ratio in training; pairs with a larger one are upsampled by this ratio."""
    augment: bool = True
    """Rotate, mirror, scale and jitter the training pairs."""
    noise: float = 0.0
    """Largest standard deviation of Gaussian noise on the sources of training pairs, in spacings of
    the source. For each pair it is drawn anew from 0.01 to this number. Not with --no-augment."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW; with `lr_scaling`, at `reference_clouds` clouds per step."""
    lr_scaling: LrScaling = "none"
    """How the learning rate scales with the number of clouds per step."""
    reference_clouds: float = 16.0
    """Clouds per step at which `lr_scaling` leaves the learning rate unchanged."""
    warmup_steps: int = 20
    """Steps of linear learning rate warm-up."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    ema_decay: float | None = None
    """Decay of the exponential moving average of the weights, such as 0.999. With it, the average
    is evaluated and saved as the model, and checkpoints hold both. By default no average."""
    clip_norm: float = 1.0
    """Largest gradient norm of a step; larger gradients are scaled down to it."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Recompute activations in the backward pass instead of storing them: less memory, more time,
    the same gradients. "auto" does so for batches with many children."""
    seed: int = 0
    """Seed of everything random: weights, order of samples, augmentation, dropout."""
    num_workers: int = 1
    """Data workers per training process, which read and augment samples."""
    worker_timeout: float = 120.0
    """Seconds without a batch from a data worker after which the run ends with an error."""
    max_unreadable: float = 0.01
    """Share of the training samples that may turn out damaged when they are read; such samples are
    left out of their steps. More end the run."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl and points in TensorBoard. A step with an evaluation has
    a line too."""
    eval_every: int | None = None
    """Steps between evaluations (by default a quarter of the run, half of it without --data, or 500
    if its length in steps is unknown)."""
    save_every: int | None = None
    """Steps between checkpoints (the same default as eval_every)."""
    save_minutes: float = 10.0
    """Longest time between checkpoints in minutes, where save_every steps take longer; a run that
    is killed loses about as much."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep; older ones are deleted."""
    num_pictures: int = 3
    """Validation samples that each evaluation renders as pictures."""
    log_with: tuple[str, ...] = ("tensorboard",)
    """Trackers of Accelerate to log to; metrics.jsonl is always written."""
    patience: int | None = None
    """Stop after this many evaluations without an improvement."""
    target_chamfer: float | None = None
    """Stop once the validation score, the Chamfer distance divided by that of the midpoint
    baseline, is this low."""
    collective_timeout: float = 20.0
    """Minutes after which a collective operation of the process group fails."""
    hang_timeout: float = 300.0
    """Seconds without progress of a process after which the run ends and reports what every process
    was doing; waiting for others that make progress counts as progress. 10000000 disables this."""
    on_save_error: OnSaveError = "go-on"
    """What to do if the disk is full or read-only when a checkpoint is saved."""
    debug: bool = False
    """Enable slow checks: anomaly detection in the backward pass, distributed checks, and the full
    log of every process on the console."""
    quick: bool = False
    """Check the setup: a few steps, an evaluation, a checkpoint, and continuing from it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        if any("\ud800" <= char <= "\udfff" for char in str(self.output_dir)):
            raise ConfigError(
                f"--output-dir {self.output_dir}: this locale can't decode the name; "
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
        if isinstance(self.data, str):
            raise ConfigError(f"data is {self.data!r}; give a tuple of names")
        data_sources(self.data)
        positive = (
            "steps", "epochs", "hours", "token_budget", "max_clouds", "accumulation_steps",
            "learning_rate", "reference_clouds", "clip_norm", "worker_timeout", "log_every",
            "eval_every", "save_every", "save_minutes", "keep_checkpoints", "patience",
            "target_chamfer", "collective_timeout", "hang_timeout",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value != "auto" and not value > 0:
                raise ConfigError(f"{option(name)} is {value}; it must be greater than 0")
        not_negative = (
            "warmup_steps", "weight_decay", "num_workers", "num_pictures", "seed", "max_unreadable",
            "noise",
        )  # fmt: skip
        for name in not_negative:
            if getattr(self, name) < 0:
                raise ConfigError(f"{option(name)} is {getattr(self, name)}; it can't be negative")
        least = 2 * self.model.k
        budget = self.token_budget
        if self.crop and budget is not None and budget != "auto" and budget < least:
            raise ConfigError(
                f"--token-budget is {self.token_budget}; with --crop it must be at least {least}, "
                "for --model.k neighbours in source and target"
            )
        if self.noise and not self.augment:
            raise ConfigError("--noise needs --augment")
        if 0 < self.noise <= JITTER:
            raise ConfigError(
                f"--noise is {self.noise}; augmentation adds {JITTER} in any case; give more, or 0"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"--ema-decay is {self.ema_decay}; it must lie between 0 and 1")
        for name in ("ratio", "max_ratio"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(
                    f"{option(name)} is {value}; upsampling needs a ratio of at least 1"
                )


def default_token_budget(config: TrainConfig) -> int:
    """The token budget if none is given; procedural pairs are small, and so are their steps."""
    return DEFAULT_TOKEN_BUDGET if config.data else PROCEDURAL_TOKEN_BUDGET


def default_steps(config: TrainConfig) -> int:
    """The length of a run in steps if none is given."""
    return DEFAULT_STEPS if config.data else PROCEDURAL_STEPS


def default_evaluations(config: TrainConfig) -> int:
    """The number of evaluations and checkpoints of a run if no interval is given."""
    return DEFAULT_EVALUATIONS if config.data else PROCEDURAL_EVALUATIONS


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
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return values


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one level of keys, joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value  # YAML has keys that are no strings, such as `yes`.
    return flat


NAMES_OF_TYPES = {
    bool: "true or false, without quotes",
    int: "a whole number in digits",
    float: "a number",
    str: "a text",
    Path: "a path",
    NoneType: "null",
}


def options_of_file(path: Path) -> dict[str, Any]:
    """The options in a YAML or JSON file, such as the config.json of a run, by dotted field name.

    Null means that an option is not given, except where None is one of its values. Raises
    ConfigError for a file that can't be read, for an unknown option, and for a value of a wrong
    type.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--config {path}: can't be read as YAML ({reason})") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: holds no options; write one per line, such as `steps: 2000`"
        )
    types = option_types(TrainConfig)
    options: dict[str, Any] = {}
    for key, value in flattened(with_current_options(values)).items():
        name = key.replace("-", "_")
        if name in NOT_OPTIONS:
            continue
        if name not in types:
            raise ConfigError(
                f"--config {path}: {key} is no option of train.py; see `train.py --help`"
            )
        if value is None and NoneType not in get_args(types[name]):
            continue
        try:
            options[name] = converted(value, types[name])
        except (TypeError, ValueError):
            expected = description_of(types[name])
            raise ConfigError(
                f"--config {path}: {key} is {value!r:.40}; it must be {expected}"
            ) from None
    return options


def option_types(config: type, prefix: str = "") -> dict[str, Any]:
    """The type of each option by dotted name; a group of options, such as `model`, has one too."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(config).items():
        types[prefix + name] = kind
        if isinstance(kind, type) and is_dataclass(kind):
            types |= option_types(kind, f"{prefix}{name}.")
    return types


def converted(value: Any, kind: Any) -> Any:
    """A value of YAML or JSON as a value of the type of an option.

    A number may be quoted. YAML reads `on` and `off` as booleans: for choices that have these words
    they are words again. Raises ValueError or TypeError for a value of another type.
    """
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        for part in parts:
            try:
                return converted(value, part)
            except (TypeError, ValueError):
                continue
        raise TypeError
    if get_origin(kind) is Literal:
        word = ("off", "on")[value] if isinstance(value, bool) else value
        return parts[parts.index(word)]
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(items)
        return tuple(converted(*pair) for pair in zip(items, parts, strict=True))
    if kind in (bool, NoneType):
        is_valid = isinstance(value, kind)
    else:
        is_valid = not isinstance(value, bool | list | NoneType)
    if not is_valid:
        raise TypeError
    # int(2.5) would be 2.
    return value if kind in (bool, NoneType) else kind(str(value))


def description_of(kind: Any) -> str:
    """What values a type has, as a part of a sentence: "a number or null"."""
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(description_of, parts))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, parts))
    if get_origin(kind) is tuple:
        if parts[-1] is Ellipsis:
            return f"a list, each item {description_of(parts[0])}"
        return f"[{', '.join(map(description_of, parts))}]"
    if is_dataclass(kind):
        return "a group of options"
    return NAMES_OF_TYPES[kind]


LENGTHS = frozenset({"--steps", "--epochs", "--hours"})
OPTIONS_FILE = """

--config FILE reads options from a YAML or JSON file, such as the config.json of a run or a preset
(`pointup config` lists them); flags override them. A value of null
means that the option is not given."""


def parse_command_line(
    args: Sequence[str] | None, description: str, prog: str = "train.py"
) -> TrainConfig:
    """The options of a run: flags override `--config FILE`, which overrides the defaults.

    `prog` is the name of the program in the usage. Exits with status 0 after `--help` and 2 for
    wrong usage. Raises ConfigError for a file that can't be read or that has an unknown option or a
    value of a wrong kind or out of range, and for a flag that was renamed; ConfigError or
    ValueError for a flag out of range.
    """
    flags, file = without_config(sys.argv[1:] if args is None else args)
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("--")}
    for name in sorted(names & RENAMED_OPTIONS.keys()):
        raise ConfigError(f"{name} is now {RENAMED_OPTIONS[name]}")
    options = options_of_file(file) if file else {}
    # The last value of a repeated flag wins, except for `--data`, which collects its values, and
    # for the lengths, of which a run takes only one.
    overridden = {"--data"} & names | (LENGTHS if LENGTHS & names else set())
    from_file = [
        word
        for name, value in options.items()
        if option(name) not in overridden
        for word in flag_of(option(name), value)
    ]
    if file and are_parsed(flags) and not are_parsed(from_file + flags):
        check_model_options(file, options)
    try:
        return tyro.cli(
            with_option_help(TrainConfig),
            prog=prog,
            description=description + OPTIONS_FILE,
            args=from_file + flags,
        )
    except (PointupError, ValueError) as error:
        if file and are_valid(flags):
            raise ConfigError(f"--config {file}: {error}") from None
        raise


def without_config(args: Sequence[str]) -> tuple[list[str], Path | None]:
    """Split `args` into the arguments without `--config FILE`, and FILE (None if absent)."""
    rest: list[str] = []
    file: Path | None = None
    left = iter(args)
    for argument in left:
        name, _, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        value = value or next(left, "")
        if not value or file is not None:
            raise ConfigError("--config takes one file with options, such as run.yaml")
        file = Path(value)
    return rest, file


def check_model_options(file: Path, options: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the file, for model options of it that are out of range.

    tyro would report them as if they were flags.
    """
    given = {
        name.removeprefix("model."): value
        for name, value in options.items()
        if name.startswith("model.")
    }
    try:
        ModelConfig(**given)
    except ValueError as error:
        raise ConfigError(f"--config {file}: {error}") from None


def are_parsed(flags: Iterable[str]) -> bool:
    """Whether tyro accepts the flags: ranges are checked for options of the model only."""
    try:
        are_valid(flags)
    except SystemExit:
        return False
    return True  # Or out of range, perhaps only without the other flags.


def are_valid(flags: Iterable[str]) -> bool:
    """Whether no value is out of range. Exits for a value of a kind that its option does not
    take."""
    try:
        with redirect_stderr(StringIO()):  # For what `console_outputs` leaves.
            tyro.cli(TrainConfig, args=list(flags), console_outputs=False)
    except (PointupError, ValueError):
        return False
    return True


def flag_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        prefix, _, last = name.rpartition(".")
        return [name] if value else [f"{prefix}.no-{last}" if prefix else f"--no-{last[2:]}"]
    if name == "--data":
        return [word for each in value for word in (name, str(each))]
    if isinstance(value, list | tuple):
        return [name, *map(str, value)]
    return [name, str(value)]


RENAMED_OPTIONS = {
    f"--model.{old.replace('_', '-')}": f"--model.{new.replace('_', '-')}"
    for old, new in RENAMED.items()
}
"""Current names of train.py flags, by their earlier names."""
RENAMED_CHAMFER = {"plain": "unsquared"}


def with_current_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The stored options of a run, with current names and values."""
    current = dict(saved)
    if "data" in saved and not isinstance(saved["data"], list | tuple):
        # A run had one dataset, or none.
        current["data"] = [] if saved["data"] is None else [str(saved["data"])]
    model, loss = saved.get("model"), saved.get("loss")
    if isinstance(model, dict):
        current["model"] = with_current_names(model)
    if isinstance(loss, dict) and isinstance(loss.get("chamfer"), str):
        current["loss"] = {
            **loss,
            "chamfer": RENAMED_CHAMFER.get(loss["chamfer"], loss["chamfer"]),
        }
    return current


MAX_WEIGHT = 10_000.0


@dataclass(frozen=True)
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
        weight = float(number)
    except ValueError:
        return text, 1.0
    return name, weight if math.isfinite(weight) else 0.0


def _labels(names: Sequence[str]) -> list[str]:
    parts = [Path(name).resolve().parts[1:] or (name,) for name in names]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return list(names)
