"""One file upsampled into another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from pointup.apps.progress import ProgressBar
from pointup.apps.shares import LaunchedShares
from pointup.apps.window import Window
from pointup.data.clouds import os_errors
from pointup.data.files import LAS_EXTENSIONS, PointCloud, copy_points, iter_points, open_writer
from pointup.errors import ConfigError, DataError, FileError
from pointup.model import Upsampler
from pointup.upsampling.attributes import SYNTHETIC, added_dimensions
from pointup.upsampling.made import Summary
from pointup.upsampling.passes import run_passes
from pointup.upsampling.store import CHUNK_SIZE, Store, build_store
from pointup.upsampling.wishes import Wishes

MAX_RATIO = 100.0
MAX_POINTS = 2_000_000_000
# Disk space of a point that was made, and of a candidate until it is thinned out.
POINT_BYTES, CANDIDATE_BYTES = 100, 16


def upsample_file(
    source: Path,
    target: Path,
    model: Upsampler,
    wishes: Wishes,
    shares: LaunchedShares,
    *,
    only_new: bool = False,
    tile: float | None = None,
    token_budget: int | None = None,
    picture: Path | None = None,
    force: bool = False,
) -> str:
    """Upsample a file, and tell in a line what was done. All processes of `shares` call it.

    Raises PointupError in all of them when one of them meets it; then nothing is written.
    """
    began = time.monotonic()
    num_written = 0
    summary = Summary()
    hidden = not shares.is_main
    with _work_directory(target, shares) as directory, ProgressBar(source.name, hidden) as progress:
        with shares.together():
            if shares.is_main:
                _sort_points(source, directory, progress)
        with shares.together():
            store = _open_store(directory)
            _check_size(source, target, len(store), wishes, model, force)
        made = run_passes(
            store,
            model,
            wishes,
            shares,
            shares.device,
            token_budget=token_budget,
            tile=tile,
            begin=progress.begin,
            # The others are about as far as this process.
            report=lambda points: progress.add(points * shares.num_processes),
            summary=summary,
        )
        with shares.together():
            if shares.is_main:
                window = Window(store) if picture else None
                keep = wishes.originals and not only_new
                progress.begin("writing")
                num_written = _write(source, target, store, made, keep, window, progress)
                if picture and window:
                    window.draw(source, wishes.originals, picture)
    seconds = time.monotonic() - began
    line = f"{source}: {len(store):,} points in, {num_written:,} out, {seconds:.1f} s: {target}"
    return f"{line}; {_closing_words(summary, wishes)}"


def _closing_words(summary: Summary, wishes: Wishes) -> str:
    words = f"new points at most {summary.farthest:.3g} from a measured one"
    if wishes.above_ground:
        words += f", {summary.num_below:,} of them below the lowest return around them"
    return words


@contextmanager
def _work_directory(target: Path, shares: LaunchedShares) -> Iterator[Path]:
    """A directory beside the target, for as long as the work lasts."""
    path = ""
    with shares.together():
        if shares.is_main:
            with os_errors(target, "written"):
                path = mkdtemp(prefix=f".{target.name}.", suffix=".work", dir=target.parent)
    directory = Path(shares.from_main(path))
    try:
        yield directory
    finally:
        if shares.is_main:
            shutil.rmtree(directory, ignore_errors=True)


def _sort_points(source: Path, directory: Path, progress: ProgressBar) -> None:
    def chunks() -> Iterator[PointCloud]:
        progress.begin("reading")
        for chunk in iter_points(source, CHUNK_SIZE):
            yield chunk
            progress.add(len(chunk))

    try:
        build_store(chunks(), directory)
    except DataError as error:
        raise FileError(f"{source}: {error}") from None


def _open_store(directory: Path) -> Store:
    try:
        return Store(directory)
    except FileNotFoundError:
        raise FileError(
            f"{directory}: not seen by all processes; write to a folder that all machines share"
        ) from None


def _check_size(
    source: Path, target: Path, num_points: int, wishes: Wishes, model: Upsampler, force: bool
) -> None:
    """Refuse what is a mistake, or doesn't fit the disk."""
    if force:
        return
    num_out = wishes.num_out(num_points)
    size = num_out * POINT_BYTES
    if wishes.ratio > MAX_RATIO or num_out > MAX_POINTS:
        raise ConfigError(
            f"{source}: ratio {wishes.ratio:g} makes {num_out:,} points of {num_points:,}, about "
            f"{_in_units(size)}; lower it, or add --force"
        )
    if wishes.density is None:
        needed = size + int(num_out * model.config.slots_per_ratio) * CANDIDATE_BYTES
        oversampling = wishes.oversampling_of(model.config)
        if oversampling > 1:
            needed += int(oversampling * needed)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise FileError(
                f"{target}: {num_out:,} points and what it takes to make them need about "
                f"{_in_units(needed)}, and {target.parent} has {_in_units(free)}; make room, write "
                "elsewhere, or add --force"
            )


def _in_units(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _write(
    source: Path,
    target: Path,
    store: Store,
    made: Iterator[PointCloud],
    with_originals: bool,
    window: Window | None,
    progress: ProgressBar,
) -> int:
    """The file as it was, then the points made; how many points that are."""
    like = next(iter_points(source, 2))
    # Scale and offset of a LAS file made of another kind hold the whole extent.
    like.positions = store.anchor + np.array([np.zeros(3), store.high.max(axis=0)])
    added = added_dimensions(like)
    if target.suffix.lower() in LAS_EXTENSIONS:
        # LAS has a flag for it.
        added = [dimension for dimension in added if dimension.name != SYNTHETIC]
    with open_writer(target, like, added) as writer:
        if with_originals:
            copy_points(source, writer, CHUNK_SIZE)
            progress.add(writer.num_points)
        for cloud in made:
            writer.write(cloud)
            progress.add(len(cloud))
            if window:
                window.add(cloud.positions)
        return writer.num_points
