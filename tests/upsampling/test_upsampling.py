"""The new points of a cloud: even, dense where they should be, near measured ones; their
attributes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from sheets import UTM, grid, sheet, small_model, upsample_in_blocks

from pointup import upsample
from pointup.geometry.midpoints import midpoint_upsample
from pointup.io.cloud import PointCloud
from pointup.upsampling.attributes import attributes_between
from pointup.upsampling.ground import Ground
from pointup.upsampling.options import MAX_LOCAL_RATIO, UpsampleOptions


def test_measured_points_come_first_and_unchanged():
    points = sheet(500) + UTM
    made = upsample(points, 2.5, model=small_model(0.1))
    assert np.array_equal(made[:500], points)
    new = upsample(points, 2.5, model=small_model(0.1), only_new=True)
    assert np.array_equal(made[500:], new)
    assert np.array_equal(upsample(points, 1.0, model=small_model()), points)


def test_there_is_no_seam_between_blocks(make_store):
    # Sides of blocks are 8, so that lines at odd multiples of 4 are inside.
    points = sheet(6000, side=32.0)
    points[0] = 0.0
    store = make_store(points, block_size=500)
    model = small_model(0.05)
    new = upsample_in_blocks(store, model, UpsampleOptions(ratio=4.0), budget=500)
    inside = ((points > 1) & (points < 31))[:, :2].all(axis=1)

    def near_lines(cloud: np.ndarray, offset: float) -> np.ndarray:
        away = np.abs((cloud[:, :2] + offset + 4) % 8 - 4).min(axis=1)
        return (away < 0.15) & ((cloud > 1) & (cloud < 31))[:, :2].all(axis=1)

    ratio = near_lines(new, 0).sum() / near_lines(points, 0).sum()
    assert inside.sum() > 5000
    assert ratio == pytest.approx(near_lines(new, 4).sum() / near_lines(points, 4).sum(), rel=0.1)
    gap = cKDTree(np.concatenate([points, new])).query(new, k=2)[0][:, 1]
    at_borders, between = gap[near_lines(new, 0)], gap[near_lines(new, 4)]
    for share in (2, 10, 50):
        border, inner = np.percentile(at_borders, share), np.percentile(between, share)
        assert border == pytest.approx(inner, rel=0.15)


def test_thinning_is_as_good_as_farthest_points():
    rng = np.random.default_rng(0)

    def sphere(num_points: int) -> np.ndarray:
        points = rng.normal(size=(num_points, 3))
        return points / np.linalg.norm(points, axis=1, keepdims=True)

    def chamfer(cloud: np.ndarray, truth: np.ndarray) -> float:
        return float(
            np.square(cKDTree(truth).query(cloud)[0]).mean()
            + np.square(cKDTree(cloud).query(truth)[0]).mean()
        )

    points, truth = sphere(1000), sphere(20_000)
    pos = torch.from_numpy(points.astype(np.float32))
    farthest = midpoint_upsample(pos, torch.tensor([0, 1000]), 4.0)[0].numpy()
    made = upsample(points, 4.0, model=small_model(), originals=False)
    kept = upsample(points, 4.0, model=small_model())
    assert chamfer(made, truth) < 1.01 * chamfer(farthest, truth)
    assert chamfer(kept, truth) < 1.01 * chamfer(farthest, truth)


def test_density_adds_points_on_sparse_ground_only():
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((6000, 3)) * (20, 20, 1), rng.random((600, 3)) * (20, 20, 1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    made = upsample(points, density=6.0, model=small_model())[len(points) :]

    def count(cloud: np.ndarray, low: float, high: float, margin: float = 0.0) -> int:
        inside = (cloud[:, 0] >= low) & (cloud[:, 0] < high)
        return int((inside & (np.abs(cloud[:, 1] - 10) < 10 - margin)).sum())

    assert count(made, 0, 18) < 60
    for low, high, margin, least in ((23, 37, 3, 5.5), (22, 40, 0, 5.5), (38.5, 40, 0, 4.5)):
        area = (high - low) * (20 - 2 * margin)
        everything = count(made, low, high, margin) + count(points, low, high, margin)
        assert least < everything / area < 6.6


def test_density_is_reached_beside_a_denser_strip_too():
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((8000, 3)) * (20, 20, 0.1), rng.random((800, 3)) * (20, 20, 0.1)
    points = np.concatenate([dense, sparse + np.array([20.0, 0, 0])])
    x, y, _ = upsample(points, density=20.0, model=small_model()).T
    beside = (x >= 20.5) & (x < 22) & (np.abs(y - 10) < 8)
    assert 16 < beside.sum() / (1.5 * 16) < 24


def test_density_makes_at_most_16_points_of_one():
    points = sheet(40, side=1000.0)
    assert len(upsample(points, density=100.0, model=small_model())) <= 40 * MAX_LOCAL_RATIO


def test_the_seed_decides_between_equally_good_points():
    points, model = grid(20), small_model()
    made = [upsample(points, 2.0, model=model, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])
    assert len(made[2]) == 800


def test_a_residual_from_which_points_stay_changes_only_where_they_are_relaxed():
    points = sheet(300)
    default, none, held, steady = (
        upsample(points, 4.0, model=small_model(0.1, **options))
        for options in (
            {},
            {"relaxation_residual": 0.0},
            {"relaxation_residual": 1e-9},
            {"relaxation_steps": 0, "relaxation_residual": 1e-9},
        )
    )
    assert np.array_equal(default, none)
    assert np.array_equal(held, steady), "points stay where the network put them"
    assert not np.array_equal(held, default)


def test_no_new_point_is_beyond_the_largest_distance():
    points = np.concatenate([sheet(300, side=10.0), sheet(300, side=10.0) + np.array([30.0, 0, 0])])
    points = np.concatenate([points, [[15.0, 5.0, 20.0]]])
    for model in (small_model(), small_model(0.1)):
        far = upsample(points, 6.0, model=model, only_new=True)
        near = upsample(points, 6.0, model=model, only_new=True, max_distance=0.5)
        assert cKDTree(points).query(far)[0].max() > 0.5
        assert cKDTree(points).query(near)[0].max() <= 0.5
        assert 0 < len(near) <= len(far)


@pytest.mark.parametrize(
    ("options", "originals"),
    [
        # Each target once.
        pytest.param(options, originals, marks=pytest.mark.slow if originals == place % 2 else ())
        for place, options in enumerate(
            [{"ratio": 4.0}, {"ratio": 16.0}, {"ratio": 4.0, "oversampling": 2.0}, {"density": 20}]
        )
        for originals in (True, False)
    ],
)
def test_where_the_largest_distance_leaves_too_little_room_no_point_is_repeated(options, originals):
    # Ground, and leaves above it.
    points, model = np.random.default_rng(0).random((250, 3)) * (11, 11, 0.1), small_model(0.1)
    points[150:, 2] = 3 + 3 * np.random.default_rng(1).random(100)
    options = {**options, "above_ground": True, "only_new": originals, "originals": originals}
    for limit in (0.4, 0.05):
        made = upsample(points, model=model, max_distance=limit, **options)
        distance = cKDTree(points).query(made)[0]
        assert len(made) < 20 * len(points) and (distance <= limit).all()
        assert len(np.unique(made.round(6), axis=0)) == len(made)
        if originals:
            assert (distance > 1e-4).all()


def test_no_point_of_a_later_pass_is_moved_to_a_measured_one_with_a_largest_distance():
    # Beside a dense place, points of the second pass are out of reach.
    points = np.random.default_rng(5).normal(size=(200, 3))
    points[:100] *= 0.1
    made = upsample(points, 16.0, model=small_model(0.1), only_new=True, max_distance=0.5)
    assert np.linalg.norm(made[:, None] - points, axis=2).min() > 1e-4
    assert len(np.unique(made.round(6), axis=0)) == len(made)


def test_the_largest_distance_holds_although_positions_are_rounded_to_a_grid():
    # Most points are far apart, so that the grid is coarse.
    sparse = sheet(200, side=16_000.0) + np.array([100.0, 0, 0])
    for seed in range(3):
        points = np.concatenate([sheet(190, side=12.0, seed=seed), sparse]) + UTM
        options = {"above_ground": True, "only_new": True, "max_distance": 0.5}
        made = upsample(points, 8.0, model=small_model(0.1), **options)
        distance = np.linalg.norm(made[:, None] - points, axis=2).min(axis=1)
        assert 0.4 < distance.max() <= 0.5


def test_the_largest_distance_holds_for_points_that_are_lifted_onto_the_ground(monkeypatch):
    def lifted(ground: Ground, points: np.ndarray) -> np.ndarray:
        return points + np.array([0.0, 0.0, 0.3])

    monkeypatch.setattr(Ground, "lifted", lifted)
    points = sheet(400, side=12.0) + UTM
    options = {"above_ground": True, "originals": False, "max_distance": 0.4}
    made = upsample(points, 4.0, model=small_model(0.1), **options)
    distance = np.linalg.norm(made[:, None] - points, axis=2).min(axis=1)
    assert len(made) > 400
    assert 0.3 < distance.max() <= 0.4


def test_a_colour_packed_into_one_number_is_copied_and_one_in_channels_is_mixed():
    red_or_blue = np.random.default_rng(0).integers(0, 2, 300) == 0
    channels = np.where(red_or_blue[:, None], [255, 0, 0], [0, 0, 255]).astype(np.uint8)
    packed = np.where(red_or_blue, 0xFF0000, 0xFF).astype(np.uint32)
    cloud = PointCloud(sheet(300), {"rgba": packed, "color": channels})
    made = upsample(cloud, 4.0, model=small_model(0.1), only_new=True).attributes
    assert set(made["rgba"].tolist()) == {0xFF0000, 0xFF}
    assert len(np.unique(made["color"], axis=0)) > 2


def test_attributes_are_those_of_the_nearest_point_and_intensity_is_interpolated():
    points = sheet(400)
    cloud = PointCloud(
        points,
        {
            "intensity": np.arange(400, dtype=np.uint16) * 100,
            "classification": 19 + np.arange(400, dtype=np.uint16),
            "colors": np.random.default_rng(0).random((400, 3)),
        },
    )
    made = upsample(cloud, 3.0, model=small_model(0.1))
    assert len(made) == 1200 and made.attributes["colors"].shape == (1200, 3)
    for name, values in cloud.attributes.items():
        assert np.array_equal(made.attributes[name][:400], values)
    assert made.attributes["synthetic"].tolist() == [0] * 400 + [1] * 800
    assert np.array_equal(made.attributes["parent_index"][:400], np.arange(400))
    distance, nearest = cKDTree(points).query(made.positions[400:], k=3)
    assert np.allclose(made.attributes["distance_to_measured"][400:], distance[:, 0], atol=1e-4)
    is_clear = distance[:, 0] < distance[:, 1] - 1e-3
    new_class = made.attributes["classification"][400:]
    assert np.array_equal(new_class[is_clear], 19 + nearest[is_clear, 0])
    intensity = made.attributes["intensity"][400:].astype(np.float64)
    among = cloud.attributes["intensity"][nearest]
    assert (intensity >= among.min(1)).all() and (intensity <= among.max(1)).all()
    assert (intensity[is_clear] != among[is_clear, 0]).any()
    parent = made.attributes["parent_index"][400:]
    assert np.linalg.norm(points[parent] - made.positions[400:], axis=1).max() < 6


def test_values_that_are_not_numbers_don_t_spread():
    rows = np.zeros(4, [("intensity", np.float32), ("rgb", np.float64, 3)])
    rows["intensity"] = [1.0, np.nan, 4.0, np.nan]
    rows["rgb"] = [[1, 2, 3], [np.nan, 2, 3], [3, 4, 5], [3, 4, np.nan]]
    distance = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, np.inf], [1.0, 1.0, 1.0]])
    nearest = np.array([[0, 1, 2], [0, 1, -1], [1, 3, 3]])
    found = attributes_between(rows, distance, nearest)
    assert found["intensity"][:2].tolist() == [2.5, 1.0]
    assert np.isnan(found["intensity"][2])
    np.testing.assert_allclose(found["rgb"][0], [2, 8 / 3, 11 / 3])
    np.testing.assert_allclose(found["rgb"][1], [1, 2, 3])


@pytest.mark.parametrize("name", ["red", "Red", "scalar_Red", "diffuse_red"])
def test_a_colour_is_interpolated_under_the_names_that_other_programs_give_it(name):
    rows = np.array([(10,), (20,), (60,)], [(name, np.uint8)])
    found = attributes_between(rows, np.ones((1, 3)), np.array([[0, 1, 2]]))
    assert found[name].tolist() == [30]


@pytest.mark.parametrize("options", [{"only_new": True}, {"originals": False}])
def test_an_empty_result_has_the_attributes_of_any_other(options):
    rng = np.random.default_rng(0)
    classes = np.full(100, 5, np.uint8)
    cloud = PointCloud(rng.random((100, 3)), {"classification": classes})
    model = small_model()
    none = upsample(cloud, 1.0, model=model, only_new=True)
    some = upsample(cloud, 2.0, model=model, **options)
    assert len(none) == 0 < len(some)
    assert none.attributes.keys() == some.attributes.keys()
    assert none.attributes["classification"].dtype == np.uint8
