"""Validation: metrics of the model, as users get its output, and of its references.

The references are the midpoint baseline, the source, and the resampled ground truth.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import make_loader
from pointup.datasets.dataset_units import known_unit, readable_unit
from pointup.errors import ConfigError, FileError, NonFiniteError
from pointup.evaluation.cloud_metrics import (
    METRICS,
    Clouds,
    Figures,
    clouds_of_pairs,
    mean_rows,
    share_of_midpoints,
)
from pointup.geometry.surfaces import Surface
from pointup.model.upsampler import Upsampler
from pointup.terminal import first_line
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.distributed.accelerator import release_cached_memory
from pointup.training.faults.out_of_memory import is_out_of_memory
from pointup.training.model_choice import (
    SURVEY_FIGURES,
    MeasuredModel,
    chamfer_of_parts,
    parts_per_side,
)
from pointup.training.objective import training_ratio

logger = logging.getLogger("pointup")

Record = dict[str, Any]
"""What is gathered of a cloud: its `index` with `rows` of metrics, those `of_surveys`, the `parts`
of `MeasuredModel` and the `picture` of some, or with the `fault` by which it has none."""


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
    """Pictures of samples by name."""
    by_dataset: dict[str, tuple[dict[str, dict[str, float]], list[float]]] = field(
        default_factory=dict
    )
    """`rows` and `shares` of each dataset by its label, if there are several."""
    unit: str = ""
    """The unit of lengths in `rows`; empty if unknown."""
    of_surveys: dict[str, Figures] = field(default_factory=dict)
    """Like `rows`, each of `SURVEY_FIGURES`, for the model, the midpoints and the source."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """`MeasuredModel.parts`."""

    @property
    def score(self) -> float:
        """Mean over the clouds of the figure that the run chooses by, in units of the midpoint
        baseline's: lower is better, and it is comparable between clouds of any scale.

        Infinite if the model failed on a cloud, so that such a model is never the best.
        """
        if not self.parts or not self.is_complete:
            return math.inf
        return float(np.mean([np.mean(parts) for parts in self.parts.values()]))

    def measured(self, step: int) -> MeasuredModel:
        """What a checkpoint keeps of this evaluation of the model of `step`."""
        figures = self.rows.get("model", {}) | self.of_surveys.get("model", {})
        return {"step": step, "score": self.score, "parts": self.parts, "figures": figures}


class Evaluation:
    """Evaluates a model as users get it: the output of `pointup upsample` for every sample.

    The processes take the clouds in turn, and the records of all clouds are gathered once. So the
    result is the same for any number of processes. The metrics of the references are computed in
    the first evaluation only. A cloud that can't be measured and a picture that can't be drawn are
    excluded with a warning, because a failed metric must not end a run.

    Attributes:
        indices: of the validation samples that are measured; by default all.
    """

    def __init__(
        self,
        data: TrainingData,
        accelerator: Accelerator,
        config: TrainConfig,
        indices: Sequence[int] | None = None,
    ) -> None:
        self.data, self.accelerator, self.config = data, accelerator, config
        dataset = data.validation
        self.indices = sorted(range(len(dataset)) if indices is None else indices)
        self._check_figure(config.choose_by)
        own = self.indices[accelerator.process_index :: accelerator.num_processes]
        self.batches = make_loader(dataset, [[(0, i)] for i in own], device=accelerator.device)
        places = np.linspace(0, len(self.indices) - 1, config.num_pictures)
        self.drawn = {self.indices[round(place)] for place in places}
        self.per_side = parts_per_side(len(self.indices))
        self.units = [readable_unit(source.name) for source in data.sources]
        self.unit = known_unit(source.name for source in data.sources)
        self.references: dict[int, Record] = {}
        self.unreadable: set[Path] = set()
        self.aborted: Record = {"index": -1}
        """The record of a process that aborts its evaluation."""

    def _check_figure(self, chosen_by: str) -> None:
        """Raise ConfigError if no validation pair has the figure that the run chooses by."""
        samples, missing = self.data.validation.samples, ""
        if chosen_by == "p2f" and not any(map(samples.surface, self.indices)):
            missing = "a surface"
        if chosen_by in SURVEY_FIGURES and not any(map(samples.is_vertical, self.indices)):
            missing = "heights"
        if missing and self.indices:
            raise ConfigError(
                f"--choose-by {chosen_by}: no validation pair has {missing}; choose another"
            )

    @torch.no_grad()
    def records_of(self, batch: Batch, model: Upsampler) -> list[Record]:
        """The record of a batch of one cloud: its metrics, or the reason why it has none."""
        if not batch.num_graphs:
            ((index, _, fault),) = batch.faults
            return [{"index": index, "fault": fault, "is_model_fault": False}]
        index = int(batch.index[0])
        try:
            return [{"index": index, **self._measured(index, batch, model)}]
        except Exception as error:
            logger.debug("an evaluation failed", exc_info=True)
            fault = first_line(error)
            # Memory is no fault of the weights: without this cloud, the others decide.
            is_model_fault = index in self.references and not (
                isinstance(error, RuntimeError) and is_out_of_memory(error)
            )
            if isinstance(error, NonFiniteError):
                origin = "the model" if is_model_fault else "the sample"
                fault = f"{origin} has points that aren't finite"
        release_cached_memory()
        return [{"index": index, "fault": fault, "is_model_fault": is_model_fault}]

    def _measured(self, index: int, batch: Batch, model: Upsampler) -> Record:
        # Imported here: the start of a run does not wait for upsampling and formats of surveys.
        from pointup.evaluation.pairs import upsampled_pairs

        config, vertical = self.config, self.data.validation.samples.is_vertical(index)
        ratio = training_ratio(batch, config.ratio, config.max_ratio)
        clouds = clouds_of_pairs(batch, ratio)
        (core,) = batch.core
        if index not in self.references:
            self.references[index] = self._figures(index, batch, clouds)
        # A model of noisy points is used to replace them.
        output = upsampled_pairs(
            batch, ratio, model, [vertical], originals=not config.noise_spacings
        )
        found = self._figures(index, batch, {"model": output, "source": clouds["source"]})
        record: Record = {
            kind: {"model": rows["model"], **self.references[index][kind]} if rows else {}
            for kind, rows in found.items()
        }
        everything = {
            row: record["rows"][row] | record["of_surveys"].get(row, {})
            for row in ("model", "midpoints")
        }
        share = share_of_midpoints(everything, config.choose_by)
        points = {row: _points(pos) for row, (pos, _) in {**clouds, "model": output}.items()}
        target = _points(batch.target)
        if share is not None:
            record["parts"] = [share]
            if self.per_side > 1 and config.choose_by == "chamfer":
                parts = chamfer_of_parts(points["model"], target, self.per_side, core)
                # Parts have unequally many points; their mean is to be that of the whole pair.
                record["parts"] = [share * each / (np.mean(parts) or 1.0) for each in parts]
        if index in self.drawn:
            record["picture"] = self._picture(index, points, target)
        return record

    def _figures(self, index: int, batch: Batch, clouds: Clouds) -> Record:
        """The `rows` of metrics of clouds of a sample, and in surveys those `of_surveys`."""
        from pointup.evaluation.pairs import figures_of_pairs

        samples = self.data.validation.samples
        unit = self.units[bisect_right(self.data.bounds["validation"], index) - 1]
        surfaces = [self._surface(samples.surface(index))]
        (found,) = figures_of_pairs(batch, clouds, surfaces, [samples.is_vertical(index)], unit)
        return {
            kind: {row: {n: of[n] for n in names if n in of} for row, of in found.items()}
            for kind, names in (("rows", METRICS), ("of_surveys", SURVEY_FIGURES))
        }

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
        assert seen == self.indices, "each cloud is evaluated once"
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
            rows,
            shares,
            is_complete=not any(record["is_model_fault"] for record in faults),
            of_surveys=mean_rows([r["of_surveys"] for r in gathered if "of_surveys" in r]),
            parts={str(r["index"]): r["parts"] for r in gathered if "parts" in r},
            unit=self.unit,
            pictures={
                str(names[r["index"]]): r["picture"]
                for r in gathered
                if r.get("picture") is not None
            },
        )
        bounds = [bisect_left(seen, bound) for bound in self.data.bounds["validation"]]
        for label, (start, end) in zip(self.data.labels, pairwise(bounds), strict=False):
            if start < end:
                result.by_dataset[label] = summary_of(gathered[start:end])
        return result

    def _picture(
        self, index: int, points: dict[str, np.ndarray], target: np.ndarray
    ) -> np.ndarray | None:
        """A picture of a sample; None if it can't be drawn.

        Drawn here, because a picture is smaller than the clouds: all processes receive all records.
        """
        samples, name = self.data.validation.samples, self.data.validation.names[index]
        vertical, origin = samples.is_vertical(index), samples.origin(index)
        try:
            # Imported here: the start of a run does not wait for matplotlib.
            from pointup.visualization.columns import evaluation_picture

            return evaluation_picture(
                source=points["source"] + origin,
                baseline=points["midpoints"] + origin,
                prediction=points["model"] + origin,
                target=target + origin,
                title=str(name),
                unit=self.unit if vertical else "",
                vertical=vertical,
            )
        except Exception as error:
            logger.warning("no picture of %s: %s", name, error)
            logger.debug("drawing failed", exc_info=True)
            return None


def _points(pos: Tensor) -> np.ndarray:
    return pos.cpu().double().numpy()


def summary_of(records: list[Record]) -> tuple[dict[str, Figures], list[float]]:
    """The mean metrics of records by row, and the share of the midpoint baseline of each."""
    measured = [record["rows"] for record in records if "rows" in record]
    shares = [share for share in map(share_of_midpoints, measured) if share is not None]
    return mean_rows(measured), shares
