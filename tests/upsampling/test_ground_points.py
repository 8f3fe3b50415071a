from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sheets import small_model

from pointup.io.cloud import PointCloud
from pointup.upsampling import upsample
from pointup.upsampling.attributes import DISTANCE
from pointup.upsampling.executor import SingleProcess, make_ground_points
from pointup.upsampling.ground_points import LARGEST_SHARE, _places, interpolated
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.store.point_store import Store

StoreMaker = Callable[..., Store]
SIDE, HOLE = 24.0, 4.0
CROWN, ROOF, WATER, BRIDGE = 5, 6, 9, 26


def terrain(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 100 + 0.2 * x + 0.3 * np.sin(y / 6)


def survey(
    above: int | None = CROWN,
    several: bool = True,
    surface: Callable[[np.ndarray, np.ndarray], np.ndarray] = terrain,
    seed: int = 0,
) -> PointCloud:
    """A square of ground with a hole of radius `HOLE` in its middle, and returns of a class above
    it at 5 to 12 m; with `several` each of these is the first of two returns."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(0, SIDE, (2, 2500))
    is_seen = np.hypot(x - SIDE / 2, y - SIDE / 2) > HOLE
    x, y = x[is_seen], y[is_seen]
    parts = [np.column_stack([x, y, surface(x, y) + 0.02 * rng.standard_normal(len(x))])]
    classes = [np.full(len(x), 2)]
    if above is not None:
        radius, angle = (HOLE + 0.5) * rng.uniform(0, 1, 900) ** 0.5, rng.uniform(0, 7, 900)
        x, y = SIDE / 2 + radius * np.cos(angle), SIDE / 2 + radius * np.sin(angle)
        height = rng.uniform(5, 12, 900) if above != WATER else np.zeros(900)
        parts.append(np.column_stack([x, y, surface(x, y) + height]))
        classes.append(np.full(900, above))
    kinds = np.concatenate(classes).astype(np.uint8)
    attributes = {
        "classification": kinds,
        "number_of_returns": np.where((kinds != 2) & several, 2, 1).astype(np.uint8),
        "intensity": np.where(kinds == 2, 100, 900).astype(np.uint16),
    }
    return PointCloud(np.concatenate(parts), attributes)


def made(store: Store, **options: object) -> np.ndarray:
    """The points (M, 3) that are made on the ground, in the coordinates of the file."""
    settings = UpsampleOptions(**({"ratio": 4.0, "above_ground": True} | options))  # type: ignore[arg-type]
    points = make_ground_points(store, settings, SingleProcess())
    if points is None:
        return np.empty((0, 3))
    return np.concatenate([points.output.positions(block) for block in range(store.num_blocks)])


def test_the_ground_below_a_crown_is_filled_at_the_density_of_the_ground_around_it(make_store):
    points = made(make_store(survey(), block_size=1000))
    x, y, z = points.T
    assert np.abs(z - terrain(x, y)).max() < 0.25
    from_middle = np.hypot(x - SIDE / 2, y - SIDE / 2)
    assert from_middle.max() < HOLE + 1
    density = len(points) / (np.pi * HOLE**2)
    assert 0.6 < density / (2500 / SIDE**2) < 1.3
    thirds = np.histogram(from_middle**2, 3, (0, HOLE**2))[0]  # Of equal area.
    assert thirds.min() > 0.5 * thirds.max()


@pytest.mark.parametrize(
    ("above", "several"),
    [(None, False), (ROOF, True), (WATER, True), (BRIDGE, True), (CROWN, False)],
    ids=["nothing", "a roof", "water", "a bridge", "pulses with one return"],
)
def test_nothing_is_made_where_no_crown_hides_the_ground(above, several, make_store):
    cloud = survey(above, several)
    # Elsewhere in the survey some pulses have several returns.
    cloud.attributes["number_of_returns"][:50] = 2
    from_middle = np.hypot(*(made(make_store(cloud, block_size=1000))[:, :2] - SIDE / 2).T)
    assert not (from_middle < HOLE - 1).any()


def test_nothing_is_made_where_points_of_other_classes_lie_on_the_ground(make_store):
    """In a survey whose pulses have one return each, or do not tell."""
    cloud = survey(above=None)
    is_other = np.random.default_rng(1).random(len(cloud)) < 0.75
    cloud.attributes["classification"][is_other] = 1
    assert not len(made(make_store(cloud, block_size=1000)))


def test_nothing_is_made_across_a_cliff(make_store):
    points = made(make_store(survey(surface=lambda x, y: terrain(x, y) + 8 * (x > SIDE / 2 + 0.3))))
    assert not (np.abs(points[:, 0] - SIDE / 2 - 0.3) < 0.5).any()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_nothing_is_made_between_a_roof_and_the_ground_without_classes(seed, make_store):
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(-25, 25, (2, 20000))
    z = terrain(x, y) + 0.02 * rng.standard_normal(len(x))
    is_roof = (np.abs(x) < 8) & (np.abs(y) < 5)
    z[is_roof] = (106 - 0.8 * np.abs(y))[is_roof]
    x, y, z = made(make_store(PointCloud(np.column_stack([x, y, z])), block_size=2000)).T
    assert not (z > terrain(x, y) + 1.0).any()


def test_nothing_is_made_on_the_ground_below_a_smooth_roof(make_store):
    """Of a survey without classes whose pulses have one return, such as photogrammetry."""
    x, y = np.random.default_rng(0).uniform(-20, 20, (2, 12000))
    z = np.where((np.abs(x) < 6) & (np.abs(y) < 6), 106.0, 100.0)
    points = made(make_store(PointCloud(np.column_stack([x, y, z])), block_size=2000))
    assert not (np.abs(points[:, :2]) < 5.7).all(axis=1).any()


def test_ground_that_cannot_be_interpolated_gets_no_points(make_store):
    rough = np.random.default_rng(1)
    cloud = survey(surface=lambda x, y: terrain(x, y) + rough.uniform(0, 3, len(x)))
    assert not len(made(make_store(cloud, block_size=1000)))


def test_options_limit_the_points_on_the_ground(make_store):
    cloud = survey()
    store = make_store(cloud, block_size=1000)
    assert not len(made(store, ground_density=0))
    assert not len(made(store, above_ground=False))
    sparse = made(store, ground_density=1.0)
    assert 0.5 < len(sparse) / (np.pi * HOLE**2) < 1.2
    assert len(made(store, density=1.0)) == len(sparse)
    num_new = round(0.2 * len(cloud))
    assert 0 < len(made(store, ratio=1.2)) <= LARGEST_SHARE * num_new
    near = made(store, max_distance=1.0)
    distance = np.linalg.norm(near[:, None] - cloud.positions, axis=2).min(axis=1)
    assert 0 < len(near) < 200 and distance.max() <= 1.0


def test_points_on_the_ground_count_for_the_ratio_and_have_its_class_and_their_distance():
    cloud, model = survey(), small_model()
    new = upsample(cloud, 3.0, model=model, only_new=True, above_ground=True)
    assert len(new) == 2 * len(cloud)
    below = new.positions[:, 2] < terrain(*new.positions[:, :2].T) + 1
    inside = np.hypot(*(new.positions[:, :2] - SIDE / 2).T) < HOLE - 1
    ground = new.select(below & inside)
    assert len(ground) > 50
    assert (ground.attributes["classification"] == 2).all()
    assert (ground.attributes["intensity"] == 100).all()
    parent = ground.attributes["parent_index"]
    assert (cloud.attributes["classification"][parent] == 2).all()
    distance = np.linalg.norm(ground.positions[:, None] - cloud.positions, axis=2).min(axis=1)
    assert ground.attributes["distance_to_measured"] == pytest.approx(distance, abs=0.01)


def test_the_farthest_point_on_the_ground_is_told(make_store):
    options, device = UpsampleOptions(ratio=3.0, above_ground=True), torch.device("cpu")
    new = run_passes(make_store(survey()), small_model(), options, SingleProcess(), device)
    told = new.summary([0])
    distance = np.concatenate([each.attributes[DISTANCE] for each in new.of_file()])
    assert max(told.farthest, told.farthest_ground) == pytest.approx(distance.max())
    assert told.farthest < told.farthest_ground and (distance > told.farthest).sum() > 10


def test_points_on_the_ground_count_for_the_density():
    cloud, model = survey(), small_model()
    settings = {"model": model, "density": 25.0, "above_ground": True, "only_new": True}
    with_ground, without = (
        upsample(cloud, ground_density=ground_density, **settings).positions
        for ground_density in (None, 0.0)
    )
    inside = [np.hypot(*(new[:, :2] - SIDE / 2).T) < HOLE - 1 for new in (with_ground, without)]
    num_ground = (inside[0] & (with_ground[:, 2] < terrain(*with_ground[:, :2].T) + 1)).sum()
    assert num_ground > 50
    assert abs(int(inside[0].sum()) - int(inside[1].sum())) < 0.2 * num_ground


def test_a_wrong_measurement_far_away_costs_nothing(make_store):
    cloud, alone = survey(), made(make_store(survey(), block_size=4096))
    cloud.positions[0, :2] += 70_000  # A raster up to there would have 10^11 cells.
    points = made(make_store(cloud, block_size=4096))
    assert np.hypot(*(points[:, :2] - SIDE / 2).T).max() < HOLE + 1
    assert len(points) > 0.8 * len(alone)


def test_the_places_near_points_are_those_of_one_grid_whatever_the_points():
    def near(places: np.ndarray) -> np.ndarray:
        return places[np.linalg.norm(places[:, None] - few, axis=2).min(axis=1) <= 2.5]

    few = np.random.default_rng(0).uniform(-20, 20, (20, 2))
    everywhere = np.indices((50, 50)).reshape(2, -1).T - 25.0
    places = _places(few, 2.5, 0.7, seed=3)
    assert len(places) < 0.6 * len(_places(everywhere, 2.5, 0.7, seed=3))
    assert np.array_equal(near(places), near(_places(everywhere, 2.5, 0.7, seed=3)))


def test_blocks_do_not_change_the_points(make_store):
    few, many = (made(make_store(survey(), block_size=size)) for size in (400, 4000))
    # The density is measured in a part of the blocks.
    gap = np.abs(few[:, None] - many).max(axis=2).min(axis=1)
    assert len(few) == pytest.approx(len(many), rel=0.2)
    assert np.median(gap) < 1.0


def test_the_order_of_the_points_changes_nothing(make_store):
    cloud = survey()
    shuffled = cloud.select(np.random.default_rng(0).permutation(len(cloud)))
    one, other = (
        np.sort(made(make_store(c, block_size=1000)).view("f8,f8,f8"), axis=0)
        for c in (cloud, shuffled)
    )
    assert len(one) and (one == other).all()


def test_a_plane_is_interpolated_without_error_between_returns_in_the_same_place():
    rng = np.random.default_rng(0)
    xy = rng.uniform(0, 10, (200, 2)).repeat(2, axis=0)
    returns = np.column_stack([xy, 3 + 0 * xy[:, 0]])
    for heights in interpolated(returns, rng.uniform(1, 9, (50, 2)), 1.0, (64, 8)):
        assert heights == pytest.approx(3, abs=1e-6)
