"""Points very far from all others: float32 coordinates must keep the differences of the others."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import CPU, UTM, StoreMaker, upsample_in_blocks

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.upsampling.in_memory import load_model
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.candidates import near_groups
from pointup.upsampling.store.point_store import build_store
from pointup.upsampling.store.region import Region


def sphere(num_points: int, seed: int = 0) -> np.ndarray:
    """Random points of a sphere of radius 1."""
    points = np.random.default_rng(seed).standard_normal((num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def mean_error(points: np.ndarray, centre: np.ndarray) -> float:
    """Mean distance of the points near a sphere of radius 1 from it."""
    distance = np.linalg.norm(points - centre, axis=1)
    return float(np.abs(distance[distance < 10] - 1).mean())


@pytest.mark.parametrize(
    ("model", "num_points"), [("shapes", 1000), ("lidar", 1000), ("forest", 1000), ("shapes", 50)]
)
def test_a_stray_return_at_the_origin_does_not_spoil_a_scan(model: str, num_points: int) -> None:
    points = sphere(num_points) + UTM
    expected = mean_error(upsample(points, 4, model=model, only_new=True), UTM)
    with_stray = upsample(np.vstack([points, np.zeros(3)]), 4, model=model, only_new=True)
    assert len(with_stray) == 3 * (num_points + 1)
    assert mean_error(with_stray, UTM) < 1.2 * expected


@pytest.mark.parametrize("away", [1e4, 1e6, 1e8])
def test_two_scans_far_apart_are_each_as_good_as_alone(away: float) -> None:
    there = np.array([away, -away, 0.3 * away])
    points = np.concatenate([sphere(700), sphere(500, seed=1) + there])
    new = upsample(points, 4, model="shapes", only_new=True)
    for centre, alone in ((np.zeros(3), sphere(700)), (there, sphere(500, seed=1))):
        expected = mean_error(upsample(alone, 4, model="shapes", only_new=True), np.zeros(3))
        assert mean_error(new, centre) < 1.2 * expected


def test_new_points_near_a_stray_point_do_not_depend_on_the_size_of_batches(
    make_store: StoreMaker,
) -> None:
    model = load_model("shapes", CPU)
    points = np.vstack([sphere(900), [[3e6, 0, 0]]])
    options = UpsampleOptions(ratio=3.0, originals=True)
    few, many = (
        upsample_in_blocks(make_store(points), model, options, budget=budget)
        for budget in (300, 100_000)
    )
    assert len(few) == len(many)
    # A share of 1 % may differ, because sums are rounded differently in batches of other sizes.
    assert np.quantile(cKDTree(few).query(many)[0], 0.99) < 1e-3


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    away=st.sampled_from([0.0, 10.0, 1e4, 1e7]),
    seed=st.integers(0, 2**16),
)
def test_groups_are_near_or_few_and_hold_each_point_once(
    sizes: list[int], away: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    clusters = [sphere(size, seed) + away * rng.random(3) for size in sizes]
    with TemporaryDirectory() as directory:
        cloud = PointCloud(np.concatenate([*clusters, np.ones((1, 3))]))
        store = build_store([cloud], Path(directory), block_size=128)
        region = Region(store, 0, store.num_blocks)
        core = np.arange(len(store))
        groups = near_groups(region, core)
        assert np.array_equal(np.concatenate([core[group] for group in groups]), core)
        side = 1000 * 2**14 * store.resolution
        for group in groups:
            points = region.rows["position"][core[group]]
            assert near_groups(region, core[group]) == [slice(0, len(points))]
            assert len(points) <= 64 or np.ptp(points, axis=0).max() < 1.03 * side
        if np.ptp(region.rows["position"], axis=0).max() < side:
            assert len(groups) == 1
