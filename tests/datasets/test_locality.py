"""The spatial order of points is that of a Morton curve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pointup.datasets import pair_dataset
from pointup.datasets.pair_dataset import in_spatial_order, spatial_order


def morton_code(cell: np.ndarray) -> int:
    """Interleaves the bits one by one: the lowest bits of x, y and z, then the next ones."""
    return sum(
        ((int(cell[axis]) >> bit) & 1) << (3 * bit + axis) for bit in range(16) for axis in range(3)
    )


def test_points_are_sorted_along_the_morton_curve() -> None:
    cells = np.random.default_rng(0).integers(0, 2**16, (300, 3))
    cells[:2] = [[0, 0, 0], [2**16 - 1] * 3]
    order = spatial_order(cells.astype(np.float64) + 7.0)
    codes = [morton_code(cell) for cell in cells[order]]
    assert codes == sorted(codes) and sorted(order) == list(range(300))


def test_neighbours_in_the_order_are_neighbours_in_space() -> None:
    points = np.random.default_rng(0).random((4000, 3)).astype(np.float32)
    steps = np.linalg.norm(np.diff(points[spatial_order(points)], axis=0), axis=1)
    assert np.median(steps) < 0.1 < 0.5 < np.median(np.linalg.norm(np.diff(points, axis=0), axis=1))


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(0, 12), st.just(3)),
        elements=st.sampled_from([0.0, 1.0, -3e7, np.nan, np.inf]),
    )
)
def test_the_order_is_a_permutation_of_any_points(points: np.ndarray) -> None:
    order = spatial_order(points)
    assert sorted(order.tolist()) == list(range(len(points)))
    if not np.isfinite(points).all():
        assert order.tolist() == list(range(len(points)))


def test_large_clouds_of_a_pair_are_sorted_together_with_their_normals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_dataset, "SORTED_FROM", 30)
    rng = np.random.default_rng(0)
    target = rng.random((50, 3)).astype(np.float32)
    clouds = {
        "source": rng.random((20, 3)).astype(np.float32),
        "target": target,
        "target_normals": 2 * target,
        "resample": np.empty((0, 3), np.float32),
    }
    ordered = in_spatial_order(clouds)
    assert list(ordered) == list(clouds)
    assert ordered["source"] is clouds["source"] and ordered["resample"] is clouds["resample"]
    assert np.array_equal(ordered["target"], target[spatial_order(target)])
    assert not np.array_equal(ordered["target"], target)
    assert np.array_equal(ordered["target_normals"], 2 * ordered["target"])
