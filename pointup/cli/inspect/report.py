"""The text and the JSON content that `pointup inspect` prints."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pointup.cli.inspect.statistics import Split, read_info
from pointup.datasets.held_out import HeldOut
from pointup.datasets.held_out_elsewhere import SURVEYS
from pointup.terminal import printable

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*#@"
NUM_BINS = 24
FEWEST_FOR_BARS = 8
NOT_SHOWN = frozenset({"contents"})
"""Entries of pointup.json for programs only: digests of the splits."""


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
    return printable("\n".join(lines))


def _headline(label: str, splits: list[Split]) -> str:
    num_pairs = sum(split.num_samples for split in splits)
    num_points = sum(
        int(split.columns[c].sum()) for split in splits for c in ("source points", "target points")
    )
    path = Path(label)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    on_disk = f", {_bytes(size)}" if size else ""
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
    blocks = BLOCKS if _can_print(BLOCKS) else ASCII_BLOCKS
    # Rounded up, so that a bin with a single sample is visible.
    return "".join(blocks[level] for level in np.ceil(counts / counts.max() * 8).astype(int))


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _shorten(value: Any) -> str:
    if isinstance(value, list) and len(value) > 3:
        return f"{value[0]}, {value[1]}, ... {value[-1]} ({len(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def as_json(label: str, splits: list[Split]) -> dict[str, Any]:
    """The content of `pointup inspect --json`."""

    def summary(values: np.ndarray) -> dict[str, float | None]:
        finite = values[np.isfinite(values)]
        keys = ("min", "median", "mean", "max")
        return {k: float(getattr(np, k)(finite)) if len(finite) else None for k in keys}

    return {
        "info": read_info(label),
        "splits": {
            split.name: {
                "num_samples": split.num_samples,
                "share_in_target": split.share_in_target,
                **{name.replace(" ", "_"): summary(v) for name, v in split.columns.items()},
                "bad_samples": [asdict(sample) for sample in split.bad],
            }
            for split in splits
        },
    }
