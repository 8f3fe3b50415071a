"""Help texts of options: the docstrings of a command's fields, each as one paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import docstring_parser
import tyro


def with_option_help(command: type, args: Sequence[str]) -> tuple[type, list[str]]:
    """The dataclass of a command, prepared for `tyro`, and the arguments to parse with it.

    The help of an option is the docstring below its field. tyro itself keeps the line breaks of the
    source where a line is indented, so that lines of `--help` would end anywhere. `--help` leaves
    out the fields that a command names in `RARELY_SET`; `--help-all` has them.
    """
    # For `--help` alone: tyro does not parse an option that it does not show.
    _prepare(command, hides=not {"-h", "--help"}.isdisjoint(args))
    return command, ["--help" if arg == "--help-all" else arg for arg in args]


def _prepare(command: type, hides: bool) -> None:
    rare = getattr(command, "RARELY_SET", "").split() if hides else []
    suppressed: Any = tyro.conf.Suppress
    for base in filter(is_dataclass, command.__mro__):
        for name, (hint, nested) in _described(base).items():
            for each in nested:
                _prepare(each, hides)
            base.__annotations__[name] = suppressed[hint] if name in rare else hint


@cache
def _described(command: type) -> dict[str, tuple[Any, list[type]]]:
    """The hint of each own field with its help, and the dataclasses that the hint consists of."""
    described = docstring_parser.parse_from_object(command).params
    texts = {option.arg_name: option.description for option in described}
    hints = get_type_hints(command, include_extras=True)
    fields = {}
    for name in vars(command).get("__annotations__", {}):
        hint = hints[name]
        if text := texts.get(name):
            hint = Annotated[hint, tyro.conf.arg(help=" ".join(text.split()))]
        fields[name] = (hint, _dataclasses_in(hints[name]))
    return fields


def _dataclasses_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [found for part in get_args(hint) for found in _dataclasses_in(part)]


def optional(metavar: str, name: str | None = None) -> Any:
    """How `--help` shows an option that has no default value of its own."""
    return tyro.conf.arg(metavar=metavar, name=name, help_behavior_hint="(optional)")
