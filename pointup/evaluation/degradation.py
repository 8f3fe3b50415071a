"""In words: which figures of a method are much worse than those of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pointup.evaluation.baselines import BASELINES
from pointup.evaluation.cloud_metrics import Metric
from pointup.evaluation.report import numbers

BESIDE = ("midpoints", *BASELINES)
LARGER_BY = 0.10
"""Share by which a distance must exceed the source's to be named."""
SHARE_LARGER_BY, SHARE_POINTS = 0.5, 0.1
"""The same of a share in percent, and the percentage points that it must be larger by besides."""
SCORE_POINTS = 1.0
"""Percentage points by which a score must fall below the source's."""
FARTHER_BY = 2.0
"""How many times the midpoints' a distance must be that the source doesn't have."""


def worse_than_source(
    rows: Mapping[str, Mapping[str, float]],
    metrics: Mapping[str, Metric],
    methods: Sequence[str],
    source: str = "source",
) -> list[str]:
    """A sentence for each of `methods` that is among the rows: what is much worse, or that
    nothing is.

    Much worse: a distance larger by 10 %; a share of bad points (in percent, lower is better)
    larger by half and 0.1 percentage points; a score (higher is better) lower by a percentage
    point. A figure that only new points have is much worse at twice the midpoints'. Nothing
    without a row of the source.
    """
    if source not in rows:
        return []
    sentences = []
    for method in methods:
        if method not in rows:
            continue
        found = []
        for name, metric in metrics.items():
            value, before = rows[method].get(name), rows[source].get(name)
            beside = rows.get("midpoints", {}).get(name)
            if value is None:
                continue
            if before is not None:
                if _much_worse(metric, value, before):
                    found.append(_described(metric, value, before))
            elif beside is not None and metric.better == "lower" and value > FARTHER_BY * beside:
                found.append(_described(metric, value, beside, "the midpoints' "))
        if found:
            sentences.append(f"{method}, much worse than the source: " + "; ".join(found))
        else:
            sentences.append(f"{method}: no figure is much worse than the source's")
    return sentences


def _much_worse(metric: Metric, value: float, before: float) -> bool:
    if metric.better == "higher":
        return value < before - SCORE_POINTS
    if metric.better != "lower":
        return False
    if metric.unit == "%":
        return value > (1 + SHARE_LARGER_BY) * before and value > before + SHARE_POINTS
    return value > (1 + LARGER_BY) * before


def _described(metric: Metric, value: float, before: float, whose: str = "") -> str:
    now, then = numbers([value, before])
    unit = f" {metric.unit}" if metric.unit else ""
    name = metric.title.strip()
    if metric.unit == "%":
        return f"{name} {now} %, not {then} % ({value - before:+.2g} points)"
    times = value / before if before else 0.0
    change = f" ({times:.3g} times)" if times >= 3 else f" ({times - 1:+.0%})" if times else ""
    return f"{name} {now}{unit}, not {whose}{then}{unit}{change}"


def beside_baselines(
    rows: Mapping[str, Mapping[str, float]],
    methods: Sequence[str],
    baselines: Sequence[str] = BESIDE,
) -> list[str]:
    """For each of `methods` a line: its Chamfer distance as a share of the best baseline's and of
    the midpoints', of the same means as the table's."""
    known = {name: rows[name]["chamfer"] for name in baselines if name in rows}
    if not known:
        return []
    best = min(known, key=known.__getitem__)
    lines = []
    for method in methods:
        if method not in rows:
            continue
        chamfer = rows[method]["chamfer"]
        line = f"Chamfer of the {method}: {chamfer / known[best]:.1%} of the best baseline's "
        line += f"({best.replace('_', ' ')})"
        if best != "midpoints" and "midpoints" in known:
            line += f", {chamfer / known['midpoints']:.1%} of the midpoints'"
        lines.append(line)
    return lines
