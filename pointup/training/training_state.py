"""What training changes and a checkpoint holds: weights, their average, the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pointup.model.upsampler import Upsampler


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


class WeightAverage:
    r"""The exponential moving average of the weights of a model, or the model without a decay.

    With the weights w after step n, the average is

    .. math:: a_n = d_n a_{n-1} + (1 - d_n) w_n, \quad d_n = \min(d, (1 + n) / (10 + n))

    with the decay d. The smaller decay of the first steps lets the average leave the initial
    weights at once. It is less noisy than the weights, above all with few clouds in a step. Polyak
    and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging.

    Every process has its own copy. The copies are equal, because the weights are.

    Attributes:
        model: the model to evaluate and to save. Without a decay it is `weights` itself.
        num_steps: number of steps that were averaged.
    """

    def __init__(self, weights: Upsampler, decay: float | None) -> None:
        self.weights, self.decay, self.num_steps = weights, decay, 0
        self.model = weights if decay is None else copy.deepcopy(weights).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        if self.decay is None:
            return
        self.num_steps += 1
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        average = get_ema_multi_avg_fn(decay)
        average(list(self.model.parameters()), list(self.weights.parameters()), None)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint stores; None without a decay, where the weights are enough."""
        if self.decay is None:
            return None
        return {"num_steps": self.num_steps, "weights": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state`.

        Raises ValueError if `state` has no average, or an averaged weight is not finite,
        RuntimeError if a weight doesn't fit.
        """
        if self.decay is None:
            return
        if state is None:
            raise ValueError("optimizer.pt has no average of the weights")
        for name, values in state["weights"].items():
            if not values.isfinite().all():
                raise ValueError(f"optimizer.pt has an average of {name} that is not finite")
        self.model.load_state_dict(state["weights"])
        self.num_steps = int(state["num_steps"])


FUSED = frozenset({"cuda", "xpu", "mps"})
"""Device types with a fused AdamW, one launch for all weights; on others torch decides."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], device: torch.device, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """AdamW for parameters that are, or will be, on `device`."""
    fused = True if device.type in FUSED else None
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=fused)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
