from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import (
    CPU,
    UTM,
    StoreMaker,
    assert_attributes_of_measured,
    sheet,
    small_model,
    upsample_in_blocks,
)

from pointup import Upsampler, upsample
from pointup.geometry.thinning import poisson_disk_subset
from pointup.upsampling.executor import SingleProcess, run_upsampling
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.candidates import Candidates
from pointup.upsampling.single_pass.upsampling_pass import UpsamplingPass
from pointup.upsampling.store.point_store import build_store


@settings(max_examples=5)
@given(st.integers(2, 60), st.floats(1.0, 20.0), st.floats(1.1, 5.0), st.booleans())
def test_oversampling_keeps_the_exact_number_of_points(
    size: int, ratio: float, oversampling: float, originals: bool
) -> None:
    made = upsample(
        sheet(size),
        ratio,
        model=small_model(0.1),
        originals=originals,
        oversampling=oversampling,
    )
    assert len(made) == round(ratio * size)


def test_tiles_threads_and_place_do_not_change_oversampled_points(
    make_store: StoreMaker,
) -> None:
    model, points = small_model(0.1), np.round(sheet(160), 2)
    for options in (
        UpsampleOptions(ratio=3.0, oversampling=3.0),
        UpsampleOptions(ratio=10.0, oversampling=2.0),
        UpsampleOptions(density=3.0, originals=False, oversampling=3.0),
    ):
        made = upsample_in_blocks(make_store(points, block_size=60), model, options)
        tiled = upsample_in_blocks(
            make_store(points, block_size=60, chunk_size=40), model, options, 4.0
        )
        assert np.array_equal(tiled, made)
        there = upsample_in_blocks(make_store(points + UTM, block_size=60), model, options)
        assert np.abs(there - UTM - made).max() < 1e-8


@pytest.mark.parametrize("originals", [True, False])
def test_candidates_are_all_points_of_the_first_and_the_second_pass(
    make_store: StoreMaker, tmp_path: Path, originals: bool
) -> None:
    store = make_store(sheet(28), block_size=10)
    options, model = UpsampleOptions(originals=originals), small_model(0.1)
    first = UpsamplingPass(store, model, options, CPU, ratio=3.0, oversampling=2.0)
    run_upsampling(first, SingleProcess())
    # Blocks so small that they rarely contain children of more than one row.
    finer = build_store(first.output.for_second_pass(), tmp_path, block_size=2)
    second = UpsamplingPass(finer, model, UpsampleOptions(), CPU, ratio=2.0, measured=store)
    run_upsampling(second, SingleProcess())
    first.take_second_pass(second)

    def of_blocks(made: UpsamplingPass) -> np.ndarray:
        saved = [made._files.load(block, "points")["position"] for block in range(len(made))]
        return np.concatenate(saved) + (0.0 if made is first else finer.frame.origin)

    expected = np.concatenate([of_blocks(first), of_blocks(second)])
    found, distances = [], []
    for block in range(len(first)):
        first.candidates_from_second_pass(block)
        with first._files.load(block, "candidates") as saved:
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


def test_oversampling_fills_holes_of_thin_shapes() -> None:
    rng = np.random.default_rng(0)
    around, across = 2 * np.pi * rng.random((2, 20_000))
    off = 1 + 0.1 * np.cos(across)
    ring = np.column_stack([off * np.cos(around), off * np.sin(around), 0.1 * np.sin(across)])
    samplings = [ring[poisson_disk_subset(ring, 400, rng)] for _ in range(2)]

    def hole(oversampling: float) -> float:
        holes = []
        for points in samplings:
            made = upsample(points, 4.0, model="shapes", oversampling=oversampling)
            holes.append(cKDTree(made).query(ring)[0].max())
        return float(np.mean(holes))

    assert hole(4.0) < 0.97 * hole(1.0)


def test_oversampling_is_that_of_the_model_unless_an_option_overrides_it() -> None:
    points = sheet(200)
    torch.manual_seed(0)
    oversampling_model = Upsampler(feature_dim=8, heads=2, child_heads=2, oversampling=3.0).eval()
    torch.manual_seed(0)
    plain = Upsampler(feature_dim=8, heads=2, child_heads=2).eval()
    made = upsample(points, 2.0, model=oversampling_model)
    assert np.array_equal(made, upsample(points, 2.0, model=plain, oversampling=3.0))
    without = upsample(points, 2.0, model=oversampling_model, oversampling=1.0)
    assert np.array_equal(without, upsample(points, 2.0, model=plain))
    assert not np.array_equal(made, without)


@pytest.mark.parametrize("originals", [True, False])
def test_oversampled_points_refer_to_measured_points(originals: bool) -> None:
    assert_attributes_of_measured(
        4.0, originals, farthest=1.2, at_least=400, to_parent=2, oversampling=3.0
    )
