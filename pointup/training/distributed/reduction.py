"""One reduction a step: gradients, counts and flags of all processes in a single all-reduce."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch_geometric.data import Batch

from pointup.geometry.packed import widest_float

NOTABLE = 0.02
"""Share of a step that waiting may take before it is said to limit it."""


@dataclass(frozen=True)
class StepTotals:
    """What all processes together did in one optimizer step."""

    num_clouds: int
    """Clouds with weight one; the gradient is divided by their number."""
    num_tokens: int
    loss: float
    """Mean loss of a cloud."""
    stop: bool
    """Whether any process was asked to stop; all of them then do, after this very step."""
    elapsed_seconds: float
    """Length of the run so far by the main process's clock, the same for all."""
    busy_seconds: tuple[float, ...]
    """Time each process spent on its own micro-batches."""
    data_wait_seconds: tuple[float, ...]
    """Time each process waited for its data."""
    out_of_memory: int
    """How often memory ran out in this step, on all processes together."""
    data_seconds: Mapping[str, float]
    """Time that each stage of making this process's batches took, whoever did it meanwhile."""

    @property
    def idle_fraction(self) -> float:
        """Share of the processes' time spent waiting for the slowest one."""
        slowest = max(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * slowest) if slowest else 0.0

    @property
    def limited_by(self) -> str:
        """What a faster step needs: the slowest stage of making batches, if they are waited for;
        "other processes", if they are; else "training"."""
        waits = max(self.data_wait_seconds)
        if waits > NOTABLE * (waits + max(self.busy_seconds)):
            return max(
                self.data_seconds, key=lambda stage: self.data_seconds[stage], default="data"
            )
        return "other processes" if self.idle_fraction > NOTABLE else "training"


class StepReduction:
    """Sum the gradients of a window of micro-batches over all processes, exactly.

    The gradient of a step is the sum over all its clouds divided by their number, however they
    were dealt to processes and micro-batches. Sums are kept in float64 (float32 on devices
    without it): each micro-batch's gradient is the same float32 numbers wherever it is computed,
    and in float64 the order of addition no longer shows in the rounded result, so that 1 process
    x 4 accumulation steps and 4 x 1 train the same model. A parameter without gradient counts as
    zero, so that an empty micro-batch hangs nobody.
    """

    def __init__(self, accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
        self.accelerator = accelerator
        self.parameters = [p for p in parameters if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.num_weights = sum(self.sizes)
        # Behind the gradients: sum of losses, clouds, tokens, stop, elapsed, times out of memory,
        # two times a process.
        self.buffer = torch.zeros(
            self.num_weights + 6 + 2 * accelerator.num_processes,
            dtype=widest_float(accelerator.device),
            device=accelerator.device,
        )
        self.no_gradient = torch.zeros(max(self.sizes, default=0), device=accelerator.device)
        self.num_clouds = self.num_tokens = 0
        self.busy_seconds = self.data_wait_seconds = 0.0
        self.data_seconds: Counter[str] = Counter()
        self.out_of_memory = 0
        # Of each micro-batch: names, losses, and the sum of all sums with it.
        self.micro_batches: list[tuple[list[str], Tensor, Tensor]] = []

    def start(self) -> None:
        """Forget the last window, and the gradients that it left in the parameters."""
        self.buffer.zero_()
        self.micro_batches = []
        self.forget()
        self.num_clouds = self.num_tokens = 0
        self.busy_seconds = self.data_wait_seconds = 0.0
        self.data_seconds = Counter()
        self.out_of_memory = 0

    def forget_failure(self) -> None:
        """Take away the gradients of an attempt that ran out of memory, and count it."""
        self.forget()
        self.out_of_memory += 1

    def forget(self) -> None:
        """Take away the gradients in the parameters, without adding them."""
        for parameter in self.parameters:
            parameter.grad = None

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time until it is there counts as waiting for data."""
        began = time.monotonic()
        batch = next(batches)
        self.data_wait_seconds += time.monotonic() - began
        self.data_seconds.update(batch.seconds)
        return batch

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time spent inside as this process's own work."""
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began

    def add(self, losses: Tensor, num_tokens: int, names: Sequence[str] = ()) -> None:
        """Add a micro-batch after its backward pass, and take its gradients away.

        Shapes: `losses` (B,), one of each cloud of these `names`, whose sum was propagated
        backward.
        """
        losses = losses.detach()
        parts = [
            self.no_gradient[:size] if parameter.grad is None else parameter.grad.flatten()
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
        ]
        sums = self.buffer[: self.num_weights + 1]
        # One by one they would take a launch each, most of them for a few dozen numbers.
        sums += torch.cat([*parts, losses.sum(dtype=torch.float32).view(1)])
        self.forget()
        self.num_clouds += len(losses)
        self.num_tokens += num_tokens
        # Not looked at here: that would wait for the device.
        self.micro_batches.append((list(names), losses, sums.sum()))

    def non_finite_clouds(self) -> list[str]:
        """Clouds of this process that a non-finite number of this step came from.

        Those whose loss is non-finite; else all of the first micro-batch whose gradient is.
        """
        bad = [
            name
            for names, losses, _ in self.micro_batches
            for name, is_finite in zip(names, losses.isfinite().tolist(), strict=True)
            if not is_finite
        ]
        first = (names for names, _, total in self.micro_batches if not total.isfinite())
        return bad or next(first, [])

    def finish(self, stop: bool, elapsed_seconds: float) -> StepTotals:
        """Sum over the processes and leave the step's gradient in the parameters.

        Every process must call this once a step; it is the step's only collective.
        """
        num_processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        if self.accelerator.device.type != "cpu":
            # Work on the device is over only now; the reduction would wait for it anyway.
            with self.working():
                torch.accelerator.synchronize()
        tail = [0.0] * (5 + 2 * num_processes)
        tail[:5] = (
            self.num_clouds, self.num_tokens, stop, elapsed_seconds if rank == 0 else 0.0,
            self.out_of_memory,
        )  # fmt: skip
        tail[5 + rank] = self.busy_seconds
        tail[5 + num_processes + rank] = self.data_wait_seconds
        self.buffer[self.num_weights + 1 :].copy_(
            torch.tensor(tail, dtype=self.buffer.dtype), non_blocking=True
        )
        reduced = self.accelerator.reduce(self.buffer, reduction="sum")
        loss, *totals = reduced[self.num_weights :].tolist()
        num_clouds = round(totals[0])
        mean = (reduced[: self.num_weights] / max(num_clouds, 1)).float()
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return StepTotals(
            num_clouds=num_clouds,
            num_tokens=round(totals[1]),
            loss=loss / max(num_clouds, 1),
            stop=totals[2] > 0,
            elapsed_seconds=totals[3],
            busy_seconds=tuple(totals[5 : 5 + num_processes]),
            data_wait_seconds=tuple(totals[5 + num_processes :]),
            out_of_memory=round(totals[4]),
            data_seconds=self.data_seconds,
        )
