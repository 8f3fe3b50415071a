"""Pairs from large surveys: sorting into blocks, thinning, and held-out tiles."""

from __future__ import annotations

import resource
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pointup.datasets import survey_tiles
from pointup.datasets.block_pairs import (
    TileBlock,
    fewest_dense_points,
    thinned_pairs,
    thinning_ratio,
    two_survey_pairs,
)
from pointup.datasets.pair import Pair
from pointup.datasets.survey_tiles import (
    Place,
    hold_out,
    read_block,
    sort_file,
    split_blocks,
    split_tiles,
)
from pointup.errors import DataError


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


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    np.save(tmp_path / "a.npy", survey(0, 1000))
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        # A FileError would leave out the input, as if that were damaged.
        with pytest.raises(OSError, match=r"0\.xyz: can't be written: File too large; free space"):
            sort_file(tmp_path / "a.npy", tmp_path / "s", 100.0, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))


def test_blocks_hold_the_same_points_as_a_mask(tmp_path, monkeypatch):
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


def test_tiles_with_enough_points_on_every_side_are_found(tmp_path):
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
def test_source_and_disjoint_target_together_are_the_tile(pattern, tmp_path):
    points = survey(0, 800, width=9.9)
    (file,) = sorted_files(tmp_path, points, tile=10.0, block=1)
    (xy,) = file.tile_xy.tolist()
    name = f"t_{xy[0]}_{xy[1]}"
    (pair,) = thinned_pairs(
        TileBlock([[file.folder]], "t", tuple(xy), frozenset([name]), None, 10.0),
        ratio=3, pattern=pattern, disjoint=True, seed=0, min_points=1,
    ).pairs  # fmt: skip
    assert pair.name == name
    assert (len(pair.source), len(pair.target)) == (200, 600)
    together = np.concatenate([pair.source, pair.target]) + pair.origin
    assert rows(together.round(2)) == rows(points.round(2))


def test_the_target_may_be_all_points_of_the_tile(tmp_path):
    points = survey(0, 800, width=9.9)
    (file,) = sorted_files(tmp_path, points, tile=10.0, block=1)
    (xy,) = file.tile_xy.tolist()
    (pair,) = thinned_pairs(
        TileBlock([[file.folder]], "t", tuple(xy), frozenset([f"t_{xy[0]}_{xy[1]}"]), None, 10.0),
        ratio=4, pattern="random", disjoint=False, seed=0, min_points=1,
    ).pairs  # fmt: skip
    assert (len(pair.source), len(pair.target)) == (200, 800)
    assert rows(pair.source) < rows(pair.target)


@pytest.mark.parametrize("disjoint", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 2.5, 4.0])
def test_tiles_with_the_smallest_accepted_size_give_both_sides_enough_points(ratio, disjoint):
    num_points = fewest_dense_points(32, ratio, disjoint)
    num_source = round(num_points / thinning_ratio(ratio, disjoint))
    assert num_source >= 32
    assert not disjoint or num_points - num_source >= 32


def test_held_out_tiles_are_whole_blocks_of_each_place():
    grid = np.stack(np.meshgrid(np.arange(-3, 21), np.arange(24)), axis=-1).reshape(-1, 2)
    held = hold_out([grid, grid + 4], fraction=0.1, seed=0, block=4)
    assert 0.05 < np.concatenate(held).mean() < 0.15
    for xy, mask in zip((grid, grid + 4), held, strict=True):
        by_block: dict[tuple[int, ...], set[bool]] = {}
        for block, chosen in zip((xy // 4).tolist(), mask.tolist(), strict=True):
            by_block.setdefault(tuple(block), set()).add(chosen)
        assert all(len(chosen) == 1 for chosen in by_block.values())


def test_blocks_shrink_if_there_are_few():
    strip = np.column_stack([np.arange(16) // 2, np.arange(16) % 2])
    (held,) = hold_out([strip], fraction=0.1, seed=0, block=4)
    assert held.sum() == 2


def test_a_fraction_of_zero_holds_out_nothing():
    (held,) = hold_out([np.zeros((5, 2), int)], fraction=0, seed=0, block=4)
    assert not held.any()


NUMBERS = arrays.arrays(
    np.int64, st.tuples(st.integers(0, 40), st.just(2)), elements=st.integers(-6, 6)
)


@given(NUMBERS, st.sampled_from([0.5, 1.0, 3.0]))
def test_tiles_equal_a_grouping_by_dictionary(numbers, tile):
    positions = numbers / 4
    tiles = split_tiles(positions, tile)
    expected = defaultdict(list)
    for i, (x, y) in enumerate(positions):
        expected[int(x // tile), int(y // tile)].append(i)
    found = {tuple(xy): tiles.points(t).tolist() for t, xy in enumerate(tiles.xy.tolist())}
    assert found == expected
    assert list(found) == sorted(found)
    assert len(tiles) == len(found)


def test_a_tile_holds_the_points_between_its_corners():
    positions = np.random.default_rng(0).random((500, 2)) * [70, 30] + [4e5, 5.1e6]
    tiles = split_tiles(positions, 10.0)
    assert len(tiles) == 21
    for t in range(len(tiles)):
        low, held = tiles.xy[t] * 10.0, positions[tiles.points(t)]
        assert ((held >= low) & (held < low + 10.0)).all()


def test_points_too_far_away_or_apart_are_errors():
    for far in (np.nan, np.inf, 1e300):
        with pytest.raises(DataError, match="too far away"):
            split_tiles(np.array([[0, 0], [far, 0]]), 1.0)
    with pytest.raises(DataError, match="too far apart"):
        split_tiles(np.array([[0, 0], [1e12, 1e12]]), 1.0)


def pairs_of_surveys(
    folder: Path, source: np.ndarray, target: np.ndarray, min_points: int
) -> list[Pair]:
    """The pairs of two surveys in one block."""
    files = sorted_files(folder, source, target, tile=10.0, block=10**7)
    tiles = np.concatenate([file.tile_xy for file in files]).tolist()
    names = frozenset(f"here_{x}_{y}" for x, y in tiles)
    block = TileBlock([[file.folder] for file in files], "here", (0, 0), names, None, 10.0)
    return two_survey_pairs(block, min_points=min_points).pairs


def test_pairs_of_surveys_keep_map_coordinates_to_a_tenth_of_a_millimetre(tmp_path):
    rng = np.random.default_rng(0)
    source, target = (rng.random((n, 3)) * [40, 20, 9] + [4e5, 5.1e6, 100] for n in (800, 3000))
    pairs = pairs_of_surveys(tmp_path, source, target, min_points=10)
    assert [pair.name for pair in pairs] == [
        f"here_{x}_{y}" for x in range(40000, 40004) for y in (510000, 510001)
    ]
    for number, cloud in ((0, source), (1, target)):
        points = [(pair.source, pair.target)[number] + pair.origin for pair in pairs]
        assert sum(len(p) for p in points) == len(cloud)
        back, there = (np.array(sorted(p.tolist())) for p in (np.concatenate(points), cloud))
        assert np.abs(back - there).max() < 1e-4
    for pair in pairs:
        assert pair.source.dtype == pair.target.dtype == np.float32
        assert np.abs(pair.source.mean(axis=0)).max() < 1e-5
        assert pair.vertical


@pytest.mark.parametrize(("min_points", "found"), [(2, [1, 3]), (0, [1, 2, 3])])
def test_tiles_without_enough_points_in_both_surveys_give_no_pairs(min_points, found, tmp_path):
    def row(tiles: list[int]) -> np.ndarray:
        return np.array([[10 * x + 5.0, 5.0, float(z)] for z, x in enumerate(tiles)])

    source, target = row([0, 0, 1, 1, 2, 3, 3]), row([1, 1, 2, 2, 3, 3, 3, 4, 4])
    pairs = pairs_of_surveys(tmp_path, source, target, min_points)
    assert [pair.name for pair in pairs] == [f"here_{x}_0" for x in found]


@given(
    NUMBERS,
    st.floats(0.01, 0.99),
    st.integers(0, 3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_both_sides_of_a_split_have_tiles_and_no_block_is_split(
    tile_xy, fraction, seed, block, random
):
    held_out = split_blocks(tile_xy, fraction, seed, block)
    assert held_out.shape == (len(tile_xy),)
    blocks = [tuple(xy) for xy in (tile_xy // block).tolist()]
    if len(set(blocks)) > 1:
        assert 0 < held_out.sum() < len(tile_xy)
        sides = {(place, bool(side)) for place, side in zip(blocks, held_out, strict=True)}
        assert len(sides) == len(set(blocks))
    elif len(set(map(tuple, tile_xy.tolist()))) > 1:
        # Smaller blocks are made before they are split.
        assert 0 < hold_out([tile_xy], fraction, seed, block)[0].sum() < len(tile_xy)
    else:
        assert not held_out.any()
    order = random.sample(range(len(tile_xy)), len(tile_xy))
    assert np.array_equal(split_blocks(tile_xy[order], fraction, seed, block), held_out[order])


def test_a_split_holds_out_about_the_requested_fraction_and_depends_on_the_seed():
    tile_xy = np.stack(np.meshgrid(np.arange(40), np.arange(25)), axis=-1).reshape(-1, 2)
    splits = [split_blocks(tile_xy, 0.1, seed, 5) for seed in range(5)]
    assert [int(split.sum()) for split in splits] == [100] * 5
    assert len({split.tobytes() for split in splits}) == 5
