"""What training changes and a checkpoint holds."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from pointup.model.upsampler import Upsampler
from pointup.training.averaging import WeightAverage


class TrainingState:
    """Weights, optimizer, gradient scaler (None but for fp16), and the average of the weights."""

    def __init__(
        self,
        weights: Upsampler,
        optimizer: AcceleratedOptimizer,
        scaler: Any | None,
        ema_decay: float | None,
    ) -> None:
        self.weights, self.optimizer, self.scaler = weights, optimizer, scaler
        self.average = WeightAverage(weights, ema_decay)

    @property
    def model(self) -> Upsampler:
        """The model to evaluate and to save: the average of the weights, or the weights."""
        return self.average.model

    def update_average(self) -> None:
        """Add the weights after a step, unless the fp16 scaler skipped it."""
        if not self.optimizer.step_was_skipped:
            self.average.update()
