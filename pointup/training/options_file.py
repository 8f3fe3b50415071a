"""Reads the options of a run from a YAML or JSON file, and checks the type of each value."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from pointup.errors import ConfigError
from pointup.training.config import NOT_OPTIONS, TrainConfig, flattened
from pointup.training.renamed_options import with_current_options

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
