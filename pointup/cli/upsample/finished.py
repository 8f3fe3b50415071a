"""Remembers which files of a folder `pointup upsample` has written, so that a call continues.

Each written file has a small file in the hidden folder `.upsampled` of the output, so that jobs of
an array do not get in each other's way.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pointup.cli.upsample.plan import Job
from pointup.io.cloud import os_errors
from pointup.model.upsampler import Upsampler

FOLDER = ".upsampled"


class FinishedFiles:
    """The files that were written into an output folder, with what each was made of.

    `options` are all options that change the result, as JSON values.
    """

    def __init__(self, output: Path, options: dict[str, Any]) -> None:
        self.output, self.options = output, options

    def identity(self, survey: Sequence[Job], model: Upsampler) -> str:
        """A digest of what the results of a survey depend on: files, options, model."""
        weights = 0
        for weight in model.state_dict().values():
            weights = zlib.crc32(weight.detach().cpu().numpy().tobytes(), weights)
        files = []
        for job in survey:
            stat = job.source.stat()
            values = [str(job.source.resolve()), stat.st_size, stat.st_mtime_ns, job.is_context]
            files.append(values)
        content = [self.options, asdict(model.config), weights, files]
        text = json.dumps(content, default=str, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def are_written(self, survey: Sequence[Job], identity: str) -> bool:
        """Whether all files of a survey were written from the same files, options and weights."""
        return all(self._is_written(job, identity) for job in survey if not job.is_context)

    def record(self, jobs: Sequence[Job], identity: str, has_files: bool = True) -> None:
        """Remember that files of a survey were written, or that there was nothing to write."""
        for job in jobs:
            path = self._path(job)
            with os_errors(path, "written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f"{path.name}.{os.getpid()}")
                size = job.target.stat().st_size if has_files else None
                part.write_text(json.dumps({"identity": identity, "bytes": size}))
                part.replace(path)

    def _is_written(self, job: Job, identity: str) -> bool:
        try:
            known = json.loads(self._path(job).read_text())
            if known == {"identity": identity, "bytes": None}:
                return True  # There was nothing to write.
            size = job.target.stat().st_size
        except (OSError, ValueError):
            return False
        return bool(known == {"identity": identity, "bytes": size})

    def _path(self, job: Job) -> Path:
        inside = job.target.relative_to(self.output)
        return self.output / FOLDER / inside.with_name(f"{inside.name}.json")
