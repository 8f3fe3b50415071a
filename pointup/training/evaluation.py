"""Validation: metrics of the model and of its references, once for each validation sample.

The references are the midpoint baseline, the source, and the resampled ground truth.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.datasets.batch import make_loader
from pointup.datasets.dataset_units import known_unit
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import FileError, NonFiniteError
from pointup.evaluation.cloud_metrics import Figures, mean_rows, measure, measure_pairs
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.distributed.accelerator import release_cached_memory
from pointup.training.faults.out_of_memory import clouds, is_out_of_memory
from pointup.training.objective import training_ratio

logger = logging.getLogger("pointup")

Record = dict[str, Any]
"""What is gathered of a cloud: its `index` with `rows` of metrics and the `clouds` that are drawn,
or with the `fault` by which it has none."""


@dataclass(frozen=True)
class EvaluationResult:
    rows: dict[str, dict[str, float]]
    """Metrics by row (model, midpoints, source, resampled), each averaged over the clouds that have
    it."""
    shares: list[float]
    """For each cloud, the model's Chamfer distance divided by that of the midpoint baseline."""
    is_complete: bool
    """Whether the model's output was measured on every cloud on which the references were."""
    pictures: dict[str, np.ndarray] = field(default_factory=dict)
    """Pictures of samples by name, on the main process only."""
    by_dataset: dict[str, tuple[dict[str, dict[str, float]], list[float]]] = field(
        default_factory=dict
    )
    """`rows` and `shares` of each dataset by its label, if there are several."""
    unit: str = ""
    """The unit of lengths in `rows`, on the main process only; empty if unknown."""

    @property
    def score(self) -> float:
        """Mean of `shares`: lower is better, and it is comparable between clouds of any scale.

        Infinite if the model failed on a cloud, so that such a model is never the best.
        """
        return float(np.mean(self.shares)) if self.shares and self.is_complete else math.inf


class Evaluation:
    """Evaluates a model on a validation set, with the same result for any number of processes.

    Batches are planned as for one process and assigned to the processes in turn. The records of
    all clouds are gathered once. So each cloud is computed in the same batch, and counted once, for
    any number of processes. The metrics of the references are computed in the first evaluation
    only. A cloud that can't be measured and a picture that can't be drawn are excluded with a
    warning, because a failed metric must not end a run.
    """

    def __init__(
        self,
        data: TrainingData,
        accelerator: Accelerator,
        config: TrainConfig,
        token_budget: int,
    ) -> None:
        self.data, self.accelerator, self.config = data, accelerator, config
        dataset = data.validation
        if config.token_budget == "auto" and not config.crop:
            # The budget is what training fits into memory; evaluation stores no gradients.
            token_budget = max(token_budget, int(dataset.full_sizes.max()))
        dataset.max_tokens = token_budget if config.crop else None
        plan = list(
            TokenBudgetBatchSampler(
                dataset.full_sizes,
                token_budget,
                max_clouds=config.max_clouds,
                names=dataset.names,
                shuffle=False,
                crop=config.crop,
            )
        )
        own_batches = plan[accelerator.process_index :: accelerator.num_processes]
        self.batches = make_loader(dataset, own_batches, device=accelerator.device)
        self.drawn = {round(i) for i in np.linspace(0, len(dataset) - 1, config.num_pictures)}
        self.references: dict[int, dict[str, Figures]] = {}
        self.unreadable: set[Path] = set()
        self.aborted: Record = {"index": -1}
        """The record of a process that aborts its evaluation."""

    @torch.no_grad()
    def records_of(self, batch: Batch, model: torch.nn.Module) -> list[Record]:
        """One record per cloud: its metrics, or the reason why it has none."""
        unreadable = [
            {"index": index, "fault": reason, "is_model_fault": False}
            for index, _, reason in batch.get("faults", [])
        ]
        return unreadable + self._records(batch, model) if batch.num_graphs else unreadable

    def _records(self, batch: Batch, model: torch.nn.Module) -> list[Record]:
        try:
            return self._measured(batch, model)
        except Exception as error:
            logger.debug("an evaluation failed", exc_info=True)
            fault = (str(error).strip().splitlines() or [type(error).__name__])[0]
            index = int(batch.index[0])
            # Memory is no fault of the weights: without this cloud, the others decide.
            is_model_fault = index in self.references and not (
                isinstance(error, RuntimeError) and is_out_of_memory(error)
            )
            if isinstance(error, NonFiniteError):
                origin = "the model" if is_model_fault else "the sample"
                fault = f"{origin} has points that aren't finite"
        release_cached_memory()
        if batch.num_graphs == 1:
            return [{"index": index, "fault": fault, "is_model_fault": is_model_fault}]
        # One by one: this isolates a bad cloud, and takes less memory.
        singles = [clouds(batch, i, i + 1) for i in range(batch.num_graphs)]
        return [record for single in singles for record in self._records(single, model)]

    def _measured(self, batch: Batch, model: torch.nn.Module) -> list[Record]:
        ratio = training_ratio(batch, self.config.ratio, self.config.max_ratio)
        indices, samples = batch.index.tolist(), self.data.validation.samples
        surfaces = [self._surface(samples.surface(index)) for index in indices]
        if any(index not in self.references for index in indices):
            references = measure_pairs(batch, ratio, surfaces=surfaces)
            self.references.update(zip(indices, references, strict=True))
        with self.accelerator.autocast():
            output = model(batch.pos, batch.ptr, ratio)
        prediction = output.pos.float(), output.ptr
        measured = measure(*prediction, batch.target, batch.target_ptr, surfaces)
        records: list[Record] = [
            {"index": index, "rows": {"model": figures, **self.references[index]}}
            for index, figures in zip(indices, measured, strict=True)
        ]
        for cloud, record in enumerate(records):
            if record["index"] in self.drawn:
                packed = {
                    "source": (batch.pos, batch.ptr),
                    "baseline": midpoint_upsample(batch.pos, batch.ptr, ratio),
                    "prediction": prediction,
                    "target": (batch.target, batch.target_ptr),
                }
                record["clouds"] = {
                    name: pos[ptr[cloud] : ptr[cloud + 1]].cpu().numpy()
                    for name, (pos, ptr) in packed.items()
                }
        return records

    def _surface(self, file: Path | None) -> Surface | None:
        """The surface in `file`; None without one, and, with one warning per file, if it can't be
        read."""
        if file is None:
            return None
        try:
            return Surface.load(file)
        except FileError as error:
            if file not in self.unreadable:
                logger.warning("%s; its sample has no P2F", error)
                self.unreadable.add(file)
            return None

    def result_of(self, gathered: list[Record]) -> EvaluationResult | None:
        """The result of the records of all processes; None if a process has aborted."""
        gathered.sort(key=lambda record: record["index"])
        seen, names = [record["index"] for record in gathered], self.data.validation.names
        if self.aborted in gathered:
            return None
        assert seen == list(range(len(names))), "each cloud is evaluated once"
        faults = [record for record in gathered if "fault" in record]
        if faults:
            faulty = [names[record["index"]] for record in faults]
            logger.warning(
                "%d of %d validation samples can't be measured; the first one, %s: %s",
                len(faults), len(seen), faulty[0], faults[0]["fault"],
            )  # fmt: skip
            logger.debug("can't be measured: %s", ", ".join(faulty))
        rows, shares = summary_of(gathered)
        result = EvaluationResult(
            rows, shares, is_complete=not any(record["is_model_fault"] for record in faults)
        )
        bounds = self.data.bounds["validation"]
        for label, (start, end) in zip(self.data.labels, pairwise(bounds), strict=False):
            if start < end:
                result.by_dataset[label] = summary_of(gathered[start:end])
        if not self.accelerator.is_main_process:
            return result
        unit = known_unit(source.name for source in self.data.sources)
        return replace(result, unit=unit, pictures=self._pictures(gathered, unit))

    def _pictures(self, records: list[Record], unit: str) -> dict[str, np.ndarray]:
        """A picture of each sample that can be drawn, by its name; `unit` is that of surveys."""
        pictures, samples = {}, self.data.validation.samples
        for record in records:
            if "clouds" not in record:
                continue
            name = str(self.data.validation.names[record["index"]])
            vertical = samples.is_vertical(record["index"])
            try:
                # Imported here, because only the main process needs matplotlib.
                from pointup.visualization import evaluation_picture

                pictures[name] = evaluation_picture(
                    **record["clouds"], title=name, unit=unit if vertical else "", vertical=vertical
                )
            except Exception as error:
                logger.warning("no picture of %s: %s", name, error)
                logger.debug("drawing failed", exc_info=True)
        return pictures


def summary_of(records: list[Record]) -> tuple[dict[str, Figures], list[float]]:
    """The mean metrics of records by row, and the share of the midpoint baseline of each."""
    measured = [record["rows"] for record in records if "rows" in record]
    shares = [share for share in map(share_of_midpoints, measured) if share is not None]
    return mean_rows(measured), shares


def share_of_midpoints(rows: dict[str, Figures]) -> float | None:
    """The model's Chamfer distance divided by that of the midpoint baseline.

    None if either is missing, or if that of the baseline is 0.
    """
    model, midpoints = (rows.get(row, {}).get("chamfer") for row in ("model", "midpoints"))
    return None if model is None or not midpoints else model / midpoints
