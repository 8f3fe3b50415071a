"""What `pointup evaluate pairs` says about its figures: ratios, the gap that is closed, remarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pointup.evaluation.cloud_metrics import Figures, Metric, mean_rows
from pointup.evaluation.degradation import gap_closed, worse_than_source

ON_SURFACE = 1e-3
"""A source lies on the true surface if its mean distance to it is at most this share of its Chamfer
distance."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of points of a pair, and the ratio by which its source was upsampled."""

    source: int
    target: int
    ratio: float

    @property
    def own_ratio(self) -> float:
        return self.target / max(self.source, 1)

    @property
    def has_own_ratio(self) -> bool:
        """Whether the upsampled clouds have as many points as the target."""
        return round(self.ratio * self.source) == self.target


def notes_on_ratios(sizes: Sequence[Sizes]) -> list[str]:
    """How many pairs were upsampled to another number of points than their target's."""
    others = [pair for pair in sizes if not pair.has_own_ratio]
    if not others:
        return []
    used, own = (_span([p.ratio for p in others]), _span([p.own_ratio for p in others]))
    return [
        f"{len(others):,} of {len(sizes):,} pairs were upsampled by {used} instead of their own "
        f"{own} (--ratio, --max-ratio); target and resampled ground truth keep their points"
    ]


def notes_on_gap(in_order: Sequence[Mapping[str, Figures]], sizes: Sequence[Sizes]) -> list[str]:
    """How much of the gap to a second sampling is closed, over the pairs that have one.

    Pairs that were upsampled to another number of points than their target's are left out: Chamfer
    distances of clouds of several sizes have no gap in common.
    """
    having = [
        (rows, pair) for rows, pair in zip(in_order, sizes, strict=True) if "resampled" in rows
    ]
    chosen = [rows for rows, pair in having if pair.has_own_ratio]
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
    off_surface = [not _lies_on_surface(rows["source"]) for rows in in_order]
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


def _lies_on_surface(source: Figures) -> bool:
    # P2F is in thousandths.
    return "p2f" in source and source["p2f"] <= 1e3 * ON_SURFACE * source["chamfer"]


def _without_p2f(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "p2f"}


def _span(ratios: Sequence[float]) -> str:
    low, high = (f"{end:.3g}x" for end in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"
