"""How uncertainties are compared with the truth, and calibrated."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.evaluation.uncertainty import (
    describe_reliability,
    distances_beyond,
    measured_uncertainty,
    reliability,
)
from pointup.io.cloud import PointCloud
from pointup.model.calibration import Calibration

RNG = np.random.default_rng(0)


def plane(number: int, height: float = 0.0) -> np.ndarray:
    return np.column_stack([RNG.uniform(0, 10, (number, 2)), np.full(number, height)])


def test_nine_in_ten_points_of_the_surface_are_not_beyond_a_random_sampling_of_it():
    source, target = plane(2000), plane(4000)
    inside = (np.abs(source[:, :2] - 5) < 4.5).all(axis=1)
    on_surface = distances_beyond(plane(2000)[inside], source, target)
    assert np.mean(on_surface == 0) == pytest.approx(0.9, abs=0.03)
    above = distances_beyond(plane(2000, 0.7)[inside], source, target)
    assert np.mean(above <= 0.7) == pytest.approx(0.9, abs=0.03)
    assert above == pytest.approx(0.7, abs=0.1)
    # Without measured points nothing is known of the target.
    points = plane(50, 0.2)
    assert distances_beyond(points, source[:0], target) == pytest.approx(
        cKDTree(target).query(points)[0]
    )


def test_a_calibration_is_right_for_every_prediction_and_monotone():
    log_error = RNG.uniform(-2, 2, 20_000)
    distance = np.exp(1.3 * log_error) * RNG.exponential(0.2, 20_000)
    fitted = Calibration.fit(log_error, distance)
    found = reliability([(fitted.within(log_error), distance)])
    assert found["within"] == pytest.approx(90, abs=1)
    assert np.asarray(found["within_by_decile"]) == pytest.approx(90, abs=4)
    assert found["sharpness"] == pytest.approx(np.exp(1.3 * 3.6), rel=0.3)
    noise = Calibration.fit(log_error, RNG.exponential(1.0, 20_000))
    assert (np.diff(noise.log_distances) >= 0).all() and (np.diff(noise.log_errors) > 0).all()
    assert len(Calibration.fit(log_error[:5], distance[:5]).log_errors) == 1


def test_a_calibration_of_two_ratios_is_right_in_between():
    def drawn(ratio: float) -> tuple[np.ndarray, np.ndarray]:
        log_error = RNG.uniform(-2, 2, 20_000)
        return log_error, np.exp(log_error + 1.5 / ratio) * RNG.exponential(0.2, 20_000)

    log_error, distance = np.concatenate([drawn(2.0), drawn(12.0)], axis=1)
    fitted = Calibration.fit(log_error, distance, np.repeat([2.0, 12.0], 20_000))
    for ratio, within in ((2.0, 90), (4.0, 90), (12.0, 90), (60.0, 92), (1.0, 66)):
        log_error, distance = drawn(ratio)
        found = reliability([(fitted.within(log_error, ratio), distance)])
        assert found["within"] == pytest.approx(within, abs=1.5)
    one = np.full(20_000, 2.0)
    assert Calibration.fit(log_error, distance, one) == Calibration.fit(log_error, distance)


def test_the_figures_are_those_of_the_new_points_of_a_cloud():
    source, new = plane(400), plane(1000, 0.5)
    uncertainty = np.append(np.zeros(400), np.repeat([0.1, 0.9], 500)).astype(np.float32)
    cloud = PointCloud(np.concatenate([source, new]), {"uncertainty": uncertainty})
    found = reliability([measured_uncertainty(cloud, source)])
    assert found["within_by_decile"] == pytest.approx([0] * 5 + [100] * 5, abs=4)
    assert found["within"] == pytest.approx(50, abs=2)
    assert "% of the new points are within it (should be 90)" in describe_reliability(found)[0]
    assert describe_reliability(reliability([measured_uncertainty(PointCloud(new), source)])) == []


def test_deciles_are_those_of_a_loop():
    uncertainty, distance = RNG.permutation(1000) / 100.0, RNG.exponential(1.0, 1000)
    found = reliability([(uncertainty[:400], distance[:400]), (uncertainty[400:], distance[400:])])
    for tenth in range(10):
        inside = (uncertainty >= tenth) & (uncertainty < tenth + 1)
        expected = {
            "within_by_decile": 100 * np.mean(distance[inside] <= uncertainty[inside]),
            "uncertainty_by_decile": uncertainty[inside].mean(),
            "distance_by_decile": distance[inside].mean(),
            "distance_90_by_decile": np.percentile(distance[inside], 90),
        }
        for name, value in expected.items():
            assert np.asarray(found[name])[tenth] == pytest.approx(value)
