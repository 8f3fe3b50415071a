"""Handles SIGTERM and SIGHUP like Ctrl-C, so that stopped commands remove unfinished files."""

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
"""Ctrl-C; `kill` and batch systems; a closed terminal. Windows has no SIGHUP."""


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of STOP_SIGNALS; ignore further ones during clean-up.

    Signals that were ignored before, such as SIGHUP under nohup, stay ignored. Does nothing outside
    the main thread.
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
    """Defer STOP_SIGNALS to the end of the block, where the previous handler gets the first one.

    Does nothing outside the main thread.
    """
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
        # None if the handler was not installed from Python.
        if handler not in (signal.SIG_IGN, None)
    }


def start_fork_server() -> None:
    """Start the fork server of multiprocessing, unless it runs, with `STOP_SIGNALS` blocked.

    They reach the whole process group; without its server, workers end. Processes from the server
    start with these signals blocked. Not for Windows.
    """
    from multiprocessing import forkserver, resource_tracker

    # The server starts the tracker, which unblocks the signals, unless it runs.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
