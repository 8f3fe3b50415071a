"""What a pair dataset really holds out: its share, and how near it comes to what is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from pointup.datasets.columns import first_points, unpack_points

BATCH_SIZE = 256
ROUNDING = 1e-4
"""How much less than the strip a gap may be: points are stored as float32."""


@dataclass(frozen=True)
class HeldOut:
    """What is validated on, beside what is trained on.

    Attributes:
        num_pairs: pairs to validate on.
        share_of_pairs, share_of_points, share_of_area: their share of all pairs; the area is that
            of the pairs' bounding rectangles in x and y.
        gap: smallest horizontal distance between a point of training and one of validation, in the
            unit of the files; None where the pairs have no common coordinates.
    """

    num_pairs: int
    share_of_pairs: float
    share_of_points: float
    share_of_area: float
    gap: float | None

    def describe(self, strip: float | None) -> list[str]:
        """Lines to print; `strip` is the width of what was left out around the held-out pairs."""
        pairs = f"{self.num_pairs:,} pair{'s' * (self.num_pairs != 1)}"
        lines = [
            f"held out to validate on: {pairs} ({self.share_of_pairs:.1%}), "
            f"{self.share_of_points:.1%} of the points, {self.share_of_area:.1%} of the area"
        ]
        if self.gap is None:
            return lines
        left_out = f"; a strip of {strip:g} was left out" if strip else ""
        lines.append(f"  at least {self.gap:.6g} from every point of training{left_out}")
        if not strip or self.gap < strip * (1 - ROUNDING):
            lines.append(
                "  touches training ground: scores look better than they are; prepare again"
            )
        return lines


@dataclass(frozen=True)
class _Places:
    """Where the pairs of a split lie: rectangles low (n, 2) to high (n, 2), and names."""

    low: np.ndarray
    high: np.ndarray
    num_points: np.ndarray
    names: list[str]

    @property
    def area(self) -> float:
        return float(np.nansum((self.high - self.low).prod(axis=1)))

    def distances(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """(n,) from each rectangle to that of `low` (2,) to `high`; NaN where it has no points."""
        beside = np.maximum(self.low - high, low - self.high).clip(min=0)
        return np.hypot(beside[:, 0], beside[:, 1])


def measure_held_out(train: Dataset, validation: Dataset, info: dict[str, Any]) -> HeldOut:
    """Measure both splits of `open_pairs`; `info` is what pointup.json says about them.

    Points are read a pair at a time. Pairs of surveys have coordinates in common, but for those of
    `--separate`, which have them with the other pairs of their file only.
    """
    ours, others = _places(validation), _places(train)
    num_points = int(ours.num_points.sum())
    area = ours.area
    return HeldOut(
        num_pairs=len(validation),
        share_of_pairs=len(validation) / max(len(validation) + len(train), 1),
        share_of_points=num_points / max(num_points + int(others.num_points.sum()), 1),
        share_of_area=area / max(area + others.area, 1e-300),
        gap=_smallest_gap(train, validation, others, ours, bool(info.get("separate")))
        if str(info.get("made_by", "")).endswith(("prepare pairs", "prepare thin"))
        else None,
    )


def rows_near(train: Dataset, validation: Dataset, distance: float) -> np.ndarray:
    """(n,) ascending rows of `train` with a point nearer than `distance` to one of `validation`.

    Horizontally; both are datasets of `open_pairs`, in the same coordinates. With a distance of 0
    those rows whose rectangle overlaps one of `validation`.
    """
    from scipy.spatial import cKDTree

    others, ours = _places(train), _places(validation)
    near = np.zeros(len(train), dtype=bool)
    for row in range(len(validation)):
        between = others.distances(ours.low[row], ours.high[row])
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
    train: Dataset, validation: Dataset, others: _Places, ours: _Places, are_separate: bool
) -> float | None:
    from scipy.spatial import cKDTree

    # Names of tiles end in their two numbers.
    files, own_files = (
        np.array([name.rsplit("_", 2)[0] if are_separate else "" for name in places.names])
        for places in (others, ours)
    )
    smallest = np.inf
    for row in range(len(validation)):
        between = others.distances(ours.low[row], ours.high[row])
        # False for rectangles that are not numbers, too.
        candidates = np.flatnonzero((between < smallest) & (files == own_files[row]))
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
    """(N, 2) float64, x and y of all points of a pair, in the coordinates of its file."""
    table = dataset.with_format("arrow")[row]
    clouds = [first_points(table[column])[:, :2] for column in ("source", "target")]
    points = np.concatenate(clouds).astype(np.float64) + table["origin"][0].as_py()[:2]
    return points[np.isfinite(points).all(axis=1)]


def _places(dataset: Dataset) -> _Places:
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
    return _Places(np.concatenate(low), np.concatenate(high), np.concatenate(num_points), names)
