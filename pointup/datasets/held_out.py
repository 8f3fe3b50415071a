"""Measures the validation split of a pair dataset: its share, and its distance to training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pointup.datasets.samples import Samples

ROUNDING = 1e-4
"""Relative tolerance of a gap that should equal the strip, because points are stored as float32."""


@dataclass(frozen=True)
class HeldOut:
    """The size of the validation split, and its distance to the training split.

    Attributes:
        num_pairs: number of validation pairs.
        share_of_pairs, share_of_points, share_of_area: fraction of both splits. Areas are those of
            the pairs' bounding rectangles in x and y.
        gap: smallest horizontal distance between a training and a validation point, in the unit of
            the files; None if the pairs have no common coordinates.
    """

    num_pairs: int
    share_of_pairs: float
    share_of_points: float
    share_of_area: float
    gap: float | None

    def describe(self, strip: float | None, separate: bool = False) -> list[str]:
        """Lines to print; `strip` is the width of the strip left out around the held-out tiles.

        With `separate` the gap is between points of the same file only.
        """
        pairs = f"{self.num_pairs:,} pair{'s' * (self.num_pairs != 1)}"
        lines = [
            f"held out to validate on: {pairs} ({self.share_of_pairs:.1%}), "
            f"{self.share_of_points:.1%} of the points, {self.share_of_area:.1%} of the area"
        ]
        if self.gap is None:
            return lines
        of_file = " of the same file" if separate else ""
        left_out = f"; a strip of {strip:g} was left out" if strip else ""
        lines.append(f"  at least {self.gap:.6g} from every training point{of_file}{left_out}")
        if not strip or self.gap < strip * (1 - ROUNDING):
            lines.append("  touches training ground, so that scores are too good; prepare it again")
        return lines


@dataclass(frozen=True)
class _Rectangles:
    """The pairs of a split: bounding rectangles `low` (n, 2) to `high` (n, 2), sizes, names."""

    low: np.ndarray
    high: np.ndarray
    num_points: np.ndarray
    names: list[str]

    @property
    def area(self) -> float:
        return float(np.nansum((self.high - self.low).prod(axis=1)))

    def distances(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Distances (n,) to the rectangle `low` (2,) to `high` (2,); NaN without points."""
        beside = np.maximum(self.low - high, low - self.high).clip(min=0)
        return np.hypot(beside[:, 0], beside[:, 1])


def measure_held_out(train: Samples, validation: Samples, info: dict[str, Any]) -> HeldOut:
    """Measure both splits of a dataset; `info` is the content of the dataset's pointup.json.

    Only points of pairs that lie near the other split are read. Pairs of surveys have common
    coordinates. Pairs made with `--separate` have common coordinates with the pairs of the same
    file only.
    """
    held_out, trained = _rectangles(validation), _rectangles(train)
    num_points = int(held_out.num_points.sum())
    area = held_out.area
    return HeldOut(
        num_pairs=len(validation),
        share_of_pairs=len(validation) / max(len(validation) + len(train), 1),
        share_of_points=num_points / max(num_points + int(trained.num_points.sum()), 1),
        share_of_area=area / max(area + trained.area, 1e-300),
        gap=_smallest_gap(train, validation, trained, held_out, bool(info.get("separate")))
        if str(info.get("made_by", "")).endswith(("prepare pairs", "prepare thin"))
        else None,
    )


def rows_near(train: Samples, validation: Samples, distance: float) -> np.ndarray:
    """Rows (n,) of `train` with a point nearer than `distance` to a point of `validation`.

    The rows ascend. Distances are horizontal. Both are in the same coordinates. A distance of 0
    gives the rows whose rectangle overlaps or touches one of `validation`.
    """
    from scipy.spatial import cKDTree

    trained, held_out = _rectangles(train), _rectangles(validation)
    near = np.zeros(len(train), dtype=bool)
    for row in range(len(validation)):
        between = trained.distances(held_out.low[row], held_out.high[row])
        if not distance:
            near |= between == 0
        candidates = np.flatnonzero((between < distance) & ~near)
        tree = cKDTree(_points(validation, row)) if len(candidates) else None
        for other in candidates.tolist():
            assert tree is not None
            distances = tree.query(_points(train, other), k=[1], distance_upper_bound=distance)[0]
            near[other] = np.min(distances, initial=np.inf) < distance * (1 - ROUNDING)
    return np.flatnonzero(near)


def _smallest_gap(
    train: Samples,
    validation: Samples,
    trained: _Rectangles,
    held_out: _Rectangles,
    are_separate: bool,
) -> float | None:
    from scipy.spatial import cKDTree

    # The names of tiles end in their two indices.
    train_files, held_out_files = (
        np.array([name.rsplit("_", 2)[0] if are_separate else "" for name in rectangles.names])
        for rectangles in (trained, held_out)
    )
    smallest = np.inf
    for row in range(len(validation)):
        between = trained.distances(held_out.low[row], held_out.high[row])
        # The comparison is also False for a distance of NaN.
        candidates = np.flatnonzero((between < smallest) & (train_files == held_out_files[row]))
        if not len(candidates):
            continue
        tree = cKDTree(_points(validation, row))
        for other in candidates[np.argsort(between[candidates], kind="stable")].tolist():
            if between[other] >= smallest:
                break
            distances = tree.query(_points(train, other), k=[1], distance_upper_bound=smallest)[0]
            smallest = float(np.min(distances, initial=smallest))
    return smallest if np.isfinite(smallest) else None


def _points(samples: Samples, row: int) -> np.ndarray:
    """x and y (N, 2) float64 of all points of a pair, in the coordinates of its file."""
    clouds = samples.points(row)
    points = np.concatenate([clouds["source"], clouds["target"]])[:, :2].astype(np.float64)
    return points + samples.value("origin", row)[:2]


def _rectangles(samples: Samples) -> _Rectangles:
    origin, low, high = (samples.array(name)[:, :2] for name in ("origin", "low", "high"))
    num_points = samples.array("num_source").astype(np.int64) + samples.array("num_target")
    return _Rectangles(origin + low, origin + high, num_points, list(samples.names))
