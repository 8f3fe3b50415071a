"""Curves of a report, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pointup.cli.report.runs import RunRecord, differing_references
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
    chart = _Chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        steps, values = run.curve(key)
        if smooth and len(values) >= 2 * SMOOTHED:
            chart.axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
            half = SMOOTHED // 2
            kernel = np.ones(SMOOTHED) / SMOOTHED
            steps, values = steps[half:-half], np.convolve(values, kernel, "valid")
        chart.curve(run.name, steps, values, color=color)
    return chart.svg()


def _chamfer(runs: Sequence[RunRecord]) -> str:
    chart = _Chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        chart.curve(run.name, *run.validation_curve("chamfer"), color=color, marker="o", ms=3)
    evaluated = next((run for run in runs if run.evaluations), runs[0])
    differing = differing_references(runs)
    for row, (label, style) in REFERENCES.items():
        values = evaluated.validation_curve("chamfer", row)[1]
        if len(values):
            name = f"{label}, {evaluated.name}" if row in differing else label
            chart.level(name, values[-1], style)
    return chart.svg()


def _share(runs: Sequence[RunRecord]) -> str:
    chart = _Chart()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        steps, values = run.validation_curve("share")
        chart.curve(run.name, steps, 100 * values, color=color, marker="o", ms=3)
    chart.level("midpoint baseline", 100, "--")
    chart.axes.set_ylabel("%", color=FAINT)
    return chart.svg()


def _colors(number: int) -> list[str]:
    return [RUN_COLORS[i % len(RUN_COLORS)] for i in range(number)]


class _Chart:
    """Curves over steps, and their names, which may be any text."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(6.2, 3.3), layout="constrained")
        # The types of matplotlib's axes change by version.
        self.axes: Any = self.figure.add_subplot()
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.grid(color="#e6e8eb", linewidth=0.7)
        self.axes.tick_params(colors=INK, labelsize=9)
        self.axes.set_xlabel("step", color=FAINT)
        self.named: list[tuple[str, Artist]] = []
        self.is_empty = True

    def curve(self, name: str, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
        self.named.append((name, self.axes.plot(steps, values, **style)[0]))
        self.is_empty = self.is_empty and not len(steps)

    def level(self, name: str, value: float, style: str) -> None:
        """A horizontal line; alone it is no reason for a chart."""
        line = self.axes.axhline(value, color=FAINT, linestyle=style, linewidth=1)
        self.named.append((name, line))

    def svg(self) -> str:
        """The chart; empty without a curve."""
        if self.is_empty:
            return ""
        # A legend leaves out labels that begin with _, and reads two dollar signs as a formula.
        handles = [handle for _, handle in self.named]
        legend = self.axes.legend(handles, map(str, range(len(handles))), frameon=False, fontsize=9)
        for text, (name, _) in zip(legend.get_texts(), self.named, strict=True):
            text.set_parse_math(False)
            text.set_text(name)
        # Text stays text, and the same runs give the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pointup"}):
            stream = StringIO()
            FigureCanvasSVG(self.figure).print_svg(stream, metadata={"Date": None})
        return stream.getvalue().split("?>", 1)[1].split(">", 1)[1]
