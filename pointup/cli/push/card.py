"""Model cards: what a model was trained on, how, what it reaches, and where it fails."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import ModelCard, ModelCardData

import pointup
from pointup.cli.report.page import samples_of_runs
from pointup.cli.report.runs import RunRecord, differing_options
from pointup.errors import PointupError
from pointup.evaluation.cloud_metrics import metrics_in
from pointup.model.hub import MODEL_CARD
from pointup.model.upsampler import Upsampler
from pointup.training.config import DataSource, data_sources, option
from pointup.training.tracking.tables import NETWORK_ALONE, ROW_LABELS

TAGS = ["point-cloud", "upsampling", "lidar"]
SHOWN_METRICS = ("chamfer", "hausdorff", "cd", "hd", "p2f", "spacing_cv")
LIMITS = (
    "New points are estimates, at most `reach` (config.json) local spacings from measured ones. "
    "They are no measurements, and gaps are not filled.",
    "The figures are those of validation data that were prepared like the training data. On other "
    "sensors, densities and landscapes or shapes, measure before use: `pointup evaluate`.",
)
# Of pointup.json; other entries are of no use to readers of the card.
DESCRIBED = (
    "made_by", "tile", "ratio", "pattern", "source_density", "target_density", "kinds",
    "num_source", "validation", "strip", "seed",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class CardPicture:
    """Picture (height, width, 3) uint8 of a validation pair, and its caption."""

    pixels: np.ndarray
    caption: str


def picture_of_run(run: RunRecord, max_pairs: int) -> CardPicture | None:
    """The median one of some validation pairs; None, saying why, where none can be shown."""
    try:
        pictures = samples_of_runs([run], max_pairs, names_run=False).pictures
    except PointupError as error:
        print(f"no picture: {error}")
        return None
    caption = next((name for name in pictures if name.startswith("median")), next(iter(pictures)))
    return CardPicture(pictures[caption], caption)


def card_of_run(
    run: RunRecord, upsampler: Upsampler, repo: str, license: str, limits: str, caption: str
) -> str:
    """The card of a run as Markdown. `caption`: of validation.png; empty without a picture."""
    picture = f"![{caption}](validation.png)\n\n*Validation: {caption}.*" if caption else ""
    parts = [
        f"# {repo.split('/')[1]}",
        _use(repo),
        picture,
        "## Figures",
        _figures(run),
        "## Data",
        _data(run),
        "## Training",
        _training(run, upsampler),
        "## Limits",
        "\n".join(f"- {line}" for line in (*_limits(run), *([limits] if limits else []))),
    ]
    return _card(license, "\n\n".join(part for part in parts if part))


def card_of_model(directory: Path, repo: str, license: str, limits: str) -> str:
    """The card of a model directory: its own, where it was written by hand, with this licence.

    Otherwise one that says that nothing is known about data and figures.
    """
    path = directory / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    written = ModelCard(text).text.strip() if text else ""
    template = MODEL_CARD.split("---", 2)[2].strip()
    if written and written != template:
        added = f"\n\n## Limits, added\n\n{limits}" if limits else ""
        return _card(license, written + added)
    unknown = "The model was given without its run: its data and its figures are not stated."
    lines = [*LIMITS[:1], unknown, *([limits] if limits else [])]
    parts = [f"# {repo.split('/')[1]}", _use(repo), "## Limits"]
    return _card(license, "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)]))


def command_of_run(run: RunRecord) -> str:
    """The command that repeats a run: the options that are not the default. The dataset is given
    without its folder."""
    words = ["pointup", "train"]
    for name, (value, _) in differing_options([run]).items():
        if name == "initial_model" and value is not None:
            value = _name(value)
        if name == "data":
            value = [_name(source.name) + _weight(source) for source in data_sources(value)]
        if value is not None:
            words += _flag(option(name), value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        prefix, _, last = name.rpartition(".")
        return [name] if value else [f"{prefix}.no-{last}" if prefix else f"--no-{last[2:]}"]
    if name == "--data":
        return [word for each in value for word in (name, each)]
    return [name, *map(str, value if isinstance(value, list) else [value])]


def _card(license: str, text: str) -> str:
    data = ModelCardData(license=license, library_name="pointup", tags=TAGS)
    return f"---\n{data}\n---\n\n{text}\n"


def _use(repo: str) -> str:
    return f"""Upsamples point clouds by any ratio with pointup:

```bash
pointup upsample survey.laz -o dense.laz --model {repo}
```

```python
from pointup import upsample

dense = upsample(points, ratio=4, model="{repo}")  # points: (N, 3)
```"""


def _figures(run: RunRecord) -> str:
    if run.best is None:
        return "The run ended before its first evaluation."
    rows: dict[str, dict[str, float]] = run.best["validation"]
    names = [name for name in SHOWN_METRICS if any(name in figures for figures in rows.values())]
    known = metrics_in(run.unit)
    titles = [ROW_LABELS.get(row, row) for row in rows]
    lines = [
        f"Validation at step {run.best['step']:,}; lower is better. On average over the pairs, the "
        f"Chamfer distance is {run.best['share_of_midpoints']:.1%} of that of the midpoint "
        "baseline, which uses no network. The table has the means over the pairs.",
        "",
        NETWORK_ALONE,
        "",
        "| metric | " + " | ".join(titles) + " |",
        "|---" + "|---:" * len(rows) + "|",
    ]
    for name in names:
        metric = known[name]
        unit = f", {metric.unit}" if metric.unit else ""
        cells = [_number(figures.get(name)) for figures in rows.values()]
        lines.append(f"| {metric.title}{unit} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {known[n].title}: {known[n].convention}" for n in names)]
    return "\n".join(lines)


def _data(run: RunRecord) -> str:
    sources = data_sources(run.options.get("data") or ())
    if not sources:
        return "Procedural shapes and scenes, which `pointup train` generates."
    return "\n\n".join(_dataset(source) for source in sources)


def _dataset(source: DataSource) -> str:
    path = Path(source.name, "pointup.json")
    lines = [f"Pairs of `{_name(source.name)}{_weight(source)}`."]
    if path.is_file():
        info = json.loads(path.read_text(encoding="utf-8"))
        sides = [name for side in ("inputs", "source", "target") for name in info.get(side, ())]
        files = list(dict.fromkeys(Path(str(name)).name for name in sides))
        known = {name: info[name] for name in DESCRIBED if info.get(name) not in (None, "", [])}
        known |= {"files": files} if files else {}
        rows = (f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in known.items())
        lines += ["", "| | |", "|---|---|", *rows]
    return "\n".join(lines)


def _weight(source: DataSource) -> str:
    """The weight as `--data` has it, nothing for a weight of 1."""
    return "" if source.weight == 1 else f"={source.weight:g}"


def _training(run: RunRecord, upsampler: Upsampler) -> str:
    seconds = float(run.curve("step_seconds")[1].sum())
    recorded, last = len(run.steps), run.last_step
    # Not every step is recorded, but those that are stand for the others.
    minutes = seconds / max(recorded, 1) * last / 60
    plan = dict(line.split(None, 1) for line in run.plan.splitlines() if len(line.split()) > 1)
    num_weights = sum(parameter.numel() for parameter in upsampler.parameters())
    facts = {
        "weights": f"{num_weights:,}",
        "steps": f"{last:,}",
        "time": f"about {minutes:,.1f} minutes of steps" if seconds else "",
        "device": plan.get("device", "").strip(),
        "pointup": pointup.__version__,
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    return f"```bash\n{command_of_run(run)}\n```\n\n| | |\n|---|---|\n{rows}"


def _limits(run: RunRecord) -> list[str]:
    lines = list(LIMITS)
    best = run.best
    if best is not None and best["share_of_midpoints"] > 0.95:
        share = best["share_of_midpoints"]
        verdict = (
            "worse than" if share > 1 else "no better than" if share == 1 else "hardly better than"
        )
        lines.append(
            f"On its validation data the network alone is {verdict} the midpoint baseline "
            f"({share:.1%} of its Chamfer distance)."
        )
    if ratio := run.options.get("ratio"):
        lines.append(f"It was trained at a ratio of {ratio:g}.")
    return lines


def _name(path: str) -> str:
    """The last part of a local path; names of the Hub stay whole."""
    return Path(path).name if Path(path).exists() or Path(path).is_absolute() else path


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
