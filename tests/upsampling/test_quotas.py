"""New points are distributed by the quotas of the model, within the number of candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sheets import small_model

from pointup import upsample
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


def test_new_points_are_distributed_by_the_quotas_of_the_model() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((3000, 2)), np.zeros(3000)])
    # Twice as dense on the left.
    points = points[(points[:, 0] < 0.5) | (rng.random(3000) < 0.5)]
    model, shares = small_model(), []
    for power, trust, ratio in (
        (0.0, 0.7, 4), (1.0, 0.7, 4), (1.0, 0.3, 4), (1.0, 0.0, 4), (1.0, 0.7, 9),
    ):  # fmt: skip
        torch.nn.init.constant_(model.quota_powers, 0.0)
        with torch.no_grad():
            model.quota_powers[1] = power
        model.config = replace(model.config, density_exponent=trust)
        made = upsample(points, ratio, model=model, originals=False)
        assert len(made) == ratio * len(points)
        shares.append(float(np.mean(made[:, 0] < 0.5)))
    as_measured = pytest.approx(np.mean(points[:, 0] < 0.5), abs=0.01)
    assert shares[0] == as_measured and shares[3] == as_measured
    # Gaps on the right are larger by the root of two.
    assert shares[1] == pytest.approx(2 / (2 + 2 ** (0.7 * 0.5)), abs=0.01)
    assert shares[2] == pytest.approx(2 / (2 + 2 ** (0.3 * 0.5)), abs=0.01)
    # The second pass keeps the distribution of the first one.
    assert shares[4] == pytest.approx(shares[1], abs=0.01)


def test_quotas_of_predicted_errors_are_multiplied_by_the_predicted_quotas() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((3000, 2)), np.zeros(3000)])
    # Twice as dense on the left; before training, all predicted errors are equal.
    points = points[(points[:, 0] < 0.5) | (rng.random(3000) < 0.5)]
    model = small_model(predict_error=True)
    with torch.no_grad():
        model.quota_powers.copy_(torch.tensor([0.0, 1.0]))
    shares = {}
    for exponent in (0.0, 0.4, 0.8):
        model.config = replace(model.config, density_exponent=0.25, quota_exponent=exponent)
        made = upsample(points, 4, model=model, originals=False)
        shares[exponent] = float(np.mean(made[:, 0] < 0.5))
    assert shares[0.0] == pytest.approx(np.mean(points[:, 0] < 0.5), abs=0.01)
    # Gaps on the right are larger by the root of two.
    for exponent in (0.4, 0.8):
        expected = 2 / (2 + 2 ** (exponent * 0.5))
        assert shares[exponent] == pytest.approx(expected, abs=0.015)


def test_gaps_by_chance_get_more_points_and_dense_places_stay_denser() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((4000, 2)), np.zeros(4000)])
    # Four times as dense on the left.
    points = points[(points[:, 0] < 0.5) | (rng.random(4000) < 0.25)]
    made = upsample(points, 4.0, model=small_model())
    num_left, left = np.count_nonzero(points[:, 0] < 0.5), np.count_nonzero(made[:, 0] < 0.5)
    assert len(made) == 4 * len(points)
    assert 3.6 * num_left < left < 3.95 * num_left

    def spread(cloud: np.ndarray) -> float:
        counts = np.histogram2d(cloud[:, 0], cloud[:, 1], bins=[[0.05, 0.25, 0.45], 10])[0]
        return float(counts.std() / counts.mean())

    assert spread(made) < 0.95 * spread(points)
