"""Times on any device, and how much time a figure of the benchmark may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

MOST_ROUNDS = 7
Result = TypeVar("Result")


@dataclass(frozen=True)
class Effort:
    """Extent and device of the measurements."""

    quick: bool
    """Small sizes and few rounds: all sections together take less than a minute."""
    device: torch.device

    def repeat(self, work: Callable[[], Result]) -> list[Result]:
        """Results of up to `MOST_ROUNDS` calls of `work`, of which the last begins within 1 s, or
        10 s if not `quick`."""
        end = time.perf_counter() + (1.0 if self.quick else 10.0)
        results = [work()]
        while len(results) < MOST_ROUNDS and time.perf_counter() < end:
            results.append(work())
        return results


def now(device: torch.device) -> float:
    """Seconds of a clock, after all work of the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    start = now(device)
    work()
    return now(device) - start
