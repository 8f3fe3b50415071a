"""The progress of commands that process points: a bar on a terminal, elsewhere lines."""

from __future__ import annotations

import sys
import time
from typing import Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class ProgressBar:
    """Shows processed points, rate and remaining time of each phase.

    Use it as a context manager. `begin` starts a phase. On a terminal each phase has a bar.
    Elsewhere, as in the log of a job, a line is written to stderr every `SECONDS_BETWEEN_LINES`.
    Nothing is written if it is `hidden`.
    """

    def __init__(self, name: str, hidden: bool) -> None:
        self._name, self._hidden = name, hidden
        self._bar: tqdm | None = None
        self._has_lines = not (hidden or sys.stderr.isatty())
        self._written_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, phase: str, total: int | None = None) -> None:
        if self._bar is not None:
            self._bar.close()
        self._title, self._done, self._total = f"{self._name}: {phase}", 0.0, total
        self._began = time.monotonic()
        self._bar = tqdm(
            desc=self._title,
            total=total,
            unit=" points",
            unit_scale=True,
            leave=False,
            disable=True if self._hidden else None,
        )

    def add(self, points: float) -> None:
        assert self._bar is not None
        left = (self._total or float("inf")) - self._done
        self._done += min(points, left)
        self._bar.update(min(points, left))
        if self._has_lines and time.monotonic() - self._written_at >= SECONDS_BETWEEN_LINES:
            self._written_at = time.monotonic()
            print(self._line(self._written_at - self._began), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Write a note to stderr, above the bar."""
        tqdm.write(f"note: {text}", file=sys.stderr)

    def _line(self, seconds: float) -> str:
        if not self._total:
            return f"{self._title}: {self._done:,.0f} points"
        line = f"{self._title}: {self._done:,.0f} of {self._total:,} points"
        if self._done:
            left = seconds * (self._total - self._done) / self._done
            line += f", {tqdm.format_interval(left)} left"
        return line
