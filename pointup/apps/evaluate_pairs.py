"""`pointup evaluate pairs`: a pair dataset, with the figures that training validates on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.apps.evaluate_output import Model, Output, describe_model, open_model
from pointup.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """On a pair dataset: what training validates on, the same figures."""

    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Directory made by `pointup prepare`, or a Hub dataset."""
    model: Model = None
    """Model to evaluate. Without one, the baseline, the raw source and the floor are printed."""
    split: str = "validation"
    """Which part of the dataset."""
    ratio: float | None = None
    """Upsampling ratio; by default each pair's own. As train.py's --ratio."""
    max_ratio: float = 16.0
    """Largest ratio; pairs beyond it are upsampled by this much. As train.py's --max-ratio."""
    token_budget: int = 24576
    """Most points (source and target) held at a time; more where a single pair has more."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        import numpy as np
        from tqdm import tqdm

        from pointup.data.batch import collate
        from pointup.data.pairs import PairDataset, find_bad_samples, open_pairs
        from pointup.data.sampler import TokenBudgetBatchSampler
        from pointup.evaluation.measures import METRICS, mean_rows
        from pointup.evaluation.pairs import ROWS, measure_pairs
        from pointup.evaluation.report import Report, Table
        from pointup.modelconfig import ModelConfig
        from pointup.training.objective import training_ratio

        for name in ("ratio", "max_ratio"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.token_budget < 1:
            raise ConfigError(f"--token-budget {self.token_budget}: must be at least 1")
        self.output.check()
        upsampler = open_model(self.model)
        device = next(upsampler.parameters()).device if upsampler else "cpu"
        table = open_pairs(self.dataset, self.split)
        config = upsampler.config if upsampler else ModelConfig()
        bad = find_bad_samples(table, min_points=config.k, folder=self.dataset)
        keep = np.setdiff1d(np.arange(len(table)), [sample.index for sample in bad])
        if not len(keep):
            raise DataError(
                f"{self.dataset}: none of the {len(table)} {self.split} pairs can be used; "
                f"`pointup inspect {self.dataset}` lists why"
            )
        pairs = PairDataset(table, keep=keep)
        files = table["surface"][:] if "surface" in table.column_names else [""] * len(table)
        plan = TokenBudgetBatchSampler(
            pairs.sizes, max(self.token_budget, int(pairs.sizes.max())), shuffle=False
        )
        measured: dict[int, dict[str, dict[str, float]]] = {}
        with tqdm(total=len(pairs), unit="pair", leave=False, disable=None) as progress:
            for keys in plan:
                batch = collate([pairs[key] for key in keys]).to(device)
                surfaces = [self._surface(files[keep[i]]) for i in batch.index.tolist()]
                ratio = training_ratio(batch, self.ratio, self.max_ratio)
                rows = measure_pairs(batch, ratio, upsampler, surfaces)
                measured |= dict(zip(batch.index.tolist(), rows, strict=True))
                progress.update(len(keys))

        in_order = [measured[index] for index in range(len(pairs))]
        means = mean_rows(in_order)
        heading = [
            f"{self.split} pairs of {self.dataset}: {len(pairs):,}"
            + (f", {len(bad)} bad ones left out" if bad else ""),
            describe_model(self.model, upsampler),
        ]
        score = None
        if upsampler is not None:
            shares = [m["model"]["chamfer"] / m["midpoints"]["chamfer"] for m in in_order]
            score = float(np.mean(shares))
            heading.append(
                f"the model's Chamfer is {score:.1%} of the midpoints', mean over the pairs; "
                f"lower for {np.mean(np.less(shares, 1)):.0%} of them"
            )
        summary = {title: means[row] for row, title in ROWS.items() if row in means}
        report = Report(heading, [Table(f"mean of {len(pairs):,} pairs", METRICS, summary)])
        content = {
            "evaluation": "pairs",
            "model": self.model,
            "dataset": self.dataset,
            "split": self.split,
            "chamfer_share_of_midpoints": score,
            "means": means,
            "pairs": [
                {"name": str(name), "rows": rows}
                for name, rows in zip(pairs.names, in_order, strict=True)
            ],
            "bad": [{"name": sample.name, "reason": sample.reason} for sample in bad],
        }
        self.output.show(report, content, METRICS)
        return 0

    def _surface(self, file: str) -> Surface | None:
        from pointup.geometry.surfaces import Surface

        return Surface.load(Path(self.dataset, "surfaces", file)) if file else None
