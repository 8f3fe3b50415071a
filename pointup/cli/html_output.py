"""Options of the commands that write an HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

HtmlFile = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE.html")]
Title = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(optional)")]


def describe_page(path: Path, size: int) -> str:
    """The last line that such a command prints."""
    return f"{path}: {size / 1e6:.1f} MB; open it in a browser"
