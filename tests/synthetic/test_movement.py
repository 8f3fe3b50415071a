"""Movement of plants between two surveys: how far leaves move, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.synthetic.landscapes import Stand, random_site, stand_site
from pointup.synthetic.scene_pairs import moved
from pointup.synthetic.site import Site

STAND = Stand(
    height=25.0,
    evenness=0.6,
    cover=1.0,
    understory=0.5,
    conifers=0.3,
    foliage=0.3,
    shrubs=0.1,
    dead_wood=0.05,
)


def forest() -> Site:
    return stand_site(np.random.default_rng(3), 8.0, STAND)


def leaf_movements(before: Site, after: Site) -> tuple[np.ndarray, np.ndarray]:
    """Height (N,) of all leaves above the foot of their plant, and how they moved (N, 3, 3)."""
    pairs = [(before.rough[p.foliage], after.rough[p.foliage], p.foot[2]) for p in before.plants]
    height = np.concatenate([one[:, 0, 2] - foot for one, _, foot in pairs])
    return height, np.concatenate([other - one for one, other, _ in pairs])


@pytest.mark.parametrize("distance", [0.1, 0.8])
def test_leaves_high_above_the_ground_move_by_the_distance(distance: float) -> None:
    before = forest()
    height, movement = leaf_movements(before, moved(before, distance, np.random.default_rng(0)))
    rms = np.sqrt(np.square(movement[:, 0]).sum(axis=1).mean(where=height > 12))
    assert rms == pytest.approx(distance, rel=0.15)


def test_leaves_near_the_ground_move_less() -> None:
    before = forest()
    height, movement = leaf_movements(before, moved(before, 0.5, np.random.default_rng(0)))
    length = np.linalg.norm(movement[:, 0], axis=1)
    assert 0.1 < length[height < 1.5].mean() < 0.6 * length[height > 12].mean()


def test_leaves_keep_their_form_and_move_on_average_nowhere() -> None:
    before = forest()
    _, movement = leaf_movements(before, moved(before, 0.5, np.random.default_rng(0)))
    np.testing.assert_allclose(movement, np.broadcast_to(movement[:, :1], movement.shape))
    assert np.abs(movement.mean(axis=(0, 1))).max() < 0.1


def test_wood_stays_connected() -> None:
    before = forest()
    after = moved(before, 0.5, np.random.default_rng(0))
    corners = before.solid[before.plants[0].wood].reshape(-1, 3)
    moved_corners = after.solid[after.plants[0].wood].reshape(-1, 3)
    for corner in corners[:50]:
        of_corner = moved_corners[(corners == corner).all(axis=1)]
        np.testing.assert_allclose(of_corner, np.broadcast_to(of_corner[:1], of_corner.shape))


def test_what_is_no_plant_stays_and_the_first_site_is_not_changed() -> None:
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
