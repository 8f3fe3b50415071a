"""`pointup config`: paths of the included launch configurations, presets and QGIS script."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import tyro

from pointup.errors import ConfigError
from pointup.shipped import PRESETS, shipped_file, shipped_options

QGIS = "qgis"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Print the path of an included file: a launch configuration, a preset of options, or `qgis`,
    a Processing script for QGIS. Without a name all of them are listed.

    accelerate launch --config_file $(pointup config 8gpu) -m pointup train --data pairs/
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """Name of a file, such as 8gpu."""

    def run(self) -> int:
        files = shipped_options() | {QGIS: shipped_file("cli/qgis_script.py")}
        if self.name is None:
            print(listing(files))
            return 0
        if self.name not in files:
            near = get_close_matches(self.name, files, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(files)}"
            raise ConfigError(f"{self.name}: no such configuration; {hint}")
        print(files[self.name])
        return 0


def listing(files: dict[str, Path]) -> str:
    """Names by kind, each with the first line of its comment."""
    width = max(map(len, files), default=0)
    lines: dict[str, list[str]] = {"presets": [], "configurations": []}
    for name, path in files.items():
        if path.suffix != ".yaml":
            continue
        kind = "presets" if path.parent.name == PRESETS else "configurations"
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines[kind].append(f"  {name:{width}}  {first}")
    return "\n".join(
        [
            "for accelerate launch --config_file $(pointup config NAME):",
            *lines["configurations"],
            "for pointup train --config NAME:",
            *lines["presets"],
            "for QGIS, a script to add to its Processing Toolbox:",
            f"  {QGIS}",
        ]
    )
