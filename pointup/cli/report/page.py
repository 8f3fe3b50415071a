"""The page of a report: text, tables, curves, pictures and the viewer, in one HTML file."""

from __future__ import annotations

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import BytesIO, StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image
from torch_geometric.data import Batch

import pointup
from pointup.cli.report.runs import BASELINE, RunRecord, differing_options, differing_references
from pointup.datasets.batch import collate
from pointup.datasets.dataset_units import known_unit
from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import DataError
from pointup.evaluation.cloud_metrics import (
    Clouds,
    clouds_of_pairs,
    measure_clouds,
    metrics_in,
    share_of_midpoints,
)
from pointup.evaluation.pairs import upsampled_pairs, worst_to_best
from pointup.progress import tracked
from pointup.synthetic.default_dataset import default_dataset
from pointup.training.config import data_sources
from pointup.training.datasets import open_split
from pointup.training.objective import training_ratio
from pointup.training.tracking.tables import AS_WRITTEN, ROW_LABELS
from pointup.training.tracking.trackers import REFERENCES
from pointup.upsampling.in_memory import default_device, load_model
from pointup.visualization.columns import evaluation_picture
from pointup.visualization.page import FAINT, INK
from pointup.visualization.viewer.document import filled_page, viewer_html
from pointup.visualization.viewer.scenes import Scene, compare_with_reference

Row = Sequence[object]
DIFFERENT_DATA = (
    "The references of the runs differ: the runs were validated on different data, or at different "
    "ratios. Compare each run with its own references, not with the other runs."
)
NO_STEP = "No step has been recorded."
BEST = (
    "Each run at its best evaluation. The share is the mean of the ratios of the pairs, not the "
    "ratio of the means. The midpoint baseline uses no network."
)


def report_html(
    runs: Sequence[RunRecord], samples: ReportSamples | None, reason: str, title: str
) -> str:
    """The page as text. `reason` says why there are no samples, where there are none."""
    charts = "".join(_figure(name, svg) for name, svg in curve_charts(runs).items())
    sections = {
        "Runs": _runs(runs),
        "Curves": f'<div class="charts">{charts}</div>' if charts else _text(NO_STEP),
        "Validation": _metrics(runs),
        "Samples": _samples(samples, runs, title) if samples else _text(reason),
        "Options": _options(runs),
        "Machine and speed": _machine(runs),
    }
    content = (
        f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections.items()
    )
    marks = {
        "TITLE": escape(title),
        "FOOTER": escape(f"Written by pointup {pointup.__version__}."),
        "CONTENT": "\n".join(content),
    }
    return filled_page(files("pointup.cli.report"), "report", title, marks)


def _runs(runs: Sequence[RunRecord]) -> str:
    chamfer = f"Chamfer, {_unit(runs)}".rstrip(", ")
    share = "share of the midpoint baseline"
    rows: list[Row] = [["run", "steps", "best step", chamfer, share, "data"]]
    for run in runs:
        best = run.best or {}
        figures = best.get("validation", {}).get("model", {})
        data = ", ".join(run.options.get("data") or ["procedural pairs"])
        numbers = (_number(figures.get("chamfer")), _percent(best.get("share_of_midpoints"), 1))
        rows.append([run.name, run.last_step, best.get("step", "-"), *numbers, data])
    return _table(rows, BEST)


def _unit(runs: Sequence[RunRecord]) -> str:
    """The unit of lengths of all runs; empty if unknown, or if they differ."""
    units = {run.unit for run in runs}
    return units.pop() if len(units) == 1 else ""


def _metrics(runs: Sequence[RunRecord]) -> str:
    """Metrics of the best evaluation of each run, then those of the references."""
    evaluated = [run for run in runs if run.best]
    if not evaluated:
        return _text("No evaluation has been recorded.")
    rows = {run.name: run.best["validation"].get("model", {}) for run in evaluated if run.best}
    differing = differing_references(evaluated)
    for run in evaluated:
        for row, figures in run.references.items():
            label = ROW_LABELS.get(row, row)
            rows.setdefault(f"{label}, {run.name}" if row in differing else label, figures)
    metrics = metrics_in(_unit(evaluated))
    names = [name for name in metrics if any(name in figures for figures in rows.values())]
    head = ["", *(f"{metrics[name].title}, {metrics[name].unit}".rstrip(", ") for name in names)]
    body = [[row, *(_number(figures.get(name)) for name in names)] for row, figures in rows.items()]
    conventions = "".join(
        f"<li>{escape(metrics[name].title)}: {escape(metrics[name].convention)}</li>"
        for name in names
        if metrics[name].convention
    )
    table = _table([head, *body], DIFFERENT_DATA if differing else "")
    return table + _text(AS_WRITTEN) + _folded("Conventions", f"<ul>{conventions}</ul>")


def _samples(samples: ReportSamples, runs: Sequence[RunRecord], title: str) -> str:
    measured = len(samples.shares)
    low, middle, high = np.percentile(samples.shares, [0, 50, 100])
    text = (
        f"{measured:,} of {samples.num_pairs:,} validation pairs, upsampled with the model of "
        f"{runs[0].name}: Chamfer distance {low:.1%} (best), {middle:.1%} (median) and "
        f"{high:.1%} (worst) of that of the midpoint baseline; lower for "
        f"{np.mean(samples.shares < 1):.0%} of the pairs."
    )
    viewer = escape(viewer_html(samples.scenes, title), quote=True)
    pictures = "".join(
        _figure(name, f'<img alt="{escape(name)}" src="{_png(picture)}">')
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
    rows: list[Row] = [["run", "tokens per second", "seconds per step", "idle", "peak memory"]]
    for run in runs:
        tokens, seconds, idle = (
            float(np.median(values)) if len(values := run.curve(key)[1]) else None
            for key in ("tokens_per_second", "step_seconds", "idle_fraction")
        )
        # Each step has the peak of the process so far.
        memory = max(run.curve("peak_memory_bytes")[1], default=None)
        in_gib = "-" if memory is None else f"{memory / 2**30:.2f} GiB"
        rows.append([run.name, _number(tokens), _number(seconds), _percent(idle), in_gib])
    plans = "".join(
        _folded(f"Start of {run.name}", f"<pre>{escape(run.plan)}</pre>")
        for run in runs
        if run.plan
    )
    return _table(rows, "Medians over the recorded steps, and the largest peak memory.") + plans


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _text(text: str) -> str:
    """A paragraph; what stands between backticks is code."""
    coded = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return f"<p>{coded}</p>"


def _table(rows: Sequence[Row], note: str = "") -> str:
    """A table whose first row is its head."""
    head, *body = (
        "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    caption = _text(note) if note else ""
    return (
        f'{caption}<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table></div>"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float | None, decimals: int = 0) -> str:
    return "-" if value is None else f"{value:.{decimals}%}"


def _png(picture: np.ndarray) -> str:
    stream = BytesIO()
    Image.fromarray(picture).save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(stream.getvalue()).decode()}"


RUN_COLORS = ("#1f6fb2", "#e08a3c", "#2f9e56", "#a64ca6", "#c0392b", "#5b6770")
LINE_STYLES = {"midpoints": "--", "source": ":", "resampled": "-."}
SMOOTHED = 11
"""Steps of the running mean of noisy curves; the values themselves are drawn faintly."""


def curve_charts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """SVG of each chart by title; charts without values are left out."""
    known = next((run for run in runs if run.evaluations), runs[0])
    differing, levels = differing_references(runs), {}
    for row, style in LINE_STYLES.items():
        if len(values := known.validation_curve("chamfer", row)[1]):
            name = f"{REFERENCES[row]}, {known.name}" if row in differing else REFERENCES[row]
            levels[name] = (values[-1], style)
    charts = {
        "Training loss": _chart(runs, lambda run: run.curve("loss"), smooth=True),
        "Chamfer distance on validation pairs": _chart(
            runs, lambda run: run.validation_curve("chamfer"), levels, marker="o", ms=3
        ),
        "Share of the midpoint baseline": _chart(
            runs,
            lambda run: run.validation_curve("share"),
            {BASELINE: (1.0, "--")},
            in_percent=True,
            marker="o",
            ms=3,
        ),
        "Learning rate": _chart(runs, lambda run: run.curve("learning_rate")),
        "Tokens per second": _chart(runs, lambda run: run.curve("tokens_per_second"), smooth=True),
    }
    return {title: svg for title, svg in charts.items() if svg}


def _chart(
    runs: Sequence[RunRecord],
    curve: Callable[[RunRecord], tuple[np.ndarray, np.ndarray]],
    levels: Mapping[str, tuple[float, str]] | None = None,
    smooth: bool = False,
    in_percent: bool = False,
    **style: Any,
) -> str:
    """SVG of a curve of each run over its steps; empty if no run has values.

    `levels`: height and line style of horizontal lines by name.
    """
    curves = [curve(run) for run in runs]
    if not any(len(steps) for steps, _ in curves):
        return ""
    figure = Figure(figsize=(6.2, 3.3), layout="constrained")
    # The types of matplotlib's axes change by version.
    axes: Any = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e8eb", linewidth=0.7)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_xlabel("step", color=FAINT)
    # Of one evaluation, too.
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if in_percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    named = []
    for run, (steps, values), color in zip(runs, curves, cycle(RUN_COLORS), strict=False):
        if smooth and len(values) >= 2 * SMOOTHED:
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
            half = SMOOTHED // 2
            steps = steps[half:-half]
            values = np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid")
        named.append((run.name, axes.plot(steps, values, color=color, **style)[0]))
    for name, (value, line) in (levels or {}).items():
        named.append((name, axes.axhline(value, color=FAINT, linestyle=line, linewidth=1)))
    # A legend leaves out labels that begin with _, and reads two dollar signs as a formula.
    handles = [handle for _, handle in named]
    legend = axes.legend(handles, map(str, range(len(handles))), frameon=False, fontsize=9)
    for text, (name, _) in zip(legend.get_texts(), named, strict=True):
        text.set_parse_math(False)
        # A legend wider than the chart would leave no room for the axes.
        text.set_text(name if len(name) <= 60 else f"{name[:29]}…{name[-30:]}")
    # Text stays text, and the same runs give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pointup"}):
        stream = StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return stream.getvalue().split("?>", 1)[1].split(">", 1)[1]


@dataclass(frozen=True)
class ReportSamples:
    """Samples of a report."""

    scenes: list[Scene]
    """For the viewer: source, midpoint baseline, the output of each evaluated run, target."""
    pictures: dict[str, np.ndarray]
    """Of the same samples by the first run, by name."""
    shares: np.ndarray
    """Of the midpoint baseline's Chamfer distance, by the first run, sorted, of measured pairs."""
    num_pairs: int
    """Number of usable validation pairs, of which some were measured."""


@torch.no_grad()
def samples_of_runs(
    runs: Sequence[RunRecord], max_pairs: int, names_run: bool = True
) -> ReportSamples:
    """Measure validation pairs with the model of the first run, and upsample three with all.

    As in validation, sources have the noise that the first run was trained with, and a run with
    noise replaces the measured points. `names_run` adds the name of the first run, whose figures
    they are, to the names of pictures.
    Raises DataError if the dataset of the first run is gone, ModelError without a model.
    """
    first = runs[0]
    sources = data_sources(first.options.get("data") or [str(default_dataset())])
    device = default_device()
    models = {
        run.name: load_model(str(run.path / "model"), device)
        for run in runs
        if run is first or run.best  # A run that has just begun has no model yet.
    }
    min_points = max(model.config.k for model in models.values())
    try:
        usable, _ = open_split(sources, "validation", min_points)
    except DataError as error:
        names = [source.name for source in sources]
        missing = [n for n in names if not (Path(n).exists() or Path(n).is_absolute())]
        if not missing:
            raise
        # A name such as a/b may be one on the Hub.
        raise DataError(
            f"{error}. A directory {' or '.join(missing)} is relative to the folder in which "
            f"{first.path} was trained; run this command in that folder"
        ) from error
    noise = {run.name: run.options.get("noise_spacings") or 0.0 for run in runs}
    pairs = PairDataset(usable, seed=first.options.get("seed") or 0, noise=noise[first.name])
    ratio, max_ratio = first.options.get("ratio"), float(first.options.get("max_ratio") or 16.0)
    places = np.linspace(0, len(pairs) - 1, min(max_pairs, len(pairs))).round().astype(int)

    def upsampled(index: int, names: Iterable[str]) -> tuple[Batch, Clouds, Clouds]:
        """A pair, its references, and what the models of the runs make of it, by name."""
        batch = collate([pairs[(0, index)]]).to(device)
        by, vertical = training_ratio(batch, ratio, max_ratio), [usable.is_vertical(index)]
        made = {
            name: upsampled_pairs(batch, by, models[name], vertical, originals=not noise[name])
            for name in names
        }
        return batch, clouds_of_pairs(batch, by), made

    shares = np.full(len(places), np.nan)
    for i, index in enumerate(tracked(places.tolist(), len(places), "measuring", "pairs")):
        batch, references, made = upsampled(index, [first.name])
        (rows,) = measure_clouds(batch, references | {"model": made[first.name]})
        if (share := share_of_midpoints(rows)) is not None:
            shares[i] = share
    if not np.isfinite(shares).any():
        raise DataError(f"{sources[0].name}: the model can't be measured on any validation pair")
    scenes, pictures = [], {}
    for place, i in worst_to_best(shares.tolist()).items():
        index = int(places[i])
        unit = known_unit([sources[bisect_right(usable.bounds, index) - 1].name])
        title = f"{place}: {pairs.names[index]}"
        note = f"{shares[i]:.1%} of the Chamfer distance of the midpoint baseline"
        note += f", {first.name}" if names_run else ""
        batch, references, made = upsampled(index, models)
        packed = {"source": references["source"], BASELINE: references["midpoints"], **made}
        origin, vertical = usable.origin(index), usable.is_vertical(index)
        clouds = {name: points.cpu().numpy() + origin for name, (points, _) in packed.items()}
        target = batch.target.cpu().numpy() + origin
        scene = compare_with_reference(
            clouds, target, unit, "z" if vertical else "y", name=title, note=note, of="target"
        )
        scenes.append(scene)
        source, prediction = clouds["source"], clouds[first.name]
        pictures[f"{title}, {note}"] = evaluation_picture(
            source, prediction, target, unit=unit, vertical=vertical, baseline=clouds[BASELINE]
        )
    return ReportSamples(scenes, pictures, np.sort(shares[np.isfinite(shares)]), len(pairs))
