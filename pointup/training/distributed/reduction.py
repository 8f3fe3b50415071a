"""Reduces gradients and totals of all processes in one all-reduce per optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from pointup.geometry.packed import widest_float


class StepReduction:
    """Sums the gradients of a step's micro-batches over all processes, exactly.

    The gradient of a step is the sum over all its clouds, divided by their number, for any
    assignment of clouds to processes and micro-batches. Sums are in float64 (float32 on devices
    without it): the float32 gradient of a micro-batch is the same on every process, and in float64
    the order of addition doesn't change the rounded result. So 1 process x 4 accumulation steps
    and 4 x 1 train the same model. A parameter without a gradient counts as zero, so an empty
    micro-batch can't block the other processes.
    """

    def __init__(self, accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
        self.accelerator, device = accelerator, accelerator.device
        self.parameters = [p for p in parameters if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.num_weights = sum(self.sizes)
        # The last number is the sum of the losses.
        self.sums = torch.zeros(self.num_weights + 1, dtype=widest_float(device), device=device)
        self.no_gradient = torch.zeros(max(self.sizes, default=0), device=device)

    def total_of(self, losses: Tensor) -> Tensor:
        """The number whose backward pass `add` expects: the sum of `losses` (B,) of a micro-batch.

        With fp16 it is divided by a power of two, at least the number of clouds. Gradients in fp16
        would overflow in micro-batches of many clouds, and the loss scale would fall with them.
        """
        divisor = self._divisor(len(losses))
        return losses.sum() / divisor if divisor > 1 else losses.sum()

    def _divisor(self, num_clouds: int) -> int:
        return 1 if self.accelerator.scaler is None else 1 << max(num_clouds - 1, 0).bit_length()

    def add(self, losses: Tensor) -> None:
        """Add the gradients of a micro-batch after the backward pass of `total_of(losses)`, and
        clear them."""
        parts = [
            self.no_gradient[:size] if parameter.grad is None else parameter.grad.flatten()
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
        ]
        # Concatenated, because one addition per parameter would launch a kernel for a few numbers.
        added = torch.cat([*parts, losses.detach().sum(dtype=torch.float32).view(1)])
        divisor = self._divisor(len(losses))
        if divisor > 1:
            added[:-1] *= divisor
        self.sums += added
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self, numbers: Tensor) -> list[float]:
        """Set the gradients of the parameters to those of the step; clear them before the next one.

        `numbers` (K,) of this process are summed over the processes too; the first one is the
        number of clouds. Returns the sum of the losses, and the sums of `numbers`. Every process
        must call this once per step; it is the only collective of a step.
        """
        own = torch.cat([self.sums, numbers.to(self.sums)])
        self.sums.zero_()
        reduced = self.accelerator.reduce(own, reduction="sum")
        totals: list[float] = reduced[self.num_weights :].tolist()
        mean = (reduced[: self.num_weights] / max(round(totals[1]), 1)).float()
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return totals
