"""The trackers of a run: TensorBoard by pointup itself, the others by Accelerate."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from pointup.training.config import TrainConfig, as_dict, flattened
from pointup.training.evaluation import SampleClouds
from pointup.training.tracking.tensorboard import TAGS, TensorBoardRun, WandbRun

PROJECT = "pointup"
"""Name of the project in trackers."""
NOT_ACCEPTED = re.compile(r"[^\w.\- /:]")

logger = logging.getLogger("pointup")


class Trackers:
    """The trackers of `accelerator`, on the main process only.

    A tracker that fails is reported, and ends neither the run nor the other trackers. One that
    can't be started is left out. TensorBoard's writer ends with its first OSError, such as a full
    disk; other trackers are used again at the next step, because their server may come back.

    Attributes:
        tensorboard, wandb: None if not among the trackers.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.tensorboard: TensorBoardRun | None = None
        self.wandb: WandbRun | None = None
        # Names of trackers whose last call raised an OSError.
        self.failing: set[str] = set()

    def start(self, config: TrainConfig, resume_step: int) -> None:
        """Start the trackers; points of TensorBoard after `resume_step` are removed."""
        accelerator = self.accelerator
        # `--quick` uses a subdirectory of the Accelerator's output directory.
        accelerator.project_configuration.logging_dir = str(config.output_dir)
        values = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flattened(as_dict(config)).items()
        }
        names = accelerator.log_with
        started: list[GeneralTracker] = []
        for each in names:
            name = str(getattr(each, "value", each))
            self._attempt(
                name, lambda e=each: started.extend(self._start(e, config, resume_step, values))
            )
        accelerator.log_with = names
        accelerator.trackers = started

    def _start(
        self, each: Any, config: TrainConfig, resume_step: int, values: dict[str, Any]
    ) -> list[GeneralTracker]:
        if getattr(each, "value", each) == "tensorboard":
            # Without a checkpoint all steps are purged, else those after the checkpoint.
            purge_step = resume_step + 1 if resume_step else 0
            tensorboard = TensorBoardRun(config.output_dir, purge_step)
            tensorboard.start(values)
            self.tensorboard = tensorboard
            return [tensorboard.tracker]
        # TensorBoard names a run by its directory, the others by project and run.
        options = {"name": config.output_dir.resolve().name, "dir": str(config.output_dir)}
        if getattr(each, "value", each) == "wandb":
            options |= {"id": wandb_id(config.output_dir, resume_step), "resume": "allow"}
        self.accelerator.log_with = [each]
        self.accelerator.init_trackers(PROJECT, init_kwargs={"wandb": options})
        for tracker in self.accelerator.trackers:
            tracker.store_init_configuration(values)
            if tracker.name == "wandb":
                best = [TAGS["share_of_midpoints"], TAGS["chamfer"]]
                self.wandb = WandbRun(tracker.tracker, best)
        return self.accelerator.trackers

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A point of each curve, in all trackers."""
        for tracker in self.accelerator.trackers:
            self._attempt(tracker.name, tracker.log, values, step=step)

    def log_references(self, step: int, rows: dict[str, Any], curves: Mapping[str, float]) -> None:
        """The rows of an evaluation that don't depend on the model: runs of their own in
        TensorBoard, `curves` in the others."""
        if self.tensorboard is not None:
            self._attempt("tensorboard", self.tensorboard.write_references, step, rows)
        self._log_elsewhere(step, curves)

    def log_dataset(self, step: int, label: str, values: Mapping[str, float]) -> None:
        """Points of the curves of one dataset: a run of TensorBoard, curves of the others."""
        if self.tensorboard is not None:
            name = f"datasets/{label}"
            self._attempt("tensorboard", self.tensorboard.write_beside, step, name, values)
        self._log_elsewhere(step, {beside(tag, label): value for tag, value in values.items()})

    def _log_elsewhere(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self.accelerator.trackers:
            if tracker.name != "tensorboard":
                self._attempt(tracker.name, tracker.log, values, step=step)

    def log_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """A picture (height, width, 3) uint8, in the trackers that accept pictures."""
        for tracker in self.accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                images = {name: picture[None]}
                self._attempt(tracker.name, tracker.log_images, images, step=step, **layout)

    def log_clouds(self, step: int, name: str, clouds: SampleClouds) -> None:
        """Clouds of a validation sample, to turn about in the trackers that draw points."""
        if self.tensorboard is not None:
            self._attempt("tensorboard", self.tensorboard.write_clouds, step, name, clouds)
        if self.wandb is not None:
            self._attempt("wandb", self.wandb.write_clouds, step, name, clouds)

    def log_plan(self, plan: str, cards: str) -> None:
        """The plan of the run, and the descriptions of its datasets."""
        if self.tensorboard is not None:
            self._attempt("tensorboard", self.tensorboard.write_text, "plan", f"```\n{plan}\n```")
            self._attempt("tensorboard", self.tensorboard.write_text, "dataset", cards)
        if self.wandb is not None:
            self._attempt("wandb", self.wandb.write_plan, plan, cards)

    def finish(self) -> None:
        """Finish all trackers; a second run in this process starts its own."""
        for tracker in self.accelerator.trackers:
            self._attempt(tracker.name, tracker.finish)
        if self.tensorboard is not None:
            self._attempt("tensorboard", self.tensorboard.finish)
        self.accelerator.trackers = []

    def _attempt(self, name: str, call: Callable[..., Any], *values: Any, **options: Any) -> None:
        if name == "tensorboard" and name in self.failing:
            return
        try:
            call(*values, **options)
        except OSError as error:
            if name not in self.failing:
                after = "no more curves" if name == "tensorboard" else "it is tried again"
                logger.warning("%s can't write (%s): %s", name, error.strerror or error, after)
            self.failing.add(name)
        except Exception as error:
            # Trackers raise errors of any type; a picture may fail while curves still work.
            what = ", ".join(
                str(part) for value in values if isinstance(value, dict) for part in value
            )
            logger.warning("%s failed%s: %s", name, f" at {what}" if what else "", error)
            logger.debug("%s failed", name, exc_info=True)
        else:
            self.failing.discard(name)


def beside(tag: str, label: str) -> str:
    """The name of the curve of `tag` for `label`, with characters that all trackers accept: MLflow
    refuses others than letters, digits, spaces and _ - . : /."""
    return f"{tag} - {NOT_ACCEPTED.sub('_', label)}"


def wandb_id(output_dir: Path, resume_step: int) -> str:
    """The id of a run at Weights & Biases; one that continues from a checkpoint keeps its id."""
    path = output_dir / "wandb_id"
    if resume_step and path.is_file():
        return path.read_text().strip()
    found = uuid.uuid4().hex[:8]
    path.write_text(f"{found}\n")
    return found
