"""Tiles: grouping of points, pairs that keep their coordinates, and splits by place."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pointup.datasets.survey_tiles import split_blocks, split_tiles, survey_pairs
from pointup.errors import ConfigError, DataError

NUMBERS = arrays.arrays(
    np.int64, st.tuples(st.integers(0, 40), st.just(2)), elements=st.integers(-6, 6)
)


@given(NUMBERS, st.sampled_from([0.5, 1.0, 3.0]))
def test_tiles_equal_a_grouping_by_dictionary(numbers: np.ndarray, tile: float) -> None:
    positions = numbers / 4
    tiles = split_tiles(positions, tile)
    expected = defaultdict(list)
    for i, (x, y) in enumerate(positions):
        expected[int(x // tile), int(y // tile)].append(i)
    found = {tuple(xy): tiles.points(t).tolist() for t, xy in enumerate(tiles.xy.tolist())}
    assert found == expected
    assert list(found) == sorted(found)
    assert len(tiles) == len(found)


def test_a_tile_holds_the_points_between_its_corners() -> None:
    positions = np.random.default_rng(0).random((500, 2)) * [70, 30] + [4e5, 5.1e6]
    tiles = split_tiles(positions, 10.0)
    assert len(tiles) == 21
    for t in range(len(tiles)):
        low, held = tiles.xy[t] * tiles.size, positions[tiles.points(t)]
        assert ((held >= low) & (held < low + tiles.size)).all()


def test_impossible_tiles_are_errors() -> None:
    for size in (0, -1, np.nan, np.inf):
        with pytest.raises(ConfigError, match="must be a positive length"):
            split_tiles(np.zeros((2, 2)), size)
    for far in (np.nan, np.inf, 1e300):
        with pytest.raises(DataError, match="too far away"):
            split_tiles(np.array([[0, 0], [far, 0]]), 1.0)
    with pytest.raises(DataError, match="too far apart"):
        split_tiles(np.array([[0, 0], [1e12, 1e12]]), 1.0)


def test_pairs_of_surveys_keep_map_coordinates_to_a_tenth_of_a_millimetre() -> None:
    rng = np.random.default_rng(0)
    source, target = (rng.random((n, 3)) * [40, 20, 9] + [4e5, 5.1e6, 100] for n in (800, 3000))
    pairs = list(survey_pairs(source, target, 10.0, min_points=10, stem="here"))
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


def test_tiles_without_enough_points_in_both_surveys_give_no_pairs() -> None:
    def row(tiles: list[int]) -> np.ndarray:
        return np.array([[10 * x + 5.0, 5.0, 0.0] for x in tiles])

    source, target = row([0, 0, 1, 1, 2, 3, 3]), row([1, 1, 2, 2, 3, 3, 3, 4, 4])
    names = [pair.name for pair in survey_pairs(source, target, 10.0, min_points=2)]
    assert names == ["tile_1_0", "tile_3_0"]
    assert [p.name for p in survey_pairs(source, target, 10.0, min_points=0)] == [
        "tile_1_0",
        "tile_2_0",
        "tile_3_0",
    ]


@given(
    NUMBERS,
    st.floats(0.01, 0.99),
    st.integers(0, 3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_both_sides_of_a_split_have_tiles_and_no_block_is_split(
    tile_xy: np.ndarray, fraction: float, seed: int, block: int, random
) -> None:
    held_out = split_blocks(tile_xy, fraction, seed, block)
    assert held_out.shape == (len(tile_xy),)
    blocks = [tuple(xy) for xy in (tile_xy // block).tolist()]
    if len(set(blocks)) > 1:
        assert 0 < held_out.sum() < len(tile_xy)
        sides = {(place, bool(side)) for place, side in zip(blocks, held_out, strict=True)}
        assert len(sides) == len(set(blocks))
    elif len(set(map(tuple, tile_xy.tolist()))) > 1:
        assert 0 < held_out.sum() < len(tile_xy)
    else:
        assert not held_out.any()
    order = random.sample(range(len(tile_xy)), len(tile_xy))
    assert np.array_equal(split_blocks(tile_xy[order], fraction, seed, block), held_out[order])


def test_a_split_holds_out_about_the_requested_fraction_and_depends_on_the_seed() -> None:
    tile_xy = np.stack(np.meshgrid(np.arange(40), np.arange(25)), axis=-1).reshape(-1, 2)
    splits = [split_blocks(tile_xy, 0.1, seed, 5) for seed in range(5)]
    assert [int(split.sum()) for split in splits] == [100] * 5
    assert len({split.tobytes() for split in splits}) == 5


def test_impossible_splits_are_errors() -> None:
    for fraction in (0, 1, -0.1, np.nan):
        with pytest.raises(ConfigError, match="must be between 0 and 1"):
            split_blocks(np.zeros((2, 2)), fraction, 0, 1)
    with pytest.raises(ConfigError, match="must be at least 1"):
        split_blocks(np.zeros((2, 2)), 0.1, 0, 0)
