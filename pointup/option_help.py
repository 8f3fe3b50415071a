"""Help texts of options: the docstrings of a command's fields, each as one paragraph."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import docstring_parser
import tyro


@cache
def with_option_help(command: type) -> type:
    """The dataclass of a command, prepared for `tyro`; nested dataclasses are, too.

    The help of an option is the docstring below its field. tyro itself keeps the line breaks of the
    source where a line is indented, so that lines of `--help` would end anywhere.
    """
    for base in filter(is_dataclass, command.__mro__):
        described = docstring_parser.parse_from_object(base).params
        texts = {option.arg_name: option.description for option in described}
        hints = get_type_hints(base, include_extras=True)
        own = vars(base).get("__annotations__", {})
        for name in own:
            for nested in _dataclasses_in(hints[name]):
                with_option_help(nested)
            if text := texts.get(name):
                joined = tyro.conf.arg(help=" ".join(text.split()))
                own[name] = Annotated[hints[name], joined]
    return command


def _dataclasses_in(hint: Any) -> list[type]:
    """The dataclasses that a type hint consists of."""
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [found for part in get_args(hint) for found in _dataclasses_in(part)]
