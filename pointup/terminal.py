"""What is written to a terminal that may be closed, or gone, and that obeys what it reads."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def literal(text: str) -> str:
    """`text` with what a terminal would obey, other than line ends and tabs, shown by its number.

    Escape sequences, carriage returns and the marks that turn the direction of writing would let a
    name change what stands before it.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def print_error(text: str) -> None:
    """Write to stderr, literally, unless its terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        print(literal(text), file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr empty ones.

    Python has None for them then, and the next file that is opened becomes what libraries write
    their messages to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
