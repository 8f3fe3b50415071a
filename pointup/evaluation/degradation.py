"""Writes remarks for reports: figures much worse than the source's, and shares of the baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pointup.evaluation.baselines import BASELINES
from pointup.evaluation.cloud_metrics import Metric
from pointup.evaluation.report import numbers

BESIDE = ("midpoints", *BASELINES)
LARGER_BY = 0.10
"""A distance is much worse if it exceeds the source's by more than this share."""
SHARE_LARGER_BY, SHARE_POINTS = 0.5, 0.1
"""A figure in percent is much worse if it exceeds the source's by more than this share, and by more
than this number of percentage points."""
SCORE_POINTS = 1.0
"""A score is much worse if it is lower than the source's by more percentage points than this."""
FARTHER_BY = 2.0
"""A figure of new points is much worse if it exceeds this multiple of the midpoint baseline."""


def worse_than_source(
    rows: Mapping[str, Mapping[str, float]],
    metrics: Mapping[str, Metric],
    methods: Sequence[str],
    source: str = "source",
) -> list[str]:
    """A sentence for each of `methods` in `rows`: which figures are much worse than the source's.

    Much worse is a distance larger by more than 10 %; a share of points in percent (lower is
    better) larger by more than half and more than 0.1 percentage points; a score (higher is better)
    lower by more than one percentage point. A figure that the source does not have is much worse if
    it is more than twice the midpoint baseline's. The list is empty if `rows` has no source.
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
                found.append(_described(metric, value, beside, "the midpoint baseline's "))
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
    """A line for each of `methods` in `rows`: its Chamfer distance as a share of the best
    baseline's and of the midpoint baseline's, computed from the means in `rows`."""
    known = _distances(rows, baselines)
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
            line += f", {chamfer / known['midpoints']:.1%} of the midpoint baseline's"
        lines.append(line)
    return lines


def gap_closed(
    rows: Mapping[str, Mapping[str, float]],
    methods: Sequence[str],
    baselines: Sequence[str] = BESIDE,
) -> list[str]:
    """A line for each of `methods` in `rows`: how much of the gap between the best baseline and the
    second survey, the row "resampled", is closed; negative if the method is worse than that
    baseline. The rows must be means over the same clouds."""
    known = _distances(rows, baselines)
    second = rows.get("resampled", {}).get("chamfer")
    if not known or second is None or second >= min(known.values()):
        return []
    best = min(known.values())
    return [
        f"the {method} closes {(best - rows[method]['chamfer']) / (best - second):.0%} of the gap "
        "between the best baseline and the resampled ground truth"
        for method in methods
        if method in rows
    ]


def _distances(
    rows: Mapping[str, Mapping[str, float]], baselines: Sequence[str]
) -> dict[str, float]:
    """Chamfer distances of the baselines; none if one is 0, where the source is the reference."""
    known = {name: rows[name]["chamfer"] for name in baselines if name in rows}
    return known if all(known.values()) else {}
