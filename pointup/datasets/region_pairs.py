"""What worker processes do for a large survey: sort files into blocks, make the pairs of a region.

A file is sorted once, into a folder that appears when it is complete, or into a text file with the
reason why it can't be used. A region waits for the folders of its files, which are sorted by calls
that began before it.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.block_pairs import BlockPairs
from pointup.datasets.dataset_parts import write_part
from pointup.datasets.pair import Pair
from pointup.datasets.region_split import is_held_out
from pointup.datasets.regions import Region
from pointup.datasets.surveys import HeldOutTiles, Place, SortedFile, sort_file
from pointup.errors import FileError, PointupError
from pointup.io.extents import FileExtent

SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class RegionTiling:
    """How regions are cut into blocks and tiles, and which of these are for validation.

    Attributes:
        tile: side length of a tile.
        block: side length of a block in tiles.
        size: side length of a region in blocks.
        strip: width of the strip around validation tiles.
        threshold, seed: for `is_held_out`, which says which blocks are for validation.
        fewest_points: a tile with fewer points on a side is left out.
        include_noise: whether noise and withheld points are kept.
    """

    tile: float
    block: int
    size: int
    strip: float
    threshold: float
    seed: int
    fewest_points: int
    include_noise: bool = False


MakePairs = Callable[[Place], partial[BlockPairs]]
"""Returns the function that makes the pairs of a block of a place."""


def sort_into(
    folder: Path, path: Path, extent: FileExtent, tiling: RegionTiling, wanted: frozenset[Any]
) -> None:
    """Sort the points of a file that lie in the regions `wanted` into blocks, in `folder`.

    If the file can't be used, `folder` becomes a text file with the reason.
    """
    if folder.exists():
        return
    staging = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        regions = tiling.size, wanted
        found = sort_file(path, staging, tiling.tile, tiling.block, regions, tiling.include_noise)
        low, high = found.low.copy(), found.high.copy()
        if np.isfinite(low).all() and not extent.holds(np.array([low, high])):
            raise FileError(
                f"{path}: points lie outside of the extent in its header, x from "
                f"{extent.low[0]:.10g} to {extent.high[0]:.10g}, y from {extent.low[1]:.10g} to "
                f"{extent.high[1]:.10g}; repair the header"
            )
        np.savez(
            staging / "tiles.npz",
            xy=found.tile_xy,
            num=found.num_points,
            low=low,
            high=high,
            noise=np.array(found.num_noise),
        )
        staging.rename(folder)
    except PointupError as error:
        shutil.rmtree(staging, ignore_errors=True)
        reason = staging.with_suffix(".txt")
        reason.write_text(str(error))
        reason.rename(folder)


def make_part(
    folder: Path,
    region: Region,
    sorted_files: tuple[tuple[Path, ...], ...],
    tiling: RegionTiling,
    stem: str,
    make: MakePairs,
    held_out: np.ndarray,
) -> None:
    """Write the pairs of a region as a part of the dataset, in `folder`.

    `held_out` (B, 2) int64 are the validation blocks whose strip may reach into the region.
    `sorted_files` are the results of `sort_into` for each side; waits until they are there.
    """
    left_out: list[str] = []
    sides = tuple(list(_usable(side, left_out)) for side in sorted_files)
    facts: dict[str, Any] = {
        "region": list(region.xy), "left_out": left_out, "num_tiles": 0, "num_filled": 0,
        "points_in_tiles": 0, "points_in_pairs": 0, "num_repeated": 0, "num_outside": 0,
        "noise": {file.folder.name: file.num_noise for side in sides for file in side},
    }  # fmt: skip
    pairs: dict[str, Iterable[Pair]] = {"train": [], "validation": []}
    if all(sides):
        place = Place(stem, sides)
        xy = _inside(place.tiles_with(tiling.fewest_points), region, tiling)
        filled = _inside(place.tiles_with(1), region, tiling)
        facts["num_tiles"], facts["num_filled"] = len(xy), len(filled)
        facts["points_in_tiles"] = int(place.num_points(xy).sum())
        held = is_held_out(xy // tiling.block, tiling.threshold, tiling.seed)
        around = HeldOutTiles(tiling.tile, _tiles_of(held_out, tiling.block), tiling.strip)
        of_place = make(place)
        pairs = {
            split: _pairs(of_place, stem, xy[held == is_validation], tiling, near, facts)
            for split, is_validation, near in (
                ("train", False, around),
                ("validation", True, None),
            )
        }
    write_part(folder, region.number, pairs, facts)


def blocks_of(
    stem: str, tile_xy: np.ndarray, block: int
) -> Iterator[tuple[tuple[int, int], frozenset[str]]]:
    """The blocks of the given tiles, ascending, with the names of the tiles in each."""
    names: dict[tuple[int, int], list[str]] = {}
    for x, y in tile_xy.tolist():
        names.setdefault((x // block, y // block), []).append(f"{stem}_{x}_{y}")
    for block_xy in sorted(names):
        yield block_xy, frozenset(names[block_xy])


def _pairs(
    make: partial[BlockPairs],
    stem: str,
    tile_xy: np.ndarray,
    tiling: RegionTiling,
    around: HeldOutTiles | None,
    facts: dict[str, Any],
) -> Iterator[Pair]:
    for block_xy, names in blocks_of(stem, tile_xy, tiling.block):
        near = None if around is None else around.near_block(block_xy, tiling.block)
        found = make(block_xy=block_xy, names=names, held_out=near)
        facts["num_repeated"] += found.num_repeated
        facts["num_outside"] += found.num_outside
        for pair in found.pairs:
            facts["points_in_pairs"] += len(pair.source) + len(pair.target)
            yield pair


def _usable(folders: tuple[Path, ...], left_out: list[str]) -> Iterator[SortedFile]:
    for folder in folders:
        while not folder.exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if folder.is_file():
            left_out.append(folder.read_text())
            continue
        with np.load(folder / "tiles.npz") as found:
            xy, num, low, high = (found[name] for name in ("xy", "num", "low", "high"))
            yield SortedFile(folder, xy, num, low, high, int(found["noise"]))


def _inside(tile_xy: np.ndarray, region: Region, tiling: RegionTiling) -> np.ndarray:
    regions = tile_xy // (tiling.block * tiling.size)
    return tile_xy[(regions == np.array(region.xy)).all(axis=1)]


def _tiles_of(block_xy: np.ndarray, block: int) -> np.ndarray:
    """The tiles (T, 2) of blocks (B, 2)."""
    steps = np.stack(np.meshgrid(*[np.arange(block)] * 2, indexing="ij"), axis=-1)
    return (block_xy[:, None] * block + steps.reshape(1, -1, 2)).reshape(-1, 2)
