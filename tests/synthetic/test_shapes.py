"""Procedural shapes: valid, varied and reproducible surfaces of all families."""

import numpy as np
import pytest

from pointup.synthetic.shapes import FAMILIES, deform, random_surface
from pointup.synthetic.solids import CLOSE_SIDES, parallel_sheets, slotted_block
from pointup.synthetic.tessellation import surface_of

NAMES = {family.__name__: family for family in [*FAMILIES, *CLOSE_SIDES]}
OPEN = ("open_sheet", "parallel_sheets")


@pytest.mark.parametrize("name", NAMES)
def test_a_family_makes_different_valid_surfaces(name):
    areas = set()
    for seed in range(2):
        triangles = NAMES[name](np.random.default_rng(seed))
        assert np.isfinite(triangles).all()
        surface = surface_of(triangles)
        a, b, c = np.moveaxis(surface.vertices[surface.faces], 1, 0)
        doubled = np.linalg.norm(np.cross(b - a, c - a), axis=1)
        assert (doubled > 0).all()
        assert len(np.unique(surface.faces)) == len(surface.vertices)
        if name not in OPEN:
            # Faces are oriented outwards: the volume is positive.
            assert np.einsum("ij,ij->", a, np.cross(b, c)) > 0
        areas.add(round(surface.area, 6))
    assert len(areas) == 2


def test_random_surfaces_are_normalised_and_sampled_on_the_surface():
    rng = np.random.default_rng(5)
    for _ in range(5):
        surface, family = random_surface(rng)
        assert family in NAMES
        radius = np.linalg.norm(surface.vertices, axis=1).max()
        assert radius == pytest.approx(1)
        np.testing.assert_allclose(
            surface.vertices.min(axis=0), -surface.vertices.max(axis=0), atol=1e-12
        )
        points, _ = surface.sample(50, rng)
        assert surface.distance(points).max() < 1e-9


def test_deforming_keeps_a_surface_closed():
    body = NAMES["polyhedron"](np.random.default_rng(1))
    for seed in range(5):
        bent = surface_of(deform(body, np.random.default_rng(seed)))
        edges = np.sort(np.concatenate([bent.faces[:, [i, (i + 1) % 3]] for i in range(3)]), axis=1)
        assert (np.unique(edges, axis=0, return_counts=True)[1] == 2).all()


def test_sides_are_close_to_each_other_without_contact():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        triangles = parallel_sheets(rng)
        layers = triangles.reshape(-1, 2 * 43 * 43, 3, 3)
        first, second = layers[0].reshape(-1, 3), layers[1].reshape(-1, 3)
        shift = np.linalg.norm(second - first, axis=1)
        # A disc is a grid whose first row is one point, where the normal is not defined.
        shift = shift[shift > 0]
        assert shift.min() >= 0.012 - 1e-9
        assert shift.max() <= 0.12 * 4
        assert len(shift) > 0.98 * len(first)


def test_slots_are_closed_and_narrow():
    for seed in range(6):
        block = slotted_block(np.random.default_rng(seed))
        surface = surface_of(block)
        x, y, z = block.reshape(-1, 3).T
        # Prongs and slots alternate along x; a slot is at least 0.02 wide.
        assert np.diff(np.unique(x)).min() >= 0.02 - 1e-12
        filled = np.ptp(x) * np.ptp(y) * np.ptp(z)
        a, b, c = np.moveaxis(surface.vertices[surface.faces], 1, 0)
        volume = np.einsum("ij,ij->", a, np.cross(b, c)) / 6
        assert 0 < volume < filled * (1 - 1e-6)


def test_close_sides_are_drawn_only_when_asked_for():
    close, others = (
        {random_surface(np.random.default_rng(seed), close)[1] for seed in range(10)}
        for close in (True, False)
    )
    assert close <= {family.__name__ for family in CLOSE_SIDES}
    assert len(close) > 2
    assert not close & others
