"""Notes where the two surveys of a new dataset seem to have heights in different systems."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from pointup.datasets.sample_table import UnreadableSample
from pointup.datasets.table_store import open_samples
from pointup.evaluation.vertical_offset import note_on_offset
from pointup.io.length_unit import dataset_unit

# Pairs that are read: enough for a median, and read in seconds.
_MOST_PAIRS = 200


def notes_on_heights(dataset: Path, splits: Collection[str]) -> list[str]:
    """A note if the lowest points of sources and targets are at different heights in most pairs.

    `splits` names the stored splits of the dataset.
    """
    opened = [open_samples(dataset, split, draws_validation=False) for split in splits]
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
