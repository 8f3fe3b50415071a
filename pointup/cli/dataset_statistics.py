"""Statistics of a pair dataset, as `pointup inspect` prints and shows them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from pointup.datasets.checks import notes_on_pairs
from pointup.datasets.dataset_units import known_unit
from pointup.datasets.held_out import SURVEYS, HeldOut, measure_held_out
from pointup.datasets.opening import open_samples
from pointup.datasets.samples import (
    SAMPLES_PER_CALL,
    BadSample,
    Samples,
    UnreadableSample,
    damaged_samples,
)
from pointup.disk import read_json
from pointup.errors import DataError
from pointup.evaluation.pairs import ShownPair
from pointup.progress import tracked
from pointup.terminal import in_bytes, print_error, printable
from pointup.visualization.page import beside, dataset_picture, save_picture, stacked
from pointup.visualization.viewer.document import write_viewer

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*#@"
NUM_BINS = 24
FEWEST_FOR_BARS = 8
NUM_MEASURED = 64
"""Samples of a split, at equal intervals, on which distances between points are measured."""
VIEWED_PER_SPLIT, DRAWN_PER_SPLIT = 3, 2
NOT_SHOWN = frozenset({"contents"})
"""Entries of pointup.json for programs only: digests of the splits."""


@dataclass(frozen=True)
class Split:
    """Statistics of one split.

    `columns` has one value for each sample, by the printed names; medians of distances are those of
    at most `NUM_MEASURED` samples. `share_in_target` is the share of source points that are also in
    the target, bit by bit: near 1 if the source was thinned from the target. `notes` are
    those of `notes_on_pairs`.
    """

    name: str
    num_samples: int
    columns: dict[str, np.ndarray]
    share_in_target: float
    bad: list[BadSample]
    notes: list[str]


def inspect_dataset(
    path_or_hub_id: str | Path, min_points: int = 2, deep: bool = False
) -> list[Split]:
    """Statistics of the train split and, if there is one, of the validation split.

    With `deep`, all points are read and compared with their checksums.
    """
    opened = {"train": open_samples(path_or_hub_id, "train")}
    try:
        opened["validation"] = open_samples(path_or_hub_id, "validation")
    except DataError as error:
        # A dataset of one sample has no validation split. Other errors are raised by the train
        # split.
        print_error(f"pointup: warning: {error}")
    return [_inspect_split(name, samples, min_points, deep) for name, samples in opened.items()]


def held_out_of(path_or_hub_id: str) -> HeldOut:
    train, validation = (open_samples(path_or_hub_id, split) for split in ("train", "validation"))
    return measure_held_out(train, validation, read_info(path_or_hub_id))


def read_info(label: str) -> dict[str, Any]:
    """The description of a dataset directory, pointup.json; {} without one."""
    return read_json(Path(label) / "pointup.json")


def _inspect_split(name: str, samples: Samples, min_points: int, deep: bool) -> Split:
    bad = samples.bad_samples(min_points)
    if deep:
        parts = tracked(
            damaged_samples(samples), len(samples), "reading", "samples",
            size=lambda _: SAMPLES_PER_CALL, delay=2.0,
        )  # fmt: skip
        damaged = {sample.index: sample for part in parts for sample in part}
        found = damaged | {sample.index: sample for sample in bad}
        bad = [found[index] for index in sorted(found)]
    num_source, num_target = (samples.array(f"num_{c}") for c in ("source", "target"))
    columns: dict[str, np.ndarray] = {
        "source points": num_source,
        "target points": num_target,
        "tokens": num_source + num_target,
        "ratio": num_target / np.where(num_source, num_source, np.nan),
        "longest side": samples.array("source_extent"),
    }
    measured, shared = _measure(samples, _at_intervals(len(samples), bad, NUM_MEASURED))
    notes = notes_on_pairs(samples)
    return Split(name, len(samples), columns | measured, shared, bad, notes)


def _at_intervals(num_samples: int, bad: list[BadSample], number: int) -> np.ndarray:
    """Indices of samples at equal intervals, without bad ones; fewer where there are not enough."""
    usable = np.setdiff1d(np.arange(num_samples), [sample.index for sample in bad])
    places = np.linspace(0, len(usable) - 1, min(number, len(usable)))
    return usable[places.round().astype(int)]


def _measure(samples: Samples, rows: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    spacings = np.full((len(rows), 3), np.nan)
    num_points = num_shared = 0
    for i, row in enumerate(rows):
        try:
            clouds = samples.points(int(row))
        except UnreadableSample as error:
            print_error(f"pointup: warning: {samples.names[int(row)]}: {error}")
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


def report(label: str, splits: list[Split], held_out: HeldOut | None = None) -> str:
    """The text that `pointup inspect` prints."""
    lines = [_headline(label, splits)]
    description = read_info(label)
    info = {
        key: value
        for key, value in description.items()
        if key not in NOT_SHOWN and value is not False and value not in ([], "", {})
    }
    if SURVEYS in info:
        num_files = sum(len(survey["files"]) for survey in info[SURVEYS].values())
        info[SURVEYS] = _count(num_files, "file")
    width = max((len(key) for key in info), default=0)
    lines += [f"  {key.replace('_', ' '):<{width}}  {_shorten(info[key])}" for key in info]
    if held_out:
        # Without a validation split, one is drawn when the dataset is opened, without a strip.
        strip = description.get("strip") if description.get("validation", True) else None
        lines += ["", *held_out.describe(strip, bool(description.get("separate")))]
    for split in splits:
        lines += ["", *_table(split)]
    for split in splits:
        if split.bad:
            lines += ["", f"bad samples in {split.name}: {len(split.bad):,}"]
            lines += [f"  {sample.name}: {sample.reason}" for sample in split.bad]
    if not any(split.bad for split in splits):
        lines += ["", "no bad samples"]
    lines += [f"note: {split.name}: {text}" for split in splits for text in split.notes]
    return printable("\n".join(lines))


def _headline(label: str, splits: list[Split]) -> str:
    num_pairs = sum(split.num_samples for split in splits)
    num_points = sum(
        int(split.columns[c].sum()) for split in splits for c in ("source points", "target points")
    )
    path = Path(label)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    on_disk = f", {in_bytes(size)}" if size else ""
    return f"{label}: {_count(num_pairs, 'pair')}, {num_points:,} points{on_disk}"


def _table(split: Split) -> list[str]:
    """Lines of fixed columns, so that the tables of both splits are aligned; each ends in bars."""
    title = f"{split.name}, {_count(split.num_samples, 'pair')}"
    lines = [f"{title:<24}{'min':>10}{'median':>10}{'max':>10}"]
    for name, values in split.columns.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            numbers = (finite.min(), np.median(finite), finite.max())
            row = "".join(f"{_number(number):>10}" for number in numbers)
            lines.append(f"  {name:<22}{row}  {_bars(finite)}".rstrip())
    remark = "  scores look better than they are" if split.share_in_target > 0.05 else ""
    lines.append(f"  {'source also in target':<22}{split.share_in_target:>10.0%}{remark}")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:.3g}"


def _bars(values: np.ndarray) -> str:
    """Histogram from the smallest to the largest value, one character for each bin."""
    if values.min() == values.max() or len(values) < FEWEST_FOR_BARS:
        return ""
    counts = np.histogram(values, NUM_BINS)[0]
    blocks = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII_BLOCKS
    # Rounded up, so that a bin with a single sample is visible.
    return "".join(blocks[level] for level in np.ceil(counts / counts.max() * 8).astype(int))


def _shorten(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > 3:
        return f"{value[0]}, {value[1]}, ... {value[-1]} ({len(value)})"
    return ", ".join(map(str, value))


def as_json(label: str, splits: list[Split], held_out: HeldOut | None) -> dict[str, Any]:
    """The content of `pointup inspect --json`."""

    def summary(values: np.ndarray) -> dict[str, float | None]:
        finite = values[np.isfinite(values)]
        keys = ("min", "median", "mean", "max")
        return {k: float(getattr(np, k)(finite)) if len(finite) else None for k in keys}

    return {
        "dataset": label,
        "info": read_info(label),
        "splits": {
            split.name: {
                "num_samples": split.num_samples,
                "share_in_target": split.share_in_target,
                **{name.replace(" ", "_"): summary(v) for name, v in split.columns.items()},
                "bad_samples": [asdict(sample) for sample in split.bad],
                "notes": split.notes,
            }
            for split in splits
        },
        "held_out": asdict(held_out) if held_out else None,
    }


def write_dataset_picture(dataset: str, splits: Sequence[Split], path: Path) -> None:
    """Write histograms of all samples, and pictures of two pairs of each split."""
    num_source, num_target, extent = (
        np.concatenate([split.columns[column] for split in splits])
        for column in ("source points", "target points", "longest side")
    )
    histograms = dataset_picture(num_source, num_target, extent, unit=known_unit([dataset]))
    rows = []
    for split in splits:
        if pairs := _pairs_to_show(dataset, split, DRAWN_PER_SPLIT):
            rows.append(beside([pair.picture(errors=False) for pair in pairs]))
    save_picture(stacked([histograms, *rows]), path)


def write_dataset_view(dataset: str, splits: Sequence[Split], path: Path) -> None:
    """Write a viewer of three pairs of each split; DataError if no sample can be shown."""
    pairs = [pair for split in splits for pair in _pairs_to_show(dataset, split, VIEWED_PER_SPLIT)]
    if not pairs:
        raise DataError(f"{dataset}: has no pair that can be shown; the list above says why")
    write_viewer(path, [pair.scene() for pair in pairs], dataset)


def _pairs_to_show(dataset: str, split: Split, number: int) -> list[ShownPair]:
    """Pairs at equal intervals of a split; bad samples are left out."""
    samples, unit = open_samples(dataset, split.name), known_unit([dataset])
    rows = _at_intervals(len(samples), split.bad, number).tolist()
    pairs = map(samples.pair, rows)
    return [
        ShownPair(
            f"{split.name}: {pair.name}",
            {"source": pair.source},
            pair.target,
            pair.vertical,
            unit,
            notes={"target": f"{len(pair.target) / len(pair.source):.3g} for each source point"},
            origin=pair.origin,
        )
        for pair in pairs
    ]
