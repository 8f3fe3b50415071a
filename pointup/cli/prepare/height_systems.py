"""Notes where the two surveys of a new dataset seem to have heights in different systems."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pointup.datasets.sample_table import SampleTable, UnreadableSample
from pointup.datasets.table_store import open_samples
from pointup.evaluation.vertical_offset import note_on_offset
from pointup.io.length_unit import dataset_unit

# Pairs that are read: enough for a median, and read in seconds.
_MOST_PAIRS = 200


def notes_on_heights(dataset: Path, tables: dict[str, SampleTable]) -> list[str]:
    """A note if the lowest points of sources and targets are at different heights in most pairs.

    `tables` holds the sample table of each split of the dataset.
    """
    offsets = []
    for split, table in tables.items():
        samples = open_samples(dataset, split)
        share = max(1, _MOST_PAIRS * len(table) // sum(map(len, tables.values())))
        for index in np.linspace(0, len(table) - 1, min(share, len(table))).astype(int):
            try:
                pair = samples.pair(int(index))
            except UnreadableSample:
                continue
            offsets.append(float(pair.source[:, 2].min() - pair.target[:, 2].min()))
    return note_on_offset(
        float(np.median(offsets)) if offsets else 0.0, dataset_unit(dataset), "target"
    )
