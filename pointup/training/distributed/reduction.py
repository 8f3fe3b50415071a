"""Reduces gradients, counts and flags of all processes in one all-reduce per optimizer step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import gettempdir

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch_geometric.data import Batch

from pointup.errors import TrainingError
from pointup.geometry.packed import copied_ahead, widest_float

NOTABLE = 0.02
"""Share of the step time above which waiting is reported as the limit of the step."""


@dataclass(frozen=True)
class StepTotals:
    """Totals of one optimizer step over all processes."""

    num_clouds: int
    """Clouds of the step; the gradient is divided by their number."""
    num_tokens: int
    loss: float
    """Mean loss of a cloud."""
    stop: bool
    """Whether a stop was requested on any process; all processes stop after this step."""
    elapsed_seconds: float
    """Training time of the run so far by the clock of the main process."""
    busy_seconds: tuple[float, ...]
    """Time that each process spent on its own micro-batches."""
    data_wait_seconds: tuple[float, ...]
    """Time that each process waited for data."""
    out_of_memory: int
    """Out-of-memory errors in this step, on all processes."""
    data_seconds: Mapping[str, float]
    """Time of each stage of making this process's batches, in this process or in its workers."""
    num_unreadable: int = 0
    """Samples of the step that couldn't be read, on all processes; they don't count as clouds."""
    clouds_by_dataset: tuple[int, ...] = ()
    """Clouds of the step of each dataset."""
    loss_by_dataset: tuple[float, ...] = ()
    """Mean loss of a cloud of each dataset; NaN for a dataset without a cloud in the step."""

    @property
    def idle_fraction(self) -> float:
        """Share of the processes' time spent waiting for the slowest process."""
        slowest = max(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * slowest) if slowest else 0.0

    @property
    def limited_by(self) -> str:
        """What limits the speed of the step: the slowest stage of making batches if a process waits
        for data; "other processes" if it waits for them; else "training"."""
        waits = max(self.data_wait_seconds)
        if waits > NOTABLE * (waits + max(self.busy_seconds)):
            return max(
                self.data_seconds, key=lambda stage: self.data_seconds[stage], default="data"
            )
        return "other processes" if self.idle_fraction > NOTABLE else "training"


def loss_divisor(accelerator: Accelerator, num_clouds: int) -> int:
    """By what the sum of the losses of a micro-batch is divided for its backward pass.

    1, but for fp16: there a power of two, at least the number of clouds. Gradients in fp16 would
    overflow in micro-batches of many clouds, and the loss scale would fall with their number.
    """
    return 1 if accelerator.scaler is None else 1 << max(num_clouds - 1, 0).bit_length()


def no_connection(cause: Exception) -> TrainingError:
    """The error of a data worker that can't be reached."""
    return TrainingError(
        f"no connection to a data worker ({cause!r}); was {gettempdir()} emptied, where Python "
        "keeps the socket? The same command again continues from the last checkpoint"
    )


class StepReduction:
    """Sums the gradients of a step's micro-batches over all processes, exactly.

    The gradient of a step is the sum over all its clouds, divided by their number, for any
    assignment of clouds to processes and micro-batches. Sums are in float64 (float32 on devices
    without it): the float32 gradient of a micro-batch is the same on every process, and in float64
    the order of addition doesn't change the rounded result. So 1 process x 4 accumulation steps
    and 4 x 1 train the same model. A parameter without a gradient counts as zero, so an empty
    micro-batch can't block the other processes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parameters: Iterable[nn.Parameter],
        num_datasets: int = 1,
    ) -> None:
        self.accelerator = accelerator
        self.copied_ahead = copied_ahead(accelerator.device)
        self.parameters = [p for p in parameters if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.num_weights = sum(self.sizes)
        # After the gradients: sum of losses, clouds, tokens, stop, elapsed seconds, out-of-memory
        # errors, unreadable samples, and two durations per process; then the sums of losses and the
        # clouds of each dataset. With one dataset these are the totals.
        self.num_datasets = num_datasets if num_datasets > 1 else 0
        self.buffer = torch.zeros(
            self.num_weights + 7 + 2 * accelerator.num_processes + 2 * self.num_datasets,
            dtype=widest_float(accelerator.device),
            device=accelerator.device,
        )
        self.no_gradient = torch.zeros(max(self.sizes, default=0), device=accelerator.device)
        self.num_clouds = self.num_tokens = 0
        self.clouds_by_dataset = torch.zeros(self.num_datasets, dtype=torch.int64)
        self.busy_seconds = self.data_wait_seconds = 0.0
        self.data_seconds: Counter[str] = Counter()
        self.out_of_memory = 0
        self.faults: list[tuple[int, str, str]] = []
        """Index, name and reason of each sample of this process that couldn't be read."""
        # Of each micro-batch: names, losses, and the total of the buffer after it.
        self.micro_batches: list[tuple[list[str], Tensor, Tensor]] = []

    def start(self) -> None:
        """Start a step: clear all sums, and the gradients of the parameters."""
        self.buffer.zero_()
        self.micro_batches = []
        self.drop_gradients()
        self.num_clouds = self.num_tokens = 0
        self.clouds_by_dataset.zero_()
        self.busy_seconds = self.data_wait_seconds = 0.0
        self.data_seconds = Counter()
        self.out_of_memory = 0
        self.faults = []

    def drop_failed(self) -> None:
        """Drop the gradients of a micro-batch that ran out of memory, and count the error."""
        self.drop_gradients()
        self.out_of_memory += 1

    def drop_gradients(self) -> None:
        """Clear the gradients of the parameters without adding them to the sum."""
        for parameter in self.parameters:
            parameter.grad = None

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; counts the time until it arrives as waiting for data.

        Raises TrainingError if its worker can't be reached, and what reading the samples raises.
        Where batches are pinned, a thread of the loader meets that error and ends; it shows only
        as the loader's timeout.
        """
        began = time.monotonic()
        try:
            batch = next(batches)
        except (ConnectionError, FileNotFoundError) as error:
            # Those of a dataset name a file, and those that a worker reports have no number.
            if error.errno is None or error.filename is not None:
                raise
            raise no_connection(error) from error
        except RuntimeError as error:
            thread = getattr(batches, "_pin_memory_thread", None)
            is_gone = thread is not None and not thread.is_alive()
            if not (is_gone and str(error).startswith("DataLoader timed out")):
                raise
            raise no_connection(error) from error
        self.data_wait_seconds += time.monotonic() - began
        self.data_seconds.update(batch.seconds)
        self.faults += batch.faults
        return batch

    @contextmanager
    def timed_work(self) -> Iterator[None]:
        """Count the time of the `with` block as this process's own work."""
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began

    def add(
        self,
        losses: Tensor,
        num_tokens: int,
        names: Sequence[str] = (),
        datasets: Tensor | None = None,
    ) -> None:
        """Add the gradients of a micro-batch after its backward pass, and clear them.

        `losses` (B,) has the loss of each cloud in `names`; the backward pass was of their sum,
        divided by `loss_divisor`.
        `datasets` (B,) int64 on the CPU is the number of the dataset of each cloud, by default 0.
        """
        losses = losses.detach()
        parts = [
            self.no_gradient[:size] if parameter.grad is None else parameter.grad.flatten()
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
        ]
        sums = self.buffer[: self.num_weights + 1]
        divisor = loss_divisor(self.accelerator, len(losses))
        # Concatenated, because one addition per parameter would launch a kernel for a few numbers.
        added = torch.cat([*parts, losses.sum(dtype=torch.float32).view(1)])
        if divisor > 1:
            added[:-1] *= divisor
        sums += added
        self.drop_gradients()
        if self.num_datasets:
            datasets = torch.zeros(len(losses)) if datasets is None else datasets
            is_of = datasets == torch.arange(self.num_datasets)[:, None]
            # Not `index_add_`, which adds in any order on a GPU; a loss that is not finite stays in
            # its dataset.
            own = torch.where(is_of.to(losses.device, non_blocking=self.copied_ahead), losses, 0.0)
            end = len(self.buffer) - self.num_datasets
            self.buffer[end - self.num_datasets : end] += own.sum(1, dtype=self.buffer.dtype)
            self.clouds_by_dataset += is_of.sum(1)
        self.num_clouds += len(losses)
        self.num_tokens += num_tokens
        # Not read here, because that would synchronise with the device.
        self.micro_batches.append((list(names), losses, sums.sum()))

    def non_finite_clouds(self) -> list[str]:
        """Clouds of this process that may have caused a non-finite loss or gradient in this step.

        These are the clouds with a non-finite loss, or else all clouds of the first micro-batch
        with a non-finite gradient.
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
        """Sum over the processes and set the gradients of the parameters to those of the step.

        Every process must call this once per step; it is the only collective of a step. `stop`
        says whether a stop was requested on this process.
        """
        num_processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        if self.accelerator.device.type != "cpu":
            # The reduction would wait for the device anyway; here the wait counts as work.
            with self.timed_work():
                torch.accelerator.synchronize()
        tail = [0.0] * (6 + 2 * num_processes)
        tail[:6] = (
            self.num_clouds, self.num_tokens, stop, elapsed_seconds if rank == 0 else 0.0,
            self.out_of_memory, len(self.faults),
        )  # fmt: skip
        tail[6 + rank] = self.busy_seconds
        tail[6 + num_processes + rank] = self.data_wait_seconds
        first, dtype = self.num_weights + 1, self.buffer.dtype
        self.buffer[first : first + len(tail)].copy_(
            torch.tensor(tail, dtype=dtype), non_blocking=self.copied_ahead
        )
        if self.num_datasets:
            self.buffer[-self.num_datasets :].copy_(
                self.clouds_by_dataset, non_blocking=self.copied_ahead
            )
        reduced = self.accelerator.reduce(self.buffer, reduction="sum")
        loss, *totals = reduced[self.num_weights :].tolist()
        num_clouds = round(totals[0])
        by_dataset = totals[len(tail) :] if self.num_datasets else [loss, num_clouds]
        counts = [round(number) for number in by_dataset[len(by_dataset) // 2 :]]
        mean = (reduced[: self.num_weights] / max(num_clouds, 1)).float()
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return StepTotals(
            num_clouds=num_clouds,
            num_tokens=round(totals[1]),
            loss=loss / max(num_clouds, 1),
            stop=totals[2] > 0,
            elapsed_seconds=totals[3],
            busy_seconds=tuple(totals[6 : 6 + num_processes]),
            data_wait_seconds=tuple(totals[6 + num_processes : len(tail)]),
            out_of_memory=round(totals[4]),
            data_seconds=self.data_seconds,
            num_unreadable=round(totals[5]),
            clouds_by_dataset=tuple(counts),
            loss_by_dataset=tuple(
                total / number if number else math.nan
                for total, number in zip(by_dataset, counts, strict=False)
            ),
        )
