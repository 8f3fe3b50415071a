"""Logging of a run: a file for every process, and the console for the main process."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import sys
from datetime import datetime
from pathlib import Path

from pointup.errors import ConfigError
from pointup.progress import write_line
from pointup.terminal import literal, print_error

logger = logging.getLogger("pointup")


class RankLog:
    """Inside its `with` block, logging goes to `output_dir/logs/rank_N.log` and to the console.

    The file gets all messages of pointup, all warnings, the exception that ends the block, and the
    stacks of a crash in native code. The console shows, for the main process only, messages from
    level INFO on, above the progress bar; with `is_verbose` all messages of every process.
    """

    def __init__(
        self,
        output_dir: Path,
        process_index: int = 0,
        num_processes: int = 1,
        is_verbose: bool = False,
    ) -> None:
        self.path = output_dir.resolve() / "logs" / f"rank_{process_index}.log"
        self.process_index, self.num_processes = process_index, num_processes
        self.is_verbose = is_verbose

    def __enter__(self) -> RankLog:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = LogFile(self.path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: can't be written ({error.strerror}); move away what is there, or "
                "give another --output-dir"
            ) from error
        file.setFormatter(FileFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.handlers: list[logging.Handler] = [file]
        if self.is_verbose:
            self.handlers.append(ConsoleHandler(logging.DEBUG))
            self.handlers[-1].setFormatter(FileFormatter(f"[{self.process_index}] %(message)s"))
        elif self.process_index == 0:
            self.handlers.append(ConsoleHandler(logging.INFO))
        for handler in self.handlers:
            logging.getLogger().addHandler(handler)
        self.previous_level = logger.level
        logger.setLevel(logging.DEBUG)
        logging.captureWarnings(True)
        self.handles_crashes = not faulthandler.is_enabled()
        if self.handles_crashes and file.stream is not None:
            faulthandler.enable(file.stream)
        logger.debug(
            "process %d of %d, pid %d on %s, started %s: %s",
            self.process_index, self.num_processes, os.getpid(), platform.node(),
            datetime.now().astimezone().isoformat(timespec="seconds"), " ".join(sys.argv),
        )  # fmt: skip
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            # To the file only, because the caller reports the exception to the user.
            message, values = "process %d ends: %s", (self.process_index, error)
            cause = (type(error), error, error.__traceback__)
            self.handlers[0].handle(
                logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, values, cause)
            )
        if self.handles_crashes:
            faulthandler.disable()
        logging.captureWarnings(False)
        logger.setLevel(self.previous_level)
        for handler in self.handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()


class LogFile(logging.FileHandler):
    """Warns on stderr once that the disk is full, instead of a traceback for each lost message."""

    has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_warned:
            self.has_warned = True
            print_error(f"warning: {self.baseFilename}: {error.strerror}")

    def close(self) -> None:
        # With a full disk, the rest of the buffer is lost anyway.
        with contextlib.suppress(OSError):
            super().close()


class FileFormatter(logging.Formatter):
    """Starts a message of several lines, such as a table, on a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = literal(record.message)
        if "\n" in record.message.rstrip():
            record.message = "\n" + record.message
        return super().formatMessage(record)


class ConsoleHandler(logging.Handler):
    """Writes messages to stderr above the progress bar; only warnings get a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = literal(self.format(record).rstrip())
            if record.name == "py.warnings":
                text = text.partition("\n")[0]
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname.lower()}: {text}"
            write_line(text)
        except Exception:
            self.handleError(record)
