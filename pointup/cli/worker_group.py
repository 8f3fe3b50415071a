"""The processes that `accelerate launch` started, at work on the same files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate.utils import broadcast_object_list, gather_object

from pointup.errors import FileError, PointupError
from pointup.training.distributed.accelerator import make_accelerator

Item = TypeVar("Item")

# Other processes wait while one reads or writes a file of any size.
_PATIENCE_MINUTES = 7 * 24 * 60.0


class LaunchedWorkerGroup:
    """Work shared among the processes of a launch; one that wasn't launched does it alone.

    Raises ConfigError when the launcher's configuration can't be honoured.
    """

    def __init__(self, folder: Path) -> None:
        self._accelerator = make_accelerator(folder, collective_timeout_minutes=_PATIENCE_MINUTES)
        self.device = self._accelerator.device
        self.num_processes = self._accelerator.num_processes
        self.is_main = self._accelerator.is_main_process

    def shard(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every n-th item: neighbours cost about the same, so that shares do."""
        return items[self._accelerator.process_index :: self.num_processes]

    def from_main(self, value: Item) -> Item:
        """What the main process has for this value."""
        values: list[Item] = broadcast_object_list([value])
        return values[0]

    def from_all(self, values: list[Item]) -> list[Item]:
        """What all processes have in their lists, those of the first one first."""
        gathered: list[Item] = gather_object(values)
        return gathered

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Work that all begin, and end together: by an error if one of them meets one."""
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
        """Leave the other processes."""
        self._accelerator.end_training()
