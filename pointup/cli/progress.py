"""The progress bar of commands that process points."""

from __future__ import annotations

from typing import Self

from tqdm import tqdm


class ProgressBar:
    """A progress bar of processed points, with rate and remaining time.

    Use it as a context manager. `begin` starts a phase with a new bar. Nothing is printed if it is
    `hidden`, or if the output is not a terminal.
    """

    def __init__(self, name: str, hidden: bool) -> None:
        self._name, self._hidden = name, hidden
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, phase: str, total: int | None = None) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(
            desc=f"{self._name}: {phase}",
            total=total,
            unit=" points",
            unit_scale=True,
            leave=False,
            disable=True if self._hidden else None,
        )

    def add(self, points: float) -> None:
        assert self._bar is not None
        left = (self._bar.total or float("inf")) - self._bar.n
        self._bar.update(min(points, left))
