"""Peak memory of a block of code, relative to the memory in use before it."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from types import TracebackType
from typing import Self

import psutil
import torch

from pointup.training.distributed.accelerator import device_module

INTERVAL = 0.005


class PeakMemory:
    """A context manager that sets `bytes` to the peak memory of its body, above that before it.

    On devices with memory statistics, the peak of torch's allocations; otherwise the resident
    memory of the process, sampled every 5 ms.
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
            # Reuse of freed memory that glibc kept would not show in the resident memory.
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
