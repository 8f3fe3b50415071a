"""Curves of a report, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pointup.cli.report.runs import RunRecord
from pointup.visualization.page import FAINT, INK

RUN_COLORS = ("#1f6fb2", "#e08a3c", "#2f9e56", "#a64ca6", "#c0392b", "#5b6770")
REFERENCES = {
    "midpoints": ("midpoint baseline", "--"),
    "source": ("source as it is", ":"),
    "resampled": ("resampled ground truth", "-."),
}
SMOOTHED = 11
"""Steps of the running mean of noisy curves; the values themselves are drawn faintly."""


def curve_charts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """SVG of each chart by title; charts without values are left out."""
    charts = {
        "Training loss": _training(runs, "loss", smooth=True),
        "Chamfer distance on validation pairs": _chamfer(runs),
        "Share of the midpoint baseline": _share(runs),
        "Learning rate": _training(runs, "learning_rate"),
        "Tokens per second": _training(runs, "tokens_per_second", smooth=True),
    }
    return {title: svg for title, svg in charts.items() if svg}


def _training(runs: Sequence[RunRecord], key: str, smooth: bool = False) -> str:
    figure, axes = _chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        steps, values = run.curve(key)
        if smooth and len(values) >= 2 * SMOOTHED:
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
            half = SMOOTHED // 2
            kernel = np.ones(SMOOTHED) / SMOOTHED
            steps, values = steps[half:-half], np.convolve(values, kernel, "valid")
        axes.plot(steps, values, color=color, label=run.name)
    return _svg(figure, axes)


def _chamfer(runs: Sequence[RunRecord]) -> str:
    figure, axes = _chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        axes.plot(*run.validation_curve("chamfer"), color=color, marker="o", ms=3, label=run.name)
    for row, (label, style) in REFERENCES.items():
        values = runs[0].validation_curve("chamfer", row)[1]
        if len(values):
            axes.axhline(values[-1], color=FAINT, linestyle=style, linewidth=1, label=label)
    return _svg(figure, axes)


def _share(runs: Sequence[RunRecord]) -> str:
    figure, axes = _chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        steps, values = run.validation_curve("share")
        axes.plot(steps, 100 * values, color=color, marker="o", ms=3, label=run.name)
    axes.axhline(100, color=FAINT, linestyle="--", linewidth=1, label="midpoint baseline")
    axes.set_ylabel("%", color=FAINT)
    return _svg(figure, axes)


def _colors(number: int) -> list[str]:
    return [RUN_COLORS[i % len(RUN_COLORS)] for i in range(number)]


def _chart():  # type: ignore[no-untyped-def]  # the types of matplotlib's axes change by version
    figure = Figure(figsize=(6.2, 3.3), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e8eb", linewidth=0.7)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_xlabel("step", color=FAINT)
    return figure, axes


def _svg(figure: Figure, axes) -> str:  # type: ignore[no-untyped-def]
    # Lines of references have two points and are no reason for a chart.
    if not any(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "-"):
        return ""
    axes.legend(frameon=False, fontsize=9)
    # Text stays text, and the same runs give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pointup"}):
        stream = StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return stream.getvalue().split("?>", 1)[1].split(">", 1)[1]
