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


def test_nine_in_ten_points_of_the_truth_are_not_beyond_a_target_whatever_their_gap():
    # Twigs hit by many points or few; isolated measured points are on twigs that few points hit.
    twigs, share = RNG.uniform(0, 10, (500, 3)), RNG.exponential(1.0, 500) ** 3

    def foliage(number: int) -> np.ndarray:
        twig = RNG.choice(500, number, p=share / share.sum())
        return twigs[twig] + RNG.normal(0, 0.15, (number, 3))

    source, target, points = foliage(4000), foliage(8000), foliage(8000)
    beyond = distances_beyond(points, source, target)
    gap = cKDTree(source).query(points)[0]
    assert np.mean(beyond == 0) == pytest.approx(0.9, abs=0.015)
    assert np.array_equal(distances_beyond(points, np.repeat(source, 2, axis=0), target), beyond)
    for rows in np.array_split(np.argsort(gap), 5):
        assert np.mean(beyond[rows] == 0) == pytest.approx(0.9, abs=0.035)
    # Without measured points, or with one, nothing is known of the target.
    for few in (source[:0], source[:1]):
        assert distances_beyond(points[:50], few, target) == pytest.approx(
            cKDTree(target).query(points[:50])[0], abs=0.15
        )
    assert (distances_beyond(points[:50], target[:9], target) >= 0).all()
    in_another_unit = distances_beyond(1e-6 * points, 1e-6 * source, 1e-6 * target)
    np.testing.assert_allclose(1e6 * in_another_unit, beyond, rtol=0, atol=1e-4)


def test_new_points_on_flat_ground_are_off_by_their_height_whatever_the_scan_lines():
    def lines(along: float, height: float = 0.0) -> np.ndarray:
        x, y = np.meshgrid(np.arange(0, 20, 0.5), np.arange(along, 20, 0.5))
        z = np.full(x.size, height) + RNG.normal(0, 0.002, x.size)
        return np.column_stack([x.ravel(), y.ravel(), z])

    # The measured points are close to those of the target, those in between are not.
    source, target = lines(0.0), lines(0.02)
    between = lines(0.25)[50:-50]
    assert cKDTree(target).query(between)[0].min() > 0.2
    assert distances_beyond(between, source, target).max() < 0.01
    above = distances_beyond(lines(0.25, 0.3)[50:-50], source, target)
    assert above == pytest.approx(0.3, abs=0.01)
    # Beyond the rim of the target there is no plane, nor along a single line.
    assert distances_beyond(np.array([[-2.0, -2.0, 0.0]]), source, target) > 2.7
    line = target[target[:, 1] == 0.02]
    assert distances_beyond(np.array([[10.0, 0.02, 0.7]]), source[:0], line) > 0.68


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
    for of_surface, rest in ((True, ","), (False, ", beyond what measured points around are off,")):
        (line,) = describe_reliability(found, of_surface=of_surface)
        assert f"% of the new points are within it (should be 90){rest} by decile" in line
    nothing = reliability([measured_uncertainty(PointCloud(new), source)])
    assert describe_reliability(nothing, of_surface=True) == []


def test_no_decile_is_compared_with_a_first_one_that_is_nowhere_off():
    uncertainty = np.arange(1.0, 101.0)
    for off, is_compared in ((0.0, False), (0.1, True)):
        found = reliability([(uncertainty, np.where(uncertainty > 10, 0.5, off))])
        (line,) = describe_reliability(found, of_surface=False)
        assert ("last decile 5 times that of the first" in line) == is_compared
        assert line.endswith("100") != is_compared


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


def test_new_points_alone_are_measured_with_the_measured_points_of_their_source():
    rng = np.random.default_rng(0)
    source, target, new = (rng.random((n, 3)) for n in (200, 800, 400))
    uncertainty = rng.random(400).astype(np.float32) + 0.01
    alone = PointCloud(new, {"uncertainty": uncertainty})
    whole = PointCloud(
        np.concatenate([source, new]),
        {"uncertainty": np.concatenate([np.zeros(200, np.float32), uncertainty])},
    )
    found = measured_uncertainty(alone, target, source=source)
    assert np.array_equal(found, measured_uncertainty(whole, target))
    # Without them, as in the calibration of a model that was trained on noise.
    _, distance = measured_uncertainty(alone, target)
    assert np.array_equal(distance, distances_beyond(new, source[:0], target))
