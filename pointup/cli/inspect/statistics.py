"""Statistics of the splits of a pair dataset, for `pointup inspect`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from tqdm import tqdm

from pointup.datasets.checks import BadSample
from pointup.datasets.held_out import HeldOut, measure_held_out
from pointup.datasets.pair_dataset import open_samples
from pointup.datasets.sample_table import UnreadableSample
from pointup.datasets.samples import SAMPLES_PER_CALL, Samples, damaged_samples
from pointup.errors import DataError

# Number of samples of a split, at equal intervals, on which distances between points are measured.
NUM_MEASURED = 64


@dataclass(frozen=True)
class Split:
    """Statistics of one split.

    `columns` has one value for each sample, by the printed names: numbers of points, their sum
    (tokens) and ratio, the longest side of the source's bounding box. Measured on at most 64
    samples are the median distance to the nearest other point (spacing), and the median distance
    from the source to the nearest target point. `share_in_target` is the share of source points
    that are also in the target, bit by bit. It is near 1 if the source was thinned from the target,
    which makes scores look better than they are.
    """

    name: str
    num_samples: int
    columns: dict[str, np.ndarray]
    share_in_target: float
    bad: list[BadSample]


def inspect_dataset(
    path_or_hub_id: str | Path, min_points: int = 2, deep: bool = False
) -> list[Split]:
    """Statistics of the train split and, if there is one, of the validation split.

    They come from the sample tables. With `deep`, all points are read and compared with their
    checksums.
    """
    opened = {"train": open_samples(path_or_hub_id, "train")}
    try:
        opened["validation"] = open_samples(path_or_hub_id, "validation")
    except DataError as error:
        # A dataset of one sample has no validation split. Other errors are raised by the train
        # split.
        print(f"pointup: warning: {error}", file=sys.stderr)
    return [_inspect_split(name, samples, min_points, deep) for name, samples in opened.items()]


def held_out_of(path_or_hub_id: str) -> HeldOut:
    """How train and validation are separated; see `measure_held_out`."""
    train, validation = (open_samples(path_or_hub_id, split) for split in ("train", "validation"))
    return measure_held_out(train, validation, read_info(path_or_hub_id))


def read_info(label: str) -> dict[str, Any]:
    """The description of a dataset directory, pointup.json; {} without one."""
    path = Path(label) / "pointup.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _inspect_split(name: str, samples: Samples, min_points: int, deep: bool) -> Split:
    bad = samples.bad_samples(min_points)
    if deep:
        known = {sample.index for sample in bad}
        bad += [sample for sample in _damaged(samples) if sample.index not in known]
        bad.sort(key=lambda sample: sample.index)
    num_source, num_target = (samples.array(f"num_{c}") for c in ("source", "target"))
    columns: dict[str, np.ndarray] = {
        "source points": num_source,
        "target points": num_target,
        "tokens": num_source + num_target,
        "ratio": num_target / np.where(num_source, num_source, np.nan),
        "longest side": samples.array("source_extent"),
    }
    usable = np.setdiff1d(np.arange(len(samples)), [sample.index for sample in bad])
    steps = np.linspace(0, len(usable) - 1, min(NUM_MEASURED, len(usable))).round().astype(int)
    measured, shared = _measure(samples, usable[steps])
    return Split(name, len(samples), columns | measured, shared, bad)


def _damaged(samples: Samples) -> list[BadSample]:
    with tqdm(total=len(samples), unit=" samples", delay=2, leave=False, disable=None) as bar:
        bad = []
        for found in damaged_samples(samples):
            bad += found
            bar.update(min(SAMPLES_PER_CALL, len(samples) - bar.n))
    return bad


def _measure(samples: Samples, rows: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    spacings = np.full((len(rows), 3), np.nan)
    num_points = num_shared = 0
    for i, row in enumerate(rows):
        try:
            clouds = samples.points(int(row))
        except UnreadableSample as error:
            print(f"pointup: warning: {samples.names[int(row)]}: {error}", file=sys.stderr)
            continue
        source, target = clouds["source"], clouds["target"]
        source_tree, target_tree = cKDTree(source), cKDTree(target)
        # The nearest of a cloud's own points is the point itself.
        distances = (
            source_tree.query(source, k=[2])[0],
            target_tree.query(target, k=[2])[0],
            target_tree.query(source, k=[1])[0],
        )
        spacings[i] = [np.median(distance) for distance in distances]
        num_points += len(source)
        num_shared += int(np.count_nonzero(distances[2] == 0))
    names = ("source spacing", "target spacing", "source to target")
    return dict(zip(names, spacings.T, strict=True)), num_shared / max(num_points, 1)
