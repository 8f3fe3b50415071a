"""`pointup upsample`: makes survey files and shapes denser."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.cli.input_files import Inputs
from pointup.errors import ConfigError, FileError, PointupError

if TYPE_CHECKING:
    from pointup.cli.upsample.plan import Job
    from pointup.cli.worker_group import LaunchedWorkerGroup
    from pointup.upsampling.options import UpsampleOptions

DEFAULT_RATIO = 4.0


@dataclass(frozen=True, kw_only=True)
class Upsample:
    """Make point clouds denser: survey files, shapes, whole folders.

    The points of a file are kept as they are and new ones added. The result does not depend on the
    size or order of tiles, nor on the number of processes: with `accelerate launch --config_file
    CONFIG -m pointup upsample ...` several share the work.

    Files that border on each other are one survey: no seam shows where it was cut, its points are
    as many as the ratio says, and each file gets the points made of its own. Of a point that stands
    in several files, as in tiles with a buffer, new points are made once and go to each of them.
    """

    inputs: Inputs
    """Files to upsample, or folders of them, searched at any depth."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE|DIR")]
    """File to write, its kind by its extension; of several files or a folder, a folder, which is
    made. Folders in a folder are kept."""
    model: Annotated[str | None, tyro.conf.arg(metavar="shapes|lidar|DIR|HUB_ID")] = None
    """One of the models that come with pointup, or directory or Hub repository of another; by
    default `lidar` for files of scanners (LAS, LAZ, E57, PTS, PCD, BIN), `shapes` for others."""
    ratio: Annotated[float | None, tyro.conf.arg(metavar="R")] = None
    """Points out for each point in, 1 or more, fractions too; by default 4."""
    density: Annotated[float | None, tyro.conf.arg(metavar="D")] = None
    """In place of a ratio: points per square metre on the ground (per square unit of the file's
    coordinates, if that isn't metres). Places that are denser are left alone; of one point, at most
    16 are made."""
    classes: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="CLASS ...")] = None
    """Upsample only points of these classes, as in `--classes 2 3 4 5` or `--classes 2,3,4,5`, and
    copy the others. What is not a number ends the classes: files may follow."""
    include_noise: bool = False
    """Upsample withheld points and noise (classes 7 and 18), too. Without, they are copied; the
    ratio counts the points that are upsampled, and only these are neighbours of new ones."""
    separate: bool = False
    """Each file is a survey of its own, also if it borders on others."""
    only_new: bool = False
    """Write the new points only."""
    no_originals: bool = False
    """Let the model make all points, instead of keeping those of the file; noise and other classes
    are left out, too."""
    max_distance: Annotated[float | None, tyro.conf.arg(metavar="LENGTH")] = None
    """Make no point farther than this from every measured one."""
    above_ground: bool | None = None
    """The third coordinate is a height: make no point below the lowest ones around, and give new
    points class 2 on the ground only. By default True for files of scanners and with the
    model `lidar`, False otherwise."""
    oversampling: Annotated[float | None, tyro.conf.arg(metavar="O")] = None
    """Points drafted for each one that is kept, 1 to 8, in place of what the model asks for: 1 is
    fast, 4 takes five to six times as long and fills more holes."""
    seed: int = 0
    """Decides between new points that are as good as each other."""
    tile: Annotated[float | None, tyro.conf.arg(metavar="LENGTH")] = None
    """Side of the squares that are worked on at a time, for memory and speed alone."""
    token_budget: Annotated[int | None, tyro.conf.arg(metavar="POINTS")] = None
    """Points that go through the model at a time; lower it where memory is short."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw the cloud before and after."""
    force: bool = False
    """Go ahead with a size that looks like a mistake."""

    def run(self) -> int:
        # As an interrupt does, so that nothing half-written is left.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return self._run()
        except (PointupError, ValueError, OSError):
            if os.environ.get("RANK", "0") == "0":
                raise
            # The main process tells.
            return 1
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self) -> int:
        from pointup.cli.upsample.files import upsample_survey
        from pointup.cli.upsample.plan import plan_jobs
        from pointup.cli.worker_group import LaunchedWorkerGroup
        from pointup.training.next_commands import command_after_upsampling
        from pointup.upsampling.filtering import PointFilter
        from pointup.upsampling.models import load_model

        options = self._options()
        classes, inputs = self._classes_and_inputs()
        point_filter = PointFilter(classes=classes, include_noise=self.include_noise)
        jobs, complaints = plan_jobs(inputs, self.output, self.model)
        if self.picture and len(jobs) > 1:
            raise ConfigError(f"--picture shows one file, not {len(jobs)}; draw them one by one")
        workers = LaunchedWorkerGroup(self.output.parent)
        models = {name: load_model(name, workers.device) for name in {job.model for job in jobs}}
        surveys = self._group(jobs, complaints, workers)
        for survey in surveys:
            try:
                lines, of_survey = upsample_survey(
                    survey,
                    models[survey[0].model],
                    replace(options, above_ground=self._has_heights(survey[0])),
                    workers,
                    point_filter=point_filter,
                    only_new=self.only_new,
                    tile=self.tile,
                    token_budget=self.token_budget,
                    picture=self.picture,
                    force=self.force,
                )
                complaints += of_survey
                if workers.is_main:
                    print(*lines, sep="\n")
            except (PointupError, ValueError, OSError) as error:
                complaints.append(error)
        workers.end()
        following = command_after_upsampling(self.model) if self.model and not complaints else None
        if following and workers.is_main:
            print(f"next: {following}")
        if len(complaints) == 1:
            raise complaints[0]
        for complaint in complaints:
            if workers.is_main:
                print(f"pointup: error: {' '.join(str(complaint).split())}", file=sys.stderr)
        return int(bool(complaints))

    def _group(
        self, jobs: list[Job], complaints: list[Exception], workers: LaunchedWorkerGroup
    ) -> list[list[Job]]:
        """The surveys that the files make up, as the main process sees them; it copies those that
        have no points."""
        from pointup.cli.upsample.plan import Plan, plan_surveys
        from pointup.io.files import copy_file

        plan = Plan()
        with workers.barrier():
            if workers.is_main:
                plan = plan_surveys(jobs, self.separate)
        plan = workers.from_main(plan)
        complaints += plan.complaints
        if workers.is_main:
            for line in plan.notes:
                print(f"note: {line}", file=sys.stderr)
            for job in plan.without_points:
                try:
                    copy_file(job.source, job.target)
                    print(f"{job.source}: no points in it, copied: {job.target}")
                except FileError as error:
                    complaints.append(error)
        return plan.surveys

    def _classes_and_inputs(self) -> tuple[tuple[int, ...] | None, tuple[Path, ...]]:
        """The classes, and the files, of which some may stand behind `--classes 2 3`."""
        if self.classes is None:
            return None, self.inputs
        words = [word.replace(",", " ").split() for word in self.classes]
        is_class = [bool(numbers) and all(map(str.isdecimal, numbers)) for numbers in words]
        end = is_class.index(False) if False in is_class else len(words)
        if end == 0:
            given = " ".join(self.classes)
            raise ConfigError(f"--classes {given}: give numbers, as in --classes 2,3")
        files = tuple(map(Path, self.classes[end:]))
        return tuple(int(number) for numbers in words[:end] for number in numbers), (
            *self.inputs,
            *files,
        )

    def _has_heights(self, job: Job) -> bool:
        """Whether the third coordinate of a file is a height."""
        from pointup.upsampling.models import is_survey

        if self.above_ground is not None:
            return self.above_ground
        return is_survey(job.source) or job.model == "lidar"

    def _options(self) -> UpsampleOptions:
        from pointup.upsampling.options import UpsampleOptions

        if self.ratio is not None and self.density is not None:
            raise ConfigError("--ratio and --density: give one of them")
        if self.only_new and self.no_originals:
            raise ConfigError(
                "--only-new and --no-originals: give one of them; without originals, all are new"
            )
        for name in ("tile", "token_budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
        return UpsampleOptions(
            ratio=DEFAULT_RATIO if self.ratio is None else self.ratio,
            density=self.density,
            originals=not self.no_originals,
            max_distance=self.max_distance,
            oversampling=self.oversampling,
            seed=self.seed,
        )
