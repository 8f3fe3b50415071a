"""Validation: model, no-network baseline, raw source and floor, cloud by cloud, exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.data.batch import make_loader, move
from pointup.data.sampler import TokenBudgetBatchSampler
from pointup.evaluation.measures import Figures, mean_rows, measure
from pointup.evaluation.pairs import measure_pairs
from pointup.geometry.surfaces import Surface
from pointup.pictures import evaluation_picture
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.objective import training_ratio

GIVEN_UP = -1
"""Index of a record that says that a process has stopped evaluating."""
Record = dict[str, Any]


@dataclass(frozen=True)
class EvaluationResult:
    rows: dict[str, dict[str, float]]
    """For model, midpoints, source and floor: mean of each figure over the clouds that have it."""
    shares: list[float]
    """For each cloud the model's Chamfer distance as a share of the midpoints'."""
    pictures: dict[str, np.ndarray]
    """Drawn samples by name, on the main process only."""

    @property
    def score(self) -> float:
        """Mean of `shares`: lower is better, and comparable over clouds of any scale."""
        return float(np.mean(self.shares))


class Evaluation:
    """Measures a model on a validation set, the same for any number of processes.

    Batches are planned as for one process and dealt in turn, and the records of single clouds are
    gathered once, so that each cloud is computed in the same batch and counted once whatever the
    number of processes. What doesn't depend on the model is computed the first time only.
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
        mine = plan[accelerator.process_index :: accelerator.num_processes]
        self.batches = make_loader(dataset, mine, device=accelerator.device)
        self.drawn = {round(i) for i in np.linspace(0, len(dataset) - 1, config.num_pictures)}
        self.references: dict[int, dict[str, Figures]] = {}

    @torch.no_grad()
    def run(
        self, model: torch.nn.Module, goes_on: Callable[[str], bool]
    ) -> EvaluationResult | None:
        """Evaluate; every process must call this, and all get the same result.

        `goes_on` is told before each batch what is done, and answers whether to: where it says no
        on any process, the evaluation is given up on all, and there is no result.
        """
        weights = self.accelerator.unwrap_model(model)
        was_training = weights.training
        weights.eval()
        records: list[Record] = []
        for batch in self.batches:
            if not goes_on("evaluation"):
                records.append({"index": GIVEN_UP})
                break
            records += self.records_of(move(batch, self.accelerator.device), weights)
        weights.train(was_training)

        goes_on("gathering the evaluation")
        gathered = self.accelerator.gather_for_metrics(records, use_gather_object=True)
        gathered.sort(key=lambda record: record["index"])
        seen = [record["index"] for record in gathered]
        if GIVEN_UP in seen:
            return None
        assert seen == list(range(len(self.data.validation))), "each cloud is evaluated once"
        measured = [record["rows"] for record in gathered]
        return EvaluationResult(
            rows=mean_rows(measured),
            shares=[one["model"]["chamfer"] / one["midpoints"]["chamfer"] for one in measured],
            pictures=self.draw(gathered) if self.accelerator.is_main_process else {},
        )

    def records_of(self, batch: Batch, weights: torch.nn.Module) -> list[Record]:
        ratio = training_ratio(batch, self.config.ratio, self.config.max_ratio)
        with self.accelerator.autocast():
            output = weights(batch.pos, batch.ptr, ratio)
        indices = batch.index.tolist()
        if any(index not in self.references for index in indices):
            references = measure_pairs(batch, ratio, surfaces=self.surfaces_of(batch))
            self.references.update(zip(indices, references, strict=True))
        measured = measure(
            output.pos.float(),
            output.ptr,
            batch.target,
            batch.target_ptr,
            self.surfaces_of(batch),
        )
        records = []
        for cloud, index in enumerate(indices):
            rows = {"model": measured[cloud], **self.references[index]}
            record: Record = {"index": index, "rows": rows}
            if index in self.drawn:
                record["clouds"] = [
                    pos[ptr[cloud] : ptr[cloud + 1]].cpu().numpy()
                    for pos, ptr in (
                        (batch.pos, batch.ptr),
                        (output.pos.float(), output.ptr),
                        (batch.target, batch.target_ptr),
                    )
                ]
            records.append(record)
        return records

    def surfaces_of(self, batch: Batch) -> list[Surface | None]:
        files = [self.data.surfaces[index] for index in batch.index.tolist()]
        return [Surface.load(file) if file else None for file in files]

    def draw(self, records: list[Record]) -> dict[str, np.ndarray]:
        pictures = {}
        for record in records:
            if "clouds" not in record:
                continue
            source, prediction, target = record["clouds"]
            name = str(self.data.validation.names[record["index"]])
            vertical = self.data.vertical[record["index"]]
            pictures[name] = evaluation_picture(
                source,
                prediction,
                target,
                title=name,
                unit="m" if vertical else "",
                vertical=vertical,
            )
        return pictures
