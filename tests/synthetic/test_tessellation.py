"""Triangle soups: closed, oriented outwards, with the expected volume and area."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.synthetic.fields import isosurface, round_cones
from pointup.synthetic.tessellation import (
    cells,
    circle,
    cut,
    extrude,
    grid,
    hull,
    inside_loops,
    refine,
    revolve,
    sphere,
    surface_of,
    sweep,
    union,
    weld,
)

CUBE = hull(np.indices((2, 2, 2)).reshape(3, -1).T.astype(float))
SQUARE = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1.0]])


def volume(triangles: np.ndarray) -> float:
    a, b, c = np.moveaxis(triangles, 1, 0)
    return float(np.einsum("ij,ij->", a, np.cross(b, c)) / 6)


def is_closed(triangles: np.ndarray) -> bool:
    """Whether each edge occurs equally often in both directions."""
    faces = surface_of(triangles).faces
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    passed = Counter(map(tuple, edges.tolist()))
    return all(passed[b, a] == number for (a, b), number in passed.items())


def helix() -> np.ndarray:
    t = np.linspace(0, 6, 80)
    return np.stack([np.cos(t), np.sin(t), 0.2 * t], axis=1)


SOLIDS = {
    "hull": (CUBE, 1.0),
    "sphere": (sphere(0.05), 4 / 3 * np.pi),
    "revolve": (revolve(np.array([[0, 0], [1, 0], [1, 2], [0, 2]]), 90), 2 * np.pi),
    "sweep": (sweep(np.linspace([0, 0, 0], [1, 2, 3], 4), np.ones(4), circle(90)), np.pi * 14**0.5),
    "helix": (sweep(helix(), np.full(80, 0.1), circle(30)), np.pi * 0.01 * 6 * 1.04**0.5),
    "extrude": (extrude([SQUARE, 0.5 * SQUARE], np.array([1, 3]), np.ones(2)), 6.0),
    "pyramid": (extrude([SQUARE], np.array([0, 3]), np.array([1, 0.01])), 4.04),
    "cells": (
        cells(np.eye(3, dtype=bool)[..., None], [np.arange(4.0)] * 2 + [np.arange(2.0)]),
        3.0,
    ),
    "round_cones": (
        round_cones(np.zeros((1, 3)), np.array([[2, 3, 6]]) / 7, np.full((1, 2), 0.5), 0.1, 0.04),
        np.pi * (0.25 + 0.5 / 3),
    ),
    "isosurface": (
        isosurface(lambda p: np.linalg.norm(p, axis=1) - 1, -np.ones(3), np.ones(3), 0.053),
        4 / 3 * np.pi,
    ),
}


@pytest.mark.parametrize("name", SOLIDS)
def test_solids_are_closed_oriented_outwards_and_have_the_expected_volume(name):
    triangles, expected = SOLIDS[name]
    assert is_closed(triangles)
    assert volume(triangles) == pytest.approx(expected, rel=0.012)


def test_a_ring_of_cells_has_no_wall_where_it_closes():
    occupied = np.zeros((2, 4, 1), dtype=bool)
    occupied[1] = True
    edges = [np.arange(3.0), np.arange(5.0), np.arange(2.0)]
    triangles = cells(occupied, edges, wrap_axis=1)
    assert not np.isin(triangles[:, :, 1], [0]).all(axis=1).any()
    assert len(triangles) == 2 * 16
    assert len(cells(occupied, edges)) == 2 * 18


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), max_edge=st.floats(0.05, 2))
def test_refining_keeps_the_surface_closed(seed, max_edge):
    rng = np.random.default_rng(seed)
    triangles = hull(rng.normal(size=(8, 3)))
    finer = refine(triangles, max_edge)
    edges = np.linalg.norm(np.roll(finer, -1, axis=1) - finer, axis=2)
    assert edges.max() <= max_edge
    assert is_closed(finer)
    assert volume(finer) == pytest.approx(volume(triangles))
    assert surface_of(finer).area == pytest.approx(surface_of(triangles).area)


def test_union_is_the_outer_surface():
    # The cubes have an eighth of their volume in common: 3 faces of each lose a quarter.
    parts = [CUBE, CUBE + 0.5]
    skin = surface_of(union(parts, 0.1))
    assert skin.area == pytest.approx(2 * (6 - 0.75), rel=0.02)
    points, _ = skin.sample(2000, np.random.default_rng(0))
    for low in (0, 0.5):
        depth = np.minimum(points - low, low + 1 - points).min(axis=1)
        assert depth.max() < 0.1 / 4
    kept = surface_of(union([CUBE, 0.5 * CUBE + 0.25], 0.1))
    assert kept.area == pytest.approx(6)


def test_cut_is_exact_to_a_quarter_of_the_edge_length():
    kept = cut(CUBE, lambda points: points[:, 2] > 0.33, 0.2)
    assert abs(kept[..., 2].max() - 0.33) < 0.05
    assert surface_of(kept).area == pytest.approx(1 + 4 * 0.33, rel=0.1)


def test_inside_loops_excludes_holes():
    points = np.random.default_rng(0).uniform(-1.5, 1.5, (500, 2))
    size = np.abs(points).max(axis=1)
    inside = inside_loops(points, [SQUARE, 0.5 * SQUARE])
    np.testing.assert_array_equal(inside, (size < 1) & (size > 0.5))


def test_weld_merges_equal_corners_only():
    points, faces = weld(CUBE)
    assert len(points) == 8
    np.testing.assert_array_equal(points[faces], CUBE)
    apart = np.concatenate([CUBE, CUBE + 1e-12])
    assert len(weld(apart)[0]) == 16


def test_grid_accepts_a_batch_of_grids():
    positions = np.random.default_rng(0).normal(size=(3, 4, 5, 3))
    together = grid(positions, wrap_columns=True)
    alone = np.concatenate([grid(positions[:, :, i], wrap_columns=True) for i in range(5)])
    assert {t.tobytes() for t in together} == {t.tobytes() for t in alone}
    assert len(together) == len(alone)
