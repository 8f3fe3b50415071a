"""What `pointup inspect` shows of a dataset: histograms and some pairs, source beside target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pointup.cli.inspect.statistics import Split
from pointup.datasets.pair_dataset import open_pairs, read_pair
from pointup.errors import DataError
from pointup.evaluation.pair_scenes import ShownPair
from pointup.io.length_unit import dataset_unit
from pointup.visualization import dataset_picture, save_picture, stacked
from pointup.visualization.page import beside
from pointup.visualization.viewer import write_viewer

VIEWED_PER_SPLIT, DRAWN_PER_SPLIT = 3, 2


def write_dataset_picture(dataset: str, splits: Sequence[Split], path: Path) -> None:
    """Write histograms of all samples, and two pairs of each split: overview, cross-section and
    close-up.

    Raises FileError if the file can't be written.
    """
    num_source, num_target, extent = (
        np.concatenate([split.columns[column] for split in splits])
        for column in ("source points", "target points", "longest side")
    )
    histograms = dataset_picture(num_source, num_target, extent, unit=_unit(dataset))
    rows = []
    for split in splits:
        if pairs := _pairs_to_show(dataset, split, DRAWN_PER_SPLIT):
            rows.append(beside([pair.picture(errors=False) for pair in pairs]))
    save_picture(stacked([histograms, *rows]), path)


def write_dataset_view(dataset: str, splits: Sequence[Split], path: Path) -> None:
    """Write a viewer of three pairs of each split.

    Raises DataError if no sample can be shown, FileError if the file can't be written.
    """
    pairs = [pair for split in splits for pair in _pairs_to_show(dataset, split, VIEWED_PER_SPLIT)]
    if not pairs:
        raise DataError(f"{dataset}: has no pair that can be shown; the list above says why")
    write_viewer(path, [pair.scene() for pair in pairs], dataset)


def _pairs_to_show(dataset: str, split: Split, number: int) -> list[ShownPair]:
    """Pairs at equal intervals of a split; bad samples are left out."""
    table = open_pairs(dataset, split.name)
    usable = np.setdiff1d(np.arange(len(table)), [sample.index for sample in split.bad])
    steps = np.linspace(0, len(usable) - 1, min(number, len(usable))).round().astype(int)
    unit, pairs = _unit(dataset), []
    for row in usable[steps].tolist():
        pair = read_pair(table, row)
        ratio = len(pair.target) / len(pair.source)
        pairs.append(
            ShownPair(
                f"{split.name}: {pair.name}",
                {"source": pair.source},
                pair.target,
                pair.vertical,
                unit,
                notes={"target": f"{ratio:.3g} for each source point"},
            )
        )
    return pairs


def _unit(dataset: str) -> str:
    found = dataset_unit(dataset)
    return "" if found.metres is None else found.name
