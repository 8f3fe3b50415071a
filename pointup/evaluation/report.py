"""Formats evaluation results as text, Markdown and JSON, each metric with unit and convention."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from pointup.disk import write_text

if TYPE_CHECKING:  # It imports PyTorch Geometric, which `pointup inspect FILE` does not need.
    from pointup.evaluation.cloud_metrics import Metric

WIDTH = 98
DIGITS = 4


@dataclass(frozen=True)
class Table:
    """Figures of several subjects (shapes, methods): `rows` maps each subject to its figures.

    With `metrics_down` the metrics are the lines and the subjects the columns. A missing figure is
    printed as a dash.
    """

    title: str
    metrics: Mapping[str, Metric]
    rows: Mapping[str, Mapping[str, float]]
    metrics_down: bool = False

    def present(self) -> dict[str, Metric]:
        """The metrics for which any subject has a figure."""
        return {
            name: metric
            for name, metric in self.metrics.items()
            if any(name in figures for figures in self.rows.values())
        }

    def cells(self) -> list[list[str]]:
        """The table as lines of cells, beginning with a line of titles and a line of units.

        With `metrics_down` the last column has the units instead.
        """
        metrics = self.present()
        columns = {
            name: numbers([figures.get(name) for figures in self.rows.values()]) for name in metrics
        }
        if self.metrics_down:
            lines = [[metrics[name].title, *columns[name], metrics[name].unit] for name in metrics]
            return [["", *self.rows, ""], *lines]
        titles = ["", *(metric.title for metric in metrics.values())]
        units = ["", *(metric.unit for metric in metrics.values())]
        lines = [
            [subject, *(column[i] for column in columns.values())]
            for i, subject in enumerate(self.rows)
        ]
        return [titles, units, *lines]


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation to print: `heading` says what was evaluated, `remarks` follow the tables."""

    heading: Sequence[str]
    tables: Sequence[Table]
    remarks: Sequence[str] = ()

    def text(self) -> str:
        """Text for a terminal: aligned, below 100 columns wide unless a name is long."""
        parts = [self.heading, *map(_titled, self._filled())]
        blocks = ["\n".join(lines) for lines in parts]
        wrapper = TextWrapper(WIDTH, subsequent_indent="    ")
        if self.remarks:
            blocks.append("\n".join(map(wrapper.fill, self.remarks)))
        blocks.append("\n".join(wrapper.fill(f"{title}: {text}") for title, text in self.notes()))
        return "\n\n".join(blocks)

    def markdown(self) -> str:
        """Markdown: pipe tables, and the conventions as a list."""
        lines = [f"{line}  " for line in self.heading]
        for table in self._filled():
            cells = table.cells()
            title = ["", f"**{table.title}**"] if table.title else []
            lines += [*title, "", *pipe_table(cells, _sides(table, len(cells[0])))]
        for remark in self.remarks:
            lines += ["", remark]
        lines += ["", *(f"- {title}: {text}" for title, text in self.notes())]
        return "\n".join(lines) + "\n"

    def _filled(self) -> list[Table]:
        """The tables with any figures."""
        return [table for table in self.tables if table.present()]

    def notes(self) -> list[tuple[str, str]]:
        """Title and convention of every printed metric that has a convention."""
        metrics = {name: m for table in self.tables for name, m in table.present().items()}
        return [
            (_with_unit(metric), metric.convention)
            for metric in metrics.values()
            if metric.convention
        ]


def numbers(values: Sequence[float | None]) -> list[str]:
    """Figures of one metric as text, with the decimals that give the median figure four digits."""
    known = [abs(v) for v in values if v is not None and math.isfinite(v) and v]
    if all(v == round(v) for v in known):
        decimals = 0
    else:
        typical = sorted(known)[len(known) // 2]
        decimals = min(max(DIGITS - 1 - math.floor(math.log10(typical)), 0), 8)
    return ["-" if v is None else f"{v:,.{decimals}f}" for v in values]


def write_json(path: Path, content: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
    """Write the content and the descriptions of its metrics. NaN and infinity become null."""
    described = {name: asdict(metric) for name, metric in metrics.items()}
    text = json.dumps(finite({**content, "metrics": described}), indent=2)
    write_text(path, text + "\n")


def pipe_table(lines: Sequence[Sequence[str]], sides: Sequence[str]) -> list[str]:
    """Lines of cells as a Markdown table, each column aligned to its side: "<" or ">"."""
    head, *rest = lines
    rule = ["---" if side == "<" else "---:" for side in sides]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rest)]


def aligned(lines: Sequence[Sequence[str]], sides: Sequence[str], gap: str = "   ") -> list[str]:
    """Lines of cells as text, each column aligned to its side: "<" or ">"."""
    # By hand: tabulate and rich have no head of two lines beside decimals by column and a gap that
    # follows the width.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        gap.join(
            f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _titled(table: Table) -> list[str]:
    """The aligned lines of a table, with its title in the upper left cell."""
    cells = table.cells()
    cells[0][0] = table.title
    if table.metrics_down:
        cells = [*_stacked(cells[0]), *cells[1:]]
    sides = _sides(table, len(cells[0]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return aligned(cells, sides, "   " if sum(widths) + 3 * (len(widths) - 1) <= WIDTH else "  ")


def _stacked(names: Sequence[str]) -> list[list[str]]:
    """The head as one line of cells, or as two if the name of a column has several words."""
    words = [["", *name.split(" ", 1)][-2:] for name in names[1:]]
    above = [names[0], *(first for first, _ in words)]
    below = ["", *(last for _, last in words)]
    if not any(above[1:]):
        return [[names[0], *below[1:]]]
    return [above, below]


def _sides(table: Table, num_columns: int) -> list[str]:
    """Alignment of each column: names and units to the left, numbers to the right."""
    numbers = [">"] * (num_columns - 1 - table.metrics_down)
    return ["<", *numbers, *(["<"] if table.metrics_down else [])]


def _with_unit(metric: Metric) -> str:
    title = metric.title.strip()
    return f"{title} ({metric.unit})" if metric.unit else title


def finite(value: Any) -> Any:
    """A nested value as Python numbers, with None in place of non-finite ones."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
