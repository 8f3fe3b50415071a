"""The trackers of a run, what they show, and under which names.

TensorBoard is started by pointup itself, the others by Accelerate.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker

from pointup.training.config import TrainConfig, as_dict, flattened

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("pointup")

PROJECT = "pointup"
"""Name of the project in trackers."""
OVERVIEW = "1 overview"
TAGS = {
    "loss": f"{OVERVIEW}/3 training loss",
    "learning_rate": f"{OVERVIEW}/4 learning rate",
    "tokens_per_second": f"{OVERVIEW}/5 tokens per second",
    "share_of_midpoints": f"{OVERVIEW}/1 share of the midpoint baseline",
    "chamfer": f"{OVERVIEW}/2 validation Chamfer distance",
    "grad_norm": "3 training/gradient norm",
    "epoch": "3 training/epoch",
    "num_clouds": "3 training/clouds per step",
    "num_tokens": "3 training/tokens per step",
    "fill": "3 training/fill of the token budget",
    "step_seconds": "4 speed/seconds per step",
    "data_wait_seconds": "4 speed/seconds of waiting for data",
    "idle_fraction": "4 speed/idle fraction",
    "peak_memory_gib": "5 memory/peak in GiB",
    "out_of_memory": "5 memory/out-of-memory errors",
    "seen_clouds": "3 training/clouds so far",
    "unreadable_clouds": "3 training/unreadable clouds",
}
"""Names of curves. TensorBoard sorts groups and charts by name; numbers put the main ones first.
Of the metrics, HPARAMS shows only the first one without a click."""
REFERENCES = {
    "midpoints": "midpoint baseline",
    "source": "source as it is",
    "resampled": "resampled ground truth",
}
"""Rows of an evaluation that do not depend on the model, and their names as runs."""
NOT_COMPARED = frozenset(
    {
        "output_dir", "log_with", "num_workers", "worker_timeout", "log_every", "save_every",
        "save_minutes", "keep_checkpoints", "num_pictures", "collective_timeout", "hang_timeout",
        "on_save_error", "debug", "quick",
    }
)  # fmt: skip
"""Options that differ between runs and say nothing about what they learn."""
NOT_ACCEPTED = re.compile(r"[^\w.\- /:]")


def training_tag(name: str) -> str:
    """Name of the curve of a value of metrics.jsonl; times that `TAGS` lacks are under speed."""
    return TAGS.get(name, f"4 speed/{name.replace('_', ' ')}")


def validation_tag(metric: str) -> str:
    """Name of the curve of a metric of an evaluation."""
    return TAGS["chamfer"] if metric == "chamfer" else f"2 validation/{metric.replace('_', ' ')}"


def beside(tag: str, label: str) -> str:
    """The name of the curve of `tag` for `label`, with characters that all trackers accept: MLflow
    refuses others than letters, digits, spaces and _ - . : /."""
    return f"{tag} - {NOT_ACCEPTED.sub('_', label)}"


class Trackers:
    """The trackers of `accelerator`, on the main process only.

    A tracker that fails is reported once until it works again, and ends neither the run nor the
    other trackers. One that can't be started is left out.

    TensorBoard draws a curve of the same name in several runs in one chart. So the references are
    runs of their own, in `baselines/`, and the datasets of a run that trains on several, in
    `datasets/`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.directory, self.purge_step = Path(), 0
        self.writers: dict[str, SummaryWriter] = {}
        """Of the runs beside the model's in TensorBoard, by their folder."""
        self.failing: set[str] = set()
        self.ended: set[str] = set()
        self.of_threads = threading.excepthook

    def start(self, config: TrainConfig, resume_step: int) -> None:
        """Start the trackers; points of TensorBoard after `resume_step` are removed."""
        accelerator, self.directory = self.accelerator, config.output_dir
        # `--quick` uses a subdirectory of the Accelerator's output directory.
        accelerator.project_configuration.logging_dir = str(config.output_dir)
        # Without a checkpoint all steps are purged, else those after the checkpoint.
        self.purge_step = resume_step + 1 if resume_step else 0
        values = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flattened(as_dict(config)).items()
        }
        names = accelerator.log_with
        started: list[GeneralTracker] = []

        def start(each: Any, name: str) -> None:
            if name == "tensorboard":
                tracker = TensorBoardTracker("", str(self.directory), purge_step=self.purge_step)
                tracker.start()
                write_hyperparameters(tracker.writer, values)
                started.append(tracker)
                threading.excepthook = self._report_of_thread
                return
            # TensorBoard names a run by its directory, the others by project and run.
            options = {"name": self.directory.resolve().name, "dir": str(self.directory)}
            if name == "wandb":
                options |= {"id": wandb_id(self.directory, resume_step), "resume": "allow"}
            accelerator.log_with = [each]
            accelerator.init_trackers(PROJECT, values, init_kwargs={"wandb": options})
            started.extend(accelerator.trackers)

        for each in names:
            name = str(getattr(each, "value", each))
            self._attempt(name, start, each, name)
        accelerator.log_with, accelerator.trackers = names, started

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A point of each curve, in all trackers."""
        for tracker in self.accelerator.trackers:
            self._attempt(tracker.name, tracker.log, values, step=step)

    def log_beside(self, step: int, folder: str, label: str, values: Mapping[str, float]) -> None:
        """Points of the same curves of something beside the model, a reference or one dataset: in
        TensorBoard as a run in `folder`, in others as curves."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                self._attempt(tracker.name, self._write, step, f"{folder}/{label}", values)
            else:
                own = {beside(tag, label): value for tag, value in values.items()}
                self._attempt(tracker.name, tracker.log, own, step=step)

    def _write(self, step: int, folder: str, values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if folder not in self.writers:
            path = str(self.directory / folder)
            self.writers[folder] = SummaryWriter(path, purge_step=self.purge_step)
        for tag, value in values.items():
            self.writers[folder].add_scalar(tag, value, step)
        self.writers[folder].flush()

    def log_picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """A picture (height, width, 3) uint8, in the trackers that accept pictures."""
        for tracker in self.accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                images = {name: picture[None]}
                self._attempt(tracker.name, tracker.log_images, images, step=step, **layout)

    def finish(self) -> None:
        """Finish all trackers; a second run in this process starts its own."""
        for tracker in self.accelerator.trackers:
            self._attempt(tracker.name, tracker.finish)
        for writer in self.writers.values():
            self._attempt("tensorboard", writer.close)
        self.accelerator.trackers = []
        threading.excepthook = self.of_threads

    def _report_of_thread(self, failed: threading.ExceptHookArgs) -> None:
        # The next call to TensorBoard's writer raises the error of its thread.
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            self.of_threads(failed)

    def _attempt(self, name: str, call: Callable[..., Any], *values: Any, **options: Any) -> None:
        if name in self.ended:
            return
        try:
            call(*values, **options)
        # Trackers raise errors of any type, and the server of one may come back.
        except Exception as error:
            # After an OSError, as of a full disk, a call to TensorBoard's writer may never return.
            if name == "tensorboard" and isinstance(error, OSError):
                self.ended.add(name)
            if name not in self.failing:
                after = "no more curves" if name in self.ended else "it is tried again"
                reason = getattr(error, "strerror", None) or error
                logger.warning("%s can't write (%s): %s", name, reason, after)
                logger.debug("%s failed", name, exc_info=True)
            self.failing.add(name)
        else:
            self.failing.discard(name)


def write_hyperparameters(writer: SummaryWriter, values: Mapping[str, Any]) -> None:
    """Write hyperparameters into the events of the run itself, with their types.

    SummaryWriter.add_hparams would add a run, named by the time, at each start, and store
    booleans as numbers. It would also describe the hyperparameters of the experiment; without
    a description TensorBoard compares the runs itself and lists those that differ first.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo()
    for name, value in values.items():
        if name in NOT_COMPARED:
            continue
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, (int, float)):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = value
    content = HParamsPluginData(session_start_info=info, version=metadata.PLUGIN_DATA_VERSION)
    described = metadata.create_summary_metadata(content)
    value = Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=described)
    writer._get_file_writer().add_summary(Summary(value=[value]))
    writer.flush()


def wandb_id(output_dir: Path, resume_step: int) -> str:
    """The id of a run at Weights & Biases; one that continues from a checkpoint keeps its id."""
    path = output_dir / "wandb_id"
    if resume_step and path.is_file():
        return path.read_text().strip()
    found = uuid.uuid4().hex[:8]
    path.write_text(f"{found}\n")
    return found
