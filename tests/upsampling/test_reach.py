"""New points are within reach of measured points, for any weights of a model, also where points are
very far from all others: float32 coordinates must keep the differences of the others."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import CPU, UTM, sheet, small_model, upsample_in_blocks

from pointup import Upsampler, upsample
from pointup.geometry.local_geometry import (
    LocalGeometry,
    local_geometry,
)
from pointup.geometry.neighbors import knn
from pointup.io.cloud import PointCloud
from pointup.model.config import MAX_REACH, ModelConfig
from pointup.upsampling.in_memory import load_model
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.candidates import Reach
from pointup.upsampling.store.point_store import build_survey_store


def geometry_of(points: np.ndarray, k: int = 12) -> LocalGeometry:
    pos = torch.from_numpy(points).float()
    ptr = torch.tensor([0, len(pos)])
    return local_geometry(pos, ptr, *knn(pos, ptr, k + 1))


def wild_model(strength: float, seed: int, **options: object) -> Upsampler:
    """A model with random weights, whose offsets are arbitrarily large."""
    model = small_model(**options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights += strength * torch.randn(weights.shape, generator=generator)
    return model


def as_stored(points: np.ndarray) -> np.ndarray:
    """The points (N, 3) of a shape, rounded as the store rounds them."""
    with TemporaryDirectory() as directory:
        store = build_survey_store([[PointCloud(points)]], Path(directory), upright=False)
        return store.frame.to_file(store.read(0, len(store))["position"])


def farthest_in_reach(points: np.ndarray, new: np.ndarray, config: ModelConfig) -> float:
    """Largest distance of new points to their nearest measured point, relative to its reach."""
    points = as_stored(points)
    spacing = geometry_of(points - points.mean(0), config.k).local_spacing[:, 0]
    reach = config.reach * spacing.numpy()
    gaps = np.linalg.norm(new[:, None] - points, axis=2)
    # Both ends of a midpoint are nearest.
    is_nearest = gaps <= (1 + 1e-6) * gaps.min(axis=1, keepdims=True)
    return float(np.where(is_nearest, gaps / reach, np.inf).min(axis=1).max())


@settings(max_examples=8)
@given(
    size=st.integers(1, 40),
    away=st.sampled_from([3.0, 20.0, 300.0, 1e4]),
    ratio=st.sampled_from([1.7, 4.0, 9.0]),
    strength=st.sampled_from([0.0, 0.3, 5.0]),
    originals=st.booleans(),
    seed=st.integers(0, 2**16),
    reach=st.sampled_from([0.5, 1.5, MAX_REACH]),
    extrapolation=st.booleans(),
)
# Of points much closer to one than to all others the features overflowed.
@example(
    size=32, away=3.0, ratio=9.0, strength=5.0, originals=True, seed=0, reach=0.5,
    extrapolation=True,
)  # fmt: skip
def test_new_points_are_within_reach_of_measured_ones_for_any_weights(
    size, away, ratio, strength, originals, seed, reach, extrapolation
):
    rng = np.random.default_rng(seed)
    cluster = rng.random((size, 3)) * 2 + away
    points = np.concatenate([sheet(300, seed=seed), cluster])
    model = wild_model(strength, seed, reach=reach, extrapolation=extrapolation)
    new = upsample(points, ratio, model=model, originals=originals, only_new=originals)
    assert len(new) == round(ratio * len(points)) - originals * len(points)
    assert farthest_in_reach(points, new, model.config) <= 1 + 1e-3


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("lidar", 1),
        ("shapes", 13),
        pytest.param("shapes", 5, marks=pytest.mark.slow),
        pytest.param("lidar", 12, marks=pytest.mark.slow),
    ],
)
def test_a_cluster_far_off_is_upsampled_by_itself(model, size):
    rng = np.random.default_rng(size)
    # About as dense as the sheet: the quotas of `shapes` leave denser places fewer new points.
    cluster = 2 * rng.random((size, 3)) + 499.5
    points = np.concatenate([sheet(600), cluster])
    new = upsample(points, 8.0, model=model, only_new=True)
    assert len(new) == 7 * len(points)
    near, gaps = new[new[:, 0] > 250], cKDTree(points).query(new)[0]
    assert gaps.max() < 3.5  # the sheet's points are 1.3 apart
    assert np.abs(near - 500.5).max(initial=0.0) < 1.5
    if size >= 5:
        assert len(near) >= size


def test_slack_is_what_is_left_of_the_reach_of_the_nearest_point(make_store):
    store = make_store(sheet(300), block_size=64)
    reach, expected = Reach(store), np.arange(300, dtype=np.float32)
    for block in range(store.num_blocks):
        reach.save(block, expected[store.block_ptr[block] : store.block_ptr[block + 1]])
    rows, distance = np.array([299, 0, 150, 3]), np.array([301.0, 0.5, 20.0, 1.0])
    assert reach.slack(rows, distance).tolist() == [-2.0, -0.5, 130.0, 2.0]


def test_an_attribute_named_slack_does_not_change_the_reach():
    """Points have an attribute of that name between two passes."""
    points, model = sheet(300), wild_model(1.0, seed=0)
    expected = upsample(PointCloud(points), 2.0, model=model)
    for slack in (0.0, 1e6):
        cloud = PointCloud(points, {"slack": np.full(300, slack)})
        dense = upsample(cloud, 2.0, model=model)
        assert np.array_equal(dense.positions, expected.positions)
        assert (dense.attributes["slack"] == slack).all()


def sphere(num_points: int, seed: int = 0) -> np.ndarray:
    """Random points of a sphere of radius 1."""
    points = np.random.default_rng(seed).standard_normal((num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def mean_error(points: np.ndarray, centre: np.ndarray) -> float:
    """Mean distance of the points near a sphere of radius 1 from it."""
    distance = np.linalg.norm(points - centre, axis=1)
    return float(np.abs(distance[distance < 10] - 1).mean())


@pytest.mark.parametrize(
    ("model", "num_points"),
    [
        ("lidar", 700),
        ("shapes", 50),
        pytest.param("shapes", 700, marks=pytest.mark.slow),
        ("forest", 500),
    ],
)
def test_a_stray_return_at_the_origin_does_not_spoil_a_scan(model, num_points):
    points = sphere(num_points) + UTM
    expected = mean_error(upsample(points, 4, model=model, only_new=True), UTM)
    with_stray = upsample(np.vstack([points, np.zeros(3)]), 4, model=model, only_new=True)
    assert len(with_stray) == 3 * (num_points + 1)
    assert mean_error(with_stray, UTM) < 1.2 * expected


@pytest.fixture(scope="module")
def errors_alone() -> list[float]:
    """`mean_error` of two scans, each upsampled alone."""
    scans = sphere(500), sphere(400, seed=1)
    made = (upsample(points, 4, model="shapes", only_new=True) for points in scans)
    return [mean_error(new, np.zeros(3)) for new in made]


@pytest.mark.parametrize(
    "away", [1e8, *(pytest.param(away, marks=pytest.mark.slow) for away in (1e4, 1e6))]
)
def test_two_scans_far_apart_are_each_as_good_as_alone(away, errors_alone):
    there = np.array([away, -away, 0.3 * away])
    points = np.concatenate([sphere(500), sphere(400, seed=1) + there])
    new = upsample(points, 4, model="shapes", only_new=True)
    for centre, expected in zip((np.zeros(3), there), errors_alone, strict=True):
        assert mean_error(new, centre) < 1.2 * expected


def test_new_points_near_a_stray_point_do_not_depend_on_the_size_of_batches(make_store):
    model = load_model("shapes", CPU)
    points = np.vstack([sphere(500), [[3e6, 0, 0]]])
    options = UpsampleOptions(ratio=3.0, originals=True)
    few, many = (
        upsample_in_blocks(make_store(points), model, options, budget=budget)
        for budget in (300, 100_000)
    )
    assert len(few) == len(many)
    # A share of 1 % may differ, because sums are rounded differently in batches of other sizes.
    assert np.quantile(cKDTree(few).query(many)[0], 0.99) < 1e-3
