"""The most memory that work takes, beyond what was taken before."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from types import TracebackType
from typing import Self

import psutil
import torch

from pointup.training.distributed.devices import device_module

INTERVAL = 0.005


class PeakMemory:
    """A context manager; afterwards `bytes` is how much more memory the work inside took.

    On a device that tells it what torch allocated there, otherwise what the process held, looked
    at every 5 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, device_module(device)
        self.bytes = 0

    def __enter__(self) -> Self:
        gc.collect()
        if self.module is not None:
            self.module.reset_peak_memory_stats(self.device)
            self._before = self.module.memory_allocated(self.device)
            return self
        if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            # What earlier work freed and glibc kept would be taken again without showing.
            ctypes.CDLL(None).malloc_trim(0)
        self._process = psutil.Process()
        self._before = self._peak = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.module is not None:
            self.bytes = self.module.max_memory_allocated(self.device) - self._before
            return
        self._ended.set()
        self._thread.join()
        self.bytes = self._peak - self._before

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._peak = max(self._peak, self._process.memory_info().rss)
