"""Terminal output: escaped control characters, closed streams, a terminal that is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

PIPE_CLOSED = 141
"""Exit status of a program that succeeded, but whose reader of stdout closed the pipe before."""


def literal(text: str) -> str:
    r"""`text` with unprintable characters, except line feeds and tabs, as escapes (`\x1b`).

    Escape sequences, carriage returns and bidirectional control characters in a file name could
    otherwise change the text before it.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def printable(text: str) -> str:
    """A text with file names, as valid UTF-8: bytes of a name that are not UTF-8 become \\xff."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def in_bytes(number: float) -> str:
    """A size with three digits."""
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB" if number < 999.5 else f"{number:,.0f} GB"


def one_line(error: Exception) -> str:
    """The message of an error, its lines joined."""
    return " ".join(line.strip() for line in str(error).split("\n"))


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def note(*texts: str) -> None:
    """Write notes to stderr, see `print_error`."""
    for text in texts:
        print_error(f"note: {text}")


def print_error(text: str) -> None:
    """Write escaped text (see `literal`) to stderr, and ignore a terminal that is gone."""
    with contextlib.suppress(OSError, ValueError):
        print(literal(text), file=sys.stderr, flush=True)


class OutputWithoutReader:
    """A text stream that drops what is written after its reader closed the pipe.

    With it as `sys.stdout`, a command still writes its files in `pointup ... | head`. All other
    attributes are those of the stream.

    Attributes:
        is_closed: the reader has closed the pipe.
        is_literal: what is written is escaped, see `literal`. Help has colours, and is not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.is_closed, self.is_literal = stream, False, False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(literal(text) if self.is_literal else text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        """Send the rest to the null device, also what the stream has in its buffer."""
        self.is_closed = True
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), self._stream.fileno())


class LiteralFormatter(logging.Formatter):
    """Escapes the messages of the log, see `literal`."""

    def format(self, record: logging.LogRecord) -> str:
        return literal(super().format(record))


def escape_output() -> None:
    """Escape what a command prints from now on within `status_with_output`, and what it logs."""
    if isinstance(sys.stdout, OutputWithoutReader):
        sys.stdout.is_literal = True
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LiteralFormatter())


def status_with_output(program: Callable[[], int]) -> int:
    """Run a program; returns its exit status, which is PIPE_CLOSED if stdout lost its reader.

    A program that fails keeps its status. Streams that it was started without are opened, see
    `open_closed_streams`.
    """
    open_closed_streams()
    output = OutputWithoutReader(sys.stdout)
    with contextlib.redirect_stdout(cast(TextIO, output)):
        try:
            status = program()
        except SystemExit:
            output.flush()
            if output.is_closed:
                return PIPE_CLOSED
            raise
        # Flushed here, because a closed pipe cannot be handled at exit.
        output.flush()
    return PIPE_CLOSED if output.is_closed and status == 0 else status


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device where a process was started without them.

    Python sets such streams to None, and the next file to be opened would take their descriptor,
    to which libraries write their messages.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
