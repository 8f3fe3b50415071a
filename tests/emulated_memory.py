"""Counts the memory of the emulated device: live storages, their peak, and a limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Memory:
    """Bytes of live storages, their peak, and a limit."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.storages: dict[int, list[int]] = {}
        self.allocated = self.peak = 0
        self.limit = 1 << 60

    def hold(self, host: Tensor) -> _Held:
        storage = host.untyped_storage()
        key = storage._cdata
        with self.lock:
            if key in self.storages:
                self.storages[key][1] += 1
            else:
                size = storage.nbytes()
                if self.allocated + size > self.limit:
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {size} bytes"
                    )
                self.storages[key] = [size, 1]
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
        return _Held(self, key, storage)

    def release(self, key: int) -> None:
        with self.lock:
            entry = self.storages[key]
            entry[1] -= 1
            if not entry[1]:
                del self.storages[key]
                self.allocated -= entry[0]


class _Held:
    """Keeps a storage counted while a tensor of it lives."""

    def __init__(self, memory: Memory, key: int, storage: Any) -> None:
        self.memory, self.key, self.storage = memory, key, storage

    def __del__(self) -> None:
        self.memory.release(self.key)


memory = Memory()


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """In this context, allocations beyond a number of bytes raise `torch.OutOfMemoryError`."""
    memory.limit = limit
    try:
        yield
    finally:
        memory.limit = 1 << 60
