"""The datasets of a run, as `--data` names them: path or Hub id, weight and label of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pointup.errors import ConfigError

MAX_WEIGHT = 10_000.0


@dataclass(frozen=True)
class DataSource:
    """A dataset of a run.

    Attributes:
        name: directory of the dataset, or its name on the Hub.
        weight: number of times that an epoch has each training sample.
        label: the name in metrics and curves, before the names of its samples.
    """

    name: str
    weight: float
    label: str


def data_sources(data: Sequence[str]) -> list[DataSource]:
    """The datasets that `--data` names, as NAME or NAME=WEIGHT.

    A directory whose whole name is given is that directory, also if the name ends like a weight.
    The label is the last part of the name, with as many folders before it as make it unique. Raises
    ConfigError for an impossible weight and for a dataset that is given twice.
    """
    pairs = [_name_and_weight(text) for text in data]
    places = Counter(str(Path(name).resolve()) for name, _ in pairs)
    for name, weight in pairs:
        if not 0 < weight <= MAX_WEIGHT:
            raise ConfigError(
                f"--data {name}={weight:g}: the weight must be greater than 0 and at most "
                f"{MAX_WEIGHT:g}"
            )
        if places[str(Path(name).resolve())] > 1:
            raise ConfigError(f"--data {name}: is given twice; give it once, as {name}=2")
    labels = _labels([name for name, _ in pairs])
    return [DataSource(name, weight, labels[i]) for i, (name, weight) in enumerate(pairs)]


def _name_and_weight(text: str) -> tuple[str, float]:
    name, found, number = text.rpartition("=")
    if not found or not name or Path(text).is_dir():
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        return text, 1.0
    return name, weight if math.isfinite(weight) else 0.0


def _labels(names: Sequence[str]) -> list[str]:
    parts = [Path(name).resolve().parts[1:] or (name,) for name in names]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return list(names)
