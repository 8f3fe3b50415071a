"""Model cards: what a model was trained on, how, what it reaches, and where it fails."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import pointup
from pointup.cli.report.runs import RunRecord, differing_options
from pointup.disk import read_json
from pointup.errors import PointupError
from pointup.evaluation.cloud_metrics import metrics_in
from pointup.evaluation.report import pipe_table
from pointup.model.stored_model import MODEL_CARD
from pointup.model.upsampler import Upsampler
from pointup.training.config import DataSource, data_sources, option
from pointup.training.tracking.tables import AS_WRITTEN, ROW_LABELS

TAGS = ["point-cloud", "upsampling"]
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
    "num_source", "validation", "strip", "seed", "files",
)  # fmt: skip


def picture_of_run(run: RunRecord, max_pairs: int) -> tuple[str, np.ndarray] | None:
    """Caption and picture (height, width, 3) uint8 of the median one of some validation pairs.

    None where none can be shown; the reason is printed.
    """
    from pointup.cli.report.page import samples_of_runs

    try:
        pictures = samples_of_runs([run], max_pairs, names_run=False).pictures
    except PointupError as error:
        print(f"no picture: {error}")
        return None
    caption = next((name for name in pictures if name.startswith("median")), next(iter(pictures)))
    return caption, pictures[caption]


def card_of_run(
    run: RunRecord, upsampler: Upsampler, repo: str, license: str, limits: str, caption: str
) -> str:
    """The card of a run as Markdown. `caption`: of validation.png; empty without a picture."""
    sections = {
        "Figures": _figures(run),
        "Data": _data(run),
        "Training": _training(run, upsampler),
        "Limits": _list([*_limits(run), limits]),
    }
    picture = f"![{caption}](validation.png)\n\n*Validation: {caption}.*" if caption else ""
    network = upsampler.own_class().get("network", "")
    facts = _facts_of_run(run, repo)
    has_heights, denoise = upsampler.config.has_heights, bool(run.options.get("noise_spacings"))
    return _card(license, repo, picture, sections, has_heights, network, denoise, **facts)


def card_of_model(
    directory: Path, upsampler: Upsampler, repo: str, license: str, limits: str
) -> str:
    """The card of a model directory: its own, where it was written by hand, with this licence, or
    one that says that nothing is known about data and figures."""
    path = directory / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    written = ModelCard(text).text.strip() if text else ""
    if written and written != MODEL_CARD.split("---", 2)[2].strip():
        added = f"\n\n## Limits, added\n\n{limits}" if limits else ""
        return _with_metadata(license, written + added)
    unknown = "The model was given without its run: its data and its figures are not stated."
    sections = {"Limits": _list([LIMITS[0], unknown, limits])}
    return _card(license, repo, "", sections, upsampler.config.has_heights)


def command_of_run(run: RunRecord) -> str:
    """The command that repeats a run: the options that are not the default. The dataset is given
    without its folder."""
    words = ["pointup", "train"]
    for name, (value, _) in differing_options([run]).items():
        flag = option(name)
        if name == "data":
            for source in data_sources(value):
                words += [flag, _name(source.name) + _weight(source)]
        elif isinstance(value, bool):
            prefix, _, last = flag.rpartition(".")
            off = f"{prefix}.no-{last}" if prefix else f"--no-{last[2:]}"
            words.append(flag if value else off)
        elif value is not None:
            value = _name(value) if name == "initial_model" else value
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _facts_of_run(run: RunRecord, repo: str) -> dict[str, Any]:
    """What the Hub shows beside a card: datasets and a base model that are on it, and figures."""
    names = [source.name for source in data_sources(run.options.get("data") or ())]
    on_hub = [name for name in names if _is_on_hub(name)]
    start = run.options.get("initial_model") or ""
    facts: dict[str, Any] = {"datasets": on_hub or None}
    facts["base_model"] = start if _is_on_hub(start) else None
    figures: dict[str, float] = run.best["validation"].get("model", {}) if run.best else {}
    shown = [name for name in SHOWN_METRICS if name in figures]
    if not shown:
        return facts
    data = " ".join(map(_name, names)) or "procedural"
    metrics = metrics_in(run.unit)
    results = [
        EvalResult(
            task_type="point-cloud-upsampling",
            dataset_type=on_hub[0] if len(names) == len(on_hub) == 1 else "validation-pairs",
            dataset_name=f"validation pairs of {data}",
            metric_type=name,
            metric_name=f"{metrics[name].title}, {metrics[name].unit}".rstrip(", "),
            metric_value=float(f"{figures[name]:.4g}"),
        )
        for name in shown
    ]
    return facts | {"model_name": repo.split("/")[1], "eval_results": results, "metrics": shown}


def _card(
    license: str,
    repo: str,
    picture: str,
    sections: Mapping[str, str],
    has_heights: bool,
    network: str = "",
    denoise: bool = False,
    **facts: Any,
) -> str:
    files = "survey.laz -o dense.laz" if has_heights else "cloud.ply -o dense.ply"
    needs = f" and the class `{network}`, which Python has to find (PYTHONPATH)" if network else ""
    argument = ", denoise=True" if denoise else ""
    use = f"""Upsamples point clouds by any ratio with pointup{needs}:

```bash
pointup upsample {files} --model {repo}{" --denoise" if denoise else ""}
```

```python
from pointup import upsample

dense = upsample(points, ratio=4, model="{repo}"{argument})  # points: (N, 3)
```"""
    parts = [f"# {repo.split('/')[1]}", use, *([picture] if picture else [])]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items()]
    tags = [*TAGS, "lidar"] if has_heights else TAGS
    return _with_metadata(license, "\n\n".join(parts), tags, **facts)


def _with_metadata(license: str, text: str, tags: Sequence[str] = TAGS, **facts: Any) -> str:
    data = ModelCardData(license=license, library_name="pointup", tags=list(tags), **facts)
    return f"---\n{data}\n---\n\n{text}\n"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines if line)


def _table(facts: Mapping[str, object]) -> str:
    """Two columns without a head; empty facts are left out."""
    rows = [[name, str(value)] for name, value in facts.items() if value not in (None, "", [])]
    return "\n".join(pipe_table([["", ""], *rows], "<<"))


def _figures(run: RunRecord) -> str:
    if run.best is None:
        return "The run ended before its first evaluation."
    rows: dict[str, dict[str, float]] = run.best["validation"]
    names = [name for name in SHOWN_METRICS if any(name in figures for figures in rows.values())]
    metrics = [metrics_in(run.unit)[name] for name in names]
    table = [["metric", *(ROW_LABELS.get(row, row) for row in rows)]]
    for name, metric in zip(names, metrics, strict=True):
        cells = [f"{row[name]:.4g}" if name in row else "" for row in rows.values()]
        table.append([f"{metric.title}, {metric.unit}".rstrip(", "), *cells])
    text = (
        f"Validation at step {run.best['step']:,}; lower is better. On average over the pairs, the "
        f"Chamfer distance is {run.best['share_of_midpoints']:.1%} of that of the midpoint "
        "baseline, which uses no network. The table has the means over the pairs."
    )
    if not run.best["step"]:
        start = _name(run.options["initial_model"])
        text = f"The model is the initial model {start}, unchanged: no step was better.\n\n{text}"
    sides = "<" + ">" * len(rows)
    conventions = _list([f"{metric.title}: {metric.convention}" for metric in metrics])
    return "\n\n".join([text, AS_WRITTEN, "\n".join(pipe_table(table, sides)), conventions])


def _data(run: RunRecord) -> str:
    sources = data_sources(run.options.get("data") or ())
    if not sources:
        return "Procedural shapes and scenes, which `pointup train` generates."
    return "\n\n".join(_dataset(source) for source in sources)


def _dataset(source: DataSource) -> str:
    text, path = f"Pairs of `{_name(source.name)}{_weight(source)}`.", Path(source.name)
    info = read_json(path / "pointup.json")
    if not info:
        return text
    files = [file for side in ("inputs", "source", "target") for file in info.get(side, ())]
    info["files"] = list(dict.fromkeys(Path(file).name for file in files))
    if isinstance(held_out := info.get("validation"), list):
        info["validation"] = [Path(file).name for file in held_out]
    cells = {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in ((name, info.get(name)) for name in DESCRIBED)
    }
    return f"{text}\n\n{_table(cells)}"


def _weight(source: DataSource) -> str:
    """The weight as `--data` has it, nothing for a weight of 1."""
    return "" if source.weight == 1 else f"={source.weight:g}"


def _training(run: RunRecord, upsampler: Upsampler) -> str:
    # Not every step is recorded, but those that are stand for the others.
    seconds = run.curve("step_seconds")[1]
    minutes = seconds.sum() / max(len(run.steps), 1) * run.last_step / 60
    plan = dict(line.split(None, 1) for line in run.plan.splitlines() if len(line.split()) > 1)
    facts = {
        "weights": f"{sum(parameter.numel() for parameter in upsampler.parameters()):,}",
        "steps": f"{run.last_step:,}",
        "time": f"about {minutes:,.1f} minutes of steps" if len(seconds) else "",
        "device": plan.get("device", "").strip(),
        "pointup": pointup.__version__,
    }
    return f"```bash\n{command_of_run(run)}\n```\n\n{_table(facts)}"


def _limits(run: RunRecord) -> list[str]:
    lines = list(LIMITS)
    share = run.best["share_of_midpoints"] if run.best else 0.0
    if share > 0.95:
        verdict = (
            "worse than" if share > 1 else "hardly better than" if share < 1 else "no better than"
        )
        lines.append(
            f"On its validation data the model is {verdict} the midpoint baseline "
            f"({share:.1%} of its Chamfer distance)."
        )
    if ratio := run.options.get("ratio"):
        lines.append(f"It was trained at a ratio of {ratio:g}.")
    return lines


def _is_on_hub(name: str) -> bool:
    return name.count("/") == 1 and name == _name(name) and not name.startswith((".", "/"))


def _name(path: str) -> str:
    """The last part of a local path; names of the Hub stay whole."""
    return Path(path).name if Path(path).exists() or Path(path).is_absolute() else path
