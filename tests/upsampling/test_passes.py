from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import (
    UTM,
    StoreMaker,
    assert_attributes_of_measured,
    sheet,
    small_model,
    upsample_in_blocks,
)

from pointup import upsample
from pointup.model.config import RANGES
from pointup.upsampling.options import UpsampleOptions, pass_ratios


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1, [1]), (8, [8]), (9, [4, 2.25]), (16, [4, 4]), (64, [4, 4, 4])]
)
def test_large_ratios_take_passes_of_four(ratio: float, expected: list[float]) -> None:
    assert pass_ratios(ratio) == expected
    assert UpsampleOptions(ratio=ratio).pass_ratios(1000) == expected


@settings(max_examples=6)
@given(st.integers(2, 40), st.floats(8.01, 40.0), st.booleans())
def test_passes_give_the_exact_number_of_points(size: int, ratio: float, originals: bool) -> None:
    made = upsample(sheet(size), ratio, model=small_model(0.1), originals=originals)
    assert len(made) == round(ratio * size)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_two_passes_equal_two_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reach of measured points, not that of the points of a pass.
    monkeypatch.setitem(RANGES, "reach", (0.01, 100.0))
    # A second call would turn the output of the first one into a frame of its own.
    monkeypatch.setattr(UpsampleOptions, "is_upright", lambda *_: True)
    # With a finer grid of the store, the second pass starts from the same points both ways.
    points, model = np.rint(1024 * sheet(300, seed=seed)) / 1024, small_model(0.1, reach=100.0)
    made = upsample(points, 12.0, model=model)
    once = upsample(points, 4.0, model=model)
    # Quotas are those of measured points alone.
    model.config = replace(model.config, density_exponent=0.0)
    twice = upsample(once, 3.0, model=model)
    assert np.array_equal(made[:1200], once)
    # The first pass stands block after block, which is another order where coordinates tie.
    assert cKDTree(made[1200:]).query(twice[1200:])[0].max() < 1e-9


def test_tiles_threads_and_place_do_not_change_passes(make_store: StoreMaker) -> None:
    model, points = small_model(0.1), np.round(sheet(250), 2)
    for options in (UpsampleOptions(ratio=8.5), UpsampleOptions(density=4.0, originals=False)):
        made = upsample_in_blocks(make_store(points), model, options)
        tiled = upsample_in_blocks(make_store(points, chunk_size=60), model, options, 4.0)
        assert np.array_equal(tiled, made)
        there = upsample_in_blocks(make_store(points + UTM), model, options)
        assert np.abs(there - UTM - made).max() < 1e-8


@pytest.mark.parametrize("originals", [True, False])
def test_points_of_all_passes_refer_to_measured_points(originals: bool) -> None:
    assert_attributes_of_measured(16.0, originals, farthest=1.5, at_least=2000, to_parent=3)


def test_density_takes_a_second_pass_where_a_place_is_very_sparse() -> None:
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((3000, 3)) * (20, 20, 1), rng.random((600, 3)) * (20, 20, 1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    made = upsample(points, density=18.0, model=small_model())
    for low, high in ((2, 18), (23, 38)):
        inside = (made[:, 0] > low) & (made[:, 0] < high) & (np.abs(made[:, 1] - 10) < 8)
        assert 16.5 < inside.sum() / ((high - low) * 16) < 19.5


def test_two_passes_stay_closer_to_a_surface_than_one() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)

    def off_the_sphere(max_pass_ratio: float) -> float:
        model = small_model(max_pass_ratio=max_pass_ratio)
        made = upsample(points, 16.0, model=model, only_new=True)
        return float(np.abs(np.linalg.norm(made, axis=1) - 1).mean())

    assert off_the_sphere(8.0) < 0.6 * off_the_sphere(16.0)
