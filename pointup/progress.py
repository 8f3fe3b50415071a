"""The progress of long work: a bar on a terminal; elsewhere, as in the log of a job, lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from pointup.terminal import literal

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_LOOKS = 30.0, 1.0

Item = TypeVar("Item")


def write_line(text: str) -> None:
    """Write a line to stderr, above the bars."""
    # Imported here, because `pointup --help` imports this module.
    from tqdm import tqdm

    tqdm.write(literal(text), file=sys.stderr)
    sys.stderr.flush()


class ProgressBar:
    """Shows how much is done, the rate and the remaining time of each phase.

    A context manager; `begin` starts a phase. On a terminal each phase has a bar, after `delay`
    seconds. Elsewhere `write` gets a line every `SECONDS_BETWEEN_LINES`. Nothing is shown if it is
    `hidden`.
    """

    written_at: ClassVar[float] = time.monotonic()
    """When any bar wrote its last line."""
    at_work: ClassVar[list[ProgressBar]] = []
    """The bars that write lines, the innermost last."""

    def __init__(
        self,
        name: str,
        unit: str = "points",
        *,
        hidden: bool = False,
        delay: float = 0.0,
        write: Callable[[str], object] = write_line,
    ) -> None:
        self._name, self._unit, self._hidden, self._delay = name, unit, hidden, delay
        self._write = write
        self._bar: tqdm | None = None
        self._has_lines = not (hidden or sys.stderr.isatty())
        self._made = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self in self.at_work:
            self.at_work.remove(self)

    def begin(self, phase: str = "", total: int | None = None) -> None:
        """Start a phase of `total` points or whatever the unit is; None if that is unknown."""
        from tqdm import tqdm

        self.__exit__()
        self._title = ": ".join(filter(None, (self._name, phase)))
        self._done, self._total = 0.0, total
        self._began = time.monotonic()
        self._bar = tqdm(
            desc=literal(self._title),
            total=total,
            unit=f" {self._unit}",
            unit_scale=self._unit == "points",
            leave=False,
            delay=self._delay,
            disable=True if self._hidden else None,
        )
        if self._has_lines:
            self.at_work.append(self)

    def add(self, number: float) -> None:
        """Report that so many more points are done. More than the total count as the total."""
        assert self._bar is not None
        number = min(number, (self._total or float("inf")) - self._done)
        self._done += number
        self._bar.update(number)
        if self._has_lines and is_line_due(self._made):
            self.write_line()

    def write_line(self) -> None:
        self._write(self._line(ProgressBar.written_at - self._began))

    def _line(self, seconds: float) -> str:
        if not self._total:
            return f"{self._title}: {self._done:,.0f} {self._unit}"
        from tqdm import tqdm

        line = f"{self._title}: {self._done:,.0f} of {self._total:,} {self._unit}"
        if self._done:
            left = seconds * (self._total - self._done) / self._done
            return f"{line}, {tqdm.format_interval(left)} left"
        return f"{line}, at work for {seconds:.0f} s"


def is_line_due(since: float) -> bool:
    """Whether nobody has written a line for `SECONDS_BETWEEN_LINES`; the caller, which is at work
    `since` then, writes one."""
    now = time.monotonic()
    if now - max(ProgressBar.written_at, since) < SECONDS_BETWEEN_LINES:
        return False
    ProgressBar.written_at = now
    return True


@contextmanager
def heartbeat(name: str) -> Iterator[None]:
    """Where there is no terminal, a line whenever the work inside has shown no progress for
    `SECONDS_BETWEEN_LINES`: that of its bar, if it has one."""
    began, ended = time.monotonic(), threading.Event()

    def write() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            if not is_line_due(began):
                continue
            if bars := ProgressBar.at_work:
                bars[-1].write_line()
            else:
                write_line(f"{name}: at work for {ProgressBar.written_at - began:.0f} s")

    if not sys.stderr.isatty():
        threading.Thread(target=write, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def tracked(
    items: Iterable[Item],
    total: int,
    name: str,
    unit: str = "items",
    *,
    size: Callable[[Item], int] = lambda item: 1,
    delay: float = 0.0,
    write: Callable[[str], object] = write_line,
) -> Iterator[Item]:
    """The same items, with a `ProgressBar`; `size` is what an item adds to the `total`."""
    with ProgressBar(name, unit, delay=delay, write=write) as progress:
        progress.begin(total=total)
        for item in items:
            yield item
            progress.add(size(item))
