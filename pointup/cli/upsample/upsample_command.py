"""`pointup upsample`: upsamples survey files and shapes."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pointup.cli.input_files import (
    Folder,
    Inputs,
    Model,
    Picture,
    ShardOption,
    View,
    check_shown,
    parse_shard,
)
from pointup.errors import BusyError, ConfigError, PointupError
from pointup.option_help import optional
from pointup.terminal import note

if TYPE_CHECKING:
    from pointup.cli.upsample.plan import Job
    from pointup.cli.upsample.written_files import WrittenFiles
    from pointup.cli.worker_group import LaunchedWorkerGroup
    from pointup.model.upsampler import Upsampler
    from pointup.upsampling.options import UpsampleOptions


@dataclass(frozen=True, kw_only=True)
class Upsample:
    """Upsample point clouds: survey files, shapes, whole folders.

    The points of a file are kept, and new points are added. The result does not depend on tiles or
    on the number of processes. To run on several GPUs or machines, start it with
    `accelerate launch --config_file CONFIG -m pointup upsample ...`.

    Files that border on each other are one survey: there is no seam between them, the ratio holds
    for all files together, and each file gets the new points of its own points. If a point is in
    several files, as in tiles with a buffer, each of these files gets the same new points.

    `--help-all` lists all options.
    """

    RARELY_SET = (
        "bounds force ground_density include_noise max_distance no_uncertainty oversampling "
        "processes redo seed separate shard tile token_budget"
    )

    inputs: Inputs
    """Files to upsample, folders that are searched for files at any depth, or virtual point clouds
    (.vpc)."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE|DIR")]
    """Output file, with its format by the extension. For several files or a folder, an output
    folder, which is created; subfolders are kept. A name that ends in / is one of a folder. It gets
    a virtual point cloud of its LAS and LAZ files, if there are several."""
    model: Model = None
    """Included model, or directory or Hub repository of one. By default lidar for scanner formats
    (LAS, LAZ, E57, PTS, PCD, BIN), and shapes for all others; with --denoise noisy."""
    ratio: Annotated[float | None, optional("R")] = None
    """Output points for each input point, 1 or more; can be fractional. By default 4."""
    density: Annotated[float | None, optional("D")] = None
    """Target density instead of a ratio, in points per square unit of the file's coordinates, such
    as points per square metre. Denser places get no new points; one point becomes at most 16, or
    64 with the model forest."""
    classes: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="CLASS ...", help_behavior_hint="(optional, can be repeated)"),
    ] = ()
    """Upsample only points of these classes, and copy the others: `--classes 2 3 4 5` or `--classes
    2,3,4,5`. File names may follow. Distances to measured points are to points of these classes."""
    include_noise: bool = False
    """Upsample withheld points and noise (classes 7 and 18), too. By default they are copied, do
    not count for the ratio, and are not neighbours of new points."""
    bounds: Annotated[
        tuple[float, float, float, float] | None,
        optional("XMIN YMIN XMAX YMAX"),
    ] = None
    """Upsample only this part of a survey, in the unit of its files. Files that lie outside are not
    written. Of a COPC file only what the part touches is read. The new points are not those that
    the whole survey gets there."""
    shard: ShardOption = None
    """Upsample only part K of N of the files, as a job of an array. Files that border on them are
    read as well."""
    redo: bool = False
    """Upsample all files. By default, surveys that an earlier call with the same options finished
    in this output folder are skipped; an output file is always written."""
    separate: bool = False
    """Upsample each file separately, even if it borders on others."""
    only_new: bool = False
    """Write the new points only."""
    no_originals: bool = False
    """Write only points that the model generates, as many as the ratio says. No point of the file
    is kept, noise and other classes included."""
    denoise: bool = False
    """Replace noisy points: --no-originals, by default with the included model `noisy`, which was
    trained on noise of unknown strength. Without --model, a shape with little noise is upsampled
    as without --denoise."""
    max_distance: Annotated[float | None, optional("LENGTH")] = None
    """Largest distance of a new point to its nearest measured point, in the unit of the file. Where
    this leaves too little room, there are fewer points than the ratio says."""
    max_uncertainty: Annotated[float | None, optional("LENGTH")] = None
    """Largest uncertainty of a new point: the distance to the true surface, in the unit of the
    file, that nine in ten such points stay within. There may be fewer points than by the ratio."""
    no_uncertainty: bool = False
    """Leave out the attribute `uncertainty` of new points, for programs that can't read it."""
    above_ground: bool = False
    """The third coordinate is a height: no new point lies below the ground, and only new points on
    the ground get class 2. So it is by default for scanner formats, for the models lidar and
    forest, and for models fine-tuned from them."""
    no_above_ground: bool = False
    """The third coordinate is none."""
    ground_density: Annotated[float | None, optional("D")] = None
    """Largest density of the new points on the ground below crowns, where no pulse came through, in
    points per square unit; 0 for none. By default that of the ground where it is seen."""
    oversampling: Annotated[float | None, optional("O")] = None
    """Candidates of a second pass for each point that is kept, 1 to 8. 1 is fast; 4 takes five to
    six times as long and fills more holes. By default the model's own value."""
    seed: int = 0
    """Seed of the order in which candidates are compared: another one gives other new points."""
    tile: Annotated[float | None, optional("LENGTH")] = None
    """Side length of the tiles that are processed at a time, in the unit of the file. It changes
    memory use and speed only. By default tiles have at most 65,536 points."""
    token_budget: Annotated[int | None, optional("POINTS")] = None
    """Number of points that go through the model at a time; lower it if memory is short. By default
    8,192 on a CPU, and 131,072 on an accelerator."""
    processes: Annotated[int | None, optional("N")] = None
    """Number of processes that share the cores of this machine. It changes memory use and speed
    only. By default one, and for large surveys on more than four cores one for every two cores,
    with 0.8 GB each."""
    picture: Picture = None
    """Write a picture of the cloud before and after upsampling."""
    view: View = None
    """Write an HTML file to look at: before and after, side by side or faded, in a browser."""
    rasters: Folder = None
    """Write GeoTIFFs of each file before and after to this folder, in cells of a metre: lowest and
    highest point, and density. The cells of all files are of one grid. Needs rasterio."""
    force: bool = False
    """Skip the checks for an output that is huge or does not fit on the disk, and for coordinates
    in degrees."""

    def run(self) -> int:
        try:
            with ExitStack() as stack:
                return self._run(stack)
        except (PointupError, ValueError, OSError):
            if os.environ.get("RANK", "0") == "0":
                raise
            # The main process prints the error.
            return 1

    def _run(self, stack: ExitStack) -> int:
        from pointup.cli.local_group import local_group, num_local_processes
        from pointup.cli.upsample.files import upsample_survey, work_directory
        from pointup.cli.upsample.plan import group_files, needs_folder, plan_jobs
        from pointup.cli.upsample.written_files import FinishedFiles, WrittenFiles, list_files
        from pointup.cli.worker_group import LaunchedWorkerGroup
        from pointup.io.bounds import Bounds
        from pointup.upsampling.in_memory import load_model

        options, shard = self._options(), parse_shard(self.shard)
        _, inputs = self.classes_and_inputs()
        output, is_folder = Path(self.output), self.output.endswith(("/", os.sep))
        jobs, errors = plan_jobs(inputs, output, self.model, self.denoise, is_folder)
        in_folder = needs_folder(inputs, output, is_folder)
        # A picture is of points that are upsampled in this call.
        copies_rest = in_folder and not self.picture
        self._check_pictures(len(jobs))
        number = num_local_processes([job.source for job in jobs], self.processes)
        stack.enter_context(local_group(replace(self, processes=None).run, number))
        workers = LaunchedWorkerGroup(output.parent)
        self._check_units(jobs, workers)
        models = {name: load_model(name, workers.device) for name in {job.model for job in jobs}}
        without_noise = None
        if self.denoise and self.model is None:
            without_noise = load_model("shapes", workers.device)
        used = {name: [*filter(None, (model, without_noise))] for name, model in models.items()}
        bounds = Bounds.of(self.bounds) if self.bounds else None
        surveys, of_files = group_files(jobs, workers, self.separate, bounds, shard, copies_rest)
        if shard and shard[0] > 1:
            # One bad file of thousands must not fail every job of an array: shard 1 reports it.
            errors, of_files = [], []
        if shard and not surveys and workers.is_main:
            note(f"--shard {self.shard}: has no file to write; another shard writes it")
        finished = FinishedFiles(output, self._identity(options)) if in_folder else None
        written = WrittenFiles(workers.is_main, [*errors, *of_files])
        queue = [*surveys]
        for number, survey in enumerate(queue):
            model = models[survey[0].model]
            made_by = used[survey[0].model]
            identity = workers.from_main(finished.identity(survey, made_by) if finished else "")
            skips = finished is not None and not (self.redo or self.picture)
            if finished and skips and workers.from_main(finished.are_written(survey, identity)):
                written.skip(survey)
                continue
            earlier = len(written.errors)
            # The survey is held until other calls see that it is written.
            with written.keeping_errors(), work_directory(survey, workers) as directory:
                own = options.with_heights(self._has_heights(survey[0], model))
                files, of_files = upsample_survey(
                    survey, model, own, workers, self, directory, copies_rest, without_noise
                )
                written.files += files
                written.errors += of_files
                if finished and workers.is_main:
                    # Files that are made without one of their survey are made again. A picture is
                    # of a single file: the error may be of its drawing.
                    is_whole = not of_files or self.picture
                    finished.record(files, identity if is_whole else "", made_by)
            is_busy = any(isinstance(error, BusyError) for error in written.errors[earlier:])
            if finished and workers.from_main(is_busy):
                # It waits for the end of the other call, after all others.
                del written.errors[earlier:]
                queue.append(survey)
                if number >= len(surveys):
                    time.sleep(1.0)
                elif workers.is_main:
                    first = min(job.target for job in survey if not job.is_context)
                    note(f"{first}: another call upsamples into it; waiting for its end")
        if workers.is_main:
            done = {file.job.target for file in written.files}
            if finished:
                # Those of jobs of an array as well; not what calls with other options left.
                done = {job.target for job in jobs if finished.has_output(job, used[job.model])}
            self._show(written, surveys, jobs, done, models)
            if finished:
                with written.keeping_errors():
                    list_files(output, [job.target for job in jobs if job.target in done])
        workers.end()
        return written.finish(in_folder, self.model)

    def _show(
        self,
        written: WrittenFiles,
        surveys: list[list[Job]],
        jobs: list[Job],
        done: set[Path],
        models: dict[str, Upsampler],
    ) -> None:
        """Write the page and the rasters of the files that are `done`, where asked for."""
        from pointup.cli.upsample.written_files import write_job_rasters, write_view

        shown = [
            [job for job in survey if not job.is_context and job.target in done]
            for survey in surveys
        ]
        if self.view:
            of_all = [job for survey in shown for job in survey]
            with written.keeping_errors():
                write_view(of_all, self.view, lambda job: self._has_heights(job, models[job.model]))
        if self.rasters:
            num_drawn, stems = 0, Counter(job.target.with_suffix("") for job in jobs)
            output = Path(self.output)
            for survey in shown:
                with written.keeping_errors():
                    num_drawn += write_job_rasters(
                        written, survey, self.rasters, output, self.only_new, stems
                    )
            of_drawn = f"of {num_drawn:,} file{'s' * (num_drawn != 1)} before and after"
            print(f"{self.rasters}: ground, canopy and density {of_drawn}")

    def _check_pictures(self, num_files: int) -> None:
        if self.picture and num_files > 1:
            raise ConfigError(f"--picture shows one file, not {num_files}; draw them one by one")
        check_shown(self.picture, self.view, self.rasters)
        if self.view and self.bounds:
            raise ConfigError("--view shows whole files; leave out --bounds or --view")

    def _check_units(self, jobs: list[Job], workers: LaunchedWorkerGroup) -> None:
        from pointup.cli.upsample.plan import check_units

        lengths = (self.max_distance, self.max_uncertainty, self.bounds)
        has_lengths = any(given is not None for given in lengths)
        with workers.barrier():
            if workers.is_main:
                sources = [job.source for job in jobs]
                note(*check_units(sources, self.density, has_lengths, self.force))

    def _identity(self, options: UpsampleOptions) -> dict[str, Any]:
        """The options that change the result."""
        heights = ("above_ground", "no_above_ground")
        names = ("classes", "include_noise", "only_new", "bounds", *heights)
        return {**asdict(options), **{name: getattr(self, name) for name in names}}

    def classes_and_inputs(self) -> tuple[tuple[int, ...] | None, tuple[Path, ...]]:
        """The classes, and the input files; some of these may follow `--classes 2 3`."""
        classes: list[int] = []
        inputs = [*self.inputs]
        for given in self.classes:
            words = [word.replace(",", " ").split() for word in given]
            is_class = [bool(numbers) and all(map(str.isdecimal, numbers)) for numbers in words]
            end = is_class.index(False) if False in is_class else len(words)
            if end == 0:
                raise ConfigError(f"--classes {' '.join(given)}: give numbers, as in --classes 2,3")
            classes += [int(number) for numbers in words[:end] for number in numbers]
            inputs += map(Path, given[end:])
        return tuple(classes) if self.classes else None, tuple(inputs)

    def _has_heights(self, job: Job, model: Upsampler) -> bool:
        """Whether the third coordinate of a file is a height: by option, file or model."""
        from pointup.upsampling.in_memory import has_heights

        if self.above_ground or self.no_above_ground:
            return self.above_ground
        return has_heights(job.source, model.config)

    def _options(self) -> UpsampleOptions:
        from pointup.upsampling.options import DEFAULT_RATIO, UpsampleOptions

        if self.ratio is not None and self.density is not None:
            raise ConfigError("--ratio and --density: give one of them")
        if self.above_ground and self.no_above_ground:
            raise ConfigError("--above-ground and --no-above-ground: give one of them")
        originals = not (self.no_originals or self.denoise)
        if self.only_new and not originals:
            raise ConfigError(
                "--only-new and --no-originals or --denoise: give one of them; without originals, "
                "all are new"
            )
        for name in ("tile", "token_budget", "processes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
        return UpsampleOptions(
            ratio=DEFAULT_RATIO if self.ratio is None else self.ratio,
            density=self.density,
            originals=originals,
            max_distance=self.max_distance,
            max_uncertainty=self.max_uncertainty,
            uncertainty=not self.no_uncertainty,
            ground_density=self.ground_density,
            oversampling=self.oversampling,
            seed=self.seed,
        )
