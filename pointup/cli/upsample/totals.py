"""The summary at the end of `pointup upsample` on a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pointup.cli.upsample.files import Written
from pointup.cli.upsample.plan import Job

MAX_NAMED = 5
"""Skipped files that are named; of more, the number is said."""


class Totals:
    """Counts the files and points of a call."""

    def __init__(self) -> None:
        self.num_files = self.num_skipped = self.num_in = self.num_out = 0
        self.began = time.monotonic()

    def add(self, files: Sequence[Written]) -> None:
        """Count the written files of a survey."""
        written = [file for file in files if file.num_out]
        self.num_files += len(written)
        self.num_in += sum(file.num_in for file in written)
        self.num_out += sum(file.num_out for file in written)

    def skip(self, survey: Sequence[Job], is_printed: bool) -> None:
        """Count the files of a survey that are already written, and name the first ones."""
        for job in survey:
            if not job.is_context:
                self.num_skipped += 1
                if is_printed and self.num_skipped <= MAX_NAMED:
                    print(f"{job.source}: already written, skipped: {job.target}")

    def text(self, num_errors: int) -> str:
        """The summary in a line."""
        skipped = ""
        if self.num_skipped:
            skipped = f", {self.num_skipped:,} skipped, which were already written (see --redo)"
        errors = f", {num_errors:,} error{'s' * (num_errors != 1)}" if num_errors else ""
        files = "file" if self.num_files == 1 else "files"
        seconds = time.monotonic() - self.began
        return (
            f"{self.num_files:,} {files} written{skipped}{errors}: from {self.num_in:,} to "
            f"{self.num_out:,} points, {seconds:,.1f} s"
        )
