"""`--shard 3/64`: the part of the work that one job of an array does."""

from __future__ import annotations

import re
from typing import Annotated

import tyro

from pointup.errors import ConfigError

ShardOption = Annotated[str | None, tyro.conf.arg(metavar="K/N", help_behavior_hint="(optional)")]


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """K and N of "K/N", K from 1 to N; None for None. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard {text}: give K/N with K from 1 to N, as in --shard 3/64")
    return int(found[1]), int(found[2])
