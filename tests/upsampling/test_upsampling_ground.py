"""The ground of surveys: new points stay above it, and class 2 stays on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forest_options import FOREST
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import Delaunay, cKDTree
from sheets import CPU, small_model

from pointup import Upsampler, upsample
from pointup.io.bounds import Bounds
from pointup.io.cloud import PointCloud
from pointup.model.stored_model import SHIPPED, WEIGHTS
from pointup.upsampling import ground
from pointup.upsampling.executor import SingleProcess
from pointup.upsampling.ground import _SQUARE, Ground, Raster, cell_side
from pointup.upsampling.new_points import Summary
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.store.point_store import BLOCK_SIZE, build_survey_store


def slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 0.4 * x - 0.2 * y


def forest(seed: int = 0, rough: float = 0.03) -> PointCloud:
    """A slope of 1,500 returns of class 2, and 1,500 of shrubs and crowns above it."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((2, 3000)) * 30
    height = np.where(np.arange(3000) < 1500, rng.normal(0, rough, 3000), rng.random(3000) * 8)
    classes = np.where(np.arange(3000) < 1500, 2, 5).astype(np.uint8)
    order = rng.permutation(3000)
    points = np.stack([x, y, slope(x, y) + np.where(classes == 5, height + 0.5, height)], axis=1)
    return PointCloud(points[order], {"classification": classes[order]})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classified", [True, False])
def test_no_ground_return_is_below_the_lowest_allowed_height(seed, classified, make_store):
    cloud = forest(seed)
    store = make_store(cloud if classified else PointCloud(cloud.positions), block_size=256)
    points = store.read(0, len(store))["position"]
    assert (points[:, 2] >= Ground(store).floor(points) - 1e-9).all()


def test_the_lowest_allowed_height_follows_a_slope_within_its_noise(make_store):
    store = make_store(forest(), block_size=256)
    rng = np.random.default_rng(1)
    x, y = rng.random((2, 500)) * 26 + 2
    there = np.stack([x - store.frame.origin[0], y - store.frame.origin[1], 0 * x], axis=1)
    floor = Ground(store).floor(there) + store.frame.origin[2]
    below = slope(x, y) - floor
    assert np.median(below) == pytest.approx(2 * 0.03, abs=0.05)
    assert below.max() < 0.25 and below.min() > -0.1


def test_points_far_from_a_dense_cloud_do_not_make_a_raster_of_billions_of_cells(
    make_store, monkeypatch
):
    numbers, make = list[int](), Raster.__init__

    def counted(raster: Raster, *options: Any) -> None:
        make(raster, *options)
        numbers.append(len(raster))

    monkeypatch.setattr(Raster, "__init__", counted)
    far = np.array([[150_000.0, 0, 5], [240_000, 90_000, 9]])
    store = make_store(PointCloud(np.concatenate([forest().positions, far])), block_size=256)
    ground = Ground(store)
    for block in range(store.num_blocks):
        points = store.read_block(block)["position"]
        assert np.isfinite(ground.floor(points)).all()
        assert not ground.is_below_returns(points).any()
    assert max(numbers) < 3 * _SQUARE**2


@pytest.mark.parametrize("classified", [True, False])
def test_squares_have_the_ground_of_the_whole(classified, make_store, monkeypatch):
    cloud = forest()
    cloud = cloud if classified else PointCloud(cloud.positions)
    store, same = (make_store(cloud, block_size=256) for _ in range(2))
    there = store.read(0, len(store))["position"][::7]
    there = there - np.random.default_rng(0).random((len(there), 1)) * [0, 0, 1]
    points, numbers = store.read(0, len(store))["position"], np.arange(len(store))

    def of(ground: Ground) -> list[np.ndarray]:
        are_returns = ground.are_returns(points, numbers)
        return [*ground.is_on_surface(there), ground.is_below_returns(there), are_returns]

    whole = Ground(store)
    floor, lifted, others = whole.floor(there), whole.lifted(there), of(whole)
    monkeypatch.setattr("pointup.upsampling.ground._SQUARE", 8)
    parts = Ground(same)
    # Sums over cells run in another order.
    assert np.allclose(parts.floor(there), floor, atol=1e-6)
    assert np.allclose(parts.lifted(there), lifted, atol=1e-6) and (lifted > there).any()
    for of_parts, of_whole in zip(of(parts), others, strict=True):
        assert np.array_equal(of_parts, of_whole)
    assert others[-1].any() and len(list(parts._rectangles(there))) > 10


def test_threads_that_ask_for_the_same_squares_have_them_computed_once(make_store, monkeypatch):
    store = make_store(forest(), block_size=256)
    points = store.read(0, len(store))["position"]
    monkeypatch.setattr(ground, "_SQUARE", 16)
    read, calls = ground._points_within, []
    monkeypatch.setattr(ground, "_points_within", lambda *of: calls.append(of) or read(*of))
    below = Ground(store)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, points) for ask in (below.floor, below.lifted) * 2]
    first, lifted, again, lifted_again = (call.result() for call in asked)
    assert np.array_equal(first, again) and np.array_equal(lifted, lifted_again)
    assert len(calls) == len(list(below._rectangles(points))) > 1


@pytest.mark.parametrize("classified", [True, False])
def test_squares_are_computed_once_for_all_phases_and_processes(
    classified, make_store, monkeypatch
):
    cloud = forest()
    store = make_store(cloud if classified else PointCloud(cloud.positions), block_size=256)
    points, numbers = store.read(0, len(store))["position"], np.arange(len(store))
    monkeypatch.setattr(ground, "_SQUARE", 16)

    def found(below: Ground) -> list[np.ndarray]:
        returns = below.are_returns(points, numbers)
        there = points - [0, 0, 0.3]
        return [below.floor(there), below.lifted(there), returns, *below.is_on_surface(points)]

    first = found(Ground(store))
    computed = list[object]()
    for of, name in [(ground, "_points_within"), (ground.Level, "__init__")]:
        monkeypatch.setattr(of, name, lambda *of: computed.append(of))
    for before, after in zip(first, found(Ground(store)), strict=True):
        assert np.array_equal(before, after)
    assert not computed


def test_squares_that_were_used_last_are_kept_four_for_each_thread(make_store, monkeypatch):
    store = make_store(forest(), block_size=256)
    points = store.read(0, len(store))["position"]
    monkeypatch.setattr(ground, "_SQUARE", 4)
    below, limit = Ground(store), ground._SQUARES_OF_THREAD

    def squares() -> list[Any]:
        return [rectangle for _, rectangle in below._rectangles(points)]

    first = squares()
    assert len(set(first)) == len(first) > 3 * limit
    kept = list(below._kept.items())
    assert [rectangle for _, rectangle in kept] == first[-limit:]
    oldest, again = kept[0]
    assert below._rectangle(*oldest) is again and list(below._kept)[-1] == oldest
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(squares).result()
        assert list(below._kept.values()) == second[-2 * limit :]


def test_triangles_have_the_coordinates_and_heights_that_scipy_finds():
    rng = np.random.default_rng(0)
    # Three corners are nearly on one line.
    at = np.concatenate([rng.random((400, 2)), [[0, -1], [0.5, -1 + 1e-13], [1, -1]]])
    triangles, expected = ground._Triangulation(at), Delaunay(at)
    assert np.array_equal(triangles.simplices, expected.simplices)
    assert np.array_equal(np.isnan(triangles.transform), np.isnan(expected.transform))
    assert np.isnan(expected.transform).any()
    scale = np.abs(expected.transform).max(axis=(1, 2), keepdims=True)
    close = np.abs(triangles.transform - expected.transform) <= 1e-12 * scale
    assert (close | np.isnan(expected.transform)).all()
    height, places = np.sin(9 * at).sum(axis=1), rng.random((500, 2))
    found, known = (LinearNDInterpolator(of, height)(places) for of in (triangles, expected))
    assert np.allclose(found, known, rtol=0, atol=1e-9, equal_nan=True)
    assert np.isfinite(known).mean() > 0.9


@pytest.mark.parametrize("far", ["a stray point", "another plot"])
def test_what_lies_far_away_does_not_widen_the_cells(far, make_store):
    cloud = forest()
    beside = cloud.positions + np.array([1000.0, 500.0, 0.0])
    both = np.concatenate([cloud.positions, beside[: 1 if far == "a stray point" else None]])
    alone, together = (cell_side(make_store(PointCloud(p))) for p in (cloud.positions, both))
    assert together == pytest.approx(alone, rel=0.1)
    # Points in one place occupy nothing more.
    stacked = np.concatenate([cloud.positions, np.repeat(beside[:1], 2000, axis=0)])
    assert cell_side(make_store(PointCloud(stacked))) == pytest.approx(alone, rel=0.35)


def test_lowest_returns_are_those_of_the_cells_around(make_store):
    store = make_store(PointCloud(forest().positions), block_size=256)
    points, side = store.read(0, len(store))["position"], cell_side(store)
    cells = np.floor(points[:, :2] / side)
    ground, rows = Ground(store), range(0, 3000, 97)
    lowest = np.array(
        [points[(np.abs(cells - cells[row]) <= 1).all(axis=1), 2].min() for row in rows]
    )
    there = points[rows].copy()
    there[:, 2] = lowest
    assert not ground.is_below_returns(there).any()
    there[:, 2] = np.nextafter(lowest, -np.inf)
    assert ground.is_below_returns(there).all()


def under(cover: np.ndarray, seed: int = 0) -> np.ndarray:
    """A rough slope of 40 x 40 m with 9 points/m2, and no return below a square at 20 m.

    cover: (Q, 2) x and y; those in the square have their returns 8 to 12 m above the ground.
    """
    rng = np.random.default_rng(seed)
    x, y = cover.T
    is_covered = (np.abs(cover - 20) < 3.5).all(axis=1)
    height = np.where(is_covered, 8 + 4 * rng.random(len(cover)), rng.normal(0, 0.03, len(cover)))
    return np.stack([x, y, slope(x, y) + height], axis=1)


def test_below_a_dense_crown_or_a_roof_the_ground_is_that_around_it(make_store):
    rng = np.random.default_rng(0)
    store = make_store(PointCloud(under(40 * rng.random((14_400, 2)))), block_size=256)
    there = 20 + 2 * (rng.random((200, 2)) - 0.5)
    height = slope(*there.T)
    at = np.column_stack([there, height]) - store.frame.origin
    floor = Ground(store).floor(at) + store.frame.origin[2]
    assert Ground(store).is_below_returns(at).all()
    assert (floor <= height + 0.05).all()
    assert (floor >= height - 0.4).all()


def test_a_single_return_deep_below_the_ground_lowers_only_its_surroundings(make_store):
    rng = np.random.default_rng(0)
    points = under(40 * rng.random((14_400, 2)))
    deep = np.array([[10.0, 10.0, slope(np.array(10.0), np.array(10.0)) - 30]])
    without, store = (
        make_store(PointCloud(cloud), block_size=256)
        for cloud in (points, np.concatenate([points, deep]))
    )
    there = 1 + 14 * rng.random((400, 2))
    there = there[np.abs(there - 10).max(axis=1) > 2.0]
    at = np.column_stack([there, 0 * there[:, 0]])
    floor = Ground(store).floor(at - store.frame.origin) + store.frame.origin[2]
    expected = Ground(without).floor(at - without.frame.origin) + without.frame.origin[2]
    assert np.allclose(floor, expected, atol=0.1)


@pytest.mark.parametrize("ratio", [4.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_new_points_stay_above_the_lowest_returns(ratio, make_store):
    cloud, model = forest(), small_model(noise=0.3)
    store = make_store(cloud, block_size=BLOCK_SIZE)
    ground = Ground(store)

    def num_below(above_ground: bool) -> int:
        new = upsample(
            cloud, ratio, model=model, only_new=True, above_ground=above_ground, ground_density=0
        )
        assert len(new) == round(3000 * (ratio - 1))
        # A store rounds to a grid.
        return int((new.positions[:, 2] < ground.floor(new.positions - store.frame.origin)
                    + store.frame.origin[2] - 1e-3).sum())  # fmt: skip

    assert num_below(above_ground=True) == 0
    assert num_below(above_ground=False) > 0


def test_no_new_point_lies_below_the_triangles_of_sparse_terrain():
    """Ridges 31 m apart, below low plants: no plane follows them through few ground returns."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 3000)) * 77
    is_ground = np.arange(3000) < 600
    height = np.where(is_ground, 0, 0.2 + 3 * rng.random(3000) ** 2)
    points = np.stack([x, y, 3 * np.sin(x / 5) + 0.3 * y + height], axis=1)
    cloud = PointCloud(points, {"classification": np.where(is_ground, 2, 1).astype(np.uint8)})
    model = small_model(noise=0.3)
    new = upsample(
        cloud, 4, model=model, only_new=True, above_ground=True, ground_density=0
    ).positions
    triangles = LinearNDInterpolator(points[is_ground, :2], points[is_ground, 2])
    depth = triangles(new[:, :2]) - new[:, 2]
    # Plants in hollows show that the triangles are too high there.
    assert np.nanquantile(depth, 0.98) < 0.05


def test_points_a_little_below_the_ground_returns_are_lifted_onto_them(make_store):
    """Without classes, on a wave that no plane of 3 x 3 cells follows."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 4000)) * 64

    def wave(x: np.ndarray) -> np.ndarray:
        return 0.5 * np.sin(x / 2)

    height = wave(x) + np.where(np.arange(4000) < 2000, 0, 2 + 6 * rng.random(4000))
    store = make_store(PointCloud(np.stack([x, y, height], axis=1)), block_size=256)
    ground, origin = Ground(store), store.frame.origin
    x, y = rng.random((2, 500)) * 56 + 4
    depth = np.repeat([-0.5, 0.3, 3.0], [100, 300, 100])
    there = np.stack([x, y, wave(x) - depth], axis=1) - origin
    lifted = ground.lifted(there)
    assert np.array_equal(lifted[:, :2], there[:, :2])
    above, below, far_below = np.split(lifted[:, 2] - there[:, 2], [100, 400])
    assert not above.any() and not far_below.any()
    assert np.abs(below - 0.3).mean() < 0.1 and (below > 0).mean() > 0.95
    assert np.allclose(ground.lifted(lifted), lifted)


def test_points_are_lifted_onto_the_ground_itself_but_no_return_is(make_store):
    """On a slope with dents, in each of which a single return lies, with plants and no classes."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 4000)) * 64
    above = np.concatenate([np.full(30, -0.1), np.zeros(1970), 2 + 6 * rng.random(2000)])
    store = make_store(PointCloud(np.stack([x, y, 0.1 * x + above], axis=1)), block_size=256)
    ground, origin = Ground(store), store.frame.origin
    measured = store.read(0, len(store))["position"]
    assert np.abs(ground.lifted(measured) - measured).max() < 0.01
    # Away from the dents all corners of the triangles are on the slope.
    places = rng.random((3000, 2)) * 56 + 4
    places = places[cKDTree(np.stack([x, y], axis=1)[:30]).query(places)[0] > 7]
    height = 0.1 * places[:, 0]
    lifted = ground.lifted(np.column_stack([places, height - 0.2]) - origin) + origin
    assert len(lifted) > 300
    assert np.allclose(lifted[:, 2], height, rtol=0, atol=store.resolution)


def test_points_below_all_returns_are_counted_where_they_are_written(tmp_path):
    cloud = forest(rough=0.1)
    x = cloud.positions[:, 0]
    # Two files with a buffer of 4 m, in which both have the points.
    files = [[cloud.select(x < 17)], [cloud.select(x >= 13)]]
    store = build_survey_store(files, tmp_path)
    options = UpsampleOptions(ratio=3.0, above_ground=True)
    new = run_passes(store, small_model(0.5), options, SingleProcess(), CPU)
    everywhere = new.summary([0, 1])
    assert everywhere.num_new == 6000 and everywhere.num_below > 5
    edges = [-99.0, 5.0, 10.0, 15.0, 20.0, 25.0, 99.0]
    strips = [Bounds((-99.0, low), (99.0, high)) for low, high in pairwise(edges)]
    parts = [new.summary([0, 1], strip) for strip in strips]
    assert sum(part.num_new for part in parts) == everywhere.num_new
    assert sum(part.num_below for part in parts) == everywhere.num_below
    assert max(part.num_below for part in parts) < everywhere.num_below
    assert max(part.farthest for part in parts) == everywhere.farthest
    # In a corner without a point of the second file, all is of the first.
    corner = Bounds((-99.0, -99.0), (8.0, 99.0))
    assert new.summary([0], corner) == new.summary([0, 1], corner)
    assert new.summary([1], corner) == Summary()


def test_only_points_on_the_ground_get_class_2():
    cloud = forest()
    new = upsample(cloud, 4.0, model="lidar", only_new=True, above_ground=True)
    x, y, z = new.positions.T
    height, is_ground = z - slope(x, y), new.attributes["classification"] == 2
    assert is_ground.sum() > 2000
    assert (np.abs(height[is_ground]) > 0.3).mean() < 0.01
    assert is_ground[np.abs(height) < 0.02].mean() > 0.95
    assert set(np.unique(new.attributes["classification"])) <= {1, 2, 5}


def test_the_case_of_the_name_of_the_classes_is_ignored():
    cloud, model = forest().select(slice(500)), small_model(noise=0.1)
    classes = cloud.attributes["classification"]
    other = PointCloud(cloud.positions, {"Classification": classes})
    of_lower, of_upper = (
        upsample(c, 2.0, model=model, only_new=True, above_ground=True) for c in (cloud, other)
    )
    assert np.array_equal(of_lower.positions, of_upper.positions)
    found = of_upper.attributes["Classification"]
    assert np.array_equal(found, of_lower.attributes["classification"])


def test_without_heights_there_is_no_ground():
    cloud = forest().select(slice(500))
    kept = upsample(cloud, 2.0, model="shapes", only_new=True)
    assert np.isin(kept.attributes["classification"], [2, 5]).all()


def test_a_survey_from_a_file_has_heights(tmp_path):
    cloud = forest().select(slice(500))
    cloud.path = tmp_path / "survey.laz"
    model = small_model(noise=0.3)
    by_path = upsample(cloud, 2.0, model=model)
    assert np.array_equal(
        by_path.positions, upsample(cloud, 2.0, model=model, above_ground=True).positions
    )


@pytest.mark.parametrize("path", [None, Path("trees.xyz")])
def test_a_model_with_attention_to_columns_has_heights_whatever_its_name(path):
    cloud, model = forest().select(slice(500)), small_model(noise=0.3, **FOREST)
    cloud.path = path
    by_model = upsample(cloud, 2.0, model=model)
    expected, without = (
        upsample(cloud, 2.0, model=model, above_ground=given).positions for given in (True, False)
    )
    assert np.array_equal(by_model.positions, expected)
    assert not np.array_equal(by_model.positions, without)


def test_lidar_has_heights_by_name_by_directory_and_in_memory():
    cloud, directory = forest().select(slice(500)), WEIGHTS / "lidar"
    expected, without = (
        upsample(cloud, 2.0, model="lidar", above_ground=given).positions for given in (True, False)
    )
    assert not np.array_equal(expected, without)
    for given in ("lidar", directory, str(directory), Upsampler.from_pretrained("lidar")):
        assert np.array_equal(upsample(cloud, 2.0, model=given).positions, expected)


def test_of_the_included_models_those_for_surveys_have_heights():
    with_heights = {name for name in SHIPPED if Upsampler.from_pretrained(name).config.has_heights}
    assert with_heights == {"lidar", "forest"}


def test_class_2_stays_near_sparse_ground_below_dense_crowns():
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 3000)) * 20
    is_ground = np.arange(3000) < 60
    height = np.where(is_ground, 0.0, 0.3 + 4 * rng.random(3000))
    classes = np.where(is_ground, 2, 5).astype(np.uint8)
    cloud = PointCloud(np.stack([x, y, height], axis=1), {"classification": classes})
    new = upsample(cloud, 4.0, model="lidar", only_new=True, above_ground=True)
    on_ground = new.attributes["classification"] == 2
    assert on_ground.any()
    assert new.positions[on_ground, 2].max() < 0.5


def test_classes_named_by_cloudcompare_are_corrected_like_others():
    rng = np.random.default_rng(0)
    points = np.column_stack([20 * rng.random((750, 2)), np.zeros(750)])
    up = (points[:, 0] > 10) & (rng.random(750) < 0.5)
    points[up, 2] = 0.2 + 2 * rng.random(np.count_nonzero(up))
    classes = np.where(up, 5, 2).astype(np.float32)
    made = []
    for name in ("classification", "scalar_Classification"):
        cloud = PointCloud(points, {name: classes})
        new = upsample(cloud, 2, model="lidar", above_ground=True, only_new=True)
        made.append(new.attributes[name])
        assert not ((new.attributes[name] == 2) & (new.positions[:, 2] > 0.25)).any()
    assert np.array_equal(*made)
