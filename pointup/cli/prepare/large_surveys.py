"""Prepares surveys by the thousand files: region by region, resumed where it stopped, in shards."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointup.cli.prepare.new_dataset import Making
from pointup.cli.prepare.summary import note
from pointup.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pointup.datasets.block_pairs import MakePairs, RegionTiling
    from pointup.datasets.pair_writer import DatasetPart
    from pointup.datasets.regions import Region, RegionSplit, SurveyIndex
    from pointup.io.extents import FileExtent


NO_TRAINING_PAIRS = "no training pairs are left; try a smaller --tile or --strip"


@dataclass(frozen=True)
class LargeSurvey:
    """A survey of one or two sides that is prepared by regions.

    Attributes:
        sides: the files of each side.
        extents: their extents; None for files that can't be used.
        unreadable: why they can't be used.
        index: which files each region needs.
        block: side length of a block in tiles, smaller than asked for if there are few blocks.
        split: which blocks are for validation.
    """

    sides: list[list[Path]]
    extents: list[list[FileExtent | None]]
    unreadable: list[str]
    index: SurveyIndex
    block: int
    split: RegionSplit


def read_headers(making: Making, sides: list[list[Path]], tile: float, block: int) -> LargeSurvey:
    """Read the extents of all files, in all processes, index them and choose validation blocks.

    Blocks of `block` tiles are halved while there are too few of them to hold out the share of
    `making`.
    """
    from pointup.datasets.regions import index_survey, split_regions
    from pointup.io.extents import read_extent

    paths = [path for side in sides for path in side]
    found = making.each_or_none([partial(read_extent, path) for path in paths], "reading headers")
    extents = [[next(found) for _ in side] for side in sides]
    unreadable, making.left_out[:] = list(making.left_out), []
    assert making.seed is not None
    while True:
        width = tile * block
        index = index_survey(extents, width)
        split = split_regions(extents, index, width, making.validation, making.seed)
        if block == 1 or not making.validation or split.num_blocks * making.validation >= 1:
            return LargeSurvey(sides, extents, unreadable, index, block, split)
        block //= 2


def prepare_regions(
    making: Making,
    survey: LargeSurvey,
    tiling: RegionTiling,
    make: MakePairs,
    copies: float,
    info: dict[str, Any],
    shard: tuple[int, int] | None,
) -> int:
    """Make the dataset of a survey, or of a shard (k, n) of it. Returns the exit status.

    What an interrupted call has finished is used. A point of the survey is in `copies` pairs on
    average. A shard may be without pairs, so that all shards can be joined; other datasets without
    training pairs raise DataError.
    """
    from pointup.datasets.pair_writer import (
        PartSource,
        assemble,
        read_part,
        total,
        total_rows,
    )
    from pointup.datasets.regions import shard_of

    regions = survey.index.regions
    if not regions:
        raise making.nothing_usable("no region has points of every side", survey.unreadable)
    if shard is not None:
        # The same answer for each job of an array.
        if shard[1] > len(regions):
            raise ConfigError(
                f"--shard {shard[0]}/{shard[1]}: the survey has {len(regions)} regions; give fewer "
                "shards"
            )
        regions = tuple(shard_of(regions, shard))
        info = {**info, "shard": list(shard)}
    making.check_same_options({**_identity(survey, tiling, info), "shard": shard})
    _make_parts(making, survey, regions, tiling, make)

    parts = [read_part(_part_folder(making, region)) for region in regions]
    making.left_out += survey.unreadable
    making.left_out += dict.fromkeys(text for part in parts for text in part.facts["left_out"])
    # A file has points in several regions.
    noise = {name: number for part in parts for name, number in part.facts["noise"].items()}
    note_left_out_noise(sum(noise.values()))
    num_filled, num_tiles = total(parts, "num_filled"), total(parts, "num_tiles")
    if num_tiles < 0.9 * num_filled:
        note(
            f"left out {num_filled - num_tiles:,} of {num_filled:,} tiles, which have fewer than "
            f"{tiling.fewest_points} points (see --tile, --min-points)"
        )
    num_read = total(parts, "points_in_tiles")
    note_left_out_points(total(parts, "num_repeated"), total(parts, "num_outside"), num_read)
    making.strip = strip_remark(tiling.strip, parts, copies)
    if shard is None and not total_rows(parts, "train"):
        # The remedy is other options, which can't continue from these parts.
        shutil.rmtree(making.scratch / "parts")
        raise making.nothing_usable(NO_TRAINING_PAIRS)
    sources = [PartSource(part, _part_folder(making, part)) for part in parts]
    info = making.description(
        {**info, "points_in_tiles": round(copies * num_read), "regions": len(regions)}
    )
    making.unfinished.mkdir()
    assemble(sources, making.unfinished, {**info, "left_out": making.left_out})
    return making.publish()


def strip_remark(strip: float, parts: Sequence[DatasetPart], copies: float) -> str:
    """The remark for the summary on the strip around validation tiles, from the facts of parts."""
    from pointup.datasets.pair_writer import total

    in_tiles, repeated, outside = (
        total(parts, fact) for fact in ("points_in_tiles", "num_repeated", "num_outside")
    )
    offered = copies * (in_tiles - repeated - outside)
    share = 1 - total(parts, "points_in_pairs") / max(offered, 1)
    return f"a strip of {strip:g} around them left out ({share:.0%})"


def _make_parts(
    making: Making,
    survey: LargeSurvey,
    regions: Sequence[Region],
    tiling: RegionTiling,
    make: MakePairs,
) -> None:
    """Make the parts that are missing; the points of a file are removed after its last region."""
    from pointup.datasets.block_pairs import make_part, sort_into

    making.remove_stale()
    todo = [region for region in regions if not _part_folder(making, region).exists()]
    if len(todo) < len(regions):
        note(f"continuing: {len(regions) - len(todo):,} of {len(regions):,} regions are finished")
    if not todo:
        return
    wanted = frozenset(region.xy for region in regions)
    left: Counter[tuple[int, int]] = Counter(chain.from_iterable(map(_files_of, todo)))

    def sorting(region: Region) -> Iterator[Callable[[], None]]:
        for side, number in _files_of(region):
            if (side, number) not in started:
                started.add((side, number))
                extent = survey.extents[side][number]
                assert extent is not None
                folder = _sorted_folder(making, side, number)
                yield partial(sort_into, folder, survey.sides[side][number], extent, tiling, wanted)

    def calls() -> Iterator[Callable[[], None]]:
        # The files of the next region are sorted while a region waits for the last of its own.
        for region, following in zip(todo, [*todo[1:], None], strict=True):
            yield from sorting(region)
            if following is not None:
                yield from sorting(following)
            folders = tuple(
                tuple(_sorted_folder(making, side, number) for number in numbers)
                for side, numbers in enumerate(region.files)
            )
            place = _part_folder(making, region)
            around = survey.split.held_out_around(region, tiling.strip)
            yield partial(make_part, place, region, folders, tiling, making.stem, make, around)

    started: set[tuple[int, int]] = set()
    finished = 0
    num_calls = len(todo) + len(left)
    for _ in making.each(calls(), num_calls, "files and regions"):
        # Results come in the order of the calls, but parts appear when they are complete.
        while finished < len(todo) and _part_folder(making, todo[finished]).exists():
            for side, number in _files_of(todo[finished]):
                left[side, number] -= 1
                if not left[side, number]:
                    folder = _sorted_folder(making, side, number)
                    if folder.is_dir():
                        shutil.rmtree(folder)
            finished += 1
    if finished < len(todo):
        raise DataError(": ".join(["a region could not be made", *making.left_out[:1]]))


def _files_of(region: Region) -> list[tuple[int, int]]:
    return [(side, number) for side, files in enumerate(region.files) for number in files]


def _part_folder(making: Making, region: Region | DatasetPart) -> Path:
    return making.scratch / "parts" / f"{region.number:07}"


def _sorted_folder(making: Making, side: int, number: int) -> Path:
    return making.scratch / "sorted" / f"{side}-{number}"


def _identity(survey: LargeSurvey, tiling: RegionTiling, info: dict[str, Any]) -> dict[str, Any]:
    """What a continued call must have in common with the interrupted one, as JSON values."""
    files = [
        [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
            for path in side
            if (stat := path.stat())
        ]
        for side in survey.sides
    ]
    values: dict[str, Any] = json.loads(json.dumps({**info, **asdict(tiling)}, default=str))
    return {**values, "files": files}


def note_left_out_noise(num_points: int) -> None:
    """Print how many points of a survey were left out as noise, if any."""
    if num_points:
        note(f"left out {num_points:,} points: noise, withheld or synthetic (see --include-noise)")


def note_left_out_points(num_repeated: int, num_outside: int, num_read: int) -> None:
    """Print how many of `num_read` points in tiles were left out, if any, and why.

    `num_repeated` are there twice, `num_outside` are on ground that only one survey covers.
    """
    if num_repeated:
        note(f"left out {num_repeated:,} points that are at the position of another point")
    if num_outside:
        note(
            f"left out {num_outside:,} points ({num_outside / num_read:.1%} of those in tiles of "
            "both surveys) on ground that only one survey covers"
        )
