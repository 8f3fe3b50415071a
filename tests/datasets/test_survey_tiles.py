"""Pairs from large surveys: sorting into blocks, thinning, and held-out tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointup.datasets import survey_tiles
from pointup.datasets.block_pairs import fewest_dense_points, thinned_pairs, thinning_ratio
from pointup.datasets.survey_tiles import (
    Place,
    hold_out,
    read_block,
    sort_file,
)


def survey(seed: int, number: int, width: float = 40.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    offset = np.array([500_000.0, -4_000_000.0, 10.0])
    return offset + (rng.random((number, 3)) * [width, width, 5]).round(2)


def rows(points: np.ndarray) -> set[tuple[float, ...]]:
    return set(map(tuple, points.tolist()))


def sorted_files(folder: Path, *clouds: np.ndarray, tile: float, block: int) -> list:
    files = []
    for number, points in enumerate(clouds):
        np.save(folder / f"{number}.npy", points)
        files.append(sort_file(folder / f"{number}.npy", folder / f"s{number}", tile, block))
    return files


def test_blocks_hold_the_same_points_as_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = survey_tiles.iter_points
    monkeypatch.setattr(
        survey_tiles, "iter_points", lambda path, attributes: read(path, 300, attributes)
    )
    clouds = survey(0, 1000), survey(1, 700)
    files = sorted_files(tmp_path, *clouds, tile=5.0, block=2)
    everything = np.concatenate(clouds)
    number = np.floor(everything[:, :2] / 10).astype(int)
    for block_xy in np.unique(number, axis=0):
        expected = everything[(number == block_xy).all(axis=1)]
        found = read_block([file.folder for file in files], tuple(block_xy))
        assert len(found) == len(expected)
        assert rows(found) == rows(expected)


def test_tiles_with_enough_points_on_every_side_are_found(tmp_path: Path) -> None:
    clouds = survey(0, 900), survey(1, 400), survey(2, 400)
    sparse, *dense = sorted_files(tmp_path, *clouds, tile=10.0, block=4)
    place = Place("tile", ([sparse], dense))

    def counts(points: np.ndarray) -> dict[tuple[int, ...], int]:
        xy, number = np.unique(np.floor(points[:, :2] / 10).astype(int), axis=0, return_counts=True)
        return dict(zip(map(tuple, xy.tolist()), number.tolist(), strict=True))

    one, other = counts(clouds[0]), counts(np.concatenate(clouds[1:]))
    expected = sorted(xy for xy in one if one[xy] >= 50 and other.get(xy, 0) >= 50)
    assert 0 < len(expected) < 16
    assert place.tiles_with(50).tolist() == [list(xy) for xy in expected]


@pytest.mark.parametrize("pattern", ["random", "poisson", "scanline", "mixed"])
def test_source_and_disjoint_target_together_are_the_tile(pattern: str, tmp_path: Path) -> None:
    points = survey(0, 800, width=9.9)
    (file,) = sorted_files(tmp_path, points, tile=10.0, block=1)
    (xy,) = file.tile_xy.tolist()
    name = f"t_{xy[0]}_{xy[1]}"
    (pair,) = thinned_pairs(
        [[file.folder]], "t", tuple(xy), frozenset([name]), None,
        tile=10.0, ratio=3, pattern=pattern, disjoint=True, seed=0, min_points=1,
    ).pairs  # fmt: skip
    assert pair.name == name
    assert (len(pair.source), len(pair.target)) == (200, 600)
    together = np.concatenate([pair.source, pair.target]) + pair.origin
    assert rows(together.round(2)) == rows(points.round(2))


def test_the_target_may_be_all_points_of_the_tile(tmp_path: Path) -> None:
    points = survey(0, 800, width=9.9)
    (file,) = sorted_files(tmp_path, points, tile=10.0, block=1)
    (xy,) = file.tile_xy.tolist()
    (pair,) = thinned_pairs(
        [[file.folder]], "t", tuple(xy), frozenset([f"t_{xy[0]}_{xy[1]}"]), None,
        tile=10.0, ratio=4, pattern="random", disjoint=False, seed=0, min_points=1,
    ).pairs  # fmt: skip
    assert (len(pair.source), len(pair.target)) == (200, 800)
    assert rows(pair.source) < rows(pair.target)


@pytest.mark.parametrize("disjoint", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 2.5, 4.0])
def test_tiles_with_the_smallest_accepted_size_give_both_sides_enough_points(
    ratio: float, disjoint: bool
) -> None:
    num_points = fewest_dense_points(32, ratio, disjoint)
    num_source = round(num_points / thinning_ratio(ratio, disjoint))
    assert num_source >= 32
    assert not disjoint or num_points - num_source >= 32


def test_held_out_tiles_are_whole_blocks_of_each_place() -> None:
    grid = np.stack(np.meshgrid(np.arange(-3, 21), np.arange(24)), axis=-1).reshape(-1, 2)
    held = hold_out([grid, grid + 4], fraction=0.1, seed=0, block=4)
    assert 0.05 < np.concatenate(held).mean() < 0.15
    for xy, mask in zip((grid, grid + 4), held, strict=True):
        by_block: dict[tuple[int, ...], set[bool]] = {}
        for block, chosen in zip((xy // 4).tolist(), mask.tolist(), strict=True):
            by_block.setdefault(tuple(block), set()).add(chosen)
        assert all(len(chosen) == 1 for chosen in by_block.values())


def test_blocks_shrink_if_there_are_few() -> None:
    strip = np.column_stack([np.arange(16) // 2, np.arange(16) % 2])
    (held,) = hold_out([strip], fraction=0.1, seed=0, block=4)
    assert held.sum() == 2


def test_a_fraction_of_zero_holds_out_nothing() -> None:
    (held,) = hold_out([np.zeros((5, 2), int)], fraction=0, seed=0, block=4)
    assert not held.any()
