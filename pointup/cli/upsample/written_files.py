"""The files that `pointup upsample` has written: the summary of a call, and what the next skips."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pointup.cli.input_files import describe_page
from pointup.cli.next_commands import command_after_upsampling
from pointup.cli.upsample.files import Written
from pointup.cli.upsample.plan import Job
from pointup.disk import os_errors, scratch_errors, short_name, temporary_directory, write_text
from pointup.errors import DataError, FileError, PointupError
from pointup.evaluation.rasters import aligned_cells, write_rasters
from pointup.geometry.grids import in_box
from pointup.io.bounds import Bounds
from pointup.io.cloud import LAS_EXTENSIONS, is_noise
from pointup.io.extents import FileExtent, read_extent
from pointup.io.files import iter_points
from pointup.io.length_unit import length_unit, named_system
from pointup.io.virtual_clouds import EXTENSION, write_virtual_cloud
from pointup.model.upsampler import Upsampler
from pointup.terminal import note, one_line, print_error

MAX_NAMED = 5
"""Skipped files that are named; of more, the number is said."""
# Files with other offsets differ in the last digits of a coordinate.
_SAME_PLACE = 1e-6
# Parts of the points where files overlap, of which one at a time is in memory.
_PARTS = 64


class WrittenFiles:
    """The files of a call, and the errors of those that are left out; printed in `is_main`."""

    def __init__(self, is_main: bool, errors: list[Exception]) -> None:
        self.is_main, self.errors, self.files = is_main, errors, list[Written]()
        self.num_skipped, self.began = 0, time.monotonic()

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """A block whose error is reported at the end of the call, which goes on."""
        try:
            yield
        except (PointupError, ValueError, OSError) as error:
            self.errors.append(error)

    def skip(self, survey: Sequence[Job]) -> None:
        """Count the files of a survey that are already written, and name the first ones."""
        for job in survey:
            if not job.is_context:
                self.num_skipped += 1
                if self.is_main and self.num_skipped <= MAX_NAMED:
                    print(f"{job.source}: already written, skipped: {job.target}")

    def finish(self, in_folder: bool, model: str | None) -> int:
        """Print the summary of files in a folder, the next command of a `model` that was given, and
        the errors. Returns the exit status; raises an only error.

        Other processes than the main one end with 0: the first that fails ends all, and the main
        one may still draw.
        """
        if not self.is_main:
            return 0
        if in_folder:
            print(self._summary())
        following = command_after_upsampling(model) if model and not self.errors else None
        if following:
            print(f"next: {following}")
        if len(self.errors) == 1:
            raise self.errors[0]
        for error in self.errors:
            print_error(f"pointup: error: {one_line(error)}")
        return int(bool(self.errors))

    def _summary(self) -> str:
        written = [file for file in self.files if file.num_out]
        skipped = errors = ""
        if self.num_skipped:
            skipped = f", {self.num_skipped:,} skipped, which were already written (see --redo)"
        if number := len(self.errors):
            errors = f", {number:,} error{'s' * (number != 1)}"
        num_in, num_out = (
            sum(getattr(file, name) for file in written) for name in ("num_in", "num_out")
        )
        # Nothing is said of points that an earlier call wrote.
        is_known = written or not self.num_skipped
        points = f": from {num_in:,} to {num_out:,} points" if is_known else ""
        return (
            f"{len(written):,} file{'s' * (len(written) != 1)} written{skipped}{errors}{points}, "
            f"{time.monotonic() - self.began:,.1f} s"
        )


FOLDER = ".upsampled"


class FinishedFiles:
    """The files that calls have written into an output folder, with what each was made of.

    Each has a small file in the hidden folder `.upsampled` of the output, so that jobs of an array
    do not get in each other's way. `options` are all options that change the result.
    """

    def __init__(self, output: Path, options: dict[str, Any]) -> None:
        self.output, self.options = output, options

    def identity(self, survey: Sequence[Job], models: Sequence[Upsampler]) -> str:
        """A digest of what the results of a survey depend on: files, options, models."""
        weights = 0
        for weight in [weight for model in models for weight in model.state_dict().values()]:
            weights = zlib.crc32(weight.detach().cpu().numpy().tobytes(), weights)
        files = [[str(job.source.resolve()), job.state[1:], job.is_context] for job in survey]
        of_models = [(asdict(model.config), model.calibration) for model in models]
        content = [self.options, of_models, weights, files]
        text = json.dumps(content, default=str, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def are_written(self, survey: Sequence[Job], identity: str) -> bool:
        """Whether all files of a survey were written from the same files, options and weights."""
        own = [job for job in survey if not job.is_context]
        return all(self._is_written(job, "survey", identity) for job in own)

    def has_output(self, job: Job, models: Sequence[Upsampler]) -> bool:
        """Whether a file has an output that is of these options and weights, in any survey."""
        return self._is_written(job, "file", self.identity([job], models))

    def record(self, files: Sequence[Written], identity: str, models: Sequence[Upsampler]) -> None:
        """Remember that files of a survey were written, or that there was nothing to write."""
        for file in files:
            path = self._path(file.job)
            with os_errors(path, "written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                known: dict[str, Any] = {"survey": identity, "bytes": None}
                if file.num_out:
                    known["bytes"] = file.job.target.stat().st_size
                    known["file"] = self.identity([file.job], models)
                write_text(path, json.dumps(known))

    def _is_written(self, job: Job, key: str, value: str) -> bool:
        try:
            known = json.loads(self._path(job).read_text())
            # Without a size there was nothing to write.
            size = job.target.stat().st_size if known["bytes"] is not None else None
        except (OSError, ValueError):
            return False
        return bool(known["bytes"] == size and known.get(key) == value)

    def _path(self, job: Job) -> Path:
        inside = job.target.relative_to(self.output)
        return self.output / FOLDER / inside.with_name(f"{short_name(inside)}.json")


def write_view(jobs: Sequence[Job], path: Path, has_heights: Callable[[Job], bool]) -> None:
    """Show the files of jobs before and after, and print where; a note if there are none.

    `has_heights` says whether the third coordinate of a file is a height. Raises FileError if the
    file can't be written.
    """
    from pointup.visualization.viewer.document import write_before_after

    if not jobs:
        note(f"{path}: no file to show, not written")
        return
    sources, targets = ([getattr(job, side) for job in jobs] for side in ("source", "target"))
    up = "z" if has_heights(jobs[0]) else None
    print(describe_page(path, write_before_after(sources, targets, path, up=up)))


def list_files(output: Path, targets: Sequence[Path]) -> None:
    """List the written LAS and LAZ files of an output folder in a virtual point cloud in it, named
    like the folder, if there are several, or an older list. Jobs of an array list what is there
    when they end."""
    files = [path for path in targets if path.suffix.lower() in LAS_EXTENSIONS]
    path = output / f"{output.resolve().name}{EXTENSION}"
    if len(files) > 1 or (files and path.exists()):
        number = write_virtual_cloud(path, files)
        print(f"{path}: a virtual point cloud of {number:,} file{'s' * (number != 1)}")


def write_job_rasters(
    call: WrittenFiles,
    survey: Sequence[Job],
    folder: Path,
    output: Path,
    with_sources: bool,
    stems: Mapping[Path, int],
) -> int:
    """Write rasters of files of a survey before and after, noise left out, in cells of a metre.

    Named like the files in the folder `output`, with the extension where several have one of the
    `stems`. `with_sources`: outputs hold new points only. Cells on the border of a file also have
    the points of the files beside it. Returns the number of files that have rasters: errors of the
    others are kept in `call`. Raises FileError for an extent.
    """
    number = 0
    extents = {path: read_extent(path) for job in survey for path in (job.source, job.target)}
    for job in survey:
        with call.keeping_errors():
            corners = np.array([extents[job.source].low, extents[job.source].high])
            if job.bounds is not None:
                corners = corners.clip(job.bounds.low, job.bounds.high)
            low = np.minimum(corners[0], extents[job.target].low)
            high = np.maximum(corners[1], extents[job.target].high)
            try:
                metre = length_unit(job.source, with_heights=False).of_metres(1.0)
                cells = aligned_cells(low, high, metre)
            except DataError as error:
                raise FileError(f"{job.source}: {error}") from None
            inside = job.target.relative_to(output) if job.target != output else Path(output.name)
            name = inside.name if stems[job.target.with_suffix("")] > 1 else inside.stem
            after = ["source", "target"] if with_sources else ["target"]
            for side, kinds in {"before": ["source"], "after": after}.items():
                files = {
                    path: other
                    for other in survey
                    for path in (getattr(other, kind) for kind in kinds)
                    if cells.bounds.touch(extents[path].low, extents[path].high)
                }
                chunks = _points_in(cells.bounds, files, extents)
                stem = (folder / inside).with_name(f"{name}_{side}")
                write_rasters(stem, chunks, cells, named_system(job.source))
            number += 1
    return number


def _points_in(
    area: Bounds, files: Mapping[Path, Job], extents: Mapping[Path, FileExtent]
) -> Iterator[np.ndarray]:
    """The points (n, 3) of files of jobs in an area, without noise; a point in several files once.

    Points where files overlap, which may be all, are on the disk until all files are read."""
    with temporary_directory() as folder:
        for path, job in files.items():
            others = [extents[other] for other, of in files.items() if of is not job]
            for cloud in iter_points(path, bounds=area):
                kept = ~is_noise(cloud)
                if job.bounds is not None:
                    kept &= job.bounds.inside(cloud.positions)
                points = cloud.positions[kept]
                recur = np.zeros(len(points), bool)
                for other in others:
                    recur |= in_box(points, other.low - _SAME_PLACE, other.high + _SAME_PLACE)
                yield points[~recur]
                points = points[recur]
                part = np.round(points[:, 1] / _SAME_PLACE) % _PARTS
                for number in np.unique(part):
                    shared = folder / f"{number:.0f}.f64"
                    with scratch_errors(shared), shared.open("ab") as file:
                        file.write(points[part == number].tobytes())
        for shared in folder.glob("*.f64"):
            points = np.fromfile(shared).reshape(-1, 3)
            yield points[np.unique(np.round(points / _SAME_PLACE), axis=0, return_index=True)[1]]
