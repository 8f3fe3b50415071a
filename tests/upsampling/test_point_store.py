"""The store of a survey: its order, the rows of places, and the frame that a cloud turns into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from sheets import UTM, grid, in_chunks, sheet, small_model

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.model.config import ModelConfig
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.store import point_store
from pointup.upsampling.store.bisection import BisectionOrder, split_boxes
from pointup.upsampling.store.point_store import (
    Frame,
    Store,
    build_survey_store,
    grid_resolution,
    own_frame,
)


def test_boxes_are_the_largest_that_fit():
    rng = np.random.default_rng(0)
    points = rng.random((500, 3)) * (7.0, 3.0, 0.5)
    keys = BisectionOrder(np.array([7.0, 3.0, 0.5])).keys(points)
    order = np.argsort(keys)

    def halves(index: np.ndarray, low: np.ndarray, side: np.ndarray) -> list[set[int]]:
        if len(index) <= 20:
            return [set(index.tolist())] if len(index) else []
        axis = int(np.argmax(side))
        half = side.copy()
        half[axis] /= 2
        upper = points[index, axis] >= low[axis] + half[axis]
        up = low.copy()
        up[axis] += half[axis]
        return halves(index[~upper], low, half) + halves(index[upper], up, half)

    expected = halves(np.arange(500), np.zeros(3), np.array([8.0, 4.0, 1.0]))
    starts = split_boxes(keys[order], lambda starts, stops: stops - starts <= 20)
    assert [set(part.tolist()) for part in np.split(order, starts[1:])] == expected


def test_a_store_has_every_point_once_with_its_attributes(make_store):
    points = sheet(1300) + UTM
    store = make_store(points)
    rows = store.read(0, len(store))
    index = rows["index"]
    assert sorted(index.tolist()) == list(range(1300))
    assert np.array_equal(rows["attributes"]["number"], index)
    assert np.allclose(rows["position"] + store.frame.origin, points[index], atol=1e-4)
    sizes = np.diff(store.block_ptr)
    assert sizes.sum() == 1300 and sizes.max() <= 200
    for block in range(store.num_blocks):
        inside = store.read_block(block)["position"]
        assert np.array_equal(inside.min(0), store.low[block])
        assert np.array_equal(inside.max(0), store.high[block])


def test_a_point_that_the_grid_moves_beyond_the_extent_stays_last(make_store):
    line = np.linspace(0, 1 - 1e-9, 100)[:, None] * [1, 0, 0]
    assert make_store(line).read(0, 100)["index"][-1] == 99


def test_a_store_does_not_depend_on_chunks_and_parts(make_store, monkeypatch):
    points = sheet(1300)
    points[200:500] = points[7]
    whole = make_store(points, chunk_size=1300)
    monkeypatch.setattr("pointup.upsampling.store.point_store.CHUNK_SIZE", 230)
    cut = make_store(points, chunk_size=100)
    assert np.array_equal(whole.read(0, 1300), cut.read(0, 1300))
    assert np.array_equal(whole.block_ptr, cut.block_ptr)


def test_one_point_far_away_does_not_make_a_part_of_most_of_the_cloud(make_store, monkeypatch):
    points = np.concatenate([sheet(1300) + UTM, np.zeros((1, 3))])
    whole = make_store(points, chunk_size=2000)
    sizes, real = [], point_store._sort_parts

    def sort_parts(*given: Any) -> Any:
        sizes.extend(np.diff(given[3]))
        return real(*given)

    monkeypatch.setattr(point_store, "_HISTOGRAM_BITS", 6)
    monkeypatch.setattr(point_store, "CHUNK_SIZE", 230)
    monkeypatch.setattr(point_store, "_sort_parts", sort_parts)
    cut = make_store(points, chunk_size=300)
    assert sum(sizes) == 1301 and max(sizes) <= 230
    assert np.array_equal(whole.read(0, 1301), cut.read(0, 1301))
    assert np.array_equal(whole.block_ptr, cut.block_ptr)


def test_a_place_of_a_survey_has_one_row(tmp_path):
    points = sheet(500)
    again = np.concatenate([points, points[:120], points[:30]])
    for name, cloud, num_coincident in (("once", points, 0), ("again", again, 150)):
        (tmp_path / name).mkdir()
        chunks = in_chunks(PointCloud(cloud), 100)
        store = build_survey_store([chunks], tmp_path / name, block_size=64)
        assert store.num_coincident == num_coincident
        assert sorted(store.read(0, len(store))["index"]) == list(range(500))


def test_the_same_cloud_elsewhere_gives_the_same_store(make_store):
    points = np.round(sheet(1000), 2)
    here, there = make_store(points), make_store(points + UTM)
    assert np.array_equal(here.read(0, 1000), there.read(0, 1000))


def test_points_that_only_the_grid_joins_are_places_of_their_own_in_a_buffer_as_well(tmp_path):
    points = np.round(sheet(500), 2)
    # Pairs of points much closer to each other than the steps of the grid.
    points[:40] = points[40:80] + 1e-9
    rng = np.random.default_rng(1)
    files = [points, points[rng.permutation(300)]]
    chunks = [in_chunks(PointCloud(points), 100) for points in files]
    store = build_survey_store(chunks, tmp_path, block_size=64)
    rows = store.read(0, len(store))
    assert len(np.unique(rows["position"], axis=0)) == 460
    assert len(store) == 500 and store.num_coincident == 300
    first, second = (store.places_in_file(np.arange(500), file) for file in (0, 1))
    assert sorted(first) == list(range(500))
    assert sorted(second) == [-1] * 200 + list(range(300))
    is_in_both = second >= 0
    assert np.array_equal(files[0][first[is_in_both]], files[1][second[is_in_both]])


def pose(seed: int) -> np.ndarray:
    """A random orthogonal matrix; half of them mirror."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]


def frame_of(points: np.ndarray, num_chunks: int = 1) -> tuple[Frame, np.ndarray]:
    def chunks() -> Iterator[np.ndarray]:
        return iter(np.array_split(points, num_chunks))

    return own_frame(chunks)


@settings(max_examples=4)
@given(
    st.integers(0, 1000),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.0, 1.0, 1e4]),
    st.sampled_from([{"ratio": 4.0}, {"ratio": 9.0}, {"ratio": 2.0, "oversampling": 2.0}]),
)
def test_new_points_follow_a_cloud_that_is_moved_scaled_and_turned(seed, scale, shift, options):
    points, model, turn = sheet(300, seed=seed), small_model(0.1), pose(seed)
    made = upsample(points, model=model, only_new=True, **options)
    there = upsample(scale * points @ turn + scale * shift, model=model, only_new=True, **options)
    back = (there / scale - shift) @ turn.T
    assert len(back) == len(made)
    gaps = cKDTree(back).query(made)[0]
    spacing = np.median(cKDTree(points).query(points, k=2)[0][:, 1])
    assert np.mean(gaps < 1e-3 * spacing) >= 0.99


def test_points_repeated_in_another_chunk_do_not_turn_the_frame(tmp_path, monkeypatch):
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


@settings(max_examples=4)
@given(
    st.integers(0, 1000),
    st.integers(1, 300),
    st.sampled_from([{"ratio": 4.0}, {"ratio": 9.0}, {"ratio": 4.0, "above_ground": True}]),
)
def test_repeated_points_change_no_new_point(seed, num_repeated, options):
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
def test_tilted_planes_and_lines_have_a_frame(seed, num_points, is_line):
    flat = np.random.default_rng(seed).random((num_points, 3)) * [1, not is_line, 0]
    points = flat @ pose(seed)
    frame, extent = frame_of(points)
    assert np.allclose(frame.to_file(frame.from_file(points)), points, atol=1e-9)
    assert extent.max() <= 1 and np.isfinite(frame.axes).all()


def test_a_tilted_plane_stays_a_plane():
    for seed in range(2):
        normal = pose(seed)[:, 2]
        points = (sheet(100) * [1, 1, 0]) @ pose(seed).T
        made = upsample(points, 4.0, model=small_model(0.1))
        assert made.shape == (400, 3) and np.abs(made @ normal).max() < 1e-4


def test_distances_are_in_the_unit_of_the_file():
    points, model = 1000 * sheet(200), small_model(0.1)
    made = upsample(PointCloud(points), 3.0, model=model, only_new=True)
    distance = cKDTree(points).query(made.positions)[0]
    assert np.allclose(made.attributes["distance_to_measured"], distance, rtol=1e-3, atol=1.0)
    limit = float(np.median(distance))
    near = upsample(points, 3.0, model=model, only_new=True, max_distance=limit)
    assert cKDTree(points).query(near)[0].max() <= 1.001 * limit


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 7))
def test_positions_return_to_the_file_and_fill_the_frame(seed, num_chunks):
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


def test_a_cloud_without_distinct_directions_keeps_its_axes():
    corners = np.array(list(np.ndindex(2, 2, 2)), float) * 3 + 7
    frame, extent = frame_of(corners)
    assert np.array_equal(frame.axes, np.eye(3))
    assert np.allclose(frame.origin, 7) and np.allclose(extent, 0.75)


def test_heights_stay_vertical(tmp_path):
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


def store_of(files: list[PointCloud], chunk_size: int = 100) -> Store:
    with TemporaryDirectory() as folder:
        chunks = [in_chunks(file, chunk_size) for file in files]
        store = build_survey_store(chunks, Path(folder), block_size=50)
        rows, repeated = store.read(0, len(store)), store._read_repeated
        read = [repeated(block) for block in range(store.num_blocks)]
        store.read = lambda start, stop: rows[start:stop]  # type: ignore[method-assign]
        store._read_repeated = lambda block: read[block]  # type: ignore[method-assign]
        return store


def coarse_cloud(seed: int, num_points: int = 300) -> PointCloud:
    """300 points in fewer places, some of them with equal attributes."""
    rng = np.random.default_rng(seed)
    points = np.floor(8 * rng.random((num_points, 3))) / (1, 1, 4) + UTM
    return PointCloud(points, {"class": rng.integers(0, 3, num_points), "t": rng.random(300) > 0.5})


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_splitting_into_files_and_shuffling_change_no_point_of_a_store(seed, num_files):
    cloud, rng = coarse_cloud(seed), np.random.default_rng(seed)
    order = rng.permutation(300)
    # Equal points stay in one file, so that none is stored as a repeated point.
    place = np.unique(cloud.positions, axis=0, return_inverse=True)[1].ravel()
    of_file = [order[place[order] % num_files == file] for file in range(num_files)]
    whole, cut = store_of([cloud]), store_of([cloud.select(index) for index in of_file])
    assert len(whole) == len(cut) == place.max() + 1
    for name in ("position", "key", "attributes"):
        assert np.array_equal(whole.read(0, 300)[name], cut.read(0, 300)[name])
    assert np.array_equal(whole.block_ptr, cut.block_ptr)
    rows = np.arange(len(cut))
    for file, index in enumerate(of_file):
        found = cut.places_in_file(rows, file)
        assert set(place[index[found[found >= 0]]]) == set(place[index])
        there = cloud.select(index[found[found >= 0]])
        kept = cut.read(0, 300)[found >= 0]
        assert np.array_equal(kept["position"] + cut.frame.origin, there.positions)
        assert np.array_equal(kept["attributes"]["class"], there.attributes["class"])


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(2, 4))
def test_a_point_of_several_files_is_stored_once_and_found_in_each(seed, num_files):
    cloud, rng = coarse_cloud(seed), np.random.default_rng(seed)
    of_file = [np.flatnonzero(rng.random(300) < 0.6) for _ in range(num_files)]
    store = store_of([cloud.select(index) for index in of_file])
    full = np.column_stack([cloud.positions, *cloud.attributes.values()])
    content = np.unique(cloud.positions, axis=0, return_inverse=True)[1].ravel()
    first_file = np.full(content.max() + 1, -1)
    for number in np.unique(content):
        has = [(content[index] == number).any() for index in of_file]
        first_file[number] = has.index(True) if any(has) else -1
    assert len(store) == np.count_nonzero(first_file >= 0)
    rows = store.read(0, len(store))
    for file, index in enumerate(of_file):
        place = store.places_in_file(np.arange(len(store)), file)
        inside = place[place >= 0]
        assert len(np.unique(inside)) == len(inside)
        there, kept = full[index[inside]], rows[place >= 0]
        assert np.array_equal(kept["position"] + store.frame.origin, there[:, :3])
        is_first = first_file[content[index[inside]]] == file
        assert np.array_equal(kept["attributes"]["class"][is_first], there[is_first, 3])
        assert np.array_equal(kept["attributes"]["t"][is_first], there[is_first, 4])
        assert len(np.unique(content[index])) == len(np.unique(content[index[inside]]))
    for block in range(store.num_blocks):
        among = np.arange(store.block_ptr[block], store.block_ptr[block + 1])
        has = [file for file in range(num_files) if (store.places_in_file(among, file) >= 0).any()]
        assert store.files_of(block).tolist() == has


@settings(max_examples=10)
@given(st.integers(0, 100), st.sampled_from([1e-3, 1.0, 1e5]))
def test_the_grid_is_thousands_of_times_finer_than_the_point_spacing(seed, scale):
    points, rng = scale * sheet(3000, seed=seed), np.random.default_rng(seed)
    points -= points.min(axis=0)
    extent = points.max(axis=0)

    def resolution(cloud: np.ndarray, size: int) -> float:
        return grid_resolution(
            lambda: (cloud[i : i + size] for i in range(0, len(cloud), size)), extent
        )

    whole = resolution(points, 3000)
    assert np.log2(whole) == np.floor(np.log2(whole))
    assert 2**13 < scale * 0.3 / whole < 2**15
    twice = np.concatenate([points, points[:2000]])
    assert resolution(rng.permutation(twice), 900) == whole


def test_the_grid_does_not_depend_on_the_order_of_the_points():
    cloud = np.concatenate([sheet(2000, side=1.0), 100 + sheet(2000, side=60.0)])
    cloud -= cloud.min(axis=0)
    found = {
        grid_resolution(lambda points=points: iter(np.split(points, 4)), cloud.max(axis=0))
        for points in (cloud, cloud[::-1], np.roll(cloud, 1000, axis=0))
    }
    assert len(found) == 1


def test_the_resolution_of_a_regular_grid_does_not_depend_on_its_position():
    points = grid(60)
    for shift in (0.0, 1e5 / 3, 1e7 / 7):
        there = points + shift
        there -= there.min(axis=0)
        assert grid_resolution(lambda there=there: iter([there]), there.max(axis=0)) == 2**-14
