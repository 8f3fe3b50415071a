"""Run logging: metrics.jsonl, Accelerate's trackers, log files, pictures, progress bar."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from accelerate import Accelerator

from pointup.errors import ConfigError
from pointup.terminal import literal
from pointup.training.config import TrainConfig, as_dict, flattened
from pointup.training.distributed.accelerator import peak_memory_bytes
from pointup.training.distributed.reduction import StepTotals
from pointup.training.evaluation import EvaluationResult
from pointup.training.run_directory.metrics_file import MetricsFile
from pointup.training.run_directory.rank_log import RankLog
from pointup.training.tracking.progress_bar import ProgressBar
from pointup.training.tracking.tables import dataset_card, evaluation_table, plan_table
from pointup.training.tracking.tensorboard import (
    REFERENCES,
    TAGS,
    TensorBoardRun,
    training_tag,
    validation_tag,
)
from pointup.training.tracking.wandb_run import WandbRun

__all__ = ["Monitor", "evaluation_table", "plan_table"]

logger = logging.getLogger("pointup")

PROJECT = "pointup"
"""Name of the project in trackers."""


class Monitor:
    """Records a run; a context manager that every process must enter.

    The main process writes everything; the others write only their log file. `resume_step` is the
    step that the run continues from, 0 for a new run: records of later steps, by an interrupted
    attempt, are removed from metrics.jsonl and from TensorBoard's curves. With `evaluation_due` the
    evaluation of that step is removed too, because it is repeated.

    Raises ConfigError, on every process, for a tracker whose package is not installed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainConfig,
        resume_step: int = 0,
        evaluation_due: bool = False,
    ) -> None:
        self.accelerator, self.config, self.resume_step = accelerator, config, resume_step
        self.evaluation_due = evaluation_due
        self.is_main = accelerator.is_main_process
        self.log = RankLog(config.output_dir, accelerator.process_index, accelerator.num_processes)
        self.metrics: MetricsFile | None = None
        self.bar: ProgressBar | None = None
        self.tensorboard: TensorBoardRun | None = None
        self.wandb: WandbRun | None = None
        self.learning_rate = math.nan
        self.num_evaluations = 0
        self.trackers_failed = False
        # Accelerate silently drops trackers whose package is not installed.
        found = {getattr(tracker, "value", tracker) for tracker in accelerator.log_with}
        missing = [name for name in config.log_with if name not in found and name != "all"]
        if missing:
            raise ConfigError(
                f"--log-with {missing[0]}: the package is not installed; install it or leave it out"
            )

    def __enter__(self) -> Monitor:
        self.log.__enter__()
        if self.is_main:
            self.config.output_dir.mkdir(parents=True, exist_ok=True)
            path = self.config.output_dir / "metrics.jsonl"
            self.metrics = MetricsFile(path, self.resume_step, self.evaluation_due)
            self.bar = ProgressBar()
            self._unless_it_fails(self._start_trackers)
            if self.trackers_failed:
                self.accelerator.trackers = []
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
        for tracker in self.accelerator.trackers:
            self._unless_it_fails(tracker.finish)
        if self.tensorboard is not None:
            self._unless_it_fails(self.tensorboard.finish)
        # A second run in this process starts its own trackers.
        self.accelerator.trackers = []
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
        unreadable: int = 0,
    ) -> None:
        """Record a training step: a line of metrics.jsonl, and points of the curves.

        Counts, loss and speed are over all processes. `data_wait_seconds` is the longest wait of
        any process. `totals.data_seconds` is the time of each stage of making the main process's
        batches, in its data workers if it has any. `fill` is the used share of the token budget.
        `unreadable` counts the samples of the run so far that were left out of their steps.
        """
        if self.metrics is None:
            return
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
            "out_of_memory": totals.out_of_memory,
            "unreadable_clouds": unreadable,
        }
        self.metrics.write({"step": step, **values, "limited_by": totals.limited_by})
        values["fill"] = fill
        values["peak_memory_gib"] = values.pop("peak_memory_bytes") / 2**30
        self._track({training_tag(name): value for name, value in values.items()}, step)

    def validation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation: a line of metrics.jsonl, curves, pictures, a table on the console.

        If no cloud was measured, only pictures are recorded.
        """
        if result.shares:
            self._validation(step, result.rows, result.shares)
        for name, picture in result.pictures.items():
            self.picture(step, name, picture)
        writers = [run.write_clouds for run in (self.tensorboard, self.wandb) if run is not None]
        for write_clouds in writers:
            for name, clouds in result.clouds.items():
                self._unless_it_fails(write_clouds, step, name, clouds)

    def _validation(
        self, step: int, rows: Mapping[str, Mapping[str, float]], shares: Sequence[float]
    ) -> None:
        if self.metrics is None or self.bar is None:
            return
        share, lower = float(np.mean(shares)), float(np.mean(np.less(shares, 1.0)))
        self.metrics.write({"step": step, "share_of_midpoints": share, "validation": rows})
        curves = {validation_tag(metric): value for metric, value in rows.get("model", {}).items()}
        self._track({TAGS["share_of_midpoints"]: share, **curves}, step)
        if self.tensorboard is not None:
            self._unless_it_fails(self.tensorboard.write_references, step, rows)
        references = {
            f"{validation_tag(metric)}, {REFERENCES.get(row, row)}": value
            for row, figures in rows.items()
            for metric, value in figures.items()
            if row != "model"
        }
        for tracker in self.accelerator.trackers:
            if tracker.name != "tensorboard":
                self._unless_it_fails(tracker.log, references, step=step)
        title = f"step {step:,}"
        self.print(
            evaluation_table(rows, title=title, conventions=self.num_evaluations == 0)
            + f"\nThe model's Chamfer is {share:.1%} of the midpoint baseline's, mean over clouds; "
            f"lower for {lower:.0%} of them."
        )
        self.num_evaluations += 1
        self.bar.pause()

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that a full disk rejected; called before each save."""
        if self.metrics is not None:
            self.metrics.flush()

    def picture(self, step: int, tag: str, picture: np.ndarray) -> None:
        """Send a picture (height, width, 3) uint8 to the trackers that accept pictures."""
        for tracker in self.accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                images = {f"pictures/{literal(tag)}": picture[None]}
                self._unless_it_fails(tracker.log_images, images, step=step, **layout)

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

    def plan(self, text: str, dataset: str) -> None:
        """Print the plan of a run, and keep it with the dataset's description as text."""
        self.print(text)
        if self.is_main:
            # For `pointup report`.
            self._unless_it_fails((self.config.output_dir / "plan.txt").write_text, f"{text}\n")
        if self.tensorboard is not None:
            self._unless_it_fails(self.tensorboard.write_text, "plan", f"```\n{text}\n```")
            self._unless_it_fails(self.tensorboard.write_text, "dataset", dataset_card(dataset))
        if self.wandb is not None:
            self._unless_it_fails(self.wandb.write_plan, text, dataset_card(dataset))

    def _track(self, values: Mapping[str, float], step: int) -> None:
        self._unless_it_fails(self.accelerator.log, values, step=step)

    def _unless_it_fails(self, track: Callable[..., Any], *values: Any, **options: Any) -> None:
        """Call a tracker; its failure is logged and doesn't end the run.

        After an OSError the trackers are no longer used.
        """
        if self.trackers_failed:
            return
        try:
            track(*values, **options)
        except OSError as error:
            self.trackers_failed = True
            logger.warning("trackers can't write (%s): no more curves", error.strerror or error)
        except Exception as error:
            # Trackers raise errors of any type; a picture may fail while curves still work.
            what = ", ".join(str(name) for value in values for name in value)
            logger.warning("a tracker failed%s: %s", f" at {what}" if what else "", error)
            logger.debug("a tracker failed", exc_info=True)

    def _start_trackers(self) -> None:
        # `--quick` uses a subdirectory of the Accelerator's output directory.
        self.accelerator.project_configuration.logging_dir = str(self.config.output_dir)
        name = self.config.output_dir.resolve().name
        # Without a checkpoint all steps are purged, else those after the checkpoint.
        purge_step = self.resume_step + 1 if self.resume_step else 0
        names = self.accelerator.log_with
        values = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flattened(as_dict(self.config)).items()
        }
        # TensorBoard names a run by its directory, the others by project and run.
        others = [each for each in names if getattr(each, "value", each) != "tensorboard"]
        self.accelerator.log_with = others
        try:
            self.accelerator.init_trackers(
                PROJECT, init_kwargs={"wandb": {"name": name, "dir": str(self.config.output_dir)}}
            )
        finally:
            self.accelerator.log_with = names
        for tracker in self.accelerator.trackers:
            tracker.store_init_configuration(values)
            if tracker.name == "wandb":
                best = [TAGS["share_of_midpoints"], TAGS["chamfer"]]
                self.wandb = WandbRun(tracker.tracker, best)
        if len(others) < len(names):
            self.tensorboard = TensorBoardRun(self.config.output_dir, purge_step)
            self.accelerator.trackers.append(self.tensorboard.tracker)
            self.tensorboard.start(values)
