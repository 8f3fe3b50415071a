"""Makes the pairs of a block of tiles, for `pointup prepare pairs` and `pointup prepare thin`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from pointup.datasets.common_ground import on_common_ground
from pointup.datasets.pair import Pair
from pointup.datasets.surveys import HeldOutTiles, first_occurrences, read_block
from pointup.datasets.thinning_patterns import PATTERNS, thin
from pointup.datasets.tiles import split_tiles, survey_pairs


@dataclass(frozen=True)
class BlockPairs:
    """The pairs of a block of tiles, and how many points of their tiles are in none of them.

    Attributes:
        pairs: one for each tile with enough points.
        num_repeated: points at the position of another point of the same survey.
        num_outside: points on ground that the other survey does not cover.
    """

    pairs: list[Pair]
    num_repeated: int = 0
    num_outside: int = 0


def two_survey_pairs(
    source: Sequence[Path],
    target: Sequence[Path],
    block_xy: tuple[int, int],
    names: frozenset[str],
    *,
    tile: float,
    min_points: int,
    stem: str,
    held_out: HeldOutTiles | None = None,
) -> BlockPairs:
    """Make pairs of two surveys: one for each tile of a block whose name STEM_X_Y is in `names`.

    Removed first are points at the position of another one, points on ground that only one survey
    covers, and points in the tiles of `held_out` and their strip. A tile is left out if fewer than
    `min_points` remain on a side.
    """
    sides = [read_block(folders, block_xy) for folders in (source, target)]
    clouds = [points[first_occurrences(points)] for points in sides]
    common = on_common_ground(clouds, tile)
    kept = [points[mask] for points, mask in zip(clouds, common, strict=True)]
    num_read, num_once, num_common = (
        sum(_num_in_tiles(points, tile, stem, names) for points in each)
        for each in (sides, clouds, kept)
    )
    if held_out is not None:
        kept = [held_out.without_strip(points) for points in kept]
    pairs = survey_pairs(kept[0], kept[1], tile, min_points, stem)
    found = [pair for pair in pairs if pair.name in names]
    return BlockPairs(found, num_read - num_once, num_once - num_common)


def thinned_pairs(
    folders: Sequence[Path],
    block_xy: tuple[int, int],
    names: frozenset[str],
    *,
    tile: float,
    stem: str,
    ratio: float,
    pattern: str,
    disjoint: bool,
    seed: int,
    min_points: int = 1,
    held_out: HeldOutTiles | None = None,
) -> BlockPairs:
    """Make pairs by thinning: one for each tile of a block whose name STEM_X_Y is in `names`.

    The source is a subset by `pattern` (see `pointup.datasets.thinning_patterns.thin`; "mixed"
    draws a pattern for each tile). The target is `ratio` times as large as the source: the other
    points if `disjoint`, otherwise all points. The subset depends only on the tile's points, its
    name and the seed. Removed first are points at the position of another one, and points in the
    tiles of `held_out` and their strip. A tile is left out if too few points remain for
    `min_points` on each side.
    """
    read = read_block(folders, block_xy)
    points = read[first_occurrences(read)]
    num_read, num_once = (_num_in_tiles(each, tile, stem, names) for each in (read, points))
    if held_out is not None:
        points = held_out.without_strip(points)
    fewest = fewest_dense_points(min_points, ratio, disjoint)
    tiles = split_tiles(points[:, :2], tile)
    pairs = []
    for row, (x, y) in enumerate(tiles.xy.tolist()):
        name = f"{stem}_{x}_{y}"
        if name not in names:
            continue
        dense = points[tiles.points(row)]
        if len(dense) < fewest:
            continue
        rng = np.random.default_rng([seed, crc32(name.encode())])
        kind = str(rng.choice(PATTERNS)) if pattern == "mixed" else pattern
        kept = thin(dense, thinning_ratio(ratio, disjoint), kind, rng)
        source = dense[kept]
        target = np.delete(dense, kept, axis=0) if disjoint else dense
        origin = source.mean(axis=0)
        pairs.append(
            Pair(
                name=name,
                source=(source - origin).astype(np.float32),
                target=(target - origin).astype(np.float32),
                origin=origin,
            )
        )
    return BlockPairs(pairs, num_read - num_once)


def thinning_ratio(ratio: float, disjoint: bool) -> float:
    """The thinning ratio for a target of `ratio` times the source: the other points, or all."""
    return ratio + 1 if disjoint else ratio


def fewest_dense_points(min_points: int, ratio: float, disjoint: bool) -> int:
    """The smallest number of points of a tile that gives both sides at least `min_points`."""
    return math.ceil(max(min_points, 1) * thinning_ratio(ratio, disjoint))


def _num_in_tiles(points: np.ndarray, tile: float, stem: str, names: frozenset[str]) -> int:
    """Number of the points (N, 3) in the tiles whose names STEM_X_Y are in `names`."""
    tiles = split_tiles(points[:, :2], tile)
    is_named = [f"{stem}_{x}_{y}" in names for x, y in tiles.xy.tolist()]
    return int(np.diff(tiles.ptr)[is_named].sum())
