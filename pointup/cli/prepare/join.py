"""`pointup prepare join`: several pair datasets as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pointup.cli.prepare.new_dataset import NewDataset, note
from pointup.errors import ConfigError

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.geometry.surfaces import Surface

# Entries of pointup.json that name the files of a survey, by the command that wrote it.
SURVEY_FILES = {"prepare pairs": ("source", "target"), "prepare thin": ("inputs",)}


@dataclass(frozen=True, kw_only=True)
class Join:
    """From pair datasets: all of their pairs in one. What one validates on, so does the whole.

    Where two were made from the same survey file, training pairs of one that touch what the other
    validates on are left out.
    """

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
        from pointup.datasets.pair_dataset import open_pairs, read_pair, surface_path
        from pointup.geometry.surfaces import Surface

        # What is validated on twice tells nothing new.
        folders = self.inputs if split == "train" else tuple(dict.fromkeys(self.inputs))
        for number, folder in enumerate(folders):
            dataset = open_pairs(folder, split)
            left_out = self._touching(folder) if split == "train" else set()
            for row in range(len(dataset)):
                if row in left_out:
                    continue
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

    def _touching(self, folder: Path) -> set[int]:
        """Rows to train on of one input that touch what another of the same ground validates on."""
        from pointup.datasets.held_out import rows_near
        from pointup.datasets.pair_dataset import open_pairs

        rows: set[int] = set()
        info, files = _survey_of(folder)
        for other in dict.fromkeys(self.inputs):
            other_info, other_files = _survey_of(other)
            if other == folder or not files & other_files:
                continue
            strip = max(info.get("strip", 0.0), other_info.get("strip", 0.0))
            splits = open_pairs(folder, "train"), open_pairs(other, "validation")
            touching = set(rows_near(*splits, strip).tolist()) - rows
            if touching:
                note(
                    f"{folder}: {len(touching):,} training pairs touch what {other} validates on: "
                    "left out"
                )
            rows |= touching
        return rows


def _survey_of(folder: Path) -> tuple[dict[str, Any], set[Path]]:
    """What pointup.json says of a dataset, and the files of one survey that it was made from."""
    path = folder / "pointup.json"
    info: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    made_by = str(info.get("made_by", ""))
    keys = [keys for command, keys in SURVEY_FILES.items() if made_by.endswith(command)]
    if not keys or info.get("separate"):
        return info, set()
    return info, {Path(name).resolve() for key in keys[0] for name in info.get(key, [])}
