"""`pointup prepare pairs` and `thin`: pair datasets from survey files, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pointup.cli.input_files import Inputs, find_inputs, name_inputs
from pointup.cli.prepare.new_dataset import Making, NewDataset, note
from pointup.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.datasets.surveys import Place


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the ground is cut into tiles; lengths in the unit of the files."""

    tile: float = 10.0
    """Length of a tile's side."""
    min_points: int = 32
    """Fewest points of a source and of a target; other tiles are left out."""
    block: int = 4
    """Tiles on a side of the squares that are trained or validated on as a whole."""
    strip: float | None = None
    """Width of the strip around the tiles to validate on whose points are left out, so that none is
    nearer to a point of training; half a tile by default."""
    separate: bool = False
    """Each file is a place with coordinates of its own, not a part of one survey."""

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


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """From two surveys of the same ground: the tiles in which both have points."""

    source: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Sparse survey: files, or folders of files. All of a side are one survey, however it was cut
    into files, in the coordinates of the other side."""
    target: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Dense survey of the same ground. With --separate, as many files, in the same order."""
    tiling: Tiling = Tiling()
    dataset: NewDataset

    def run(self) -> int:
        from pointup.datasets.surveys import two_survey_pairs

        def make(place: Place) -> partial[list[Pair]]:
            return partial(
                two_survey_pairs,
                place.folders(0),
                place.folders(1),
                tile=self.tiling.tile,
                min_points=self.tiling.min_points,
                stem=place.stem,
            )

        sides = [_survey_files(self.source), _survey_files(self.target)]
        info = {"command": "prepare pairs", "source": self.source, "target": self.target}
        tiling = self.tiling
        return _cut_surveys(sides, tiling, self.dataset, tiling.min_points, 1.0, make, info)


@dataclass(frozen=True, kw_only=True)
class Thin:
    """From one dense survey: the source of each tile is thinned from its points."""

    inputs: Inputs
    """Dense survey: files, or folders of files."""
    ratio: float = 4.0
    """Points of the target for each point of the source."""
    pattern: Literal["random", "poisson", "scanline", "mixed"] = "random"
    """What the source looks like: random, evenly spaced, in scan lines, or each in turn."""
    target: Literal["rest", "all"] = "rest"
    """'rest': the points that are not in the source, so that the sides share none, like two
    surveys. 'all': the source is a part of the target, which makes scores look better than they
    are."""
    tiling: Tiling = Tiling()
    dataset: NewDataset

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"--ratio {self.ratio}: must be at least 1")

    def run(self) -> int:
        from pointup.datasets.surveys import fewest_dense_points, thinned_pairs

        disjoint = self.target == "rest"

        def make(place: Place) -> partial[list[Pair]]:
            return partial(
                thinned_pairs,
                place.folders(0),
                tile=self.tiling.tile,
                stem=place.stem,
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
        # How often each point of the survey comes in the pairs.
        copies = 1.0 if disjoint else 1 + 1 / self.ratio
        return _cut_surveys(sides, self.tiling, self.dataset, fewest, copies, make, info)


def _survey_files(paths: Sequence[Path]) -> list[Path]:
    from pointup.io.files import point_extensions

    return find_inputs(paths, point_extensions)


def _cut_surveys(
    sides: list[list[Path]],
    tiling: Tiling,
    dataset: NewDataset,
    fewest_points: int,
    copies: float,
    make: Callable[[Place], partial[list[Pair]]],
    info: dict[str, Any],
) -> int:
    """Sort the files by place, choose the tiles to train and to validate on, write their pairs.

    `make` gives the function that makes a place's pairs from a block and the names of its tiles; a
    point of the surveys comes in them `copies` times on average.
    """
    import numpy as np

    from pointup.datasets.surveys import HeldOutTiles, hold_out

    with dataset.making() as making:
        places = _sort_places(making, sides, tiling)
        tiles = [place.tiles_with(fewest_points) for place in places]
        if not any(map(len, tiles)):
            raise _no_tiles(making, places, tiling, fewest_points)
        num_tiles, num_filled = (
            sum(map(len, t)) for t in (tiles, [place.tiles_with(1) for place in places])
        )
        if num_tiles < 0.9 * num_filled:
            note(
                f"{num_filled - num_tiles:,} of {num_filled:,} tiles have fewer than the "
                f"{fewest_points} points they need: left out (see --tile, --min-points)"
            )
        weights = [place.num_points(xy) for place, xy in zip(places, tiles, strict=True)]
        held_out = hold_out(tiles, dataset.validation, dataset.seed, tiling.block, weights)
        calls: dict[bool, list[partial[list[Pair]]]] = {False: [], True: []}
        for place, tile_xy, held in zip(places, tiles, held_out, strict=True):
            around = HeldOutTiles(tiling.tile, tile_xy[held], tiling.strip_width)
            for split in calls:
                for block_xy, names in _blocks(place.stem, tile_xy[held == split], tiling.block):
                    near = None if split else around.near_block(block_xy, tiling.block)
                    call = partial(make(place), block_xy=block_xy, names=names, held_out=near)
                    calls[split].append(call)

        num_offered = round(copies * sum(int(numbers.sum()) for numbers in weights))
        num_written = 0

        def pairs(split: bool, title: str) -> Iterator[Pair]:
            nonlocal num_written
            for made in making.each(calls[split], len(calls[split]), title):
                num_written += sum(len(pair.source) + len(pair.target) for pair in made)
                yield from made
            if split and any(map(np.any, held_out)):
                share = 1 - num_written / num_offered
                making.strip = (
                    f"a strip of {tiling.strip_width:g} around them left out ({share:.0%})"
                )

        info |= {**asdict(tiling), "strip": tiling.strip_width, "points_in_tiles": num_offered}
        making.remedy = "try a smaller --tile, --strip or --validation"
        return making.write(
            pairs(False, "blocks to train on"), pairs(True, "blocks to validate on"), info
        )


def _sort_places(making: Making, sides: list[list[Path]], tiling: Tiling) -> list[Place]:
    """The places with points on every side."""
    from pointup.datasets.surveys import Place, sort_file

    calls = [
        partial(sort_file, path, making.scratch / f"{side}-{number}", tiling.tile, tiling.block)
        for side, paths in enumerate(sides)
        for number, path in enumerate(paths)
    ]
    done = {file.folder.name: file for file in making.each(calls, len(calls), "reading")}
    rows = [
        [done[key] for number in range(len(paths)) if (key := f"{side}-{number}") in done]
        for side, paths in enumerate(sides)
    ]
    if not tiling.separate:
        stem = sides[-1][0].stem if len(sides[-1]) == 1 else "tile"
        return [Place(stem, tuple(rows))] if all(rows) else []
    return [
        Place(stem, tuple([done[f"{side}-{number}"]] for side in range(len(sides))))
        for number, stem in enumerate(name_inputs(sides[-1]))
        if all(f"{side}-{number}" in done for side in range(len(sides)))
    ]


def _blocks(
    stem: str, tile_xy: Any, block: int
) -> Iterator[tuple[tuple[int, int], frozenset[str]]]:
    """The blocks that hold these tiles, ascending, with the names of the tiles in each."""
    names: dict[tuple[int, int], list[str]] = {}
    for x, y in tile_xy.tolist():
        names.setdefault((x // block, y // block), []).append(f"{stem}_{x}_{y}")
    for block_xy in sorted(names):
        yield block_xy, frozenset(names[block_xy])


def _no_tiles(making: Making, places: list[Place], tiling: Tiling, fewest_points: int) -> DataError:
    if not places:
        return making.nothing_usable("no file can be used")
    extents = [places[0].describe(side) for side in range(len(places[0].sides))]
    if len(extents) == 2:
        return making.nothing_usable(
            f"no tile of {tiling.tile:g} has {fewest_points} points of both surveys: the source "
            f"spans {extents[0]}, the target {extents[1]}; are the coordinates of one system?"
        )
    return making.nothing_usable(
        f"no tile of {tiling.tile:g} has the {fewest_points} points it needs, in {extents[0]}: "
        "try a larger --tile or a smaller --min-points"
    )
