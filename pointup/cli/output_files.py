"""Options that name the files that a command writes: HTML, pictures, others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

HtmlFile = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE.html")]
View = Annotated[Path | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(optional)")]
Picture = Annotated[Path | None, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="(optional)")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")]
Title = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(optional)")]


def describe_page(path: Path, size: int) -> str:
    """The last line that a command prints about an HTML file of `size` bytes."""
    return f"{path}: {size / 1e6:.1f} MB; open it in a browser"
