"""Measures the validation split of a pair dataset: its share, and its distance to training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from pointup.datasets.columns import first_points, unpack_points

BATCH_SIZE = 256
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

    def describe(self, strip: float | None) -> list[str]:
        """Lines to print; `strip` is the width of the strip left out around the held-out tiles."""
        pairs = f"{self.num_pairs:,} pair{'s' * (self.num_pairs != 1)}"
        lines = [
            f"held out to validate on: {pairs} ({self.share_of_pairs:.1%}), "
            f"{self.share_of_points:.1%} of the points, {self.share_of_area:.1%} of the area"
        ]
        if self.gap is None:
            return lines
        left_out = f"; a strip of {strip:g} was left out" if strip else ""
        lines.append(f"  at least {self.gap:.6g} from every training point{left_out}")
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


def measure_held_out(train: Dataset, validation: Dataset, info: dict[str, Any]) -> HeldOut:
    """Measure both splits of `open_pairs`; `info` is the content of the dataset's pointup.json.

    Points are read one pair at a time. Pairs of surveys have common coordinates. Pairs made with
    `--separate` have common coordinates with the pairs of the same file only.
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


def rows_near(train: Dataset, validation: Dataset, distance: float) -> np.ndarray:
    """Rows (n,) of `train` with a point nearer than `distance` to a point of `validation`.

    The rows ascend. Distances are horizontal. Both are datasets of `open_pairs` in the same
    coordinates. A distance of 0 gives the rows whose rectangle overlaps or touches one of
    `validation`.
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
    train: Dataset,
    validation: Dataset,
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


def _points(dataset: Dataset, row: int) -> np.ndarray:
    """x and y (N, 2) float64 of all finite points of a pair, in the coordinates of its file."""
    table = dataset.with_format("arrow")[row]
    clouds = [first_points(table[column])[:, :2] for column in ("source", "target")]
    points = np.concatenate(clouds).astype(np.float64) + table["origin"][0].as_py()[:2]
    return points[np.isfinite(points).all(axis=1)]


def _rectangles(dataset: Dataset) -> _Rectangles:
    low, high, num_points = [np.empty((0, 2))], [np.empty((0, 2))], [np.empty(0, np.int64)]
    names: list[str] = []
    for table in dataset.with_format("arrow").iter(batch_size=BATCH_SIZE):
        lows, highs = np.full((len(table), 2), np.inf), np.full((len(table), 2), -np.inf)
        sizes = np.zeros(len(table), np.int64)
        for column in ("source", "target"):
            points, ptr = unpack_points(table[column].combine_chunks())
            sizes = sizes + np.diff(ptr)
            filled = np.flatnonzero(np.diff(ptr))
            if len(filled):
                xy = points[:, :2]
                least = np.fmin.reduceat(xy, ptr[filled], axis=0)
                most = np.fmax.reduceat(xy, ptr[filled], axis=0)
                lows[filled] = np.fmin(lows[filled], least)
                highs[filled] = np.fmax(highs[filled], most)
        origins = np.array(table["origin"].to_pylist(), np.float64).reshape(-1, 3)[:, :2]
        is_finite = np.isfinite(lows + highs)
        low.append(np.where(is_finite, lows + origins, np.nan))
        high.append(np.where(is_finite, highs + origins, np.nan))
        num_points.append(sizes)
        names += table["name"].to_pylist()
    return _Rectangles(np.concatenate(low), np.concatenate(high), np.concatenate(num_points), names)
