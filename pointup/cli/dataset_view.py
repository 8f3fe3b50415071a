"""The viewer of `pointup inspect --view`: some pairs of a dataset, source beside target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pointup.datasets.checks import find_bad_samples
from pointup.datasets.pair_dataset import open_pairs, read_pair
from pointup.errors import DataError
from pointup.io.length_unit import dataset_unit
from pointup.visualization.viewer import compare_with_reference, write_viewer

PAIRS_PER_SPLIT = 3


def write_dataset_view(dataset: str, splits: Sequence[str], path: Path) -> None:
    """Write a viewer of pairs at equal intervals of each split; bad samples are left out.

    Raises DataError if no sample can be shown, FileError if the file can't be written.
    """
    found = dataset_unit(dataset)
    unit = "" if found.metres is None else found.name
    scenes = []
    for split in splits:
        table = open_pairs(dataset, split)
        bad = {sample.index for sample in find_bad_samples(table, 2, Path(dataset))}
        usable = [row for row in range(len(table)) if row not in bad]
        places = np.linspace(0, len(usable) - 1, min(PAIRS_PER_SPLIT, len(usable))).round()
        for row in (usable[int(place)] for place in places):
            pair = read_pair(table, row)
            scene = compare_with_reference(
                {"source": pair.source},
                pair.target,
                unit,
                "z" if pair.vertical else "y",
                name=f"{split}: {pair.name}",
                note=f"{len(pair.target) / len(pair.source):.3g} target points for each source "
                "point",
                of="target",
            )
            scenes.append(scene)
    if not scenes:
        raise DataError(f"{dataset}: has no pair that can be shown; the list above says why")
    write_viewer(path, scenes, str(dataset))
