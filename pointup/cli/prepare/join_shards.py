"""Joins the shards of one survey into the dataset that a call without `--shard` makes, by links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pointup.cli.prepare.large_surveys import NO_TRAINING_PAIRS, strip_remark
from pointup.cli.prepare.new_dataset import OutputDirectory, note
from pointup.errors import ConfigError, FileError

OF_A_SHARD = ("shard", "contents", "points_in_tiles", "regions", "left_out", "made_by", "surveys")
"""Entries of pointup.json that may differ between shards, such as paths of other machines."""


def shard_descriptions(inputs: Sequence[Path]) -> list[dict[str, Any]]:
    """The content of pointup.json of each input, if all are shards; [] if none is.

    Raises ConfigError if only some are shards, FileError for a folder that does not exist.
    """
    paths = [folder / "pointup.json" for folder in inputs]
    infos = [json.loads(path.read_text()) if path.is_file() else {} for path in paths]
    are_shards = ["shard" in info for info in infos]
    if any(are_shards) and not all(are_shards):
        other = inputs[are_shards.index(False)]
        if not other.exists():
            raise FileError(f"{other}: no such folder; prepare it, or correct its name")
        raise ConfigError(f"{other}: is no shard, as the others are; join the shards first")
    return infos if all(are_shards) else []


def join_shards(
    inputs: Sequence[Path], infos: Sequence[dict[str, Any]], dataset: OutputDirectory
) -> int:
    """Link all shards of one preparation into one dataset. Returns the exit status.

    Raises ConfigError for shards of different preparations, and if one is missing, DataError if
    none has training pairs.
    """
    from pointup.datasets.dataset_parts import assemble, parts_of_dataset, total_rows

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
        what = f"{', '.join(f'{k}/{total}' for k in missing[:8])} are missing"
        raise ConfigError(
            f"of {total} shards, {what if missing else 'one is given twice'}; give each once"
        )
    with dataset.making() as making:
        sources = [part for folder in inputs for part in parts_of_dataset(folder)]
        left_out = [text for info in infos for text in info["left_out"]]
        making.left_out += dict.fromkeys(left_out)
        making.validation = first["validation"]
        info = {key: value for key, value in first.items() if key not in ("shard", "contents")}
        for name in ("points_in_tiles", "regions"):
            info[name] = sum(each[name] for each in infos)
        making.unfinished.mkdir()
        parts = [source.part for source in sources]
        if not total_rows(parts, "train"):
            raise making.nothing_usable(NO_TRAINING_PAIRS)
        in_tiles = sum(part.facts["points_in_tiles"] for part in parts)
        copies = info["points_in_tiles"] / max(in_tiles, 1)
        making.strip = strip_remark(first["strip"], parts, copies)
        if assemble(sources, making.unfinished, {**info, "left_out": making.left_out}):
            note("the inputs are on another file system, or one without links: copied")
        return making.publish()
