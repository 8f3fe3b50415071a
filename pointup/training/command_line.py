"""Parses the command line of train.py: flags, option files (`--config`), renamed options."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import tyro

from pointup.errors import ConfigError, PointupError
from pointup.model.config import ModelConfig
from pointup.option_help import with_option_help
from pointup.training.config import TrainConfig, option
from pointup.training.options_file import options_of_file
from pointup.training.renamed_options import RENAMED_OPTIONS

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
