"""`pointup prepare join`: several pair datasets as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pointup.apps.newdataset import NewDataset
from pointup.errors import ConfigError

if TYPE_CHECKING:
    from pointup.data.pair import Pair
    from pointup.geometry.surfaces import Surface


@dataclass(frozen=True, kw_only=True)
class Join:
    """From pair datasets: all of their pairs in one. What one validates on, so does the whole."""

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DATASET ...")]
    """Directories made by `pointup prepare`. One named twice counts twice in training."""
    dataset: NewDataset

    def run(self) -> int:
        if not self.inputs:
            raise ConfigError("no input: name directories made by `pointup prepare`")
        surfaces: dict[str, Surface] = {}
        info: dict[str, Any] = {"command": "prepare join", "inputs": self.inputs}
        info["validation"] = "that of the inputs"
        with self.dataset.making() as making:
            splits = [self._pairs(split, surfaces) for split in ("train", "validation")]
            return making.write(splits[0], splits[1], info, surfaces)

    def _pairs(self, split: str, surfaces: dict[str, Surface]) -> Iterator[Pair]:
        from pointup.data.pairs import open_pairs, read_pair, surface_path
        from pointup.geometry.surfaces import Surface

        # What is validated on twice tells nothing new.
        folders = self.inputs if split == "train" else tuple(dict.fromkeys(self.inputs))
        for number, folder in enumerate(folders):
            dataset = open_pairs(folder, split)
            for row in range(len(dataset)):
                pair = read_pair(dataset, row)
                # Names stay unique, whatever the inputs call their own.
                label = f"{number}-{folder.name}"
                if pair.surface:
                    stored = surface_path(folder, pair.surface)
                    pair.surface = f"{label}_{pair.surface.replace('/', '_')}"
                    if pair.surface not in surfaces:
                        surfaces[pair.surface] = Surface.load(stored)
                pair.name = f"{label}/{pair.name}"
                yield pair
