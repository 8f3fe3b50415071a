"""Signals that ask a command to stop: answered as Ctrl-C is, so that nothing half-made is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, `kill` and batch systems, and a terminal that is closed."""


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """The first of STOP_SIGNALS raises KeyboardInterrupt; further ones don't disturb the clean-up.

    Signals that are ignored, as SIGHUP under nohup, stay so. Off the main thread nothing changes.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {} if current_thread() is not main_thread() else _handlers()
    try:
        for number in handlers:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """STOP_SIGNALS are answered at the end, as they were to be before."""
    received: list[int] = []
    handlers = {} if current_thread() is not main_thread() else _handlers()
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)


def _handlers() -> dict[int, signal._HANDLER]:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {
        number: handler
        for number, handler in handlers.items()
        # None where something other than Python handles it.
        if handler not in (signal.SIG_IGN, None)
    }
