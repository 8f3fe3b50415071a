"""Run logging: metrics.jsonl, Accelerate's trackers, log files, pictures, progress bar."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from accelerate import Accelerator

from pointup.evaluation.cloud_metrics import metrics_in
from pointup.terminal import literal
from pointup.training.config import TrainConfig
from pointup.training.distributed.accelerator import peak_memory_bytes
from pointup.training.distributed.reduction import StepTotals
from pointup.training.evaluation import EvaluationResult
from pointup.training.progress import Progress
from pointup.training.run_directory.metrics_file import MetricsFile
from pointup.training.run_directory.rank_log import RankLog
from pointup.training.tracking.progress_bar import ProgressBar
from pointup.training.tracking.tables import (
    NETWORK_ALONE,
    WIDTH,
    dataset_card,
    evaluation_table,
    plan_table,
    share_line,
    training_curves,
    training_figures,
    validation_curves,
    validation_figures,
    validation_table,
)
from pointup.training.tracking.tensorboard import REFERENCES, TAGS, training_tag, validation_tag
from pointup.training.tracking.trackers import Trackers, beside

__all__ = ["Monitor", "evaluation_table", "plan_table"]

logger = logging.getLogger("pointup")


class Monitor:
    """Records a run; a context manager that every process must enter.

    The main process writes everything; the others write only their log file. `resume_step` is the
    step that the run continues from, 0 for a new run: records of later steps, by an interrupted
    attempt, are removed from metrics.jsonl and from TensorBoard's curves. With `evaluation_due` the
    evaluation of that step is removed too, because it is repeated. `labels` name the datasets of a
    run that trains on several.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainConfig,
        resume_step: int = 0,
        evaluation_due: bool = False,
        labels: Sequence[str] = (),
    ) -> None:
        self.labels = labels
        self.accelerator, self.config, self.resume_step = accelerator, config, resume_step
        self.evaluation_due = evaluation_due
        self.is_main = accelerator.is_main_process
        self.log = RankLog(config.output_dir, accelerator.process_index, accelerator.num_processes)
        self.metrics: MetricsFile | None = None
        self.bar: ProgressBar | None = None
        self.learning_rate = math.nan
        self.num_evaluations = 0
        self.trackers = Trackers(accelerator)

    def __enter__(self) -> Monitor:
        self.log.__enter__()
        if self.is_main:
            self.config.output_dir.mkdir(parents=True, exist_ok=True)
            path = self.config.output_dir / "metrics.jsonl"
            self.metrics = MetricsFile(path, self.resume_step, self.evaluation_due)
            self.bar = ProgressBar()
            self.trackers.start(self.config, self.resume_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.metrics is not None:
            self.metrics.close()
        self.trackers.finish()
        self.log.__exit__(kind, error, traceback)

    def train(
        self,
        step: int,
        totals: StepTotals,
        *,
        epoch: int,
        learning_rate: float,
        grad_norm: float,
        step_seconds: float,
        fill: float,
        progress: Progress | None = None,
    ) -> None:
        """Record a training step: a line of metrics.jsonl, and points of the curves.

        Counts, loss and speed are over all processes. `data_wait_seconds` is the longest wait of
        any process. `totals.data_seconds` is the time of each stage of making the main process's
        batches, in its data workers if it has any. `fill` is the used share of the token budget.
        `progress` counts the samples of the run so far that were left out of their steps, and those
        of each dataset, and the out-of-memory errors since the last line.
        """
        if self.metrics is None:
            return
        progress = progress or Progress()
        self.learning_rate = learning_rate
        stages = {f"data_{stage}_seconds": time for stage, time in totals.data_seconds.items()}
        values: dict[str, float] = {
            "epoch": epoch,
            "loss": totals.loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "num_clouds": totals.num_clouds,
            "num_tokens": totals.num_tokens,
            "tokens_per_second": totals.num_tokens / step_seconds,
            "step_seconds": step_seconds,
            "data_wait_seconds": max(totals.data_wait_seconds),
            **stages,
            "idle_fraction": totals.idle_fraction,
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            "out_of_memory": progress.unlogged_out_of_memory,
            "unreadable_clouds": progress.unreadable,
        }
        record: dict[str, Any] = {"step": step, **values, "limited_by": totals.limited_by}
        if self.labels:
            record["datasets"] = training_figures(self.labels, totals, progress.seen)
            self._track_datasets(step, training_curves(record["datasets"]))
        self.metrics.write(record)
        values["fill"] = fill
        values["peak_memory_gib"] = values.pop("peak_memory_bytes") / 2**30
        self.trackers.log({training_tag(name): value for name, value in values.items()}, step)

    def validation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation: a line of metrics.jsonl, curves, pictures, a table on the console.

        If no cloud was measured, only pictures are recorded.
        """
        if result.shares:
            self._validation(step, result)
        for name, picture in result.pictures.items():
            self.picture(step, name, picture)
        for name, clouds in result.clouds.items():
            self.trackers.log_clouds(step, name, clouds)

    def _validation(self, step: int, result: EvaluationResult) -> None:
        if self.metrics is None or self.bar is None:
            return
        rows, shares = result.rows, result.shares
        share, lower = float(np.mean(shares)), float(np.mean(np.less(shares, 1.0)))
        record = {"step": step, "share_of_midpoints": share, "validation": rows}
        record["is_complete"] = result.is_complete
        by_dataset = validation_figures(result.by_dataset)
        self.metrics.write(record | ({"datasets": by_dataset} if by_dataset else {}))
        self._track_datasets(step, validation_curves(by_dataset))
        curves = {validation_tag(metric): value for metric, value in rows.get("model", {}).items()}
        self.trackers.log({TAGS["share_of_midpoints"]: share, **curves}, step)
        references = {
            beside(validation_tag(metric), REFERENCES.get(row, row)): value
            for row, figures in rows.items()
            for metric, value in figures.items()
            if row != "model"
        }
        self.trackers.log_references(step, rows, references)
        title = f"step {step:,}"
        self.print(
            evaluation_table(rows, metrics_in(result.unit), title, self.num_evaluations == 0)
            + f"\n{share_line(share, lower)}"
            + (f"\n{validation_table(by_dataset)}" if by_dataset else "")
            + (f"\n{textwrap.fill(NETWORK_ALONE, WIDTH)}" if self.num_evaluations == 0 else "")
        )
        self.num_evaluations += 1
        self.bar.pause()

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that a full disk rejected; called before each save."""
        if self.metrics is not None:
            self.metrics.flush()

    def picture(self, step: int, tag: str, picture: np.ndarray) -> None:
        """Send a picture (height, width, 3) uint8 to the trackers that accept pictures."""
        self.trackers.log_picture(step, f"pictures/{literal(tag)}", picture)

    def progress(
        self,
        step: int,
        total_steps: int | None,
        totals: StepTotals,
        share_done: float,
    ) -> None:
        """Update the progress bar after a step; `share_done` is the completed share of the run."""
        if self.bar is not None:
            self.bar.move(
                step, total_steps, share_done, totals.loss, self.learning_rate, totals.num_tokens
            )

    def print(self, text: str) -> None:
        """Print on the console of the main process, above the bar, and in its log."""
        if self.is_main:
            logger.info(text)

    def plan(self, text: str, datasets: Sequence[str]) -> None:
        """Print the plan of a run, and keep it with the datasets' descriptions as text."""
        self.print(text)
        if self.is_main:
            path = self.config.output_dir / "plan.txt"
            try:
                path.write_text(f"{text}\n")  # For `pointup report`.
            except OSError as error:
                logger.warning("%s: can't be written (%s)", path, error.strerror)
            self.trackers.log_plan(text, "\n\n".join(map(dataset_card, datasets)))

    def _track_datasets(self, step: int, curves: Mapping[str, Mapping[str, float]]) -> None:
        for label, values in curves.items():
            self.trackers.log_dataset(step, label, values)
