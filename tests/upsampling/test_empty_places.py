"""Nothing is generated below closed surfaces, such as roofs, or in empty air beside crowns."""

from __future__ import annotations

import numpy as np
import pytest
from forest_options import FOREST
from scipy.spatial import cKDTree
from sheets import small_model

from pointup import upsample
from pointup.upsampling.empty_places import (
    NEAR,
    NUM_ABOVE,
    is_afloat,
    is_covered,
    neighbors_beside,
)
from pointup.upsampling.single_pass import measured
from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region

ROOF = 6.0


def houses(seed: int = 0, num_points: int = 3000) -> np.ndarray:
    """Ground of 20 x 20 m with two gabled roofs of 6 x 6 m, seen from above: no walls."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((2, num_points)) * 20
    on_roof = (np.abs(y - 10) < 3) & ((np.abs(x - 5) < 3) | (np.abs(x - 15) < 3))
    z = np.where(on_roof, ROOF - 0.4 * np.abs(y - 10), 0.05 * x)
    return np.stack([x, y, z + rng.normal(0, 0.02, num_points)], axis=1)


def crowns(seed: int = 0, num_points: int = 3000) -> np.ndarray:
    """Returns of a forest of 20 x 20 m: a third from the ground, the others between 2 and 12 m."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((2, num_points)) * 20
    z = np.where(rng.random(num_points) < 1 / 3, 0.0, 2 + 10 * rng.random(num_points))
    return np.stack([x, y, z], axis=1)


def covered_one_by_one(points: np.ndarray, place: np.ndarray) -> bool:
    """`is_covered` of one place, by lstsq and a full search."""
    across = np.linalg.norm(points[:, :2] - place[:2], axis=1)
    nearest = np.argsort(across)[:NUM_ABOVE]
    radius = across[nearest[-1]]
    spacing = radius * np.sqrt(np.pi / NUM_ABOVE)
    relative = points[nearest] - place
    terms = np.column_stack([relative[:, :2], np.ones(NUM_ABOVE)])
    plane, *_ = np.linalg.lstsq(terms, relative[:, 2])
    cosine = 1 / np.sqrt(1 + plane[0] ** 2 + plane[1] ** 2)
    rest = (relative[:, 2] - terms @ plane) * cosine
    tree = cKDTree(points)
    gap, closest = tree.query(place)
    mean = tree.query(points[closest], k=NUM_ABOVE)[0][1:].mean()
    return bool(
        relative[:, 2].min() > spacing
        and plane[2] * cosine > spacing
        and np.sqrt((rest**2).sum() / (NUM_ABOVE - 3)) <= spacing / 3
        and np.linalg.norm(relative[:, :2].mean(axis=0)) <= radius / 4
        and gap > mean
    )


def of_store(store: Store, places: np.ndarray) -> np.ndarray:
    return covered(Region.around(store, places), places)


def covered(region: Region, places: np.ndarray) -> np.ndarray:
    return is_covered(region, places, neighbors_beside(region, places))


@pytest.mark.parametrize("scene", [houses, crowns])
def test_covered_places_are_those_of_a_search_one_by_one(scene, make_store):
    store = make_store(scene(), block_size=100)
    points = store.read(0, len(store))["position"]
    rng = np.random.default_rng(1)
    places = points[rng.integers(len(points), size=300)] - rng.random((300, 3)) * (0.5, 0.5, 8)
    found = of_store(store, places)
    assert np.array_equal(found, [covered_one_by_one(points, place) for place in places])
    assert found.any() == (scene is houses)


def test_most_of_the_inside_of_a_house_is_covered_and_no_wall(make_store):
    store = make_store(houses(), block_size=256)
    across, along, up = np.random.default_rng(2).random((3, 400))
    inside = np.stack([3.5 + 3 * across, 7.5 + 5 * along, 1 + 2 * up], axis=1)
    wall = np.stack([np.full(400, 8.0), 7.5 + 5 * along, 1 + 3 * up], axis=1)
    assert of_store(store, inside - store.frame.origin).mean() > 0.5
    assert not of_store(store, wall - store.frame.origin).any()


def test_no_ground_below_crowns_is_covered(make_store):
    points = crowns()
    store = make_store(points[points[:, 2] > 0], block_size=256)
    rng = np.random.default_rng(3)
    ground = np.concatenate([rng.random((500, 2)) * 20, np.zeros((500, 1))], axis=1)
    assert not of_store(store, ground - store.frame.origin).any()


def test_a_sparse_floor_below_a_dense_ceiling_is_not_covered(make_store):
    rng = np.random.default_rng(4)
    ceiling = np.concatenate([rng.random((4000, 2)) * 10, np.full((4000, 1), 2.5)], axis=1)
    floor = np.concatenate([rng.random((60, 2)) * 10, np.zeros((60, 1))], axis=1)
    store = make_store(np.concatenate([ceiling, floor]), block_size=256)
    between = (floor[:-1] + floor[1:]) / 2 * (1, 1, 0)
    near = cKDTree(floor).query(between)[0] < 0.5
    assert near.sum() > 3
    assert not of_store(store, between[near] - store.frame.origin).any()
    half_way = between + np.array([0, 0, 1.2]) - store.frame.origin
    assert of_store(store, half_way).mean() > 0.3


def test_nothing_near_a_measured_point_is_covered(make_store):
    store = make_store(houses(), block_size=256)
    points = store.read(0, len(store))["position"]
    spacing = cKDTree(points).query(points, k=NUM_ABOVE + 1)[0][:, 1:].mean(axis=1)
    below = np.zeros_like(points)
    below[:, 2] = NEAR * spacing
    assert not of_store(store, points - below).any()
    assert of_store(store, points - 8 * below).any()


def test_few_points_and_points_on_a_line_cover_nothing(make_store):
    below = np.array([[0.0, 0.0, -9.0], [0.3, 0.0, -9.0]])
    for points in (
        np.random.default_rng(0).random((NUM_ABOVE - 1, 3)) * (1, 1, 0.01),
        np.arange(-50.0, 50.0)[:, None] * (1, 0, 0),
    ):
        store = make_store(points, block_size=8)
        assert not of_store(store, below).any()


def test_fewer_than_half_of_the_points_in_houses_are_left(monkeypatch):
    points = houses(num_points=1500)

    def num_inside(cloud: np.ndarray) -> int:
        x, y, z = cloud.T
        in_house = (np.abs(y - 10) < 2) & ((np.abs(x - 5) < 2) | (np.abs(x - 15) < 2))
        return int((in_house & (z > 1) & (z < ROOF - 2)).sum())

    model = small_model(**FOREST | {"column_neighbors": 12, "column_stride": 8}, reach=8.0)
    with_rule = upsample(points, ratio=8, model=model, above_ground=True)
    monkeypatch.setattr(measured, "is_covered", lambda _, points, *__: np.zeros(len(points), bool))
    without = upsample(points, ratio=8, model=model, above_ground=True)
    assert len(with_rule) == len(without) == 12_000
    assert num_inside(without) > 40
    assert num_inside(with_rule) < num_inside(without) / 2


def test_places_do_not_depend_on_the_scale_or_the_first_block(make_store):
    points = houses()
    rng = np.random.default_rng(5)
    places = points[rng.integers(len(points), size=300)] - (0, 0, 3)
    store = make_store(points, block_size=64)
    expected = of_store(store, places - store.frame.origin)
    for block in range(0, store.num_blocks, 9):
        region = Region(store, block, block + 1)
        assert np.array_equal(covered(region, places - store.frame.origin), expected)
    assert expected.any() and not expected.all()
    larger = make_store(points * 8, block_size=64)
    assert np.array_equal(of_store(larger, places * 8 - larger.frame.origin), expected)


def trees(seed: int = 0, num_points: int = 3000) -> np.ndarray:
    """Returns of four trees of 3 m radius on flat ground of 20 x 20 m: of crowns from 4 to 10 m."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((2, num_points)) * 20
    in_crown = np.hypot((x % 10) - 5, (y % 10) - 5) < 3
    z = np.where(in_crown & (rng.random(num_points) < 0.8), 4 + 6 * rng.random(num_points), 0.0)
    return np.stack([x, y, z], axis=1)


def afloat_one_by_one(points: np.ndarray, place: np.ndarray, spacing: float) -> bool:
    """`is_afloat` of one place, by a full search."""

    def nearest_to(xy: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        across = np.linalg.norm(points[:, :2] - xy, axis=1)
        nearest = np.argsort(across)[:12]
        return across, nearest, across[nearest[-1]] * np.sqrt(np.pi / 12)

    across, nearest, horizontally = nearest_to(place[:2])
    gap = np.linalg.norm(points - place, axis=1).min()
    num_below = (points[nearest, 2] < place[2]).sum()
    if num_below >= 2 and gap > max(spacing, 3.5 * horizontally):
        return True
    if num_below >= 8 and gap > max(0.75 * spacing, 2.5 * horizontally):
        return True
    around_nearest = nearest_to(points[nearest[0], :2])[2]
    return bool(across[nearest[0]] > max(0.6 * spacing, 1.75 * around_nearest))


def afloat(region: Region, places: np.ndarray, spacing: np.ndarray | float) -> np.ndarray:
    distance, spacing = region.neighbors(places, 1)[0][:, 0], np.broadcast_to(spacing, len(places))
    return is_afloat(region, places, neighbors_beside(region, places), distance, spacing)


def test_places_afloat_are_those_of_a_search_one_by_one(make_store):
    store = make_store(trees(), block_size=100)
    points = store.read(0, len(store))["position"]
    rng = np.random.default_rng(1)
    places = rng.uniform(points.min(axis=0) - 2, points.max(axis=0) + 2, (400, 3))
    spacing = rng.uniform(0.5, 1, 400) * cKDTree(points).query(places)[0]
    found = afloat(Region.around(store, places), places, spacing)
    expected = [afloat_one_by_one(points, *of) for of in zip(places, spacing, strict=True)]
    assert np.array_equal(found, expected)
    assert 100 < found.sum() < 300
    assert np.array_equal(afloat(Region(store, 0, 1), places, spacing), expected)


def test_air_beside_crowns_is_empty_and_the_space_below_them_is_not(make_store):
    points = trees()
    store = make_store(points, block_size=256)
    beside, below = np.full((2, 300, 3), [10.0, 10.0, 6.0])
    beside[:, :2] += np.random.default_rng(2).uniform(-1, 1, (300, 2))
    below[:, :2] = 5 + np.random.default_rng(3).uniform(-1, 1, (300, 2))
    below[:, 2] = 2.5
    crown_only = make_store(points[points[:, 2] > 0], block_size=256)

    def share_afloat(of: Store, places: np.ndarray) -> float:
        places = places - of.frame.origin
        return float(afloat(Region.around(of, places), places, 0.1).mean())

    assert share_afloat(store, beside) == 1
    assert share_afloat(crown_only, below) == 0
    assert share_afloat(make_store(points[:11], block_size=8), beside) == 0


def test_air_beside_a_survey_is_empty_from_two_spacings_on_whatever_its_density(make_store):
    def grid(spacing: float) -> np.ndarray:
        x, y = np.meshgrid(np.arange(0, 20, spacing), np.arange(0, 20, spacing))
        return np.stack([x.ravel(), y.ravel(), 0 * x.ravel()], axis=1)

    store = make_store(np.concatenate([grid(1.0), grid(4.0) + np.array([20, 0, 0])]), block_size=64)
    x = np.array([-1.5, -3, 9.5, 34, 41, 48])
    places = np.stack([x, 0 * x + 10, 0 * x], axis=1) - store.frame.origin
    spacing = np.repeat([1.0, 4.0], 3)
    found = afloat(Region.around(store, places), places, spacing)
    assert found.tolist() == [False, True, False, False, False, True]


def test_places_near_a_facade_are_not_beside_it(make_store):
    """From above, the points of a facade are much closer to each other than along it."""
    x, z = np.meshgrid(np.arange(0, 10, 0.1), np.arange(0, 5, 0.1))
    store = make_store(np.stack([x.ravel(), 0 * x.ravel(), z.ravel()], axis=1), block_size=256)
    places = np.array([[5.05, 0.02, 2.05], [5.05, 0.2, 2.05]]) - store.frame.origin
    assert afloat(Region.around(store, places), places, 0.1).tolist() == [False, True]


def test_fewer_new_points_hang_in_empty_air_with_the_rule(monkeypatch):
    points = trees(num_points=1500)
    tree = cKDTree(points)
    model = small_model(**FOREST | {"column_neighbors": 12, "column_stride": 8}, reach=8.0)

    def num_hanging() -> int:
        new = upsample(points, ratio=8, model=model, above_ground=True, ground_density=0)[1500:]
        assert len(new) == 7 * 1500
        return int(((tree.query(new)[0] > 2) & (new[:, 2] > 2)).sum())

    with_rule = num_hanging()
    monkeypatch.setattr(measured, "is_afloat", lambda _, points, *__: np.zeros(len(points), bool))
    assert with_rule < num_hanging() / 2
