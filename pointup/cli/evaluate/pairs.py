"""`pointup evaluate pairs`: evaluates a pair dataset with the metrics of validation and surveys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pointup.cli.evaluate import EvaluatedPairs
from pointup.cli.evaluate.output import (
    check_outputs,
    describe_model,
    open_model,
    show_report,
    write_shown,
)
from pointup.datasets.batch import collate
from pointup.datasets.dataset_units import agreed_dataset_unit
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.datasets.samples import BadSample, usable_samples
from pointup.errors import ConfigError, DataError
from pointup.evaluation.cloud_metrics import ROWS, Figures, Metric, mean_rows, share_of_midpoints
from pointup.evaluation.lidar_metrics import (
    Scale,
    beside_baselines,
    gap_closed,
    tables_of,
    worse_than_source,
)
from pointup.evaluation.pairs import (
    ShownPair,
    baselines_of_pairs,
    figures_of_pairs,
    made_clouds,
    pair_metrics,
    survey_metrics,
    unpacked,
    worst_to_best,
)
from pointup.evaluation.report import EvaluationReport
from pointup.evaluation.uncertainty import (
    Reliability,
    describe_reliability,
    measured_uncertainty,
    reliability,
)
from pointup.geometry.packed import sizes_from_ptr
from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.io.length_unit import LengthUnit, unit_of
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.progress import tracked
from pointup.training.objective import training_ratio

Rows = dict[str, Figures]
ON_SURFACE = 1e-3
"""A source lies on the true surface if its mean distance to it is at most this share of its Chamfer
distance."""


@dataclass(frozen=True)
class MeasuredPair:
    """A pair of the dataset, its figures by row, and the ratio by which it was upsampled."""

    index: int
    name: str
    num_source: int
    num_target: int
    ratio: float
    rows: Rows

    def has_own_ratio(self) -> bool:
        """Whether the upsampled clouds have as many points as the target."""
        return round(self.ratio * self.num_source) == self.num_target


def evaluate(options: EvaluatedPairs) -> int:
    """Measure the pairs, and write the report. Returns the exit status."""
    check(options)
    upsampler = open_model(options.model, options.oversampling)
    device = next(upsampler.parameters()).device if upsampler else "cpu"
    config = upsampler.config if upsampler else ModelConfig()
    samples = open_samples(options.dataset, options.split)
    samples, bad = usable_samples(samples, config.k, options.split)
    unit = agreed_dataset_unit(options.dataset)
    if options.metres_per_unit is not None:
        unit = unit_of(options.metres_per_unit)
    pairs = PairDataset(samples)
    token_budget = max(options.token_budget, int(pairs.sizes.max()))
    plan = TokenBudgetBatchSampler(pairs.sizes, token_budget, shuffle=False)
    measured: list[MeasuredPair] = []
    trusted: list[tuple[np.ndarray, np.ndarray]] = []
    have_surfaces = True
    for keys in tracked(plan, len(pairs), "measuring", "pairs", size=len):
        batch = collate([pairs[key] for key in keys])
        bad += [BadSample(*fault) for fault in batch.faults]
        if not batch.num_graphs:
            continue
        batch = batch.to(device)
        indices = batch.index.tolist()
        files = [samples.surface(i) for i in indices]
        surfaces = [Surface.load(file) if file else None for file in files]
        have_surfaces &= all(files)
        vertical = [samples.is_vertical(i) for i in indices]
        ratio = training_ratio(batch, options.ratio, options.max_ratio)
        made: list[PointCloud] = []
        clouds = made_clouds(batch, ratio, upsampler, vertical, options.as_written, made)
        if made:
            targets = unpacked(batch.target, batch.target_ptr)
            trusted += map(measured_uncertainty, made, targets, surfaces)
        baselines, noise = baselines_of_pairs(batch, ratio, options.seed)
        found = figures_of_pairs(batch, clouds | baselines, surfaces, vertical, unit)
        for rows, shares in zip(found, noise, strict=True):
            for row, share in shares.items():
                rows[row]["share"] = share
        numbers = [v.tolist() for v in map(sizes_from_ptr, (batch.ptr, batch.target_ptr))]
        columns = (indices, [pairs.names[i] for i in indices], *numbers, ratio.tolist(), found)
        measured += map(MeasuredPair, *columns)
    measured.sort(key=lambda pair: pair.index)
    if not measured:
        raise DataError(f"{options.dataset}: no {options.split} pair can be read: {bad[-1].reason}")
    reliable = reliability(trusted)
    report(options, measured, bad, unit, upsampler, reliable, have_surfaces)
    if options.picture is not None or options.view is not None:
        show(options, pairs, measured, unit, upsampler, reliable)
    return 0


def check(options: EvaluatedPairs) -> None:
    for name in ("ratio", "max_ratio"):
        value = getattr(options, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.token_budget < 1:
        raise ConfigError(f"--token-budget {options.token_budget}: must be at least 1")
    if options.metres_per_unit is not None and not 0 < options.metres_per_unit < float("inf"):
        raise ConfigError(f"--metres-per-unit {options.metres_per_unit}: must be greater than 0")
    if options.oversampling is not None and not options.as_written:
        raise ConfigError("--oversampling needs --as-written; the network alone has no second pass")
    check_outputs(options.output, options.picture, options.view)


def report(
    options: EvaluatedPairs,
    measured: Sequence[MeasuredPair],
    bad: Sequence[BadSample],
    unit: LengthUnit,
    upsampler: Upsampler | None,
    found: Reliability,
    have_surfaces: bool,
) -> None:
    metrics = pair_metrics(unit)
    in_order = [pair.rows for pair in measured]
    means = mean_rows(in_order)
    heading = [
        f"{options.split} pairs of {options.dataset}: {len(measured):,}"
        + (f", {len(bad)} bad ones left out" if bad else ""),
        f"unit: {unit.name}"
        if unit.metres is not None
        else "unit: unknown, taken for metres; set it with --metres-per-unit"
        if survey_metrics(unit).keys() & means["midpoints"].keys()
        else "unit: that of the coordinates",
        describe_model(options.model, upsampler, options.as_written)
        + (", as `pointup upsample` writes it" if upsampler and options.as_written else ""),
        "no network: midpoints; and random midpoints, jitter, plane, with the points of the "
        f"source kept (seed {options.seed})",
        *beside_baselines(means, ["model"]),
        *notes_on_ratios(measured),
        *notes_on_gap(measured),
        *describe_reliability(found, of_surface=have_surfaces),
    ]
    score = None
    # The source of a pair may be all of its target.
    if shares := [share for share in map(share_of_midpoints, in_order) if share is not None]:
        score = float(np.mean(shares))
        use = ", by which train.py selects the best model" if options.as_written else ""
        heading.append(
            f"Chamfer of the model lower than that of the midpoints for "
            f"{np.mean(np.less(shares, 1)):.0%} of the pairs; mean of the pairs' shares{use}: "
            f"{score:.1%}"
        )
    having = {row: sum(row in rows for rows in in_order) for row in ROWS if row in means}
    columns = {
        row.replace("_", " ") + (f" ({n:,} pairs)" if n < len(in_order) else ""): means[row]
        for row, n in having.items()
    }
    tables = tables_of(f"mean of {len(measured):,} pairs", metrics, columns, Scale(unit))
    remarks = remarks_on_pairs(in_order, metrics)
    content = {
        "evaluation": "pairs",
        "model": options.model,
        "as_written": options.as_written,
        "oversampling": upsampler.config.oversampling if upsampler and options.as_written else None,
        "max_ratio": options.max_ratio,
        "dataset": options.dataset,
        "split": options.split,
        "unit": unit.name,
        "metres_per_unit": unit.metres,
        "seed": options.seed,
        "chamfer_share_of_midpoints": share_of_midpoints(means),
        "mean_chamfer_share_of_midpoints": score,
        "means": means,
        "uncertainty": found,
        "pairs": [{"name": p.name, "ratio": p.ratio, "rows": p.rows} for p in measured],
        "bad": [{"name": sample.name, "reason": sample.reason} for sample in bad],
        "remarks": remarks,
    }
    show_report(options.output, EvaluationReport(heading, tables, remarks), content)


def show(
    options: EvaluatedPairs,
    pairs: PairDataset,
    measured: Sequence[MeasuredPair],
    unit: LengthUnit,
    upsampler: Upsampler | None,
    found: Reliability,
) -> None:
    """Write a picture and a viewer of the worst, the median and the best pair, where asked for.

    The order is that of the Chamfer distance of the model as a share of that of the midpoints;
    without a model, that of the midpoints. Pairs without this share are left out, because their
    midpoints equal their target; a note is printed if no pair has one.
    """
    row = "midpoints" if upsampler is None else "model"
    scores = values = np.array([pair.rows[row]["chamfer"] for pair in measured])
    if upsampler is not None:
        scores = np.array([share_of_midpoints(pair.rows) for pair in measured], float)
    if not np.isfinite(scores).any():
        print("no picture and no viewer: the midpoints equal the target in every pair")
        return
    name = "" if unit.metres is None else unit.name
    shown = []
    for place, number in worst_to_best(scores.tolist()).items():
        pair, index = measured[number], measured[number].index
        batch = collate([pairs[(0, index)]])
        batch = batch.to(next(upsampler.parameters()).device) if upsampler else batch
        vertical = pairs.samples.is_vertical(index)
        ratio = training_ratio(batch, options.ratio, options.max_ratio)
        made = made_clouds(batch, ratio, upsampler, [vertical], options.as_written)
        share = f", {scores[number]:.1%} of the midpoint baseline's" if upsampler else ""
        shown.append(
            ShownPair(
                f"{place}: {pair.name}",
                {row: unpacked(*cloud)[0] for row, cloud in made.items() if row != "resampled"},
                unpacked(batch.target, batch.target_ptr)[0],
                vertical,
                name,
                note=f"Chamfer distance {values[number]:.4g} {unit.name}{share}",
                notes={
                    row: f"Chamfer {figures['chamfer']:.3g} {name}".strip()
                    for row, figures in pair.rows.items()
                },
                origin=pairs.samples.origin(index),
            )
        )
    title = ", ".join(each.name for each in shown)
    write_shown(shown, title, options.picture, options.view, found)


def notes_on_ratios(measured: Sequence[MeasuredPair]) -> list[str]:
    """How many pairs were upsampled to another number of points than their target's."""
    others = [pair for pair in measured if not pair.has_own_ratio()]
    if not others:
        return []
    used = _span([pair.ratio for pair in others])
    own = _span([pair.num_target / max(pair.num_source, 1) for pair in others])
    return [
        f"{len(others):,} of {len(measured):,} pairs were upsampled by {used} instead of their own "
        f"{own} (--ratio, --max-ratio); target and resampled ground truth keep their points"
    ]


def _span(ratios: Sequence[float]) -> str:
    low, high = (f"{end:.3g}x" for end in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def notes_on_gap(measured: Sequence[MeasuredPair]) -> list[str]:
    """How much of the gap to a second sampling is closed, over the pairs that have one.

    Pairs that were upsampled to another number of points than their target's are left out: Chamfer
    distances of clouds of several sizes have no gap in common.
    """
    having = [pair for pair in measured if "resampled" in pair.rows]
    chosen = [pair.rows for pair in having if pair.has_own_ratio()]
    lines = gap_closed(mean_rows(chosen), ["model"])
    if len(chosen) == len(measured):
        return lines
    of_size = " and their own ratio" if len(chosen) < len(having) else ""
    return [f"{line}, in the {len(chosen):,} pairs that have one{of_size}" for line in lines]


def remarks_on_pairs(
    in_order: Sequence[Mapping[str, Figures]], metrics: Mapping[str, Metric]
) -> list[str]:
    """`worse_than_source` for the means of the pairs, with P2F of pairs with noise only.

    A source that was sampled from the surface has a P2F of rounding errors. Anything that a model
    adds is much worse than that.
    """
    limits = [1e3 * ON_SURFACE * rows["source"]["chamfer"] for rows in in_order]
    off_surface = [
        # P2F is in thousandths.
        rows["source"].get("p2f", np.inf) > limit
        for rows, limit in zip(in_order, limits, strict=True)
    ]
    if all(off_surface):
        return worse_than_source(mean_rows(in_order), metrics, ["model"])
    compared = [
        rows
        if is_off
        else {row: {k: v for k, v in f.items() if k != "p2f"} for row, f in rows.items()}
        for rows, is_off in zip(in_order, off_surface, strict=True)
    ]
    number = sum("p2f" in rows["source"] for rows in compared)
    title = f"P2F in the {number:,} pairs whose source is not on the surface:"
    metrics = {**metrics, "p2f": replace(metrics["p2f"], title=title)}
    return worse_than_source(mean_rows(compared), metrics, ["model"])
