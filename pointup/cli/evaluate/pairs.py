"""`pointup evaluate pairs`: evaluates a pair dataset with the metrics of validation and surveys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.cli.evaluate.output import (
    Output,
    Oversampling,
    describe_model,
    open_model,
)
from pointup.cli.input_files import Model, Picture, View
from pointup.errors import ConfigError, DataError
from pointup.option_help import optional

if TYPE_CHECKING:
    from pointup.cli.evaluate.pair_notes import Sizes
    from pointup.datasets.pair_dataset import BadSample
    from pointup.io.length_unit import LengthUnit
    from pointup.model.upsampler import Upsampler

Rows = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class EvaluatedPairs:
    """Evaluate on a pair dataset: the figures of validation in training, and those of surveys."""

    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Directory made by `pointup prepare`, or the name of a dataset on the Hub."""
    model: Model = None
    """Model to evaluate: included model, directory or Hub repository. Without one, baselines,
    source and resampled ground truth are measured."""
    as_written: bool = False
    """Evaluate the output of `pointup upsample`, with measured points kept, thinning and
    relaxation. By default the output of the network is evaluated, as in validation."""
    oversampling: Oversampling = None
    """Candidates of a second pass for each point that is kept, 1 to 8, as in `pointup upsample`.
    Needs --as-written. By default the model's own value."""
    split: str = "validation"
    """Split of the dataset: train or validation."""
    ratio: Annotated[float | None, optional("R")] = None
    """Upsampling ratio, 1 or more. By default that of each pair. Same as --ratio of train.py."""
    max_ratio: float = 16.0
    """Largest ratio: pairs with a larger one are upsampled by this one. Same as --max-ratio of
    train.py."""
    token_budget: int = 24576
    """Points (source and target) to process at a time. A larger pair is processed alone."""
    metres_per_unit: Annotated[float | None, optional("LENGTH")] = None
    """Length in metres of the unit of the coordinates, such as 0.3048 for feet. By default that of
    the files that the dataset was made from."""
    seed: int = 0
    """Seed of the random baselines."""
    picture: Picture = None
    """Write a picture of the worst, the median and the best pair, by the Chamfer distance of the
    model as a share of that of the midpoints."""
    view: View = None
    """Write an HTML file to look at the same pairs."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.cli.evaluate.pair_notes import MeasuredPairs, Sizes
        from pointup.datasets.batch import collate
        from pointup.datasets.dataset_units import agreed_dataset_unit
        from pointup.datasets.pair_dataset import BadSample, PairDataset, open_samples
        from pointup.datasets.sampler import TokenBudgetBatchSampler
        from pointup.datasets.samples import usable_samples
        from pointup.evaluation import pairs as rows_of
        from pointup.evaluation.cloud_metrics import clouds_of_pairs
        from pointup.geometry.packed import sizes_from_ptr
        from pointup.geometry.surfaces import Surface
        from pointup.io.length_unit import unit_of
        from pointup.model.config import ModelConfig
        from pointup.progress import tracked
        from pointup.training.objective import training_ratio

        self._check()
        upsampler = open_model(self.model, self.oversampling)
        device = next(upsampler.parameters()).device if upsampler else "cpu"
        config = upsampler.config if upsampler else ModelConfig()
        samples = open_samples(self.dataset, self.split)
        samples, bad = usable_samples(samples, config.k, self.split)
        unit = agreed_dataset_unit(self.dataset)
        if self.metres_per_unit is not None:
            unit = unit_of(self.metres_per_unit)
        pairs = PairDataset(samples)
        plan = TokenBudgetBatchSampler(
            pairs.sizes, max(self.token_budget, int(pairs.sizes.max())), shuffle=False
        )
        measured: dict[int, Rows] = {}
        sizes: dict[int, Sizes] = {}
        for keys in tracked(plan, len(pairs), "measuring", "pairs", size=len):
            batch = collate([pairs[key] for key in keys])
            bad += [BadSample(*fault) for fault in batch.faults]
            if not batch.num_graphs:
                continue
            batch = batch.to(device)
            indices = batch.index.tolist()
            files = [samples.surface(i) for i in indices]
            surfaces = [Surface.load(file) if file else None for file in files]
            vertical = [samples.is_vertical(i) for i in indices]
            ratio = training_ratio(batch, self.ratio, self.max_ratio)
            numbers = (sizes_from_ptr(ptr) for ptr in (batch.ptr, batch.target_ptr))
            each = zip(*(values.tolist() for values in (*numbers, ratio)), strict=True)
            sizes |= zip(indices, (Sizes(*pair) for pair in each), strict=True)
            network = None if self.as_written else upsampler
            clouds = clouds_of_pairs(batch, ratio, network)
            if upsampler is not None and self.as_written:
                clouds["model"] = rows_of.upsampled_pairs(batch, ratio, upsampler, vertical)
            baselines, noise = rows_of.baselines_of_pairs(batch, ratio, self.seed)
            found = rows_of.figures_of_pairs(batch, clouds | baselines, surfaces, vertical, unit)
            for rows, shares in zip(found, noise, strict=True):
                for row, share in shares.items():
                    rows[row]["share"] = share
            measured |= zip(indices, found, strict=True)
        kept = sorted(measured)
        in_order = [measured[index] for index in kept]
        names = [pairs.names[index] for index in kept]
        if not names:
            raise DataError(f"{self.dataset}: no {self.split} pair can be read: {bad[-1].reason}")
        self._report(in_order, [sizes[index] for index in kept], names, bad, unit, upsampler)
        shown = MeasuredPairs(
            pairs, kept, in_order, unit, self.ratio, self.max_ratio, self.as_written
        )
        shown.show(upsampler, self.picture, self.view)
        return 0

    def _report(
        self,
        in_order: list[Rows],
        sizes: list[Sizes],
        names: list[str],
        bad: list[BadSample],
        unit: LengthUnit,
        upsampler: Upsampler | None,
    ) -> None:
        import numpy as np

        from pointup.cli.evaluate.pair_notes import (
            notes_on_gap,
            notes_on_ratios,
            remarks_on_pairs,
        )
        from pointup.evaluation.cloud_metrics import ROWS, mean_rows
        from pointup.evaluation.lidar_metrics import Scale, beside_baselines, tables_of
        from pointup.evaluation.pairs import pair_metrics
        from pointup.evaluation.report import EvaluationReport

        metrics = pair_metrics(unit)
        means = mean_rows(in_order)
        heading = [
            f"{self.split} pairs of {self.dataset}: {len(names):,}"
            + (f", {len(bad)} bad ones left out" if bad else ""),
            f"unit: {unit.name}"
            if unit.metres is not None
            else "unit: unknown, taken for metres; set it with --metres-per-unit",
            describe_model(self.model, upsampler, self.as_written)
            + (", as `pointup upsample` writes it" if upsampler and self.as_written else ""),
            "no network: midpoints; and random midpoints, jitter, plane, with the points of the "
            f"source kept (seed {self.seed})",
            *beside_baselines(means, ["model"]),
            *notes_on_ratios(sizes),
            *notes_on_gap(in_order, sizes),
        ]
        share, score = None, None
        # The source of a pair may be all of its target.
        comparable = [m for m in in_order if m["midpoints"]["chamfer"] > 0]
        if upsampler is not None and comparable:
            share = means["model"]["chamfer"] / means["midpoints"]["chamfer"]
            shares = [m["model"]["chamfer"] / m["midpoints"]["chamfer"] for m in comparable]
            score = float(np.mean(shares))
            heading.append(
                f"Chamfer of the model lower than that of the midpoints for "
                f"{np.mean(np.less(shares, 1)):.0%} of the pairs; mean of the pairs' shares, by "
                f"which train.py selects the best model: {score:.1%}"
            )
        having = {row: sum(row in rows for rows in in_order) for row in ROWS if row in means}
        columns = {
            row.replace("_", " ") + (f" ({n:,} pairs)" if n < len(in_order) else ""): means[row]
            for row, n in having.items()
        }
        tables = tables_of(f"mean of {len(names):,} pairs", metrics, columns, Scale(unit))
        report = EvaluationReport(heading, tables, remarks_on_pairs(in_order, metrics))
        content = {
            "evaluation": "pairs",
            "model": self.model,
            "as_written": self.as_written,
            "dataset": self.dataset,
            "split": self.split,
            "unit": unit.name,
            "metres_per_unit": unit.metres,
            "seed": self.seed,
            "chamfer_share_of_midpoints": share,
            "mean_chamfer_share_of_midpoints": score,
            "means": means,
            "pairs": [
                {"name": name, "rows": rows} for name, rows in zip(names, in_order, strict=True)
            ],
            "bad": [{"name": sample.name, "reason": sample.reason} for sample in bad],
            "remarks": report.remarks,
        }
        self.output.show(report, content)

    def _check(self) -> None:
        for name in ("ratio", "max_ratio"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.token_budget < 1:
            raise ConfigError(f"--token-budget {self.token_budget}: must be at least 1")
        if self.metres_per_unit is not None and not 0 < self.metres_per_unit < float("inf"):
            raise ConfigError(f"--metres-per-unit {self.metres_per_unit}: must be greater than 0")
        if self.oversampling is not None and not self.as_written:
            raise ConfigError(
                "--oversampling needs --as-written; the network alone has no second pass"
            )
        self.output.check(self.picture, self.view)
