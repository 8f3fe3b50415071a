"""What training changes and a checkpoint holds."""

from __future__ import annotations

import math
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

    def step(self, grad_norm: float) -> bool:
        """Take an optimizer step, and add the weights to the average.

        Returns whether the weights changed. With fp16 they don't if the gradients overflowed, which
        `grad_norm` shows.
        """
        self.optimizer.step()
        # `optimizer.step_was_skipped` is not used: a fused optimizer skips in its kernel, unseen.
        if not math.isfinite(grad_norm):
            return False
        self.average.update()
        return True
