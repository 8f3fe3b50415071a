"""What `pointup prepare` prints about a new dataset, and a note on its heights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pointup.terminal import note

if TYPE_CHECKING:
    from pointup.datasets.samples import Samples

# A note is printed if the median pair has fewer source points than this.
FEW_POINTS = 100


def print_summary(output: Path, validation: float, strip: str, seconds: float) -> None:
    """Print what a new dataset holds, the next command, and notes on what looks wrong.

    `validation` is the share that was to be held out, `strip` a remark on the points that were left
    out for it, `seconds` the time that it took.
    """
    import numpy as np

    from pointup.cli.next_commands import describe_preset, preset_of, training_command
    from pointup.datasets.checks import notes_on_pairs
    from pointup.datasets.opening import open_samples
    from pointup.datasets.samples import SampleTable

    tables = {
        name: SampleTable(path, output)
        for name in ("train", "validation")
        if (path := output / "samples" / f"{name}.arrow").exists()
    }
    sizes_of = {
        name: np.column_stack([table.array("num_source"), table.array("num_target")])
        for name, table in tables.items()
    }
    sizes = np.concatenate([np.empty((0, 2), np.int64), *sizes_of.values()])
    numbers = ", ".join(f"{len(split):,} {name}" for name, split in sizes_of.items())
    numbers = f" ({numbers})" if numbers else ""
    print(f"{output}: {len(sizes):,} pairs{numbers}, {sizes.sum():,} points, {seconds:,.1f} s")
    info = json.loads((output / "pointup.json").read_text(encoding="utf-8"))
    _, num_shards = info.get("shard", (1, 1))
    joining = f"pointup prepare join {shlex.quote(str(output))} ... -o DIR"
    if not len(sizes):  # A shard of ground that holds too few points.
        print(f"next: {joining}, with all {num_shards} shards")
        return
    source, target = np.median(sizes, axis=0)
    ratio = np.median(sizes[:, 1] / sizes[:, 0].clip(min=1))
    print(f"median pair: {source:,.0f} source points, {target:,.0f} target points, {ratio:.2g}x")
    if "validation" in sizes_of:
        share = len(sizes_of["validation"]) / len(sizes)
        remark = f", {strip}" if strip else ""
        print(f"held out for validation: {share:.0%} of the pairs{remark}")
        if "train" in sizes_of:
            print(f"details: pointup inspect {shlex.quote(str(output))}")
    if "shard" in info:
        print(f"next: {joining}, with all {num_shards} shards")
    elif len(sizes) == 1:
        print("next: prepare more than one pair, so that some can be held out for validation")
    else:
        preset = preset_of(output, ratio)
        if preset is not None:
            print(f"preset {preset}: {describe_preset(preset)}")
        print(f"next: {training_command(output, preset)}")
    if source < FEW_POINTS:
        note(f"the median pair has only {source:.0f} source points")
    opened = [open_samples(output, split, draws_validation=False) for split in tables]
    notes = [text for samples in opened for text in notes_on_pairs(samples)]
    if "source" in info:
        notes += notes_on_heights(opened, output)
    bad = [sample for samples in opened for sample in samples.bad_samples(1)]
    if bad:
        notes.append(
            f"{len(bad):,} of {len(sizes):,} pairs can't be used: {bad[0].name}: {bad[0].reason}"
        )
    note(*dict.fromkeys(notes))
    # Blocks are held out in the whole survey, perhaps none in a shard.
    if validation and "validation" not in tables and "shard" not in info:
        note(
            "no pair is held out for validation: give another --seed, or make more pairs, from "
            "surveys for example with a smaller --tile"
        )


# Pairs that are read: enough for a median, and read in seconds.
_MOST_PAIRS = 200


def notes_on_heights(opened: Sequence[Samples], dataset: Path) -> list[str]:
    """A note if the lowest points of sources and targets are at different heights in most pairs.

    `opened` are the splits of the dataset.
    """
    import numpy as np

    from pointup.datasets.dataset_units import dataset_unit
    from pointup.datasets.samples import UnreadableSample
    from pointup.evaluation.common_extent import note_on_offset

    offsets = []
    for samples in opened:
        share = max(1, _MOST_PAIRS * len(samples) // sum(map(len, opened)))
        for index in np.linspace(0, len(samples) - 1, min(share, len(samples))).astype(int):
            try:
                pair = samples.pair(int(index))
            except UnreadableSample:
                continue
            offsets.append(float(pair.source[:, 2].min() - pair.target[:, 2].min()))
    offset = float(np.median(offsets)) if offsets else 0.0
    return note_on_offset(offset, dataset_unit(dataset), "target")
