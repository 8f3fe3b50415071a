"""Frames: a cloud that is moved, scaled, turned or mirrored gets the same new points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import sheet, small_model

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.model.config import ModelConfig
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.store.point_store import Frame, build_survey_store, own_frame


def pose(seed: int) -> np.ndarray:
    """A random orthogonal matrix; half of them mirror."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]


def frame_of(points: np.ndarray, num_chunks: int = 1) -> tuple[Frame, np.ndarray]:
    def chunks() -> Iterator[np.ndarray]:
        return iter(np.array_split(points, num_chunks))

    return own_frame(chunks)


@settings(max_examples=5)
@given(
    st.integers(0, 1000),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.0, 1.0, 1e4]),
    st.sampled_from([{"ratio": 4.0}, {"ratio": 9.0}, {"ratio": 2.0, "oversampling": 2.0}]),
)
def test_new_points_follow_a_cloud_that_is_moved_scaled_and_turned(
    seed: int, scale: float, shift: float, options: dict[str, float]
) -> None:
    points, model, turn = sheet(300, seed=seed), small_model(0.1), pose(seed)
    made = upsample(points, model=model, only_new=True, **options)
    there = upsample(scale * points @ turn + scale * shift, model=model, only_new=True, **options)
    back = (there / scale - shift) @ turn.T
    assert len(back) == len(made)
    gaps = cKDTree(back).query(made)[0]
    spacing = np.median(cKDTree(points).query(points, k=2)[0][:, 1])
    assert np.mean(gaps < 1e-3 * spacing) >= 0.99


def test_points_repeated_in_another_chunk_do_not_turn_the_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = np.random.default_rng(0).normal(size=(2600, 3)) * [3.0, 2.0, 1.0]
    points = points[np.argsort(points[:, 0])]
    frames = []
    for name, cloud in (("once", points), ("again", np.concatenate([points, points[:1000]]))):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("pointup.upsampling.store.point_store.CHUNK_SIZE", 500)
        store = build_survey_store([[PointCloud(cloud)]], tmp_path / name, upright=False)
        assert len(store) == 2600
        frames.append(store.frame)
    assert np.allclose(frames[0].axes, frames[1].axes, rtol=0, atol=1e-12)
    assert np.allclose(frames[0].origin, frames[1].origin, rtol=0, atol=1e-12)
    assert frames[0].unit == pytest.approx(frames[1].unit, rel=1e-12)


@settings(max_examples=6)
@given(
    st.integers(0, 1000),
    st.integers(1, 300),
    st.sampled_from([{"ratio": 4.0}, {"ratio": 9.0}, {"ratio": 4.0, "above_ground": True}]),
)
def test_repeated_points_change_no_new_point(
    seed: int, num_repeated: int, options: dict[str, float]
) -> None:
    points, model, rng = sheet(300, seed=seed), small_model(0.1), np.random.default_rng(seed)
    again = np.concatenate([points, points[rng.integers(0, 300, num_repeated)]])
    made = upsample(points, model=model, only_new=True, **options)
    assert np.array_equal(upsample(again, model=model, only_new=True, **options), made)
    shuffled = upsample(rng.permutation(again), model=model, only_new=True, **options)
    assert len(shuffled) == len(made)
    spacing = np.median(cKDTree(points).query(points, k=2)[0][:, 1])
    assert np.mean(cKDTree(shuffled).query(made)[0] < 1e-3 * spacing) >= 0.99


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(3, 60), st.booleans())
def test_tilted_planes_and_lines_have_a_frame(seed: int, num_points: int, is_line: bool) -> None:
    flat = np.random.default_rng(seed).random((num_points, 3)) * [1, not is_line, 0]
    points = flat @ pose(seed)
    frame, extent = frame_of(points)
    assert np.allclose(frame.to_file(frame.from_file(points)), points, atol=1e-9)
    assert extent.max() <= 1 and np.isfinite(frame.axes).all()


def test_a_tilted_plane_stays_a_plane() -> None:
    for seed in range(5):
        normal = pose(seed)[:, 2]
        points = (sheet(100) * [1, 1, 0]) @ pose(seed).T
        made = upsample(points, 4.0, model=small_model(0.1))
        assert made.shape == (400, 3) and np.abs(made @ normal).max() < 1e-4


def test_distances_are_in_the_unit_of_the_file() -> None:
    points, model = 1000 * sheet(200), small_model(0.1)
    made = upsample(PointCloud(points), 3.0, model=model, only_new=True)
    distance = cKDTree(points).query(made.positions)[0]
    assert np.allclose(made.attributes["distance_to_measured"], distance, rtol=1e-3, atol=1.0)
    limit = float(np.median(distance))
    near = upsample(points, 3.0, model=model, only_new=True, max_distance=limit)
    assert cKDTree(points).query(near)[0].max() <= 1.001 * limit


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 7))
def test_positions_return_to_the_file_and_fill_the_frame(seed: int, num_chunks: int) -> None:
    points = 40 * sheet(100, seed=seed) @ pose(seed) + 5e5
    frame, extent = frame_of(points, num_chunks)
    inside = frame.from_file(points)
    assert np.allclose(frame.to_file(inside), points, rtol=0, atol=1e-8)
    assert np.allclose(inside.min(axis=0), 0, atol=1e-9)
    assert np.allclose(inside.max(axis=0), extent) and extent.max() == pytest.approx(0.75)
    variances = inside.var(axis=0)
    assert (np.diff(variances) > 0).all()
    assert np.allclose(np.cov(inside.T) - np.diag(np.diag(np.cov(inside.T))), 0, atol=1e-12)
    assert (((inside - inside.mean(axis=0)) ** 3).mean(axis=0) > 0).all()


def test_a_cloud_without_distinct_directions_keeps_its_axes() -> None:
    corners = np.array(list(np.ndindex(2, 2, 2)), float) * 3 + 7
    frame, extent = frame_of(corners)
    assert np.array_equal(frame.axes, np.eye(3))
    assert np.allclose(frame.origin, 7) and np.allclose(extent, 0.75)


def test_heights_stay_vertical(tmp_path: Path) -> None:
    plain, columns = ModelConfig(), ModelConfig(column_layers=1)
    assert not UpsampleOptions().is_upright(plain)
    assert UpsampleOptions().is_upright(columns)
    assert UpsampleOptions(density=3.0).is_upright(plain)
    assert UpsampleOptions(above_ground=True).is_upright(plain)
    points = sheet(300) @ pose(1)
    for upright in (True, False):
        directory = tmp_path / str(upright)
        directory.mkdir()
        store = build_survey_store([[PointCloud(points)]], directory, upright=upright)
        assert store.frame.is_upright == upright
        low, high = store.bounds_in_file()
        for block in range(store.num_blocks):
            rows = store.read_block(block)
            there = store.frame.to_file(rows["position"])
            assert np.allclose(there, points[rows["index"]], atol=1e-4)
            assert (there >= low[block] - 1e-9).all() and (there <= high[block] + 1e-9).all()
