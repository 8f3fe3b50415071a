"""Saves the checkpoints and the best model of a run from its main process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from pointup.model.upsampler import Upsampler
from pointup.training.run_directory.checkpoint import CheckpointError, save_checkpoint, save_model

logger = logging.getLogger("pointup")

OnSaveError = Literal["go-on", "end"]


class Saver:
    """Saves on the main process while the other processes wait for the outcome.

    If the disk is full or read-only, earlier checkpoints remain unchanged. With `on_error` "end",
    or if this is the last save, all processes then raise CheckpointError. Otherwise the log warns,
    and the training continues until the next save.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        weights: Upsampler,
        optimizer: torch.optim.Optimizer,
        state: Callable[[], dict[str, Any]],
        output_dir: Path,
        keep: int,
        on_error: OnSaveError,
    ) -> None:
        self.accelerator, self.weights, self.optimizer = accelerator, weights, optimizer
        self.state, self.output_dir, self.keep, self.on_error = state, output_dir, keep, on_error

    @property
    def phase(self) -> str:
        """Phase of this process while a checkpoint is saved, for the watchdog."""
        return "saving" if self.accelerator.is_main_process else "waiting for the checkpoint"

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint with the state from `state()`; every process must call this."""

        def write() -> None:
            save_checkpoint(
                self.output_dir / "checkpoints",
                self.weights,
                self.optimizer,
                self.accelerator.scaler,
                self.state(),
                self.keep,
            )

        self.on_main_process(write, must_succeed)

    def save_best(self) -> None:
        """Save the current model as the best one; every process must call this."""
        self.on_main_process(lambda: save_model(self.weights, self.output_dir / "model"))

    def on_main_process(self, write: Callable[[], Any], must_succeed: bool = False) -> None:
        failure: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                write()
            except CheckpointError as error:
                failure = [str(error)]
        broadcast_object_list(failure)
        if failure[0] is not None:
            if must_succeed or self.on_error == "end":
                raise CheckpointError(failure[0])
            if self.accelerator.is_main_process:
                logger.warning("%s; training continues", failure[0])
