"""Formats evaluations and the plan of a run as text tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from pointup.evaluation.cloud_metrics import Metric
from pointup.evaluation.report import aligned

ROW_LABELS = {
    "model": "model",
    "midpoints": "midpoints (no network)",
    "source": "source as it is",
    "resampled": "resampled ground truth",
}
WIDTH = 100
MIDPOINTS = (
    "midpoints (no network): the midpoint baseline, between neighbours and thinned evenly\n"
    "model against midpoints: ratio of the means; cloud by cloud: mean of the ratios"
)
"""Said once below the conventions: the two figures differ, and two names mean the same."""
AS_WRITTEN = (
    "The figures are those of the output of `pointup upsample`, with measured points; of a run\n"
    "with `--noise-spacings`, with `--denoise` instead."
)


def evaluation_table(
    rows: Mapping[str, Mapping[str, float]],
    metrics: Mapping[str, Metric],
    title: str = "",
    conventions: bool = True,
) -> str:
    """A line for each of `rows`, a column for each metric of any row, with its unit below its name.

    With rows for both, a last line gives the model's relative change from the midpoint baseline.
    `conventions` adds a definition of each metric.
    """
    names = [name for name in metrics if any(name in row for row in rows.values())]
    shown = [metrics[name] for name in names]
    lines = [[title, *(metric.title for metric in shown)], ["", *(m.unit for m in shown)]]
    for row, figures in rows.items():
        cells = [f"{figures[name]:.4g}" if name in figures else "-" for name in names]
        lines.append([ROW_LABELS.get(row, row), *cells])
    if "model" in rows and "midpoints" in rows:
        changes = [_change(rows["model"].get(n), rows["midpoints"].get(n)) for n in names]
        lines.append(["model against midpoints", *changes])
    text = "\n".join(aligned(lines, ["<", *">" * len(names)]))
    if conventions:
        text += "".join(
            "\n" + textwrap.fill(f"{m.title}: {m.convention}", WIDTH, subsequent_indent="    ")
            for m in shown
            if m.convention
        )
        text += f"\n{MIDPOINTS}" if "midpoints" in rows else ""
    return text


def share_line(share: float, lower: float) -> str:
    """The sentence below the table of an evaluation: the mean of the ratios of the clouds.

    `lower` is the share of the clouds in which the model's Chamfer distance is the lower one.
    """
    return (
        f"Chamfer, cloud by cloud: {share:.1%} of that of the midpoints on average; lower for "
        f"{lower:.0%} of the clouds."
    )


def plan_table(values: Mapping[str, object]) -> str:
    """A name and a value per line; long values wrap and stay aligned."""
    indent = max(map(len, values), default=0) + 2
    return "\n".join(
        textwrap.fill(
            str(value),
            WIDTH,
            initial_indent=name.ljust(indent),
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        for name, value in values.items()
    )


def _change(value: float | None, reference: float | None) -> str:
    if value is None or not reference:
        return "-"
    return f"{value / reference - 1:+.1%}"


def datasets_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each dataset: label, clouds, Chamfer distance, share of the midpoints'."""
    lines = [["dataset", "clouds", "Chamfer", "of the midpoint baseline's"]]
    for label, values in figures.items():
        chamfer = values["validation"].get("model", {}).get("chamfer")
        share = values["share_of_midpoints"]
        lines.append(
            [
                label,
                f"{values['num_clouds']:,}",
                "-" if chamfer is None else f"{chamfer:.4g}",
                "-" if share is None else f"{share:.1%}",
            ]
        )
    return "\n".join(aligned(lines, "<>>>"))
