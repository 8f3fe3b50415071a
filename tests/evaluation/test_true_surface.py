"""Distances of clouds to a true surface, and the shares beyond a limit."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.evaluation.lidar_metrics import FAR
from pointup.evaluation.pairs import measure_to_surface, surface_metrics
from pointup.geometry.surfaces import Surface
from pointup.io.length_unit import METRE, unit_of

# Two triangles: the unit square of x and y, 100 times as wide, at z = 0.
SQUARE = Surface.from_triangles(
    np.array([[0, 0, 0], [100, 0, 0], [100, 100, 0], [0, 100, 0]], float),
    np.array([[0, 1, 2], [0, 2, 3]]),
)


def test_shares_are_those_of_new_points_by_their_height_above_a_plane() -> None:
    rng = np.random.default_rng(0)
    source = rng.uniform([10, 10, -3], [90, 90, 3], (50, 3))
    new = rng.uniform([10, 10, -2], [90, 90, 2], (400, 3))
    figures = measure_to_surface(
        {"source": source, "model": np.concatenate([source, new])}, SQUARE, METRE
    )
    for far in FAR:
        assert figures["model"][f"off_surface_{far:g}"] == pytest.approx(
            100 * np.mean(np.abs(new[:, 2]) > far)
        )
        # The source has no new points: all of it counts.
        assert figures["source"][f"off_surface_{far:g}"] == pytest.approx(
            100 * np.mean(np.abs(source[:, 2]) > far)
        )
    everything = np.concatenate([source, new])
    assert figures["model"]["p2f"] == pytest.approx(1e3 * np.abs(everything[:, 2]).mean())
    assert figures["model"].keys() == {"p2f", *surface_metrics(METRE)}


def test_limits_are_in_metres_whatever_the_unit() -> None:
    source = np.array([[50.0, 50, 0]])
    cloud = np.array([[50.0, 50, 1], [50, 50, 2], [50, 50, 4]])
    figures = measure_to_surface({"source": source, "model": cloud}, SQUARE, unit_of(0.3048))
    assert figures["model"]["off_surface_0.5"] == pytest.approx(200 / 3)
    assert figures["model"]["off_surface_1"] == pytest.approx(100 / 3)


def test_shapes_have_no_shares_and_empty_clouds_no_figures() -> None:
    clouds = {"source": np.array([[50.0, 50, 2]]), "model": np.empty((0, 3))}
    assert measure_to_surface(clouds, SQUARE, None) == {"source": {"p2f": 2000.0}}
