"""`pointup prepare join`: joins several pair datasets, or the shards of one, into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pointup.cli.prepare.new_dataset import OutputDirectory
from pointup.cli.prepare.survey_dataset import NO_TRAINING_PAIRS, strip_remark
from pointup.disk import read_json
from pointup.errors import ConfigError
from pointup.terminal import note

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.datasets.samples import Samples
    from pointup.geometry.surfaces import Surface


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join pair datasets into one. Pairs keep their split: training or validation.

    A dataset without a validation split is for training only, unless no dataset has one: then a
    tenth of each is drawn for validation.

    All parts of a survey that `--shard` made are linked, not copied: the result is the dataset that
    a command without `--shard` makes. If other datasets were made from the same survey, meshes or
    HDF5 file, training pairs of one that touch validation pairs of another or share a shape with
    them are left out.
    """

    inputs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="DATASET ...", help_behavior_hint="(required)"),
    ]
    """Directories made by `pointup prepare`. A directory given twice counts twice in training."""
    dataset: OutputDirectory

    def run(self) -> int:
        if not self.inputs:
            raise ConfigError("no input: name directories made by `pointup prepare`")
        if shards := shard_descriptions(self.inputs):
            return join_shards(self.inputs, shards, self.dataset)
        from pointup.datasets.dataset_units import dataset_units, stored_units
        from pointup.datasets.held_out import shapes_of, stored_surveys, surveys_of
        from pointup.io.length_unit import UNKNOWN

        surfaces: dict[str, Surface] = {}
        info: dict[str, Any] = {"command": "prepare join", "inputs": self.inputs}
        info["validation"] = "that of the inputs"
        # For later comparisons, when the inputs may be gone.
        surveys = {
            f"{_label(number, folder)}/{name}".rstrip("/"): survey
            for number, folder in enumerate(self.inputs)
            for name, survey in surveys_of(folder).items()
        }
        info |= stored_surveys(surveys)
        shapes = {
            f"{_label(number, folder)}/{name}": shape
            for number, folder in enumerate(self.inputs)
            for name, shape in shapes_of(folder).items()
        }
        units = {path: unit for each in self.inputs for path, unit in dataset_units(each).items()}
        info |= stored_units(units)
        if len(known := set(units.values()) - {UNKNOWN}) > 1:
            names = " and ".join(sorted(unit.name for unit in known))
            note(f"the datasets are in {names}; `pointup evaluate pairs` needs them one by one")
        with self.dataset.making() as making:
            splits = [self._pairs(split, surfaces) for split in ("train", "validation")]
            return making.write(splits[0], splits[1], info, surfaces, shapes)

    def _pairs(self, split: str, surfaces: dict[str, Surface]) -> Iterator[Pair]:
        from pointup.datasets.opening import open_together
        from pointup.geometry.surfaces import Surface

        held_out = dict(zip(self.inputs, open_together(self.inputs, "validation"), strict=True))
        for number, samples in enumerate(open_together(self.inputs, split)):
            folder = self.inputs[number]
            # A dataset given twice, however its name is spelled, is validated on once.
            before = {other.resolve() for other in self.inputs[:number]}
            if split == "validation" and folder.resolve() in before:
                continue
            left_out = set()
            if split == "train":
                left_out = _held_out_elsewhere(folder, samples, held_out)
            for row in range(len(samples)):
                if row in left_out:
                    continue
                pair = samples.pair(row)
                label = _label(number, folder)
                if pair.surface:
                    stored = samples.surface(row)
                    assert stored is not None
                    pair.surface = f"{label}_{pair.surface.replace('/', '_')}"
                    if pair.surface not in surfaces:
                        surfaces[pair.surface] = Surface.load(stored)
                pair.name = f"{label}/{pair.name}"
                yield pair


def _held_out_elsewhere(folder: Path, train: Samples, held_out: Mapping[Path, Samples]) -> set[int]:
    """Rows of `train`, of `folder`, that show what another input holds out, with notes.

    Raises DataError if these are all rows, as training does.
    """
    from pointup.datasets.held_out import none_left_of, rows_held_out_elsewhere

    rows: set[int] = set()
    for other, validation in held_out.items():
        if other.resolve() == folder.resolve():
            continue
        for how, found in rows_held_out_elsewhere(train, validation).items():
            if new := set(found.tolist()) - rows:
                note(
                    f"{folder}: left out {len(new):,} training pairs {how} validation pairs of "
                    f"{other}"
                )
                rows |= new
    if rows and len(rows) == len(train):
        raise none_left_of(folder)
    return rows


def _label(number: int, folder: Path) -> str:
    """The beginning of the names of an input's pairs, whose names are unique in each input only."""
    return f"{number}-{folder.name}"


OF_A_SHARD = ("shard", "contents", "points_in_tiles", "regions", "left_out", "made_by", "surveys")
"""Entries of pointup.json that may differ between shards, such as paths of other machines."""


def shard_descriptions(inputs: Sequence[Path]) -> list[dict[str, Any]]:
    """The content of pointup.json of each input, if all are shards; [] if none is.

    Raises ConfigError if only some are shards.
    """
    infos = [read_json(folder / "pointup.json") for folder in inputs]
    are_shards = ["shard" in info for info in infos]
    if any(are_shards) and not all(are_shards):
        other = inputs[are_shards.index(False)]
        raise ConfigError(f"{other}: is no shard, as the others are; join the shards first")
    return infos if all(are_shards) else []


def join_shards(
    inputs: Sequence[Path], infos: Sequence[dict[str, Any]], dataset: OutputDirectory
) -> int:
    """Link all shards of one preparation into one dataset. Returns the exit status.

    Raises ConfigError for shards of different preparations, and if one is missing, DataError if
    none has training pairs.
    """
    from pointup.datasets.pair_writer import assemble, parts_of_dataset, total_rows

    first = infos[0]
    for folder, info in zip(inputs, infos, strict=True):
        for name in (first.keys() | info.keys()) - set(OF_A_SHARD):
            if first.get(name) != info.get(name):
                raise ConfigError(
                    f"{folder}: has {name} {info.get(name)}, {inputs[0]} has {first.get(name)}; "
                    "join shards of one survey and one command"
                )
    total = first["shard"][1]
    numbers = [info["shard"][0] for info in infos]
    if any(info["shard"][1] != total for info in infos):
        raise ConfigError("the inputs have different numbers of shards; prepare them alike")
    missing = sorted(set(range(1, total + 1)) - set(numbers))
    if missing or len(set(numbers)) < len(numbers):
        what = f"missing: {', '.join(f'--shard {k}/{total}' for k in missing[:8])}"
        raise ConfigError(
            f"give each of {total} shards once; {what if missing else 'one is given twice'}"
        )
    with dataset.making() as making:
        sources = [part for folder in inputs for part in parts_of_dataset(folder)]
        left_out = [text for info in infos for text in info["left_out"]]
        making.left_out += dict.fromkeys(left_out)
        making.validation = first["validation"]
        info = {key: value for key, value in first.items() if key not in ("shard", "contents")}
        for name in {"points_in_tiles", "regions"} & first.keys():
            info[name] = sum(each[name] for each in infos)
        making.unfinished.mkdir()
        parts = [source.part for source in sources]
        if not total_rows(parts, "train"):
            raise making.nothing_usable(NO_TRAINING_PAIRS)
        in_tiles = sum(part.facts["points_in_tiles"] for part in parts)
        copies = info.get("points_in_tiles", 0) / max(in_tiles, 1)
        making.strip = strip_remark(first["strip"], parts, copies)
        if assemble(sources, making.unfinished, {**info, "left_out": making.left_out}):
            note("the inputs are on another file system, or one without links: copied")
        return making.publish()
