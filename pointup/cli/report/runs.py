"""Reads what a run directory holds: options, curves, evaluations, and the plan of its start."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.dataset_units import known_unit
from pointup.errors import FileError
from pointup.io.length_unit import METRE
from pointup.terminal import printable
from pointup.training.config import TrainConfig, as_dict, data_sources, flattened

NOT_COMPARED = frozenset({"output_dir"})
BASELINE = "midpoint baseline"
FIXED_CLOUDS = frozenset({"source", BASELINE, "target"})
"""Names of the clouds of a sample that no run has made."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its directory describes it: options of config.json, nested ones as "model.k", the
    lines of metrics.jsonl of steps and of evaluations, the text of its start; its name is unique
    among the runs of a report."""

    path: Path
    name: str
    options: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    plan: str

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """The evaluation of the saved model; None if no evaluation measured all clouds."""
        kept = [e for e in self.evaluations if e.get("is_kept")]
        return kept[-1] if kept else None

    @property
    def last_step(self) -> int:
        """The last step that is known of; 0 without one."""
        return max((line["step"] for line in (*self.steps, *self.evaluations)), default=0)

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """Metrics of the clouds that no network made, at the best evaluation; empty without one."""
        rows = self.best["validation"] if self.best else {}
        return {row: figures for row, figures in rows.items() if row != "model"}

    @cached_property
    def unit(self) -> str:
        """The unit of lengths of its datasets; empty if unknown. Procedural pairs are in metres."""
        sources = data_sources(self.options.get("data") or ())
        return known_unit(source.name for source in sources) if sources else METRE.name

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a training curve; values that are not finite are left out."""
        points = [(line["step"], line[key]) for line in self.steps if line.get(key) is not None]
        return _columns(points)

    def validation_curve(self, key: str, row: str = "model") -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric of an evaluation; "share" is that of the baseline."""
        points = []
        for line in self.evaluations:
            share = line.get("share_of_midpoints")
            value = share if key == "share" else line["validation"].get(row, {}).get(key)
            if value is not None:
                points.append((line["step"], value))
        return _columns(points)


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run directories, each once. Raises FileError for a path that is none."""
    paths = list({path.resolve(): path for path in paths}.values())
    names = [printable(path.resolve().name) for path in paths]
    # Beside the runs, samples have clouds of these names.
    if len(set(names)) < len(names) or FIXED_CLOUDS & set(names):
        names = [printable(f"run {path}") for path in paths]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: Path, name: str) -> RunRecord:
    metrics = path / "metrics.jsonl"
    if not metrics.is_file() or not (path / "config.json").is_file():
        raise FileError(
            f"{path}: no run of train.py; name a directory with config.json and metrics.jsonl"
        )
    try:
        options = flattened(json.loads((path / "config.json").read_text(encoding="utf-8")))
        # The last line of a run that is still writing may be incomplete.
        complete = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = [json.loads(line) for line in complete if line.endswith("\n")]
    except ValueError as error:
        raise FileError(f"{path}: damaged ({error}); copy the run again") from None
    plan = path / "plan.txt"
    return RunRecord(
        path=path,
        name=name,
        options=options,
        steps=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if "validation" in line],
        plan=plan.read_text(encoding="utf-8") if plan.is_file() else "",
    )


def differing_options(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Options in which the runs differ, with the value of each; for one run, those that are not
    the default, with run and default."""
    columns = [run.options for run in runs]
    if len(runs) == 1:
        columns = [*columns, flattened(as_dict(TrainConfig()))]
        names = [name for name in columns[0] if name in columns[1]]
    else:
        names = list(dict.fromkeys(name for options in columns for name in options))
    values = {name: [options.get(name) for options in columns] for name in names}
    return {
        name: row
        for name, row in values.items()
        if name not in NOT_COMPARED and any(value != row[0] for value in row)
    }


def differing_references(runs: Sequence[RunRecord]) -> set[str]:
    """Reference rows whose metrics are not the same in all runs with an evaluation: these were
    validated on different data, or at different ratios."""
    # Three digits, because devices round in different ways.
    figures = {
        (row, name, f"{value:.3g}")
        for run in runs
        for row, metrics in run.references.items()
        for name, value in metrics.items()
        if value is not None
    }
    numbers = Counter((row, name) for row, name, _ in figures)
    return {row for (row, _), number in numbers.items() if number > 1}


def _columns(points: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], table[:, 1]
