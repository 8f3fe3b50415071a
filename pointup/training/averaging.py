"""Exponential moving average of the weights of a model ("EMA")."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pointup.model.upsampler import Upsampler


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
