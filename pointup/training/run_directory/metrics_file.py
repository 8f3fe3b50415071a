"""Writes metrics.jsonl, the metrics of a run for other programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pointup.disk import os_errors, written_whole
from pointup.evaluation.report import finite

logger = logging.getLogger("pointup")


class MetricsFile:
    """Writes one JSON object per line, flushed line by line, each step once.

    A run that continues from `resume_step` drops the lines of later steps, written by an
    interrupted attempt, and a truncated last line; with 0 the file starts empty. With
    `evaluation_due` the evaluation of that step is dropped too, because it is repeated. Non-finite
    numbers are written as null. Lines that a full disk rejects are written once there is space.
    Raises FileError if the file can't be written.
    """

    def __init__(self, path: Path, resume_step: int = 0, evaluation_due: bool = False) -> None:
        self.path, self.unwritten = path, b""
        with os_errors(path, "written"):
            kept = lines_up_to(path, resume_step, evaluation_due)
            with written_whole(path, is_sole_writer=True) as part:
                part.write_bytes(b"".join(kept))
            # Unbuffered, because a full disk would leave a partial line in the buffer.
            self.file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        was_complete = not self.unwritten
        self.unwritten += json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        self.flush(is_news=was_complete)

    def flush(self, is_news: bool = False) -> None:
        """Write the lines that a full disk rejected; with `is_news` the log warns on failure."""
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if is_news:
                logger.warning("%s: can't be written (%s) for now", self.path, error.strerror)

    def close(self) -> None:
        self.file.close()


def lines_up_to(path: Path, step: int, evaluation_due: bool = False) -> list[bytes]:
    """Lines of a metrics file up to `step` (none for step 0), without lines that aren't records."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            logger.warning("%s: dropped a line that is no record: %.60r", path, line)
            continue
        if record["step"] < step or (
            record["step"] == step and not (evaluation_due and "validation" in record)
        ):
            kept.append(line + b"\n")
    return kept
