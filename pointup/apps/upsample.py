"""`pointup upsample`: makes survey files and shapes denser."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.apps.inputs import Inputs, find_inputs
from pointup.errors import ConfigError, FileError, PointupError

if TYPE_CHECKING:
    from pointup.upsampling.wishes import Wishes

DEFAULT_RATIO = 4.0


@dataclass(frozen=True, kw_only=True)
class Upsample:
    """Make point clouds denser: survey files, shapes, whole folders.

    The points of a file are kept as they are and new ones added. The result does not depend on the
    size or order of tiles, nor on the number of processes: with `accelerate launch --config_file
    CONFIG -m pointup upsample ...` several share the work.
    """

    inputs: Inputs
    """Files to upsample, or folders of them."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE|DIR")]
    """File to write, its kind by its extension; of several files or a folder, a folder."""
    model: Annotated[str | None, tyro.conf.arg(metavar="shapes|lidar|DIR|HUB_ID")] = None
    """One of the models that come with pointup, or directory or Hub repository of another; by
    default `lidar` for LAS and LAZ files, and `shapes` for all others."""
    ratio: Annotated[float | None, tyro.conf.arg(metavar="R")] = None
    """Points out for each point in, 1 or more, fractions too; by default 4."""
    density: Annotated[float | None, tyro.conf.arg(metavar="D")] = None
    """In place of a ratio: points per square metre on the ground (per square unit of the file's
    coordinates, if that isn't metres). Places that are denser are left alone; of one point, at most
    16 are made."""
    only_new: bool = False
    """Write the new points only."""
    no_originals: bool = False
    """Let the model make all points, instead of keeping those of the file."""
    max_distance: Annotated[float | None, tyro.conf.arg(metavar="LENGTH")] = None
    """Make no point farther than this from every measured one."""
    above_ground: bool | None = None
    """The third coordinate is a height: make no point below the lowest ones around, and give new
    points class 2 on the ground only. By default True for LAS and LAZ files, False for others."""
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
        from pointup.apps.shares import LaunchedShares
        from pointup.apps.upsample_file import upsample_file
        from pointup.upsampling.models import is_survey, load_model, shipped_for

        wishes = self._wishes()
        jobs, complaints = self._plan()
        shares = LaunchedShares(self.output.parent)
        names = [self.model or shipped_for(source) for source, _ in jobs]
        models = {name: load_model(name, shares.device) for name in set(names)}
        for (source, target), name in zip(jobs, names, strict=True):
            above_ground = self.above_ground
            if above_ground is None:
                above_ground = is_survey(source) or name == "lidar"
            try:
                line = upsample_file(
                    source,
                    target,
                    models[name],
                    replace(wishes, above_ground=above_ground),
                    shares,
                    only_new=self.only_new,
                    tile=self.tile,
                    token_budget=self.token_budget,
                    picture=self.picture,
                    force=self.force,
                )
                if shares.is_main:
                    print(line)
            except (PointupError, ValueError, OSError) as error:
                complaints.append(error)
        shares.end()
        if len(complaints) == 1:
            raise complaints[0]
        for complaint in complaints:
            if shares.is_main:
                print(f"pointup: error: {' '.join(str(complaint).split())}", file=sys.stderr)
        return int(bool(complaints))

    def _wishes(self) -> Wishes:
        from pointup.upsampling.wishes import Wishes

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
        return Wishes(
            ratio=DEFAULT_RATIO if self.ratio is None else self.ratio,
            density=self.density,
            originals=not self.no_originals,
            max_distance=self.max_distance,
            oversampling=self.oversampling,
            seed=self.seed,
        )

    def _plan(self) -> tuple[list[tuple[Path, Path]], list[Exception]]:
        """Which file becomes which, and what is wrong with those left out."""
        from pointup.data.files import point_extensions, writable_extensions

        if not self.inputs:
            raise ConfigError(f"no input: name files or folders ({' '.join(point_extensions)})")
        sources: list[Path] = []
        complaints: list[Exception] = []
        for path in self.inputs:
            try:
                sources += find_inputs([path], point_extensions)
            except FileError as error:
                complaints.append(error)
        into_folder = len(self.inputs) > 1 or self.inputs[0].is_dir() or self.output.is_dir()
        folder = self.output if into_folder else self.output.parent
        if not folder.is_dir():
            raise FileError(f"{folder}: there is no such folder to write to; make it")
        if not os.access(folder, os.W_OK):
            raise FileError(f"{folder}: can't be written to; choose another folder")
        if self.picture and len(sources) > 1:
            raise ConfigError(f"--picture shows one file, not {len(sources)}; draw them one by one")
        jobs: dict[Path, Path] = {}
        for source in sources:
            target = folder / written_name(source) if into_folder else self.output
            if target.suffix.lower() not in writable_extensions:
                raise FileError(
                    f"{target}: unknown extension {target.suffix!r} to write; known are "
                    f"{' '.join(writable_extensions)}"
                )
            if target.resolve() == source.resolve():
                complaints.append(FileError(f"{source}: is the output, too; write elsewhere"))
            elif target in jobs:
                complaints.append(
                    FileError(f"{source}: {jobs[target]} has the same name; write elsewhere")
                )
            else:
                jobs[target] = source
        return [(source, target) for target, source in jobs.items()], complaints


def written_name(source: Path) -> str:
    """Name of an upsampled file in a folder: the same, of a kind that can be written."""
    if source.name.lower().endswith(".copc.laz"):
        return source.name[: -len(".copc.laz")] + ".laz"
    return source.stem + ".ply" if source.suffix.lower() == ".obj" else source.name
