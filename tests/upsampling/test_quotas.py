"""New points are distributed by the quotas of the model, within the number of candidates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointup.upsampling.single_pass.quotas import quota_shares, scale_to_total


@given(
    st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 9)), min_size=1, max_size=30),
    st.floats(0.0, 1.0),
)
def test_cells_get_their_total_by_weight_and_never_more_than_they_have(
    cells: list[tuple[float, int]], part: float
) -> None:
    weights, num_candidates = (np.array(values, float) for values in zip(*cells, strict=True))
    total = part * num_candidates.sum()
    wanted = scale_to_total(total, weights, num_candidates)
    assert wanted.sum() == pytest.approx(total, abs=1e-9)
    assert (wanted <= max(part, 0.8) * num_candidates + 1e-9).all()
    # Cells that are not full have counts in proportion to their weights.
    is_full = wanted >= max(part, 0.8) * num_candidates - 1e-9
    scale = wanted[~is_full] / weights[~is_full]
    assert np.allclose(scale, scale.mean() if len(scale) else 0.0)
    if len(scale):
        assert (weights[is_full] * scale.mean() >= wanted[is_full] - 1e-6).all()


def test_cells_without_weight_get_what_full_cells_have_no_room_for() -> None:
    weights, room = np.array([0.0] * 90 + [50.0] * 10), np.full(100, 96.0)
    wanted = scale_to_total(1500.0, weights, room)
    assert wanted.sum() == pytest.approx(1500)
    np.testing.assert_allclose(wanted[90:], 0.8 * 96)
    np.testing.assert_allclose(wanted[:90], (1500 - 768) / 90)
    assert scale_to_total(30.0, np.zeros(2), np.array([20.0, 40.0])).tolist() == [10.0, 20.0]


def test_cells_without_weight_get_nothing() -> None:
    weights = np.array([0.0, 1.0, 1.0])
    assert scale_to_total(4.0, weights, np.full(3, 9.0)).tolist() == [0.0, 2.0, 2.0]
    assert scale_to_total(0.0, np.zeros(2), np.zeros(2)).tolist() == [0.0, 0.0]


def test_shares_follow_the_quotas_up_to_a_bound() -> None:
    quota = np.log(np.array([1.0, 2.0, 1000.0, 1e-9], np.float32))
    expected = pytest.approx([1.0, 2.0, 4.0, 0.25], rel=1e-5)
    assert quota_shares(quota, 0.0) == expected == quota_shares(quota + 30, 30.0)
