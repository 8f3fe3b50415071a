"""The page of a report: text, tables, curves, pictures and the viewer, in one HTML file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

import pointup
from pointup.cli.report.curves import curve_charts
from pointup.cli.report.runs import RunRecord, differing_options, differing_references
from pointup.cli.report.samples import Samples
from pointup.evaluation.cloud_metrics import metrics_in
from pointup.training.tracking.tables import NETWORK_ALONE, ROW_LABELS
from pointup.visualization.viewer.document import html_head, viewer_html

Cells = Sequence[Sequence[object]]
DIFFERENT_DATA = (
    "The references of the runs differ: the runs were validated on different data, or at different "
    "ratios. Compare each run with its own references, not with the other runs."
)

BEST = (
    "Each run at its best evaluation. The share is the mean of the ratios of the pairs, not the "
    "ratio of the means. The midpoint baseline uses no network."
)


def report_html(runs: Sequence[RunRecord], samples: Samples | None, reason: str, title: str) -> str:
    """The page as text. `reason` says why there are no samples, where there are none."""
    parts = [
        _section("Runs", _table(_runs(runs), BEST)),
        _section("Curves", _charts(runs)),
        _section("Validation", _metrics(runs)),
        _section("Samples", _samples(samples, runs, title) if samples else _text(reason)),
        _section("Options", _options(runs)),
        _section("Machine and speed", _machine(runs)),
    ]
    folder = files("pointup.cli.report")
    page = (folder / "report.html").read_text(encoding="utf-8")
    footer = f"Written by pointup {pointup.__version__}."
    for mark, text in (
        ("TITLE", escape(title)),
        ("FOOTER", escape(footer)),
        ("CONTENT", "\n".join(parts)),
    ):
        page = page.replace(f"<!--{mark}-->", text)
    return html_head(title, (folder / "report.css").read_text(encoding="utf-8")) + page


def _runs(runs: Sequence[RunRecord]) -> Cells:
    head: list[object] = [
        "run",
        "steps",
        "best step",
        f"Chamfer, {_unit(runs)}".rstrip(", "),
        "share of the midpoint baseline",
        "data",
    ]
    rows: list[list[object]] = [head]
    for run in runs:
        best = run.best or {}
        chamfer = best.get("validation", {}).get("model", {}).get("chamfer")
        share = best.get("share_of_midpoints")
        rows.append(
            [
                run.name,
                run.last_step,
                best.get("step", "-"),
                _number(chamfer),
                "-" if share is None else f"{share:.1%}",
                ", ".join(run.options.get("data") or ["procedural pairs"]),
            ]
        )
    return rows


def _unit(runs: Sequence[RunRecord]) -> str:
    """The unit of lengths of all runs; empty if it is unknown, or if they differ."""
    units = {run.unit for run in runs}
    return units.pop() if len(units) == 1 else ""


def _charts(runs: Sequence[RunRecord]) -> str:
    charts = curve_charts(runs)
    if not charts:
        return _text("No step has been recorded.")
    return (
        '<div class="charts">'
        + "".join(
            f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
            for title, svg in charts.items()
        )
        + "</div>"
    )


def _metrics(runs: Sequence[RunRecord]) -> str:
    """Metrics of the best evaluation of each run, then those of the references; references that
    differ between the runs have a row for each run."""
    evaluated = [run for run in runs if run.best]
    if not evaluated:
        return _text("No evaluation has been recorded.")
    rows = [(run.name, run.best["validation"].get("model", {})) for run in evaluated if run.best]
    differing = differing_references(evaluated)
    for row in dict.fromkeys(row for run in evaluated for row in run.references):
        label, known = ROW_LABELS.get(row, row), [run for run in evaluated if row in run.references]
        if row in differing:
            rows += [(f"{label}, {run.name}", run.references[row]) for run in known]
        else:
            rows.append((label, known[0].references[row]))
    given = list(dict.fromkeys(name for _, figures in rows for name in figures))
    metrics = metrics_in(_unit(evaluated))
    names = [name for name in metrics if name in given]
    head = ["", *(f"{metrics[name].title}, {metrics[name].unit}".rstrip(", ") for name in names)]
    body = [[row, *(_number(figures.get(name)) for name in names)] for row, figures in rows]
    conventions = "".join(
        f"<li>{escape(metrics[name].title)}: {escape(metrics[name].convention)}</li>"
        for name in names
        if metrics[name].convention
    )
    note = DIFFERENT_DATA if differing else ""
    return (
        _table([head, *body], note)
        + _text(NETWORK_ALONE)
        + _folded("Conventions", f"<ul>{conventions}</ul>")
    )


def _samples(samples: Samples, runs: Sequence[RunRecord], title: str) -> str:
    measured = len(samples.shares)
    low, middle, high = np.percentile(samples.shares, [0, 50, 100])
    text = (
        f"{measured:,} of {samples.num_pairs:,} validation pairs, measured with the network of "
        f"{runs[0].name} alone: Chamfer distance {low:.1%} (best), {middle:.1%} (median) and "
        f"{high:.1%} (worst) of that of the midpoint baseline; lower for "
        f"{np.mean(samples.shares < 1):.0%} of the pairs."
    )
    viewer = escape(viewer_html(samples.scenes, title), quote=True)
    pictures = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption>"
        f'<img alt="{escape(name)}" src="data:image/png;base64,{_png(picture)}"></figure>'
        for name, picture in samples.pictures.items()
    )
    return f'{_text(text)}<iframe title="Samples in 3D" srcdoc="{viewer}"></iframe>{pictures}'


def _options(runs: Sequence[RunRecord]) -> str:
    differing = differing_options(runs)
    if not differing:
        return _text("No option differs.")
    names = [run.name for run in runs] if len(runs) > 1 else [runs[0].name, "default"]
    rows = [[name, *("-" if v is None else v for v in row)] for name, row in differing.items()]
    note = "Options that differ." if len(runs) > 1 else "Options that are not the default."
    return _table([["option", *names], *rows], note)


def _machine(runs: Sequence[RunRecord]) -> str:
    head: list[object] = ["run", "tokens per second", "seconds per step", "idle", "peak memory"]
    rows: list[list[object]] = [head]
    for run in runs:
        medians = {}
        for key in ("tokens_per_second", "step_seconds", "idle_fraction"):
            values = run.curve(key)[1]
            medians[key] = float(np.median(values)) if len(values) else None
        idle = medians["idle_fraction"]
        # Each step has the peak of the process so far.
        memory = max(run.curve("peak_memory_bytes")[1], default=None)
        rows.append(
            [
                run.name,
                _number(medians["tokens_per_second"]),
                _number(medians["step_seconds"]),
                "-" if idle is None else f"{idle:.0%}",
                "-" if memory is None else f"{memory / 2**30:.2f} GiB",
            ]
        )
    plans = "".join(
        _folded(f"Start of {run.name}", f"<pre>{escape(run.plan)}</pre>")
        for run in runs
        if run.plan
    )
    return _table(rows, "Medians over the recorded steps, and the largest peak memory.") + plans


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _text(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(cells: Cells, note: str = "") -> str:
    head, *rows = (
        [f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row]
        for tag, row in [("th", cells[0]), *(("td", row) for row in cells[1:])]
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    caption = _text(note) if note else ""
    return (
        f'{caption}<div class="wide"><table><thead><tr>{"".join(head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _png(picture: np.ndarray) -> str:
    stream = BytesIO()
    Image.fromarray(picture).save(stream, "PNG", optimize=True)
    return b64encode(stream.getvalue()).decode("ascii")
