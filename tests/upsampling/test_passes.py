"""Several passes, and second passes that supply candidates: the number, place and attributes of new
points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import CPU, UTM, sheet, small_model, upsample_in_blocks

from pointup import upsample
from pointup.geometry.thinning import poisson_disk_subset
from pointup.io.cloud import PointCloud
from pointup.model.config import RANGES
from pointup.upsampling.executor import SingleProcess, run_upsampling
from pointup.upsampling.options import UpsampleOptions, pass_ratios
from pointup.upsampling.single_pass.candidates import Candidates
from pointup.upsampling.single_pass.upsampling_pass import UpsamplingPass
from pointup.upsampling.store.point_store import build_store


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1, [1]), (8, [8]), (9, [4, 2.25]), (16, [4, 4]), (64, [4, 4, 4])]
)
def test_large_ratios_take_passes_of_four(ratio, expected):
    assert pass_ratios(ratio) == expected
    assert UpsampleOptions(ratio=ratio).pass_ratios(1000) == expected


@settings(max_examples=12)
@given(
    st.integers(2, 50),
    st.one_of(st.floats(1.0, 8.0), st.floats(8.01, 30.0)),
    st.one_of(st.none(), st.floats(1.1, 5.0)),
    st.booleans(),
)
def test_a_ratio_gives_exactly_so_many_points(size, ratio, oversampling, originals):
    options = {"originals": originals, "oversampling": oversampling}
    made = upsample(sheet(size), ratio, model=small_model(0.1), **options)
    assert len(made) == round(ratio * size)
    assert np.isfinite(made).all()


@pytest.mark.parametrize(
    ("of_model", "options"),
    [
        ({"relaxation_residual": 0.1}, {"ratio": 3.3}),
        ({"volume_relaxation": 1.5}, {"ratio": 3.3}),
        pytest.param({}, {"ratio": 10.0, "oversampling": 2.0}, marks=pytest.mark.slow),
        pytest.param({}, {"density": 3.0, "originals": False}, marks=pytest.mark.slow),
        ({}, {"density": 1.5, "originals": False, "oversampling": 2.0}),
    ],
)
def test_tiles_threads_parts_and_place_do_not_change_new_points(of_model, options, make_store):
    model, given = small_model(0.1, **of_model), UpsampleOptions(**options)
    points = sheet(200)
    if "volume_relaxation" in of_model:
        points[:, 2] += np.random.default_rng(0).normal(size=len(points))
    points = np.round(points, 2)
    made = upsample_in_blocks(make_store(points, block_size=60), model, given)
    num_threads = torch.get_num_threads()
    for tile, threads, shift in ((4.0, 1, 0 * UTM), (16.0, 2, 0 * UTM), (None, 2, UTM)):
        store = make_store(points + shift, block_size=60, chunk_size=40)
        torch.set_num_threads(threads)
        try:
            again = upsample_in_blocks(store, model, given, tile)
        finally:
            assert torch.get_num_threads() == threads
            torch.set_num_threads(num_threads)
        assert np.abs(again - shift - made).max() < (1e-8 if shift.any() else 1e-300)


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize(
    ("ratio", "oversampling", "farthest", "at_least", "to_parent"),
    [(16.0, None, 1.5, 2000, 3), (4.0, 3.0, 1.2, 400, 2)],
)
def test_new_points_of_all_passes_refer_to_measured_points(
    ratio, oversampling, farthest, at_least, to_parent, originals
):
    """Each has the attributes of its nearest measured point, and a parent near it."""
    points, number = sheet(200) + UTM, np.arange(200)
    output = upsample(
        PointCloud(points, {"number": number}),
        ratio,
        model=small_model(0.05),
        originals=originals,
        max_distance=farthest,
        oversampling=oversampling,
    )
    new = output.select(output.attributes["synthetic"] == 1)
    assert len(new) > at_least
    distance, nearest = cKDTree(points).query(new.positions, k=2)
    assert np.allclose(new.attributes["distance_to_measured"], distance[:, 0], atol=1e-3)
    assert distance[:, 0].max() <= farthest + 1e-3
    is_clear = distance[:, 0] < distance[:, 1] - 1e-2
    assert np.array_equal(new.attributes["number"][is_clear], nearest[is_clear, 0])
    parent = new.attributes["parent_index"]
    assert np.isin(parent, number).all()
    assert np.median(np.linalg.norm(points[parent] - new.positions, axis=1)) < to_parent


def test_two_passes_equal_two_calls(monkeypatch):
    # The reach of measured points, not that of the points of a pass.
    monkeypatch.setitem(RANGES, "reach", (0.01, 100.0))
    # A second call would turn the output of the first one into a frame of its own.
    monkeypatch.setattr(UpsampleOptions, "is_upright", lambda *_: True)
    # With a finer grid of the store, the second pass starts from the same points both ways.
    points, model = np.rint(1024 * sheet(300)) / 1024, small_model(0.1, reach=100.0)
    made = upsample(points, 12.0, model=model)
    once = upsample(points, 4.0, model=model)
    # Quotas are those of measured points alone.
    model.config = replace(model.config, density_exponent=0.0)
    twice = upsample(once, 3.0, model=model)
    assert np.array_equal(made[:1200], once)
    # The first pass stands block after block, which is another order where coordinates tie.
    assert cKDTree(made[1200:]).query(twice[1200:])[0].max() < 1e-9


def test_density_takes_a_second_pass_where_a_place_is_very_sparse():
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((3000, 3)) * (20, 20, 1), rng.random((600, 3)) * (20, 20, 1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    made = upsample(points, density=18.0, model=small_model())
    for low, high in ((2, 18), (23, 38)):
        inside = (made[:, 0] > low) & (made[:, 0] < high) & (np.abs(made[:, 1] - 10) < 8)
        assert 16.5 < inside.sum() / ((high - low) * 16) < 19.5


def test_two_passes_stay_closer_to_a_surface_than_one():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)

    def off_the_sphere(max_pass_ratio: float) -> float:
        model = small_model(max_pass_ratio=max_pass_ratio)
        made = upsample(points, 16.0, model=model, only_new=True)
        return float(np.abs(np.linalg.norm(made, axis=1) - 1).mean())

    assert off_the_sphere(8.0) < 0.6 * off_the_sphere(16.0)


@pytest.mark.parametrize("originals", [True, False])
def test_candidates_are_all_points_of_the_first_and_the_second_pass(
    make_store, tmp_path, originals
):
    store = make_store(sheet(20), block_size=8)
    options, model = UpsampleOptions(originals=originals), small_model(0.1)
    first = UpsamplingPass(store, model, options, CPU, ratio=3.0, oversampling=2.0)
    run_upsampling(first, SingleProcess())
    # Blocks so small that they rarely contain children of more than one row.
    finer = build_store(first.output.for_second_pass(), tmp_path, block_size=2)
    second = UpsamplingPass(finer, model, UpsampleOptions(), CPU, ratio=2.0, measured=store)
    run_upsampling(second, SingleProcess())
    first.take_second_pass(second)

    def of_blocks(made: UpsamplingPass) -> np.ndarray:
        saved = [made.output.values(block, "position") for block in range(len(made))]
        return np.concatenate(saved) + (0.0 if made is first else finer.frame.origin)

    expected = np.concatenate([of_blocks(first), of_blocks(second)])
    found, distances = [], []
    for block in range(len(first)):
        first.candidates_from_second_pass(block)
        saved = first._files.load(block, "candidates")
        candidates = Candidates(*(saved[name] for name in Candidates.__dataclass_fields__))
        parents = store.read_block(block)["position"][candidates.parent]
        found.append(parents + candidates.offset)
        distances.append(candidates.distance)
        # Children of children are near the point that they came from.
        reach = 4 * candidates.spacing[candidates.parent]
        assert (np.linalg.norm(candidates.offset, axis=1) < reach).all()
    points = np.concatenate(found)
    assert len(points) == len(expected) == len(np.unique(cKDTree(expected).query(points)[1]))
    assert cKDTree(expected).query(points)[0].max() < 1e-5
    measured = np.concatenate([store.read_block(block)["position"] for block in range(len(first))])
    assert np.allclose(np.concatenate(distances), cKDTree(measured).query(points)[0], atol=1e-5)


def test_oversampling_fills_holes_of_thin_shapes():
    rng = np.random.default_rng(0)
    around, across = 2 * np.pi * rng.random((2, 8000))
    off = 1 + 0.1 * np.cos(across)
    ring = np.column_stack([off * np.cos(around), off * np.sin(around), 0.1 * np.sin(across)])
    samplings = [ring[poisson_disk_subset(ring, 250, rng)] for _ in range(3)]

    def hole(oversampling: float) -> float:
        holes = []
        for points in samplings:
            made = upsample(points, 4.0, model="shapes", oversampling=oversampling)
            holes.append(cKDTree(made).query(ring)[0].max())
        return float(np.mean(holes))

    assert hole(4.0) < 0.97 * hole(1.0)


def test_oversampling_is_that_of_the_model_unless_an_option_overrides_it():
    points, plain, oversampling = sheet(100), small_model(), small_model(oversampling=3.0)
    made = upsample(points, 2.0, model=oversampling)
    assert np.array_equal(made, upsample(points, 2.0, model=plain, oversampling=3.0))
    without = upsample(points, 2.0, model=oversampling, oversampling=1.0)
    assert np.array_equal(without, upsample(points, 2.0, model=plain))
    assert not np.array_equal(made, without)
