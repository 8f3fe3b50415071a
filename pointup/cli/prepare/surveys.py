"""`pointup prepare pairs` and `thin`: their tiles and checks, and pairs from survey files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pointup.cli.coordinate_systems import note_mixed, notes_on_systems
from pointup.cli.input_files import Inputs, ShardOption, find_inputs, name_inputs, parse_shard
from pointup.cli.prepare.large_surveys import (
    note_left_out_noise,
    note_left_out_points,
    prepare_regions,
    read_headers,
)
from pointup.cli.prepare.new_dataset import Making, NewDataset
from pointup.cli.prepare.summary import note
from pointup.errors import ConfigError, DataError
from pointup.terminal import printable

if TYPE_CHECKING:
    from pointup.datasets.block_pairs import BlockPairs, MakePairs
    from pointup.datasets.pair import Pair
    from pointup.datasets.surveys import Place


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of a survey. Lengths are in the unit of the files."""

    tile: float = 10.0
    """Side length of a tile, in the unit of the files."""
    min_points: int = 32
    """Leave out tiles with fewer points than this in source or target."""
    block: int = 4
    """Side length in tiles of the squares that belong to training or validation as a whole."""
    strip: Annotated[
        float | None, tyro.conf.arg(metavar="LENGTH", help_behavior_hint="(optional)")
    ] = None
    """Width of the strip of left-out points around validation tiles, in the unit of the files. No
    training point is closer to a validation point. By default half a tile."""
    separate: bool = False
    """Treat each file as a separate survey, with coordinates of its own."""
    include_noise: bool = False
    """Keep noise (classes 7 and 18), withheld points, and points with the synthetic flag, which are
    not measured. By default they are left out."""

    def __post_init__(self) -> None:
        if not self.tile > 0 or self.min_points < 1 or self.block < 1:
            raise ConfigError(
                f"--tile {self.tile} --min-points {self.min_points} --block {self.block}: "
                "each must be greater than 0"
            )
        if self.strip is not None and not 0 <= self.strip < float("inf"):
            raise ConfigError(f"--strip {self.strip}: must be a length of at least 0")

    @property
    def strip_width(self) -> float:
        return self.tile / 2 if self.strip is None else self.strip


def note_overlapping(places: list[Place]) -> None:
    """Print a note if separate surveys overlap, which then may share ground."""
    import numpy as np

    extents = [place.extent(-1) for place in places]
    low, high = (np.array([extent[end][:2] for extent in extents]) for end in (0, 1))
    for number, place in enumerate(places):
        overlap = (low[number] < high[:number]).all(axis=1) & (low[:number] < high[number]).all(
            axis=1
        )
        if overlap.any():
            note(
                f"{places[int(np.argmax(overlap))].stem} and {place.stem} overlap: if their "
                "coordinate system is the same, leave out --separate, or validation pairs of one "
                "file show ground that training pairs of another show"
            )
            return


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Make pairs from a sparse and a dense survey of the same area: tiles with points of both.

    Points on ground that only one of the surveys covers are left out.
    """

    source: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Sparse survey: files, or folders of files. All files of a side are one survey, in the same
    coordinate system as the other side."""
    target: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Dense survey of the same area. With --separate, as many files as --source, in the same
    order."""
    shard: ShardOption = None
    """Make only part K of N of the dataset, as a job of an array; `pointup prepare join` links all
    parts. For surveys of more than 200 MB."""
    tiling: Tiling = field(default_factory=Tiling)
    dataset: NewDataset

    def run(self) -> int:
        shard = parse_shard(self.shard)
        make = partial(_from_two_surveys, tile=self.tiling.tile, min_points=self.tiling.min_points)
        sides = [_survey_files(self.source), _survey_files(self.target)]
        if self.tiling.separate and len(sides[0]) != len(sides[1]):
            raise ConfigError(
                f"--separate pairs files in their order, but --source has {len(sides[0])} and "
                f"--target {len(sides[1])}: name as many of each"
            )
        info = {"command": "prepare pairs", "source": self.source, "target": self.target}
        tiling = self.tiling
        fewest = tiling.min_points
        return _cut_surveys(sides, tiling, self.dataset, fewest, 1.0, make, info, shard)


@dataclass(frozen=True, kw_only=True)
class Thin:
    """Make pairs from one dense survey: the source of each tile is thinned from its points."""

    inputs: Inputs
    """Dense survey: files, or folders of files."""
    ratio: float = 4.0
    """Target points for each source point."""
    pattern: Literal["random", "poisson", "scanline", "mixed"] = "random"
    """Thinning pattern of the source: random, poisson (evenly spaced), scanline (whole scan lines),
    or mixed (all of them in turn)."""
    target: Literal["rest", "all"] = "rest"
    """Points of the target. rest: all points that are not in the source, as if from another survey.
    all: all points, source included, which makes scores look better than they are."""
    shard: ShardOption = None
    """Make only part K of N of the dataset, as a job of an array; `pointup prepare join` links all
    parts. For surveys of more than 200 MB."""
    tiling: Tiling = field(default_factory=Tiling)
    dataset: NewDataset

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"--ratio {self.ratio}: must be at least 1")

    def run(self) -> int:
        from pointup.datasets.block_pairs import fewest_dense_points

        shard = parse_shard(self.shard)
        disjoint = self.target == "rest"

        make = partial(
            _from_one_survey,
            tile=self.tiling.tile,
            ratio=self.ratio,
            pattern=self.pattern,
            disjoint=disjoint,
            seed=self.dataset.seed,
            min_points=self.tiling.min_points,
        )
        info = {"command": "prepare thin", "inputs": self.inputs, "ratio": self.ratio}
        info |= {"pattern": self.pattern, "target": self.target}
        fewest = fewest_dense_points(self.tiling.min_points, self.ratio, disjoint)
        sides = [_survey_files(self.inputs)]
        # Average number of pairs that a point of the survey is in.
        copies = 1.0 if disjoint else 1 + 1 / self.ratio
        return _cut_surveys(sides, self.tiling, self.dataset, fewest, copies, make, info, shard)


def _from_two_surveys(place: Place, **options: Any) -> partial[BlockPairs]:
    """The function that makes the pairs of a block of two surveys."""
    from pointup.datasets.block_pairs import two_survey_pairs

    sides = place.folders(0), place.folders(1)
    return partial(two_survey_pairs, *sides, stem=place.stem, **options)


def _from_one_survey(place: Place, **options: Any) -> partial[BlockPairs]:
    """The function that makes the pairs of a block of a survey by thinning."""
    from pointup.datasets.block_pairs import thinned_pairs

    return partial(thinned_pairs, place.folders(0), stem=place.stem, **options)


def _survey_files(paths: Sequence[Path]) -> list[Path]:
    from pointup.io.files import point_extensions

    return find_inputs(paths, point_extensions)


def _cut_surveys(
    sides: list[list[Path]],
    tiling: Tiling,
    dataset: NewDataset,
    fewest_points: int,
    copies: float,
    make: MakePairs,
    info: dict[str, Any],
    shard: tuple[int, int] | None,
) -> int:
    """Sort the points into tiles, split the tiles into training and validation, write the pairs.

    `make` returns a function that makes the pairs of a block of tiles. A point of the surveys is in
    `copies` pairs on average.
    """
    import numpy as np

    from pointup.datasets.block_pairs import blocks_of
    from pointup.datasets.regions import LARGE_BYTES, is_large
    from pointup.datasets.surveys import HeldOutTiles, hold_out

    check_systems(sides, tiling.separate)
    info |= {**asdict(tiling), "strip": tiling.strip_width, **_surveys(sides, tiling)}
    if not tiling.separate and is_large([path for side in sides for path in side]):
        return _cut_regions(sides, tiling, dataset, fewest_points, copies, make, info, shard)
    if shard is not None:
        raise ConfigError(
            f"--shard {shard[0]}/{shard[1]}: for surveys of more than "
            f"{LARGE_BYTES / 1e6:.0f} MB without --separate; leave it out"
        )
    with dataset.making() as making:
        places = _sort_places(making, sides, tiling)
        note_overlapping(places)
        tiles = [place.tiles_with(fewest_points) for place in places]
        if not any(map(len, tiles)):
            raise _no_tiles(making, places, tiling, fewest_points)
        num_tiles = sum(map(len, tiles))
        num_filled = sum(len(place.tiles_with(1)) for place in places)
        if num_tiles < 0.9 * num_filled:
            note(
                f"left out {num_filled - num_tiles:,} of {num_filled:,} tiles, which have fewer "
                f"than {fewest_points} points (see --tile, --min-points)"
            )
        weights = [place.num_points(xy) for place, xy in zip(places, tiles, strict=True)]
        held_out = hold_out(tiles, dataset.validation, dataset.seed, tiling.block, weights)
        calls: dict[bool, list[partial[BlockPairs]]] = {False: [], True: []}
        for place, tile_xy, held in zip(places, tiles, held_out, strict=True):
            around = HeldOutTiles(tiling.tile, tile_xy[held], tiling.strip_width)
            for split in calls:
                for block_xy, names in blocks_of(place.stem, tile_xy[held == split], tiling.block):
                    near = None if split else around.near_block(block_xy, tiling.block)
                    call = partial(make(place), block_xy=block_xy, names=names, held_out=near)
                    calls[split].append(call)
        num_read = sum(int(numbers.sum()) for numbers in weights)
        num_repeated = num_outside = num_written = 0

        def pairs(split: bool, title: str) -> Iterator[Pair]:
            nonlocal num_repeated, num_outside, num_written
            for found in making.each(calls[split], len(calls[split]), title):
                num_written += sum(len(pair.source) + len(pair.target) for pair in found.pairs)
                num_repeated += found.num_repeated
                num_outside += found.num_outside
                yield from found.pairs
            if split:
                note_left_out_points(num_repeated, num_outside, num_read)
            if split and any(map(np.any, held_out)):
                share = 1 - num_written / (copies * (num_read - num_repeated - num_outside))
                making.strip = (
                    f"a strip of {tiling.strip_width:g} around them left out ({share:.0%})"
                )

        info["points_in_tiles"] = round(copies * num_read)
        making.remedy = "try a smaller --tile, --strip or --validation"
        return making.write(pairs(False, "training blocks"), pairs(True, "validation blocks"), info)


def _cut_regions(
    sides: list[list[Path]],
    tiling: Tiling,
    dataset: NewDataset,
    fewest_points: int,
    copies: float,
    make: MakePairs,
    info: dict[str, Any],
    shard: tuple[int, int] | None,
) -> int:
    """Make the pairs of a large survey region by region; see `_cut_surveys`."""
    from pointup.datasets.block_pairs import RegionTiling

    with dataset.making(is_resumable=True) as making:
        making.stem = printable(sides[-1][0].stem) if len(sides[-1]) == 1 else "tile"
        survey = read_headers(making, sides, tiling.tile, tiling.block)
        regional = RegionTiling(
            tiling.tile,
            survey.block,
            survey.index.size,
            tiling.strip_width,
            survey.split.threshold,
            dataset.seed,
            fewest_points,
            tiling.include_noise,
        )
        return prepare_regions(making, survey, regional, make, copies, info, shard)


def _sort_places(making: Making, sides: list[list[Path]], tiling: Tiling) -> list[Place]:
    """Read the files, and group them into places that have points on every side."""
    from pointup.datasets.surveys import Place, sort_file

    calls = [
        partial(
            sort_file,
            path,
            making.scratch / f"{side}-{number}",
            tiling.tile,
            tiling.block,
            include_noise=tiling.include_noise,
        )
        for side, paths in enumerate(sides)
        for number, path in enumerate(paths)
    ]
    done = {file.folder.name: file for file in making.each(calls, len(calls), "reading")}
    note_left_out_noise(sum(file.num_noise for file in done.values()))
    rows = [
        [done[key] for number in range(len(paths)) if (key := f"{side}-{number}") in done]
        for side, paths in enumerate(sides)
    ]
    if not tiling.separate:
        stem = printable(sides[-1][0].stem) if len(sides[-1]) == 1 else "tile"
        return [Place(stem, tuple(rows))] if all(rows) else []
    return [
        Place(stem, tuple([done[f"{side}-{number}"]] for side in range(len(sides))))
        for number, stem in enumerate(name_inputs(sides[-1]))
        if all(f"{side}-{number}" in done for side in range(len(sides)))
    ]


def _surveys(sides: list[list[Path]], tiling: Tiling) -> dict[str, Any]:
    """The entry of pointup.json with the surveys of a dataset: that of all files, or each file."""
    from pointup.datasets.held_out import SurveyFiles, stored_surveys

    def survey(paths: Iterable[Path]) -> SurveyFiles:
        return SurveyFiles(tiling.strip_width, frozenset(str(path.resolve()) for path in paths))

    if not tiling.separate:
        return stored_surveys({"": survey(chain.from_iterable(sides))})
    files = zip(name_inputs(sides[-1]), zip(*sides, strict=True), strict=True)
    return stored_surveys({stem: survey(paths) for stem, paths in files})


def _no_tiles(making: Making, places: list[Place], tiling: Tiling, fewest_points: int) -> DataError:
    if not places:
        return making.nothing_usable("no file can be used")
    extents = [places[0].describe(side) for side in range(len(places[0].sides))]
    if len(extents) == 2:
        return making.nothing_usable(
            f"no tile of {tiling.tile:g} has {fewest_points} points of both surveys: the source "
            f"spans {extents[0]}, the target {extents[1]}; are the coordinate systems the same?"
        )
    return making.nothing_usable(
        f"no tile of {tiling.tile:g} has {fewest_points} points or more, in {extents[0]}: "
        "try a larger --tile or a smaller --min-points"
    )


def check_systems(sides: Sequence[Sequence[Path]], separate: bool) -> None:
    """Print notes on mixed units and on files that are paired but in different systems.

    `sides` has one survey or two. If the files are separate surveys, only the two files of a pair
    are compared, and only the first note is printed: others are often the same.
    A damaged file is skipped: it is left out and reported when it is read.
    Raises DataError for files in different units, or in degrees.
    """
    from pointup.io.length_unit import agreed_unit, units_of_readable

    paths = list(chain.from_iterable(sides))
    lengths, notes = note_mixed(units_of_readable(paths))
    agreed_unit(lengths)
    for text in notes:
        note(text)
    for surveys in zip(*sides, strict=True) if separate else [paths]:
        for text in (found := notes_on_systems(surveys)):
            note(text)
        if found:
            break
