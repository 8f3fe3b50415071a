"""Records the work of the emulated device: operations, waits of the host, copies, launches."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).parent.parent


@dataclass
class Log:
    """The operations, waits and copies of a piece of work on the device."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations that launch work, by name; views and allocations launch none."""
    places: Counter[str] = field(default_factory=Counter)
    """The operations by the calling line of the package, if `trace` is on."""
    waits: list[tuple[str, str]] = field(default_factory=list)
    """Kind and place of each operation that the host waited for."""
    blocking_copies: list[tuple[int, str]] = field(default_factory=list)
    """Bytes and place of each copy to the device that the host waited for."""
    copied_bytes: int = 0
    """Total bytes copied to the device."""
    launches: Counter[str] = field(default_factory=Counter)
    """Launches of Triton kernels, which are part of the operations."""

    @property
    def num_operations(self) -> int:
        return self.operations.total()


class _State(threading.local):
    quiet = False
    """Whether operations of this thread belong to the emulation itself."""


state = _State()
log, trace = Log(), False


def _place() -> str:
    """The innermost line of the package, or of train.py, on the stack."""
    for frame in reversed(traceback.extract_stack(limit=60)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "tests" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.name}: {frame.line}"
    return "elsewhere"


def note_launch(name: str) -> None:
    if state.quiet:
        return
    log.operations[name] += 1
    if trace:
        log.places[f"{_place()}  [{name}]"] += 1


def note_kernel(name: str) -> None:
    log.launches[name] += 1
    note_launch(name)


def note_wait(what: str) -> None:
    if not state.quiet:
        log.waits.append((what, _place()))


def note_copy(values: Tensor, non_blocking: bool) -> None:
    if state.quiet:
        return
    size = values.numel() * values.element_size()
    log.copied_bytes += size
    if not non_blocking and size:
        log.blocking_copies.append((size, _place()))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """In this context, operations of this thread belong to the emulation and are not recorded."""
    before, state.quiet = state.quiet, True
    try:
        yield
    finally:
        state.quiet = before


@contextlib.contextmanager
def recorded(places: bool = False) -> Iterator[Log]:
    """Log the work in this context; with `places` also the calling lines, which is slow."""
    global log, trace
    outside = log, trace
    log, trace = Log(), places
    try:
        yield log
    finally:
        log, trace = outside
