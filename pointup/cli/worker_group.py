"""The worker group of `pointup upsample`: the processes that `accelerate launch` started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object

from pointup.errors import FileError, PointupError
from pointup.training.distributed.accelerator import (
    is_cpu_requested,
    local_processes,
    make_accelerator,
)

Item = TypeVar("Item")

# Timeout of collectives: other processes wait while one reads or writes a file of any size.
_TIMEOUT_MINUTES = 7 * 24 * 60.0


def shared_device() -> torch.device | None:
    """The accelerator of this process if the machine has more processes than accelerators.

    The group then forms on the CPU (gloo), because NCCL refuses two processes with one device.
    Python's global lock stops the threads of one process from keeping a device busy.
    """
    if is_cpu_requested() or not torch.accelerator.is_available():
        return None
    num_devices = torch.accelerator.device_count()
    if local_processes(num_devices) <= num_devices:
        return None
    os.environ["ACCELERATE_USE_CPU"] = "true"
    kind = torch.accelerator.current_accelerator()
    return torch.device(str(kind), int(os.environ.get("LOCAL_RANK", 0)) % num_devices)


class LaunchedWorkerGroup:
    """All processes of a launch, or a single process without a launcher; see `WorkerGroup`.

    Raises ConfigError if the launcher's configuration is not supported.
    """

    def __init__(self, folder: Path) -> None:
        shared = shared_device()
        self._accelerator = make_accelerator(folder, collective_timeout_minutes=_TIMEOUT_MINUTES)
        self.device = shared or self._accelerator.device
        self.num_processes = self._accelerator.num_processes
        self.is_main = self._accelerator.is_main_process

    def shard(self, items: Sequence[Item]) -> Sequence[Item]:
        """Adjacent items: much of what is computed for one serves its neighbours as well."""
        rank, of = self._accelerator.process_index, self.num_processes
        return items[len(items) * rank // of : len(items) * (rank + 1) // of]

    def from_main(self, value: Item) -> Item:
        """The value of the main process, on every process."""
        values: list[Item] = broadcast_object_list([value])
        return values[0]

    def from_all(self, values: list[Item]) -> list[Item]:
        """The lists of all processes, concatenated in the order of the processes."""
        return gather_object(values)

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """A block that all processes leave together. An error in one of them is raised in all."""
        error: Exception | None = None
        try:
            yield
        except (PointupError, ValueError, OSError) as met:
            error = met
        met_by_any = gather_object([str(error) if error else ""])
        if error:
            raise error
        for message in filter(None, met_by_any):
            raise FileError(message)

    def end(self) -> None:
        """Leave the process group."""
        self._accelerator.end_training()
