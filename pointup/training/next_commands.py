"""Composes the commands that follow preparation, training and upsampling, ready to paste."""

from __future__ import annotations

import json
import shlex
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.commands.config.config_args import default_config_file

from pointup.errors import ConfigError, DataError
from pointup.io.files import writable_extensions
from pointup.shipped import is_checkout, shipped_file
from pointup.training.data_sources import data_sources
from pointup.training.renamed_options import with_current_options

if TYPE_CHECKING:
    # The training modules take seconds and 200 MB to import; upsampling uses this module too.
    from pointup.training.config import TrainConfig

PREPARED_FROM = {"prepare pairs": "source", "prepare thin": "inputs"}
"""The entry of pointup.json that lists the sparse files, for each `pointup prepare` command."""

MAX_RATIO = 16.0
"""The default of `--max-ratio` of train.py and of `pointup evaluate pairs`."""


def training_command(data: Path) -> str:
    """The command that trains on a dataset of `pointup prepare`, on this machine's hardware."""
    names = (data.resolve().name + suffix for suffix in chain([""], map("-{}".format, count(2))))
    # An existing run was trained on other data, or on an earlier version of this dataset.
    output_dir = next(path for name in names if not (path := Path("runs", name)).exists())
    script = [_shown("train.py")] if is_checkout() else ["-m", "pointup", "train"]
    words = ["accelerate", "launch", *_launch_options(), *script]
    return shlex.join([*words, "--data", str(data), "--output-dir", str(output_dir)])


def commands_after_training(config: TrainConfig) -> list[str]:
    """The commands that upsample the sparse survey with the model of a run and evaluate the model.

    Each dataset with held-out pairs is evaluated. A command is left out if its input is unknown:
    for a dataset that `pointup prepare` did not write, or a survey that no longer exists.
    """
    model = config.output_dir / "model"
    names = [source.name for source in data_sources(config.data)]
    if not names or not model.is_dir():
        return []
    surveys = _surveys_of(Path(names[0])) if len(names) == 1 else []
    upsampling = ["pointup", "upsample", *map(str, surveys), "-o", _dense_name(surveys)]
    commands = [[*upsampling, "--model", str(model)]] if surveys else []
    commands += [
        _evaluation(name, model, config.ratio, config.max_ratio) for name in _with_held_out(names)
    ]
    return [shlex.join(command) for command in commands]


def command_after_upsampling(model: str | Path) -> str | None:
    """The command that evaluates a run's model on its held-out pairs; None for other models."""
    path = Path(model).parent / "config.json"
    try:
        options = with_current_options(json.loads(path.read_text()))
        name = _with_held_out([source.name for source in data_sources(options["data"])])[0]
        ratios = options.get("ratio"), options.get("max_ratio", MAX_RATIO)
        return shlex.join(_evaluation(name, model, *ratios))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError):
        return None


def _with_held_out(names: list[str]) -> list[str]:
    """The datasets of a run that have validation pairs: see `open_together`."""
    if len(names) == 1:
        return names
    from pointup.datasets.table_store import has_validation

    try:
        return [name for name in names if has_validation(name)] or names
    except DataError:
        # One was moved or deleted: the printed command will name it.
        return names


def _evaluation(name: str, model: str | Path, ratio: float | None, max_ratio: float) -> list[str]:
    """The words of the command that evaluates a model on pairs at the ratio of its training."""
    words = ["pointup", "evaluate", "pairs", name, "--model", str(model)]
    if ratio is not None:
        words += ["--ratio", f"{ratio:g}"]
    return words if max_ratio == MAX_RATIO else [*words, "--max-ratio", f"{max_ratio:g}"]


def _launch_options() -> list[str]:
    """The launch options for this machine; none if the user has a default configuration."""
    if Path(default_config_file).is_file():
        return []
    num_gpus = torch.cuda.device_count()
    name = {0: "cpu", 1: "1gpu"}.get(num_gpus, "8gpu")
    options = ["--config_file", _shown(f"accelerate_configs/{name}.yaml")]
    return options if num_gpus in (0, 1, 8) else [*options, "--num_processes", str(num_gpus)]


def _shown(name: str) -> str:
    """The path of an included file: `name` itself if it resolves from the working directory."""
    path = shipped_file(name)
    return name if Path(name).exists() and path.samefile(name) else str(path)


def _surveys_of(data: Path) -> list[Path]:
    try:
        info: dict[str, Any] = json.loads((data / "pointup.json").read_text())
    except (OSError, ValueError):  # A finished run must not fail at its last line.
        return []
    made_by = str(info.get("made_by", ""))
    entries = [entry for command, entry in PREPARED_FROM.items() if made_by.endswith(command)]
    surveys = [Path(name) for entry in entries for name in info.get(entry, [])]
    here = Path.cwd()
    shown = [path.relative_to(here) if path.is_relative_to(here) else path for path in surveys]
    return shown if all(survey.exists() for survey in shown) else []


def _dense_name(surveys: list[Path]) -> str:
    first = surveys[0] if surveys else Path("survey")
    if len(surveys) != 1 or first.is_dir():
        return f"{first.resolve().name if first.is_dir() else 'surveys'}_dense"
    if first.name.lower().endswith(".copc.laz"):
        return first.name[: -len(".copc.laz")] + "_dense.laz"
    return f"{first.stem}_dense{first.suffix if first.suffix in writable_extensions else '.ply'}"
