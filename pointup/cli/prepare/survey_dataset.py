"""Makes a dataset of pairs from surveys of any size.

A large survey is made region by region, in shards or resumed where it stopped; a small one is a
survey of one region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pointup.cli.coordinate_systems import note_mixed, notes_on_systems
from pointup.cli.input_files import ShardOption, name_inputs, parse_shard
from pointup.cli.prepare.new_dataset import Making, NewDataset
from pointup.disk import file_state, remove
from pointup.errors import ConfigError, DataError
from pointup.option_help import optional
from pointup.terminal import note, printable

if TYPE_CHECKING:
    from pointup.datasets.block_pairs import MakePairs, RegionTiling
    from pointup.datasets.flight_passes import FlightPass
    from pointup.datasets.pair_writer import DatasetPart
    from pointup.datasets.regions import RegionSplit, SurveyRegion
    from pointup.datasets.survey_tiles import Place
    from pointup.io.extents import FileExtent
    from pointup.io.length_unit import LengthUnit

MOSTLY = 0.8
"""Files that share a larger part of their areas lie on top of one another."""
NO_TRAINING_PAIRS = "no training pairs are left; try a smaller --tile, --strip or --validation"


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of a survey. Lengths are in the unit of the files."""

    tile: float = 10.0
    """Side length of a tile, in the unit of the files."""
    min_points: int = 32
    """Leave out tiles with fewer points than this in source or target."""
    block: int = 4
    """Side length in tiles of the squares that belong to training or validation as a whole."""
    strip: Annotated[float | None, optional("LENGTH")] = None
    """Width of the strip of left-out points around validation tiles, in the unit of the files. No
    training point is closer to a validation point. By default half a tile."""
    separate: bool = False
    """Treat each file as a separate survey, with coordinates of its own."""
    include_noise: bool = False
    """Keep noise (classes 7 and 18), withheld points, and points with the synthetic flag, which are
    not measured. By default they are left out."""
    shard: ShardOption = None
    """Make only part K of N of the dataset, as a job of an array; `pointup prepare join` links all
    parts. For surveys of more than 200 MB."""

    def __post_init__(self) -> None:
        if not 0 < self.tile < float("inf") or self.min_points < 1 or self.block < 1:
            raise ConfigError(
                f"--tile {self.tile} --min-points {self.min_points} --block {self.block}: "
                "each must be greater than 0, and finite"
            )
        if self.strip is not None and not 0 <= self.strip < float("inf"):
            raise ConfigError(f"--strip {self.strip}: must be a length of at least 0")

    @property
    def strip_width(self) -> float:
        return self.tile / 2 if self.strip is None else self.strip


@dataclass(frozen=True, kw_only=True)
class SurveyDataset:
    """A dataset that is made of a survey to thin, or of a sparse and a dense one.

    Attributes:
        sides: the files of the survey, or of both.
        make: makes the pairs of a block of tiles.
        fewest_points: a tile with fewer points on a side is left out.
        copies: the number of pairs that a point of the survey is in on average; 0 if not known.
        with_passes: whether `make` needs the columns of the flight passes.
    """

    sides: list[list[Path]]
    make: MakePairs
    fewest_points: int
    copies: float
    tiling: Tiling
    dataset: NewDataset
    with_passes: bool = False

    def run(self, command: str, info: dict[str, Any]) -> int:
        """Make the dataset by a command with the options `info`. Returns the exit status.

        A shard may be without pairs, so that all shards can be joined; other datasets without
        training pairs raise DataError.
        """
        from pointup.datasets.dataset_units import stored_units
        from pointup.datasets.flight_passes import check_passes
        from pointup.datasets.pair_writer import PartSource, assemble, read_part, total, total_rows
        from pointup.datasets.regions import LARGE_BYTES, is_large

        units = check_systems(self.sides, self.tiling.separate)
        by_regions = not self.tiling.separate and is_large(list(chain.from_iterable(self.sides)))
        if self.shard is not None and not by_regions:
            raise ConfigError(
                f"--shard {self.shard[0]}/{self.shard[1]}: for surveys of more than "
                f"{LARGE_BYTES / 1e6:.0f} MB without --separate; leave it out"
            )
        strip = self.tiling.strip_width
        info = {"command": command, **info, **asdict(self.tiling), "strip": strip}
        del info["shard"]
        info |= _surveys(self.sides, self.tiling)
        info |= stored_units(units) | ({"shard": list(self.shard)} if self.shard else {})
        with self.dataset.making(is_resumable=by_regions) as making:
            folders = self._by_regions(making, info) if by_regions else [self._at_once(making)]
            parts = [read_part(folder) for folder in folders]
            making.left_out += dict.fromkeys(
                text for part in parts for text in part.facts["left_out"]
            )
            note_left_out(parts, self.fewest_points)
            passes = print_passes(parts) if self.with_passes else []
            making.strip = strip_remark(strip, parts, self.copies)
            if self.shard is None and not total_rows(parts, "train"):
                # Other options can't continue from these parts.
                remove(making.parts)
                if self.with_passes:
                    check_passes(passes, " ".join(map(str, self.sides[0][:2])))
                raise making.nothing_usable(NO_TRAINING_PAIRS)
            if self.copies:
                info["points_in_tiles"] = round(self.copies * total(parts, "points_in_tiles"))
            info |= {"regions": len(parts)} if by_regions else {}
            info = {**making.description(info), "left_out": making.left_out}
            making.unfinished.mkdir()
            assemble(list(map(PartSource, parts, folders)), making.unfinished, info)
            return making.publish()

    @property
    def shard(self) -> tuple[int, int] | None:
        """K and N to make part K of N of the dataset."""
        return parse_shard(self.tiling.shard)

    @property
    def stem(self) -> str:
        """Beginning of the names of tiles."""
        files = self.sides[-1]
        return printable(files[0].stem) if len(files) == 1 else "tile"

    def _at_once(self, making: Making) -> Path:
        """Make the only part of the dataset of a small survey, or of separate ones."""
        from pointup.datasets.block_pairs import PlaceTiles, make_part
        from pointup.datasets.survey_tiles import HeldOutTiles, hold_out

        tiling = self.tiling
        places = self._sort_places(making)
        note_overlapping(places)
        if tiling.separate:
            note_cut_shapes(places, tiling.tile)
        elif places:
            note_stacked(self.sides, places[0])
        tiles = [place.tiles_with(self.fewest_points) for place in places]
        if not any(map(len, tiles)):
            raise self._no_tiles(making, places)
        weights = [place.num_points(xy) for place, xy in zip(places, tiles, strict=True)]
        held_out = hold_out(tiles, making.validation, self.dataset.seed, tiling.block, weights)
        ground = [
            PlaceTiles(
                place,
                xy,
                len(place.tiles_with(1)),
                held,
                HeldOutTiles(tiling.tile, xy[held], tiling.strip_width),
            )
            for place, xy, held in zip(places, tiles, held_out, strict=True)
        ]
        folder = making.scratch / "only_part"
        facts: dict[str, Any] = {"left_out": []}
        make_part(folder, None, ground, tiling.block, self.make, facts, making.each)
        return folder

    def _sort_places(self, making: Making) -> list[Place]:
        """Read the files, and group them into places that have points on every side."""
        from pointup.datasets.flight_passes import time_and_id
        from pointup.datasets.survey_tiles import Place, sort_file

        tiling = self.tiling
        calls = [
            partial(
                sort_file,
                path,
                _sorted_folder(making, side, number),
                tiling.tile,
                tiling.block,
                include_noise=tiling.include_noise,
                columns=time_and_id if self.with_passes else None,
            )
            for side, paths in enumerate(self.sides)
            for number, path in enumerate(paths)
        ]
        done = {file.folder: file for file in making.each(calls, len(calls), "reading")}
        rows = [
            [done.get(_sorted_folder(making, side, number)) for number in range(len(paths))]
            for side, paths in enumerate(self.sides)
        ]
        if self.tiling.separate:
            stems = name_inputs(self.sides[-1])
            of_stems = zip(stems, zip(*rows, strict=True), strict=True)
            grouped = [(stem, [[file] for file in files]) for stem, files in of_stems]
        else:
            grouped = [(self.stem, rows)]
        usable = [(stem, [[f for f in side if f] for side in sides]) for stem, sides in grouped]
        return [Place(stem, tuple(sides)) for stem, sides in usable if all(sides)]

    def _no_tiles(self, making: Making, places: list[Place]) -> DataError:
        if not places:
            return making.nothing_usable("no file can be used")
        extents = [places[0].describe(side) for side in range(len(self.sides))]
        no_tile = f"no tile of {self.tiling.tile:g} has {self.fewest_points} points"
        if len(extents) == 2:
            return making.nothing_usable(
                f"{no_tile} of both surveys: the source spans {extents[0]}, the target "
                f"{extents[1]}; are the coordinate systems the same?"
            )
        return making.nothing_usable(
            f"{no_tile} or more, in {extents[0]}: try a larger --tile or a smaller --min-points"
        )

    def _by_regions(self, making: Making, info: dict[str, Any]) -> list[Path]:
        """Make the parts of a large survey that an interrupted call has not finished."""
        from pointup.datasets.block_pairs import RegionTiling
        from pointup.datasets.regions import shard_of
        from pointup.io.extents import read_extent

        # By their headers; None for files that can't be used.
        calls = [partial(read_extent, path) for path in chain.from_iterable(self.sides)]
        known = {each.path: each for each in making.each(calls, len(calls), "reading headers")}
        extents = [[known.get(path) for path in side] for side in self.sides]
        block, size, regions, split = self._index(extents, making)
        if not regions:
            raise making.nothing_usable("no region has points of every side")
        if self.shard is not None:
            # The same answer for each job of an array.
            if self.shard[1] > len(regions):
                raise ConfigError(
                    f"--shard {self.shard[0]}/{self.shard[1]}: the survey has {len(regions)} "
                    "regions; give fewer shards"
                )
            regions = shard_of(regions, self.shard)
        tiling = RegionTiling(
            self.tiling.tile,
            block,
            size,
            self.tiling.strip_width,
            split.threshold,
            self.dataset.seed,
            self.fewest_points,
            self.tiling.include_noise,
            self.with_passes,
        )
        files = [[[path.resolve(), *file_state(path)[1:]] for path in side] for side in self.sides]
        making.check_same_options({**info, **asdict(tiling), "shard": self.shard, "files": files})
        self._make_parts(making, regions, extents, tiling, split)
        return [_part_folder(making, region.number) for region in regions]

    def _index(
        self, extents: list[list[FileExtent | None]], making: Making
    ) -> tuple[int, int, Sequence[SurveyRegion], RegionSplit]:
        """The side of a block in tiles, that of a region in blocks, the regions, the split."""
        from pointup.datasets.regions import index_survey, split_regions

        # Blocks are halved while there are too few to hold out the share for validation.
        block = self.tiling.block
        while True:
            width = self.tiling.tile * block
            size, regions = index_survey(extents, width)
            split = split_regions(
                extents, size, regions, width, making.validation, self.dataset.seed
            )
            if block == 1 or not making.validation or split.num_blocks * making.validation >= 1:
                return block, size, regions, split
            block //= 2

    def _make_parts(
        self,
        making: Making,
        regions: Sequence[SurveyRegion],
        extents: list[list[FileExtent | None]],
        tiling: RegionTiling,
        split: RegionSplit,
    ) -> None:
        """Make the missing parts; the points of a file are removed after its last region."""
        from pointup.datasets.block_pairs import make_region, sort_into

        todo = [region for region in regions if not _part_folder(making, region.number).exists()]
        if len(todo) < len(regions):
            note(
                f"continuing: {len(regions) - len(todo):,} of {len(regions):,} regions are finished"
            )
        if not todo:
            return
        wanted = frozenset(region.xy for region in regions)
        left: Counter[tuple[int, int]] = Counter(chain.from_iterable(map(_files_of, todo)))

        def sorting(region: SurveyRegion) -> Iterator[Callable[[], None]]:
            for side, number in _files_of(region):
                if (side, number) not in started:
                    started.add((side, number))
                    extent = extents[side][number]
                    assert extent is not None
                    folder = _sorted_folder(making, side, number)
                    yield partial(sort_into, folder, extent.path, extent, tiling, wanted)

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
                part = _part_folder(making, region.number)
                around = split.held_out_around(region, tiling.strip)
                yield partial(
                    make_region, part, region, folders, tiling, self.stem, self.make, around
                )

        started: set[tuple[int, int]] = set()
        finished = 0
        num_calls = len(todo) + len(left)
        for _ in making.each(calls(), num_calls, "files and regions"):
            # Results come in the order of the calls, but parts appear when they are complete.
            while finished < len(todo) and _part_folder(making, todo[finished].number).exists():
                for side, number in _files_of(todo[finished]):
                    left[side, number] -= 1
                    if not left[side, number]:
                        remove(_sorted_folder(making, side, number))
                finished += 1
        if finished < len(todo):
            raise DataError(": ".join(["a region could not be made", *making.left_out[-1:]]))


def _files_of(region: SurveyRegion) -> list[tuple[int, int]]:
    return [(side, number) for side, files in enumerate(region.files) for number in files]


def _part_folder(making: Making, number: int) -> Path:
    return making.parts / f"{number:07}"


def _sorted_folder(making: Making, side: int, number: int) -> Path:
    return making.scratch / "sorted" / f"{side}-{number}"


def print_passes(parts: Sequence[DatasetPart]) -> list[FlightPass]:
    """The flight passes of a survey, which are printed. Those of blocks that follow one another in
    time, with less than the pause between passes, are one: a platform may turn while it records."""
    from pointup.datasets.flight_passes import FlightPass, merged, table_of

    blocks = [block for part in parts for block in part.facts.get("passes", {}).values()]
    passes = merged(FlightPass(**each) for _, *found in blocks for each in found)
    print("\n".join(table_of(passes, sum(area for area, *_ in blocks))))
    return passes


def note_left_out(parts: Sequence[DatasetPart], fewest_points: int) -> None:
    """Print how many points and tiles of a survey were left out, if any, and why."""
    from pointup.datasets.pair_writer import total

    # A file has points in several regions.
    noise = {name: number for part in parts for name, number in part.facts["noise"].items()}
    if num_noise := sum(noise.values()):
        most = num_noise > total(parts, "points_in_tiles")
        note(
            f"left out {num_noise:,} points: noise, withheld or synthetic (see --include-noise)"
            + ("; fewer are left: is a survey one that was upsampled?" if most else "")
        )
    num_filled, num_tiles = total(parts, "num_filled"), total(parts, "num_tiles")
    if num_tiles < 0.9 * num_filled:
        note(
            f"left out {num_filled - num_tiles:,} of {num_filled:,} tiles, which have fewer than "
            f"{fewest_points} points (see --tile, --min-points)"
        )
    if num_repeated := total(parts, "num_repeated"):
        note(f"left out {num_repeated:,} points that are at the position of another point")
    if num_outside := total(parts, "num_outside"):
        share = num_outside / total(parts, "points_in_tiles")
        note(
            f"left out {num_outside:,} points ({share:.1%} of those in tiles of both surveys) on "
            "ground that only one survey covers"
        )


def strip_remark(strip: float, parts: Sequence[DatasetPart], copies: float) -> str:
    """The remark for the summary on the strip around validation tiles, from the facts of parts."""
    from pointup.datasets.pair_writer import total

    if not copies:
        return f"a strip of {strip:g} around them left out"
    in_tiles, repeated, outside = (
        total(parts, fact) for fact in ("points_in_tiles", "num_repeated", "num_outside")
    )
    offered = copies * (in_tiles - repeated - outside)
    # Points on the edge of a validation tile can make it negative.
    share = max(0.0, 1 - total(parts, "points_in_pairs") / max(offered, 1))
    return f"a strip of {strip:g} around them left out ({share:.0%})"


def note_overlapping(places: list[Place]) -> None:
    """Print a note if separate surveys overlap, which then may share ground."""
    import numpy as np

    extents = [place.extent(-1) for place in places]
    low, high = (np.array([extent[end][:2] for extent in extents]) for end in (0, 1))
    for number, place in enumerate(places):
        beside = (low[number] < high[:number]) & (low[:number] < high[number])
        overlap = beside.all(axis=1)
        if overlap.any():
            note(
                f"{places[int(np.argmax(overlap))].stem} and {place.stem} overlap: if their "
                "coordinate system is the same, leave out --separate, or validation pairs of one "
                "file show ground that training pairs of another show"
            )
            return


def note_cut_shapes(places: list[Place], tile: float) -> None:
    """Print a note if most separate surveys are smaller than a tile, as shapes are, and cut."""
    import numpy as np

    extents = [np.array(place.extent(-1))[:, :2] for place in places]
    small = [np.ptp(extent, axis=0).max() < tile for extent in extents]
    is_cut = [np.ptp(extent // tile, axis=0).any() for extent in extents]
    if places and np.mean(np.logical_and(small, is_cut)) > 0.5:
        note(
            f"{places[0].stem} and others are smaller than a tile, and are cut at multiples of "
            f"{tile:g}; move each into one tile, or make pairs of two files by "
            "`pointup prepare clouds`"
        )


def note_stacked(sides: Sequence[Sequence[Path]], place: Place) -> None:
    """Print a note if files with partners of their names lie on one another, as shapes do."""
    import numpy as np

    common = set.intersection(*({path.stem for path in side} for side in sides))
    if len(sides) < 2 or len(common) < 2:
        return
    low, high = (
        np.array([getattr(f, end)[:2] for f in place.sides[-1]]) for end in ("low", "high")
    )
    shared = (np.minimum(high[1:], high[:-1]) - np.maximum(low[1:], low[:-1])).clip(0).prod(axis=1)
    areas = (high - low).clip(1e-9).prod(axis=1)
    if np.median(shared / np.minimum(areas[1:], areas[:-1])) > MOSTLY:
        note(
            f"{len(common)} files of each side have the same names, and nearly the same place: "
            "they become one survey; if each is a shape or survey of its own, add --separate"
        )


def _surveys(sides: list[list[Path]], tiling: Tiling) -> dict[str, Any]:
    """The entry of pointup.json with the surveys of a dataset: that of all files, or each file."""
    from pointup.datasets.held_out import SurveyFiles, stored_surveys

    def survey(paths: Iterable[Path]) -> SurveyFiles:
        return SurveyFiles(tiling.strip_width, frozenset(str(path.resolve()) for path in paths))

    if not tiling.separate:
        return stored_surveys({"": survey(chain.from_iterable(sides))})
    files = zip(name_inputs(sides[-1]), zip(*sides, strict=True), strict=True)
    return stored_surveys({stem: survey(paths) for stem, paths in files})


def check_systems(sides: Sequence[Sequence[Path]], separate: bool) -> dict[Path, LengthUnit]:
    """The units of files; prints notes on mixed ones and on paired files in different systems.

    If the files are separate surveys, only the two files of a pair
    are compared, and only the first note is printed: others are often the same.
    A damaged file is skipped: it is left out and reported when it is read.
    Raises DataError for files in different units, or in degrees.
    """
    from pointup.io.length_unit import agreed_unit, units_of_readable

    paths = list(chain.from_iterable(sides))
    lengths, notes = note_mixed(units_of_readable(paths))
    agreed_unit(lengths)
    note(*notes)
    for surveys in zip(*sides, strict=True) if separate else [paths]:
        note(*(found := notes_on_systems(surveys)))
        if found:
            break
    return lengths
