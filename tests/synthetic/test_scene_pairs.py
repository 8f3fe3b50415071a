"""Pairs of simulated surveys: densities, movement of plants, independence, distance to surfaces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.spatial import cKDTree
from test_landscapes import STAND, stand_site

from pointup.datasets.pair import Pair
from pointup.geometry.surfaces import Surface
from pointup.synthetic.landscapes import KINDS, random_site
from pointup.synthetic.scene_pairs import SurveyPlan, moved, survey_pair
from pointup.synthetic.site import Site

SMALL = SurveyPlan(width=6.0, source_density=(8.0, 12.0), target_density=60.0)
WINTER = SurveyPlan(width=5.0, kinds=("forest-leaf-off",), target_density=100.0)


@cache
def validation_pair(plan: SurveyPlan) -> tuple[Pair, Surface]:
    """A validation pair that several tests look at."""
    pair, surface = survey_pair(plan, 2, True, 0)
    assert surface is not None
    return pair, surface


@pytest.mark.parametrize(
    "number",
    [
        # Of the forests one.
        pytest.param(number, marks=pytest.mark.slow if number in range(1, 5) else ())
        for number in range(len(KINDS))
    ],
)
def test_densities_are_those_asked_for_whatever_the_kind(number):
    pair, _ = survey_pair(SMALL, seed=1, validation=False, number=number)
    assert pair.name.startswith(KINDS[number])
    assert 0.9 * 8 <= len(pair.source) / 36 <= 1.1 * 12
    assert len(pair.target) / 36 == pytest.approx(60, rel=0.1)


def test_a_ratio_is_one_of_those_asked_for():
    plan = SurveyPlan(width=6.0, source_density=(15.0, 15.0), ratios=(2.0, 8.0), kinds=("field",))
    found = set()
    for number in range(3):
        pair, _ = survey_pair(plan, 3, False, number)
        ratio = len(pair.target) / len(pair.source)
        nearest = min(plan.ratios, key=lambda asked: abs(asked - ratio))
        assert ratio == pytest.approx(nearest, rel=0.2)
        found.add(nearest)
    assert found == set(plan.ratios)


def test_points_lie_within_their_noise_of_the_surface():
    for plan in (WINTER, replace(WINTER, kinds=("garden",))):
        pair, surface = validation_pair(plan)
        assert pair.resample is not None
        # At most 6 mm of noise from a drone; at most 4 cm, and 2 cm per strip, from an aeroplane.
        for points, noise in ((pair.target, 0.03), (pair.resample, 0.03), (pair.source, 0.15)):
            assert np.quantile(surface.distance(points), 0.995) < noise


def test_surveys_of_a_scene_are_independent():
    pair, _ = validation_pair(WINTER)
    assert pair.resample is not None
    assert len(pair.resample) == pytest.approx(len(pair.target), rel=0.1)
    assert cKDTree(pair.target).query(pair.resample)[0].min() > 0
    assert cKDTree(pair.target).query(pair.source)[0].min() > 0


@pytest.mark.slow
def test_plants_that_move_between_the_surveys_are_farther_from_those_of_the_first():
    def away(pair: Pair, cloud: np.ndarray) -> float:
        return float(np.mean(cKDTree(pair.target).query(cloud)[0]))

    plan = SurveyPlan(width=4.0, kinds=("forest-leaf-on",), target_density=80.0)
    (still, _), (moving, surface) = (
        survey_pair(replace(plan, movement=movement), 5, True, 0)
        for movement in ((0.0, 0.0), (0.8, 0.8))
    )
    assert np.array_equal(still.source, moving.source)
    assert away(moving, moving.source) > 1.2 * away(still, still.source)
    # The second drone survey meets the plants where the first one met them.
    assert moving.resample is not None
    assert surface is not None
    assert away(moving, moving.resample) < 1.2 * away(still, still.resample)
    assert np.quantile(surface.distance(moving.target), 0.995) < 0.03


def test_a_pair_depends_on_seed_split_and_number():
    calls = [(0, False, 0), (0, True, 0), (1, False, 0), (0, False, 1)]
    plan = SurveyPlan(width=3.0, kinds=("field",), target_density=20.0)
    sources = [survey_pair(plan, *call)[0].source.tobytes() for call in [*calls, calls[0]]]
    assert sources[0] == sources[-1]
    assert len(set(sources)) == len(calls)


def test_scenes_of_validation_are_not_those_of_training_of_any_seed(monkeypatch):
    drawn = []

    def generator(key: list[int]) -> np.random.Generator:
        drawn.append(tuple(int(part) for part in key))
        return original(key)

    original = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", generator)
    plan = SurveyPlan(width=3.0, kinds=("field",), target_density=20.0)
    for seed, validation in ((0, False), (7, False), (0, True), (7, True)):
        survey_pair(plan, seed, validation, 0)
    in_training, in_validation = ({key for key in drawn if key[2] == split} for split in (0, 1))
    assert in_training
    assert in_validation
    # Whether a scene is for validation is part of the key, so that no seed can make them equal.
    assert not in_training & in_validation


def test_normals_are_zero_on_leaves_and_of_length_one_elsewhere():
    pair, _ = validation_pair(WINTER)
    assert pair.target_normals is not None
    length = np.linalg.norm(pair.target_normals, axis=1)
    assert (np.isclose(length, 1, atol=1e-5) | (length == 0)).all()
    assert 0.02 < (length == 0).mean() < 0.98


@cache
def forest() -> Site:
    return stand_site(3, 8.0, replace(STAND, height=25.0, foliage=0.3, shrubs=0.1, dead_wood=0.05))


def leaf_movements(before: Site, after: Site) -> tuple[np.ndarray, np.ndarray]:
    """Height (N,) of all leaves above the foot of their plant, and how they moved (N, 3, 3)."""
    pairs = [(before.rough[p.foliage], after.rough[p.foliage], p.foot[2]) for p in before.plants]
    height = np.concatenate([one[:, 0, 2] - foot for one, _, foot in pairs])
    return height, np.concatenate([other - one for one, other, _ in pairs])


@pytest.mark.parametrize("distance", [0.1, 0.8])
def test_leaves_high_above_the_ground_move_by_the_distance(distance):
    before = forest()
    height, movement = leaf_movements(before, moved(before, distance, np.random.default_rng(0)))
    rms = np.sqrt(np.square(movement[:, 0]).sum(axis=1).mean(where=height > 12))
    assert rms == pytest.approx(distance, rel=0.15)


def test_leaves_near_the_ground_move_less():
    before = forest()
    height, movement = leaf_movements(before, moved(before, 0.5, np.random.default_rng(0)))
    length = np.linalg.norm(movement[:, 0], axis=1)
    assert 0.1 < length[height < 1.5].mean() < 0.6 * length[height > 12].mean()


def test_leaves_keep_their_form_and_move_on_average_nowhere():
    before = forest()
    _, movement = leaf_movements(before, moved(before, 0.5, np.random.default_rng(0)))
    np.testing.assert_allclose(movement, np.broadcast_to(movement[:, :1], movement.shape))
    assert np.abs(movement.mean(axis=(0, 1))).max() < 0.1


def test_wood_stays_connected():
    before = forest()
    after = moved(before, 0.5, np.random.default_rng(0))
    corners = before.solid[before.plants[0].wood].reshape(-1, 3)
    moved_corners = after.solid[after.plants[0].wood].reshape(-1, 3)
    for corner in corners[:50]:
        of_corner = moved_corners[(corners == corner).all(axis=1)]
        np.testing.assert_allclose(of_corner, np.broadcast_to(of_corner[:1], of_corner.shape))


def test_what_is_no_plant_stays_and_the_first_site_is_not_changed():
    rng = np.random.default_rng(1)
    before = random_site(rng, 10.0, "garden")
    kept = [part.copy() for part in (*before.solid, *before.rough)]
    after = moved(before, 0.5, np.random.default_rng(0))
    for part, copy in zip((*before.solid, *before.rough), kept, strict=True):
        np.testing.assert_array_equal(part, copy)
    wood, foliage = ({p[place] for p in before.plants} for place in (0, 1))
    for parts, later, plants in (
        (before.solid, after.solid, wood),
        (before.rough, after.rough, foliage),
    ):
        same = {i for i in range(len(parts)) if np.array_equal(parts[i], later[i])}
        assert same == set(range(len(parts))) - plants
