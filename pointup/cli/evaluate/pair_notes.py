"""Notes on the figures of `pointup evaluate pairs`; the worst, the median and the best pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pointup.cli.evaluate.output import write_shown
from pointup.datasets.batch import collate
from pointup.datasets.pair_dataset import PairDataset
from pointup.evaluation.cloud_metrics import Figures, Metric, mean_rows
from pointup.evaluation.lidar_metrics import gap_closed, worse_than_source
from pointup.evaluation.pairs import ShownPair, clouds_to_show, worst_to_best
from pointup.io.length_unit import LengthUnit
from pointup.model.upsampler import Upsampler
from pointup.training.objective import training_ratio


@dataclass(frozen=True, eq=False)
class MeasuredPairs:
    """Pairs of a dataset and their figures by row, in the same order.

    Attributes:
        kept: index of each measured pair in `pairs`.
        ratio, max_ratio: options of the command.
        as_written: the output of `pointup upsample` is shown, else that of the network.
    """

    pairs: PairDataset
    kept: Sequence[int]
    rows: Sequence[dict[str, Figures]]
    unit: LengthUnit
    ratio: float | None
    max_ratio: float
    as_written: bool

    def show(self, upsampler: Upsampler | None, picture: Path | None, view: Path | None) -> None:
        """Write a picture and a viewer of the worst, the median and the best pair, where asked for.

        The order is that of the Chamfer distance of the model as a share of that of the midpoints;
        without a model, that of the midpoints. Pairs without this share are left out, because their
        midpoints equal their target; a note is printed if no pair has one. Raises FileError if a
        file can't be written.
        """
        if picture is None and view is None:
            return
        row = "midpoints" if upsampler is None else "model"
        values = [rows[row]["chamfer"] for rows in self.rows]
        scores = values if upsampler is None else [_share(rows) for rows in self.rows]
        if not np.isfinite(scores).any():
            print("no picture and no viewer: the midpoints equal the target in every pair")
            return
        shown = []
        for place, number in worst_to_best(scores).items():
            share = f", {scores[number]:.1%} of the midpoint baseline's" if upsampler else ""
            note = f"Chamfer distance {values[number]:.4g} {self.unit.name}{share}"
            shown.append(self._pair(number, upsampler, place, note))
        write_shown(shown, ", ".join(pair.name for pair in shown), picture, view)

    def _pair(self, number: int, upsampler: Upsampler | None, place: str, note: str) -> ShownPair:
        index = self.kept[number]
        batch = collate([self.pairs[(0, index)]])
        batch = batch.to(next(upsampler.parameters()).device) if upsampler else batch
        vertical = self.pairs.samples.is_vertical(index)
        ratio = training_ratio(batch, self.ratio, self.max_ratio)
        clouds, target = clouds_to_show(batch, ratio, upsampler, vertical, self.as_written)
        unit = "" if self.unit.metres is None else self.unit.name
        notes = {
            row: f"Chamfer {figures['chamfer']:.3g} {unit}".strip()
            for row, figures in self.rows[number].items()
        }
        name = f"{place}: {self.pairs.names[index]}"
        origin = self.pairs.samples.origin(index)
        return ShownPair(name, clouds, target, vertical, unit, note, notes, origin=origin)


def _share(rows: Mapping[str, Figures]) -> float:
    """Chamfer distance of the model as a share of that of the midpoints; NaN if theirs is 0."""
    midpoints = rows["midpoints"]["chamfer"]
    return rows["model"]["chamfer"] / midpoints if midpoints else float("nan")


ON_SURFACE = 1e-3
"""A source lies on the true surface if its mean distance to it is at most this share of its Chamfer
distance."""


class Sizes(NamedTuple):
    """Numbers of points of a pair, and the ratio by which its source was upsampled."""

    source: int
    target: int
    ratio: float

    def has_own_ratio(self) -> bool:
        """Whether the upsampled clouds have as many points as the target."""
        return round(self.ratio * self.source) == self.target


def notes_on_ratios(sizes: Sequence[Sizes]) -> list[str]:
    """How many pairs were upsampled to another number of points than their target's."""
    others = [pair for pair in sizes if not pair.has_own_ratio()]
    if not others:
        return []
    used = _span([pair.ratio for pair in others])
    own = _span([pair.target / max(pair.source, 1) for pair in others])
    return [
        f"{len(others):,} of {len(sizes):,} pairs were upsampled by {used} instead of their own "
        f"{own} (--ratio, --max-ratio); target and resampled ground truth keep their points"
    ]


def _span(ratios: Sequence[float]) -> str:
    low, high = (f"{end:.3g}x" for end in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def notes_on_gap(in_order: Sequence[Mapping[str, Figures]], sizes: Sequence[Sizes]) -> list[str]:
    """How much of the gap to a second sampling is closed, over the pairs that have one.

    Pairs that were upsampled to another number of points than their target's are left out: Chamfer
    distances of clouds of several sizes have no gap in common.
    """
    having = [
        (rows, pair) for rows, pair in zip(in_order, sizes, strict=True) if "resampled" in rows
    ]
    chosen = [rows for rows, pair in having if pair.has_own_ratio()]
    lines = gap_closed(mean_rows(chosen), ["model"])
    if len(chosen) == len(in_order):
        return lines
    of_size = " and their own ratio" if len(chosen) < len(having) else ""
    return [f"{line}, in the {len(chosen):,} pairs that have one{of_size}" for line in lines]


def remarks_on_pairs(
    in_order: Sequence[Mapping[str, Figures]], metrics: Mapping[str, Metric]
) -> list[str]:
    """`worse_than_source` for the means of the pairs, with P2F of pairs with noise only.

    A source that was sampled from the surface has a P2F of rounding errors. Anything that a model
    adds is much worse than that.
    """
    limits = [1e3 * ON_SURFACE * rows["source"]["chamfer"] for rows in in_order]
    off_surface = [
        # P2F is in thousandths.
        rows["source"].get("p2f", np.inf) > limit
        for rows, limit in zip(in_order, limits, strict=True)
    ]
    if all(off_surface):
        return worse_than_source(mean_rows(in_order), metrics, ["model"])
    compared = [
        rows if is_off else {row: _without_p2f(figures) for row, figures in rows.items()}
        for rows, is_off in zip(in_order, off_surface, strict=True)
    ]
    number = sum("p2f" in rows["source"] for rows in compared)
    title = f"P2F in the {number:,} pairs whose source is not on the surface:"
    metrics = {**metrics, "p2f": replace(metrics["p2f"], title=title)}
    return worse_than_source(mean_rows(compared), metrics, ["model"])


def _without_p2f(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "p2f"}
