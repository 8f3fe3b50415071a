"""Times as medians, within a bound; what is compared takes turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

MOST_ROUNDS = 7


@dataclass(frozen=True)
class Effort:
    """How much is measured, and where."""

    quick: bool
    """Small sizes, so that all sections take less than a minute."""
    device: torch.device
    seconds: float
    """A section begins nothing that would take it beyond this."""

    def bound(self) -> Bound:
        """The time that a section has from now on."""
        return Bound(time.perf_counter() + self.seconds)


@dataclass(frozen=True)
class Bound:
    """The end of the time that a section has."""

    end: float

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.perf_counter())

    def refusal(self, expected: float) -> str | None:
        """Why work that takes so many seconds is not begun, if it isn't."""
        left = self.left
        if expected <= left > 0.0:
            return None
        if expected < 1.0:
            return "no time left"
        return f"would take {expected:.0f} s, {left:.0f} s are left"


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def compare(
    quick: Callable[[], object],
    slow: Callable[[], object],
    seconds: float,
    device: torch.device,
) -> tuple[float, float]:
    """Median seconds of what is quick and of what is slow, in turns.

    The quick one runs up to three times before and after each run of the slow one, which is begun
    again while it fits into the time.
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
