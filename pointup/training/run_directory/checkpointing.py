"""Saves the checkpoints and the best model of a run from its main process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from pointup.training.run_directory.checkpoint import CheckpointError, save_checkpoint, save_model
from pointup.training.training_state import TrainingState

logger = logging.getLogger("pointup")

OnSaveError = Literal["go-on", "end"]


class Saver:
    """Saves on the main process while the other processes wait for the outcome.

    If the disk is full or read-only, earlier checkpoints remain unchanged. With `on_error` "end",
    or if this is the last save, all processes then raise CheckpointError. Otherwise the log warns,
    and the training continues until the next save.

    Attributes:
        saved_at: training time in seconds of the last attempt to save, or of the checkpoint that
            the run continues from.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        training_state: TrainingState,
        state: Callable[[], dict[str, Any]],
        output_dir: Path,
        keep: int,
        on_error: OnSaveError,
        saved_at: float,
    ) -> None:
        self.accelerator, self.training_state = accelerator, training_state
        self.state, self.output_dir, self.keep, self.on_error = state, output_dir, keep, on_error
        self.saved_at = saved_at

    @property
    def phase(self) -> str:
        """Phase of this process while a checkpoint is saved, for the watchdog."""
        return "saving" if self.accelerator.is_main_process else "waiting for the checkpoint"

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint with the state from `state()`; every process must call this."""

        def write() -> None:
            trained = self.training_state
            save_checkpoint(
                self.output_dir / "checkpoints",
                trained.weights,
                trained.optimizer,
                trained.scaler,
                self.state(),
                self.keep,
                trained.average.state_dict(),
            )

        self.on_main_process(write, must_succeed)

    def save_best(self, must_succeed: bool) -> bool:
        """Save the current model, or its average, as the best; every process must call this.

        Returns whether it was saved.
        """
        path = self.output_dir / "model"
        return self.on_main_process(
            lambda: save_model(self.training_state.model, path), must_succeed
        )

    def on_main_process(self, write: Callable[[], Any], must_succeed: bool) -> bool:
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
        return failure[0] is None
