"""Writes the HTML file of `pointup upsample --view`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pointup.cli.upsample.plan import Job
from pointup.visualization.viewer import write_before_after


def write_view(jobs: Sequence[Job], path: Path, has_heights: Callable[[Job], bool]) -> None:
    """Show the files of jobs before and after, and print where; a note if there are none.

    `has_heights` says whether the third coordinate of a file is a height. Raises FileError if the
    file can't be written.
    """
    # A file with nothing to write has no output.
    written = [job for job in jobs if job.target.exists()]
    if not written:
        print(f"note: {path}: no file to show, not written", file=sys.stderr)
        return
    sources, targets = ([getattr(job, side) for job in written] for side in ("source", "target"))
    up = "z" if has_heights(written[0]) else None
    size = write_before_after(sources, targets, path, up=up)
    print(f"{path}: {size / 1e6:.1f} MB; open it in a browser")
