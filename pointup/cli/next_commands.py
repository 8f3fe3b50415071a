"""Composes the commands that follow preparation, training and upsampling, ready to paste."""

from __future__ import annotations

import json
import math
import os
import shlex
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from accelerate.commands.config.config_args import default_config_file

from pointup.disk import readable_json
from pointup.errors import ConfigError, DataError
from pointup.shipped import is_checkout, shipped_file, shipped_options

if TYPE_CHECKING:
    # The training modules take seconds and 200 MB to import; upsampling uses this module too.
    from pointup.training.config import TrainConfig

PREPARED_FROM = {
    **dict.fromkeys(("prepare pairs", "prepare clouds"), "source"),
    **dict.fromkeys(("prepare thin", "prepare passes"), "inputs"),
}
"""The entry of pointup.json that lists the sparse files, for each `pointup prepare` command."""

MAX_RATIO = 16.0
"""The default of `--max-ratio` of train.py and of `pointup evaluate pairs`."""

PRESETS_BELOW = ((3.0, "similar_density"), (math.inf, "airborne_to_drone"))
"""The preset for pairs of surveys with a smaller ratio than this."""
PRESETS_OF: dict[str, tuple[tuple[float, str], ...]] = {
    "prepare pairs": PRESETS_BELOW,
    "prepare passes": PRESETS_BELOW,
    "prepare scenes": ((math.inf, "forest_scenes"),),
    "prepare meshes": ((math.inf, "shapes_4x"),),
    "prepare h5": ((math.inf, "shapes_4x"),),
}
"""The presets for the dataset of a `pointup prepare` command, as their first lines say."""

# From random weights, few clouds give a poor model, and a survey one without rules for the ground.
_STARTS_FROM = {"prepare clouds": "shapes", "prepare thin": "lidar"}

_MOST_NAMED = 2


def preset_of(data: Path, ratio: float) -> str | None:
    """The preset for a dataset of `pointup prepare` with `ratio` target points for each source
    point; None without one."""
    presets = PRESETS_OF.get(_made_by(_description(data)), ())
    return next((name for most, name in presets if ratio < most), None)


def describe_preset(preset: str) -> str:
    """The length and the start of a run with a preset."""
    options = yaml.safe_load(shipped_options()[preset].read_text(encoding="utf-8"))
    start = f"the included model {options['initial_model']}" if "initial_model" in options else ""
    return f"{options['steps']:,} steps from {start or 'random weights'}"


def training_command(data: Path, preset: str | None = None) -> str:
    """The command that trains on a dataset of `pointup prepare`, on this machine's hardware."""
    names = (data.resolve().name + suffix for suffix in chain([""], map("-{}".format, count(2))))
    # An existing run was trained on other data, or on an earlier version of this dataset.
    output_dir = next(path for name in names if not (path := Path("runs", name)).exists())
    script = [_shown("train.py")] if is_checkout() else ["-m", "pointup", "train"]
    start = shlex.join(["accelerate", "launch", *_launch_options(), *script])
    if preset is not None:
        # As in the guides: one process needs no launcher, which would only make the line longer.
        is_alone = not torch.cuda.device_count() and not Path(default_config_file).is_file()
        start = "pointup train" if is_alone else start
        start += f" --config {preset}"
    initial_model = _STARTS_FROM.get(_made_by(_description(data)))
    start += f" --initial-model {initial_model}" if initial_model else ""
    return f"{start} {shlex.join(['--data', str(data), '--output-dir', str(output_dir)])}"


def commands_after_training(config: TrainConfig) -> list[str]:
    """The commands that upsample the sparse survey with the model of a run and evaluate the model.

    Each dataset with held-out pairs is evaluated. A command is left out if its input is unknown:
    for a dataset that `pointup prepare` did not write, or a survey that no longer exists. A model
    trained on noise replaces points, as in its validation, and is not evaluated: its validation
    adds noise, `evaluate pairs` does not.
    """
    from pointup.training.config import data_sources

    model = config.output_dir / "model"
    names = [source.name for source in data_sources(config.data)]
    if not names or not model.is_dir():
        return []
    surveys = _surveys_of(Path(names[0])) if len(names) == 1 else []
    upsampling = ["pointup", "upsample", *map(str, surveys), "-o", _dense_name(surveys)]
    upsampling += ["--model", str(model), *(["--denoise"] if config.noise_spacings else [])]
    commands = []
    if surveys:
        ratio = _ratio_of(Path(names[0])) if config.ratio is None else config.ratio
        commands.append([*upsampling, *_ratio_option(ratio, config)])
    ratios = config.ratio, config.max_ratio
    measured = [] if config.noise_spacings else _with_held_out(names)
    commands += [_evaluation(name, model, *ratios) for name in measured]
    return [shlex.join(command) for command in commands]


def command_after_upsampling(model: str | Path) -> str | None:
    """The command that evaluates a run's model on its held-out pairs; None for other models."""
    try:
        options = json.loads((Path(model).parent / "config.json").read_text())
        if options.get("noise_spacings"):
            return None
        # Takes seconds, for most models in vain.
        from pointup.training.config import data_sources

        name = _with_held_out([source.name for source in data_sources(options["data"])])[0]
        ratios = options.get("ratio"), options.get("max_ratio", MAX_RATIO)
        return shlex.join(_evaluation(name, model, *ratios))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError):
        return None


def _with_held_out(names: list[str]) -> list[str]:
    """The datasets of a run that have validation pairs: see `open_together`."""
    if len(names) == 1:
        return names
    from pointup.datasets.opening import has_validation

    try:
        return [name for name in names if has_validation(name)] or names
    except DataError:
        # One was moved or deleted: the printed command will name it.
        return names


def _evaluation(name: str, model: str | Path, ratio: float | None, max_ratio: float) -> list[str]:
    """The words of the command that evaluates a model on pairs as validation in training does."""
    words = ["pointup", "evaluate", "pairs", name, "--model", str(model), "--as-written"]
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


def _ratio_of(data: Path) -> float | None:
    """Target points for each source point of a dataset; None if unknown."""
    ratio = _description(data).get("ratio")
    if isinstance(ratio, int | float):
        return float(ratio)
    from pointup.datasets.samples import SampleTable

    try:
        tables = [SampleTable(path, data) for path in (data / "samples").glob("*.arrow")]
    except DataError:
        return None
    # The sum, because tiles at the edge of a survey have few points, at any ratio.
    source, target = (
        sum(int(table.array(name).sum()) for table in tables)
        for name in ("num_source", "num_target")
    )
    return target / source if source else None


def _ratio_option(ratio: float | None, config: TrainConfig) -> list[str]:
    """The option of `pointup upsample` for a ratio, up to the largest one in training; none for a
    ratio that makes no points, unless they replace the measured ones."""
    from pointup.upsampling.options import LARGEST_RATIO

    if ratio is None or (round(ratio, 1) <= 1 and not config.noise_spacings):
        return []
    used = min(max(ratio, 1.0), config.max_ratio, LARGEST_RATIO)
    return ["--ratio", f"{round(used, 1 if used < 10 else None):g}"]


def _description(data: Path) -> dict[str, Any]:
    """The content of pointup.json; empty without one."""
    # A finished run must not fail at its last line.
    return readable_json(data / "pointup.json")


def _made_by(description: dict[str, Any]) -> str:
    """The command that made a dataset: "prepare thin" of "pointup 1.0 prepare thin"."""
    return " ".join(str(description.get("made_by", "")).split()[2:])


def _surveys_of(data: Path) -> list[Path]:
    info = _description(data)
    surveys = [Path(name) for name in info.get(PREPARED_FROM.get(_made_by(info), ""), [])]
    here = Path.cwd()
    shown = [path.relative_to(here) if path.is_relative_to(here) else path for path in surveys]
    if not all(survey.exists() for survey in shown):
        return []
    # Of many files, their folder: a line of a hundred names can't be read.
    return shown if len(shown) <= _MOST_NAMED else [Path(os.path.commonpath(shown))]


def _dense_name(surveys: list[Path]) -> str:
    from pointup.io.files import writable_extensions

    first = surveys[0] if surveys else Path("survey")
    if len(surveys) != 1 or first.is_dir():
        return f"{first.resolve().name if first.is_dir() else 'surveys'}_dense"
    if first.name.lower().endswith(".copc.laz"):
        return first.name[: -len(".copc.laz")] + "_dense.laz"
    return f"{first.stem}_dense{first.suffix if first.suffix in writable_extensions else '.ply'}"
