"""Run logging: metrics.jsonl, Accelerate's trackers, pictures, tables and the progress bar."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm

from pointup.disk import os_errors, written_whole
from pointup.evaluation.cloud_metrics import metrics_in
from pointup.evaluation.report import finite
from pointup.terminal import literal
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.distributed.accelerator import peak_memory_bytes
from pointup.training.evaluation import EvaluationResult
from pointup.training.objective import LossConfig
from pointup.training.progress import Progress, RunSchedule
from pointup.training.step_totals import StepMeter, StepTotals
from pointup.training.tracking.tables import (
    AS_WRITTEN,
    datasets_table,
    evaluation_table,
    plan_table,
    share_line,
)
from pointup.training.tracking.trackers import (
    REFERENCES,
    TAGS,
    Trackers,
    training_tag,
    validation_tag,
)

logger = logging.getLogger("pointup")

MAX_NAMED = 20
"""Excluded samples that are printed; `pointup inspect` lists all."""
PRECISIONS = {"no": "fp32"}
"""The precision by Accelerate's name of mixed precision, where that does not say it."""


class Monitor:
    """Records a run; a context manager that every process must enter.

    The main process writes everything. Records of steps after that of `progress`, by an interrupted
    attempt, are removed from metrics.jsonl and from TensorBoard's curves. So is the evaluation of
    that step if it is due, because it is repeated.
    """

    def __init__(
        self, accelerator: Accelerator, config: TrainConfig, data: TrainingData, progress: Progress
    ) -> None:
        self.accelerator, self.config, self.data = accelerator, config, data
        self.progress = progress
        self.trackers = Trackers(accelerator)
        self.entered = ExitStack()
        self.metrics: MetricsFile | None = None
        self.bar: TrainingBar | None = None
        self.num_evaluations = 0

    def __enter__(self) -> Self:
        if self.accelerator.is_main_process:
            path, progress = self.config.output_dir / "metrics.jsonl", self.progress
            self.metrics = MetricsFile(path, progress.step, progress.evaluation_due)
            self.entered.enter_context(closing(self.metrics))
            self.bar = self.entered.enter_context(closing(TrainingBar()))
            self.trackers.start(self.config, progress.step)
            self.entered.callback(self.trackers.finish)
        return self

    def __exit__(self, *error: object) -> None:
        self.entered.close()

    def step(
        self,
        schedule: RunSchedule,
        step: StepMeter,
        totals: StepTotals,
        learning_rate: float,
        grad_norm: float,
    ) -> None:
        """Move the bar after a step; every `log_every` steps, and before an evaluation, which may
        end the run, record it: a line of metrics.jsonl, and points of the curves.

        Counts, loss and speed are over all processes. `data_wait_seconds` is the longest wait of
        any process. `data_reading_seconds` and the like are the times of the stages of making the
        main process's batches, in its data workers if it has any.
        """
        progress, sampler, seconds = self.progress, schedule.sampler, step.seconds
        if self.bar is not None:
            self.bar.move(schedule, progress, totals, learning_rate)
        if progress.step % self.config.log_every and not progress.evaluation_due:
            return
        num_events, progress.unlogged_out_of_memory = progress.unlogged_out_of_memory, 0
        if self.metrics is None:
            return
        stages = {f"data_{stage}_seconds": time for stage, time in totals.data_seconds.items()}
        values: dict[str, float] = {
            "epoch": sampler.epoch,
            "loss": totals.loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "num_clouds": totals.num_clouds,
            "num_tokens": totals.num_tokens,
            "tokens_per_second": totals.num_tokens / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": max(totals.data_wait_seconds),
            **stages,
            "idle_fraction": totals.idle_fraction,
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            "out_of_memory": num_events,
            "unreadable_clouds": progress.unreadable,
        }
        record: dict[str, Any] = {"step": progress.step, **values, "limited_by": totals.limited_by}
        if self.data.labels:
            record["datasets"] = {
                # NaN is the loss of a dataset without a cloud in the step.
                label: {"loss": loss, "num_clouds": clouds, "seen_clouds": seen}
                for label, loss, clouds, seen in zip(
                    self.data.labels, totals.loss_by_dataset, totals.clouds_by_dataset,
                    progress.seen, strict=True,
                )
            }  # fmt: skip
        self.metrics.write(record)
        for label, figures in record.get("datasets", {}).items():
            curves = {training_tag(n): each for n, each in figures.items() if math.isfinite(each)}
            self.trackers.log_beside(progress.step, "datasets", label, curves)
        values["fill"] = totals.num_tokens / (sampler.token_budget * sampler.slots)
        values["peak_memory_gib"] = values.pop("peak_memory_bytes") / 2**30
        self.trackers.log(
            {training_tag(name): value for name, value in values.items()}, progress.step
        )

    def validation(self, result: EvaluationResult, is_kept: bool) -> None:
        """Record an evaluation: a line of metrics.jsonl, curves, pictures, a table on the console.

        `is_kept`: the model is now that in model/. If no cloud was measured, only pictures are
        recorded.
        """
        if self.metrics is None or self.bar is None:
            return
        self.bar.pause()
        step, rows, shares = self.progress.step, result.rows, result.shares
        for name, picture in result.pictures.items():
            self.trackers.log_picture(step, f"pictures/{literal(name)}", picture)
        if not shares:
            return
        share, lower = float(np.mean(shares)), float(np.mean(np.less(shares, 1.0)))
        by_dataset: dict[str, dict[str, Any]] = {
            label: {
                "num_clouds": len(shares_there),
                "share_of_midpoints": float(np.mean(shares_there)) if shares_there else None,
                "validation": rows_there,
            }
            for label, (rows_there, shares_there) in result.by_dataset.items()
        }
        record = {"step": step, "share_of_midpoints": share, "validation": rows}
        record |= {"is_complete": result.is_complete, "is_kept": is_kept}
        if result.of_surveys:
            record["of_surveys"] = result.of_surveys
        self.metrics.write(record | ({"datasets": by_dataset} if by_dataset else {}))
        for label, there in by_dataset.items():
            curves = curves_of(there["validation"].get("model", {}), there["share_of_midpoints"])
            self.trackers.log_beside(step, "datasets", label, curves)
        figures = rows.get("model", {}) | result.of_surveys.get("model", {})
        self.trackers.log(curves_of(figures, share), step)
        for row, label in REFERENCES.items():
            if row in rows:
                figures = rows[row] | result.of_surveys.get(row, {})
                curves = curves_of(figures, 1.0 if row == "midpoints" else None)
                self.trackers.log_beside(step, "baselines", label, curves)
        is_first, title = self.num_evaluations == 0, f"step {step:,}"
        self.print(
            evaluation_table(rows, metrics_in(result.unit), title, conventions=is_first)
            + f"\n{share_line(share, lower)}"
            + (f"\n{datasets_table(by_dataset)}" if by_dataset else "")
            + (f"\n{AS_WRITTEN}" if is_first else "")
        )
        self.num_evaluations += 1

    def print(self, text: str) -> None:
        """Print on the console of the main process, above the bar, and in its log."""
        if self.accelerator.is_main_process:
            logger.info(text)

    def plan(self, schedule: RunSchedule, num_weights: int, checkpoint: Path | None) -> None:
        """Print the plan of a run, and keep it in plan.txt, for `pointup report`."""
        if not self.accelerator.is_main_process:
            return
        text = self.plan_text(schedule, num_weights, checkpoint)
        self.print(text)
        path = self.config.output_dir / "plan.txt"
        try:
            path.write_text(f"{text}\n")
        except OSError as error:
            logger.warning("%s: can't be written (%s)", path, error.strerror)

    def plan_text(self, schedule: RunSchedule, num_weights: int, checkpoint: Path | None) -> str:
        """The table at the start of a run: data, device, token budget, steps, learning rate;
        followed by excluded samples, and by the checkpoint or notes on the data."""
        config, data, accelerator = self.config, self.data, self.accelerator
        sampler, device = schedule.sampler, accelerator.device
        mixed = accelerator.mixed_precision
        scaling = f", scaling {config.lr_scaling}" if config.lr_scaling != "none" else ""
        table = {
            "data": data.description,
            "device": f"{device}, precision {PRECISIONS.get(mixed, mixed)}",
            "machine": f"{platform.machine()}, {os.cpu_count()} processors"
            + (f", {torch.cuda.get_device_name()}" if device.type == "cuda" else ""),
            "weights": f"{num_weights:,}",
            "initial model": config.initial_model or "none, random weights",
            "processes": f"{accelerator.num_processes}, of "
            f"{config.accumulation_steps} micro-batch"
            f"{'es' if config.accumulation_steps > 1 else ''} per step",
            "token budget": describe_budget(config, data, sampler.token_budget, sampler.fill),
            "clouds per step": f"{sampler.num_samples / sampler.num_steps:.1f}",
            "steps": describe_length(config, schedule),
            "learning rate": f"{schedule.peak_learning_rate:.3g}{scaling}",
        }
        left_out = [f"Left out: {line}" for line in data.left_out[:MAX_NAMED]]
        if len(data.left_out) > MAX_NAMED:
            left_out.append(f"Left out: {len(data.left_out) - MAX_NAMED:,} more samples")
        if checkpoint:
            rest = [f"Continuing from {checkpoint}."]
        else:
            rest = [f"Note: {text}" for text in data.notes()]
            default, loss = LossConfig(), config.loss
            is_given = loss.point_to_plane not in (0.0, default.point_to_plane)
            if (is_given or loss.output_to_plane != 0.0) and not data.has_normals:
                rest.append(
                    "Note: the targets have no normals, so that --loss.point-to-plane and "
                    "--loss.output-to-plane have no effect"
                )
        return "\n".join([plan_table(table), *left_out, *rest])


def curves_of(figures: Mapping[str, float], share: float | None) -> dict[str, float]:
    """Metrics of an evaluation, and its share of the midpoint baseline, by names of curves."""
    curves = {validation_tag(metric): value for metric, value in figures.items()}
    return curves if share is None else {TAGS["share_of_midpoints"]: share, **curves}


def describe_length(config: TrainConfig, schedule: RunSchedule) -> str:
    """The length of a run as text; with the intervals for hours, from which they don't follow."""
    steps_per_epoch = schedule.sampler.num_steps
    if config.hours is None:
        return f"{schedule.total_steps}, {steps_per_epoch} per epoch"
    return (
        f"as many as fit into {config.hours:g} h, {steps_per_epoch} per epoch; evaluated every "
        f"{schedule.eval_every}, saved every {schedule.save_every} or {config.save_minutes:g} min"
    )


def describe_budget(config: TrainConfig, data: TrainingData, token_budget: int, fill: float) -> str:
    """The budget as text for the plan of a run; `fill` is the share of it that batches use."""
    # 0 at the end of an epoch that had another budget: none of its samples is left to be planned.
    text = f"{token_budget:,}" + (f", {fill:.1%} used" if fill else "")
    default = config.defaults.token_budget
    if config.token_budget is None and token_budget > default:
        largest = data.train.names[int(data.train.full_sizes.argmax())]
        text += f"; raised from {default:,} to the largest pair, {largest}"
    return text


class MetricsFile:
    """Writes one JSON object per line, flushed line by line, each step once.

    A run that continues from `resume_step` drops the lines of later steps, written by an
    interrupted attempt, and a truncated last line; with 0 the file starts empty. With
    `evaluation_due` the evaluation of that step is dropped too, because it is repeated. Non-finite
    numbers are written as null. Lines that a full disk rejects are written once there is space.
    Raises FileError if the file can't be written.
    """

    def __init__(self, path: Path, resume_step: int = 0, evaluation_due: bool = False) -> None:
        self.path, self.unwritten = path, b""
        with os_errors(path, "written"):
            kept = lines_up_to(path, resume_step, evaluation_due)
            with written_whole(path, is_sole_writer=True) as part:
                part.write_bytes(b"".join(kept))
            # Unbuffered, because a full disk would leave a partial line in the buffer.
            self.file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        was_complete = not self.unwritten
        self.unwritten += json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if was_complete:
                logger.warning("%s: can't be written (%s) for now", self.path, error.strerror)

    def close(self) -> None:
        self.file.close()


def lines_up_to(path: Path, step: int, evaluation_due: bool = False) -> list[bytes]:
    """Lines of a metrics file up to `step` (none for step 0), without lines that aren't records."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            logger.warning("%s: dropped a line that is no record: %.60r", path, line)
            continue
        if record["step"] < step or (
            record["step"] == step and not (evaluation_due and "validation" in record)
        ):
            kept.append(line + b"\n")
    return kept


class TrainingBar:
    """Shows step, loss, speed and time left: a bar on a terminal, elsewhere a line every
    `seconds_between_lines`.

    Speed is that of the last 64 steps, without evaluations. The time left follows from the progress
    since the start of this process, evaluations included.
    """

    def __init__(self, seconds_between_lines: float = 30.0) -> None:
        self.seconds_between_lines = seconds_between_lines
        self.bar: tqdm | None = None
        if sys.stderr.isatty():
            bar_format = "{percentage:3.0f}% |{bar}| {desc}"
            self.bar = tqdm(total=1.0, bar_format=bar_format, dynamic_ncols=True, mininterval=0.2)
        self.recent: deque[tuple[float, int]] = deque(maxlen=64)
        self.began: tuple[float, float] | None = None
        self.unlogged = ""
        self.logged_at = -math.inf

    def move(
        self,
        schedule: RunSchedule,
        progress: Progress,
        totals: StepTotals,
        learning_rate: float,
    ) -> None:
        """Show the position after a step."""
        step, total_steps = progress.step, schedule.total_steps
        share_done, now = schedule.share_done(progress), time.monotonic()
        if total_steps and step > total_steps and share_done > 0:
            # A number of epochs was given, and their past part had more steps, of a smaller budget.
            total_steps = round(step / share_done)
        where = f"step {step:,}" + (f"/{total_steps:,}" if total_steps else "")
        state = [where, f"loss {totals.loss:.4g}", f"lr {learning_rate:.2g}"]
        self.recent.append((now, totals.num_tokens))
        if (elapsed := now - self.recent[0][0]) > 0:
            # The first entry marks the start of the second step; its tokens came before.
            done = sum(tokens for _, tokens in self.recent) - self.recent[0][1]
            state.append(f"{done / elapsed:,.0f} tokens/s")
        self.began = self.began or (now, share_done)
        if share_done > self.began[1]:
            left = (now - self.began[0]) / (share_done - self.began[1]) * (1 - share_done)
            state.append(f"{tqdm.format_interval(left)} left")
        self.unlogged = ", ".join(state)
        if self.bar is not None:
            with contextlib.suppress(OSError):  # The terminal is gone; the training continues.
                self.bar.set_description_str(self.unlogged, refresh=False)
                self.bar.update(share_done - self.bar.n)
        if now - self.logged_at >= self.seconds_between_lines:
            self._log()
            self.logged_at = now

    def pause(self) -> None:
        """Log the last step, and exclude the time since then from the speed."""
        self._log()
        self.recent.clear()

    def close(self) -> None:
        self._log()
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.refresh()
                self.bar.close()

    def _log(self) -> None:
        if self.unlogged:
            # With a bar on the console, the line goes to the log file only.
            logger.log(logging.INFO if self.bar is None else logging.DEBUG, self.unlogged)
            self.unlogged = ""
