"""The page of a report: text, tables, curves, pictures and the viewer, in one HTML file."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image
from torch_geometric.data import Batch

import pointup
from pointup.cli.report.runs import RunRecord, differing_options, differing_references
from pointup.datasets.batch import collate
from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import DataError
from pointup.evaluation.cloud_metrics import metrics_in
from pointup.evaluation.pairs import clouds_of_pairs, measure_pairs, worst_to_best
from pointup.io.length_unit import known_unit
from pointup.model.upsampler import Upsampler
from pointup.progress import tracked
from pointup.synthetic.default_dataset import default_dataset
from pointup.training.config import data_sources
from pointup.training.datasets import open_split
from pointup.training.objective import training_ratio
from pointup.training.tracking.tables import NETWORK_ALONE, ROW_LABELS
from pointup.upsampling.in_memory import default_device, load_model
from pointup.visualization import evaluation_picture
from pointup.visualization.page import FAINT, INK
from pointup.visualization.viewer import Scene, compare_with_reference
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


@dataclass(frozen=True)
class Samples:
    """Samples of a report.

    Attributes:
        scenes: for the viewer: source, midpoint baseline, the output of each run, target.
        pictures: of the same samples by the first run, by name.
        shares: of the first run's Chamfer distance, one for each measured pair, sorted.
        num_pairs: number of usable validation pairs, of which some were measured.
    """

    scenes: list[Scene]
    pictures: dict[str, np.ndarray]
    shares: np.ndarray
    num_pairs: int


@torch.no_grad()
def samples_of_runs(runs: Sequence[RunRecord], max_pairs: int, names_run: bool = True) -> Samples:
    """Measure validation pairs with the model of the first run, and upsample three with all.

    `names_run` adds the name of the first run, whose figures they are, to the names of pictures.
    A run must not have one of the names FIXED_CLOUDS of other clouds of a sample.
    Raises DataError if the dataset of the first run is gone, ModelError without a model.
    """
    first = runs[0]
    sources = data_sources(first.options.get("data") or [str(default_dataset())])
    device = default_device()
    models = {run.name: load_model(str(run.path / "model"), device) for run in runs}
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
    pairs = PairDataset(usable)
    ratio, max_ratio = first.options.get("ratio"), float(first.options.get("max_ratio") or 16.0)
    places = np.linspace(0, len(pairs) - 1, min(max_pairs, len(pairs))).round().astype(int)
    shares = np.full(len(places), np.nan)
    for i, index in enumerate(tracked(places, len(places), "measuring", "pairs")):
        batch = collate([pairs[(0, int(index))]]).to(device)
        rows = measure_pairs(batch, training_ratio(batch, ratio, max_ratio), models[first.name])[0]
        midpoints = rows.get("midpoints", {}).get("chamfer")
        if midpoints and "model" in rows:
            shares[i] = rows["model"]["chamfer"] / midpoints
    if not np.isfinite(shares).any():
        raise DataError(f"{sources[0].name}: the model can't be measured on any validation pair")
    scenes, pictures = [], {}
    for place, i in worst_to_best(shares.tolist()).items():
        index = int(places[i])
        unit = known_unit([sources[bisect_right(usable.bounds, index) - 1].name])
        batch = collate([pairs[(0, index)]]).to(device)
        title = f"{place}: {pairs.names[index]}"
        note = f"{shares[i]:.1%} of the Chamfer distance of the midpoint baseline"
        note += f", {first.name}" if names_run else ""
        vertical = usable.is_vertical(index)
        clouds = clouds_of_sample(batch, training_ratio(batch, ratio, max_ratio), models)
        target = clouds.pop("target")
        scene = compare_with_reference(
            clouds, target, unit, "z" if vertical else "y", name=title, note=note, of="target"
        )
        scenes.append(scene)
        pictures[f"{title}, {note}"] = evaluation_picture(
            clouds["source"],
            clouds[first.name],
            target,
            unit=unit,
            vertical=vertical,
            baseline=clouds["midpoint baseline"],
        )
    return Samples(scenes, pictures, np.sort(shares[np.isfinite(shares)]), len(pairs))


def clouds_of_sample(
    batch: Batch, ratio: torch.Tensor, models: dict[str, Upsampler]
) -> dict[str, np.ndarray]:
    """Clouds (N, 3) of a batch of one pair: source, baseline, output by run, target."""
    packed = clouds_of_pairs(batch, ratio)
    tensors = {"source": batch.pos, "midpoint baseline": packed["midpoints"][0]}
    for name, model in models.items():
        tensors[name] = clouds_of_pairs(batch, ratio, model)["model"][0]
    tensors["target"] = batch.target
    return {name: points.cpu().double().numpy() for name, points in tensors.items()}
