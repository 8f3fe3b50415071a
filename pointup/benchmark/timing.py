"""Median times within a time limit; functions that are compared take turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

MOST_ROUNDS = 7


@dataclass(frozen=True)
class Effort:
    """Extent and device of the measurements."""

    quick: bool
    """Small sizes: all sections together take less than a minute."""
    device: torch.device
    seconds: float
    """Time limit of a section: it starts no work that is expected to exceed it."""

    def bound(self) -> Bound:
        """Start the time limit of a section."""
        return Bound(time.perf_counter() + self.seconds)


@dataclass(frozen=True)
class Bound:
    """The time limit of a section; `end` on the clock of `time.perf_counter`."""

    end: float

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.perf_counter())

    def refusal(self, expected: float) -> str | None:
        """The reason to skip work of `expected` seconds; None where the time suffices."""
        left = self.left
        if expected <= left > 0.0:
            return None
        if expected < 1.0:
            return "no time left"
        return f"would take {expected:.0f} s, {left:.0f} s are left"


def now(device: torch.device) -> float:
    """Seconds of a clock, after all work of the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def compare(
    quick: Callable[[], object],
    slow: Callable[[], object],
    seconds: float,
    device: torch.device,
) -> tuple[float, float]:
    """Median seconds of `quick` and `slow`, which take turns.

    `quick` runs up to three times before and after each run of `slow`. `slow` runs at least once,
    and again up to `MOST_ROUNDS` times while another round fits into `seconds`.
    """
    quick_times: list[float] = []
    slow_times: list[float] = []
    began = now(device)
    quick()

    def repeat_quick() -> None:
        until = now(device) + 0.1 * seconds
        for _ in range(3):
            quick_times.append(_seconds(quick, device))
            if now(device) > until:
                break

    repeat_quick()
    while True:
        slow_times.append(_seconds(slow, device))
        repeat_quick()
        round_seconds = (now(device) - began) / len(slow_times)
        if len(slow_times) == MOST_ROUNDS or now(device) - began + round_seconds > seconds:
            return median(quick_times), median(slow_times)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    start = now(device)
    function()
    return now(device) - start
