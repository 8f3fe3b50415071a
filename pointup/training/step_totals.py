"""Counts clouds, losses and seconds of an optimizer step, on this process and on all."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import num_tokens
from pointup.geometry.packed import to_device

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


class Piece(NamedTuple):
    """What is kept of a micro-batch, or of a part of one that was split."""

    names: list[str]
    losses: Tensor
    """(B,), on the device."""
    datasets: Tensor
    """(B,) int64, on the host: the number of the dataset of each cloud."""
    sum_so_far: Tensor
    """A number on the device that is finite if all gradients up to this one are."""


class StepMeter:
    """Counts and times the micro-batches of one optimizer step on this process."""

    def __init__(self, accelerator: Accelerator, num_datasets: int = 1) -> None:
        self.accelerator, self.num_datasets = accelerator, num_datasets
        self.began = time.monotonic()
        self.num_batches = self.num_tokens = 0
        self.busy_seconds = self.data_wait_seconds = 0.0
        self.data_seconds: Counter[str] = Counter()
        self.faults: list[tuple[int, str, str]] = []
        """Index, name and reason of each sample of this process that couldn't be read."""
        self.pieces: list[Piece] = []

    @property
    def seconds(self) -> float:
        """Time since the step began."""
        return time.monotonic() - self.began

    def next_of(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time until it arrives counts as waiting for data."""
        began = time.monotonic()
        batch = next(batches)
        self.data_wait_seconds += time.monotonic() - began
        self.num_batches += 1
        self.data_seconds.update(batch.seconds)
        self.faults += batch.faults
        return batch

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count the time of the `with` block as this process's own work."""
        began = time.monotonic()
        yield
        self.busy_seconds += time.monotonic() - began

    def add(self, batch: Batch, losses: Tensor, datasets: Tensor, sums: Tensor) -> None:
        """Count a micro-batch, or a part of one, after its gradients were added to `sums`."""
        self.num_tokens += num_tokens(batch)
        # Sums are not read here, because that would synchronise with the device.
        self.pieces.append(Piece(list(batch.name), losses, datasets, sums.sum()))

    def numbers(self, stop: bool, elapsed_seconds: float) -> Tensor:
        """What `StepReduction.reduce` is to sum: (K,), on the device.

        `stop` says whether a stop was requested on this process. `elapsed_seconds` is the training
        time of the run; that of the main process counts.
        """
        accelerator = self.accelerator
        if accelerator.device.type != "cpu":
            # The reduction would wait for the device anyway; here the wait counts as work.
            with self.work():
                torch.accelerator.synchronize()
        seconds = torch.zeros(2, accelerator.num_processes, dtype=torch.float64)
        seconds[0, accelerator.process_index] = self.busy_seconds
        seconds[1, accelerator.process_index] = self.data_wait_seconds
        datasets = torch.cat([piece.datasets for piece in self.pieces])
        is_of = datasets == torch.arange(self.num_datasets)[:, None]
        # An out-of-memory error splits a micro-batch, or a part of one, into two.
        out_of_memory = len(self.pieces) - self.num_batches
        counts = [
            len(datasets), self.num_tokens, stop,
            elapsed_seconds if accelerator.process_index == 0 else 0.0, out_of_memory,
            len(self.faults), *seconds.flatten().tolist(), *is_of.sum(1).tolist(),
        ]  # fmt: skip
        numbers = to_device(torch.tensor(counts, dtype=torch.float64), accelerator.device)
        losses = torch.cat([piece.losses for piece in self.pieces])
        # A loss that is not finite stays in its dataset.
        own = torch.where(to_device(is_of, accelerator.device), losses, 0.0)
        return torch.cat([numbers, own.sum(1, dtype=numbers.dtype)])

    def totals(self, reduced: list[float]) -> StepTotals:
        """The totals of the step from what `StepReduction.reduce` returned."""
        number = self.accelerator.num_processes
        loss, clouds, tokens, stop, elapsed, out_of_memory, unreadable, *others = reduced
        busy, waits, rest = others[:number], others[number : 2 * number], others[2 * number :]
        counts = [round(count) for count in rest[: self.num_datasets]]
        sums = rest[self.num_datasets :]
        return StepTotals(
            num_clouds=round(clouds),
            num_tokens=round(tokens),
            loss=loss / max(round(clouds), 1),
            stop=stop > 0,
            elapsed_seconds=elapsed,
            busy_seconds=tuple(busy),
            data_wait_seconds=tuple(waits),
            out_of_memory=round(out_of_memory),
            data_seconds=self.data_seconds,
            num_unreadable=round(unreadable),
            clouds_by_dataset=tuple(counts),
            loss_by_dataset=tuple(
                total / count if count else math.nan
                for total, count in zip(sums, counts, strict=True)
            ),
        )
