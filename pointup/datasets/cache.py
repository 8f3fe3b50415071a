"""The directory in which pointup keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$POINTUP_CACHE, else $XDG_CACHE_HOME/pointup, else ~/.cache/pointup."""
    for variable, folder in (("POINTUP_CACHE", ""), ("XDG_CACHE_HOME", "pointup")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / folder
    return Path.home() / ".cache" / "pointup"
