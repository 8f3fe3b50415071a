"""metrics.jsonl, the figures of a run for other programs to read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pointup.errors import ConfigError

logger = logging.getLogger("pointup")


class MetricsFile:
    """One JSON object a line, flushed line by line, each step once.

    On continuing from `resume_step` the lines after that step, of an interrupted attempt, and a
    line cut short by its end are dropped; with 0 the file starts anew. With `evaluation_due` the
    evaluation of that very step is dropped too: it will be made again. Numbers that aren't finite
    are written as null. Lines that find the disk full are written when there is room again.
    Raises ConfigError where the file can't be written at all.
    """

    def __init__(self, path: Path, resume_step: int = 0, evaluation_due: bool = False) -> None:
        self.path = path
        temporary = path.with_suffix(".tmp")
        try:
            kept = lines_up_to(path, resume_step, evaluation_due)
            temporary.write_bytes(b"".join(kept))
            temporary.replace(path)
            # Unbuffered, lest a full disk leave half a line in a buffer that can't be got rid of.
            self.file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"{path}: can't be written ({error.strerror}); move away what is there, free the "
                "disk, or give another --output-dir"
            ) from error
        self.unwritten = b""

    def write(self, record: Mapping[str, Any]) -> None:
        was_complete = not self.unwritten
        self.unwritten += json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        self.flush(is_news=was_complete)

    def flush(self, is_news: bool = False) -> None:
        """Write what found the disk full before; the log tells of a failure that `is_news`."""
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if is_news:
                logger.warning("%s: can't be written (%s) for now", self.path, error.strerror)

    def close(self) -> None:
        self.file.close()


def lines_up_to(path: Path, step: int, evaluation_due: bool = False) -> list[bytes]:
    """Lines of a metrics file up to `step`, none for step 0, without lines that aren't records."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            logger.warning("%s: dropped a line that is no record: %.60r", path, line)
        elif record["step"] < step or (
            record["step"] == step and not (evaluation_due and "validation" in record)
        ):
            kept.append(line + b"\n")
    return kept


def finite(value: Any) -> Any:
    """A nested value with plain numbers, None in place of those that aren't finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
