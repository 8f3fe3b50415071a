"""The uncertainty of new points: its value, where it is written, and the largest one."""

from __future__ import annotations

import re

import laspy
import numpy as np
import pytest
import torch
from sheets import UTM, grid, sheet, small_model
from survey_files import write_las

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.errors import ConfigError
from pointup.io.cloud import PointCloud
from pointup.model.calibration import Calibration
from pointup.upsampling.new_points import UncertaintyByClass

EXACT = Calibration((-9.0, 9.0), (-9.0, 9.0))


def model_with_errors(calibration: Calibration | None = EXACT) -> Upsampler:
    """A model that predicts errors, which do not change its points."""
    model = small_model(0.1, predict_error=True, error_exponent=0.0, density_exponent=0.0)
    model.calibration = calibration
    return model


def of_new(
    points: np.ndarray, model: Upsampler, ratio: float = 3.0, **options: object
) -> PointCloud:
    return upsample(PointCloud(points), ratio, model=model, only_new=True, **options)  # type: ignore[arg-type]


def test_without_errors_to_tell_apart_it_is_a_share_of_the_local_spacing():
    # The right half is five times as dense along both axes.
    left, right = sheet(300, 10.0) * [1, 1, 0], sheet(7500, 10.0) * [1, 1, 0] + [10, 0, 0]
    made = of_new(np.concatenate([left, right]), model_with_errors(Calibration((0.0,), (0.5,))))
    uncertainty, x = made.attributes["uncertainty"], made.positions[:, 0]
    spacing = [np.exp(-0.5) * np.median(uncertainty[at]) for at in (x < 9, x > 11)]
    assert spacing == pytest.approx([(100 / n) ** 0.5 for n in (300, 7500)], rel=0.25)


def test_it_scales_with_the_cloud_and_is_zero_for_measured_points():
    points, model = sheet(400), model_with_errors()
    made = upsample(PointCloud(points), 3.0, model=model)
    uncertainty = made.attributes["uncertainty"]
    assert uncertainty.dtype == np.float32
    assert not uncertainty[:400].any() and (uncertainty[400:] > 0).all()
    larger = of_new(128 * points, model).attributes["uncertainty"]
    assert larger == pytest.approx(128 * uncertainty[400:], rel=1e-3)


def test_the_points_are_the_same_with_and_without_it():
    points = sheet(400)
    plain, other = small_model(0.1, density_exponent=0.0), model_with_errors()
    shared = plain.state_dict()
    other.load_state_dict(shared, strict=False)
    without = of_new(points, plain)
    for more in ({}, {"uncertainty": False}):
        made = of_new(points, other, **more)
        assert np.array_equal(made.positions, without.positions)
        assert (made.attributes.keys() - without.attributes.keys() == {"uncertainty"}) == (not more)
    assert "uncertainty" not in of_new(points, model_with_errors(None)).attributes


def test_a_point_made_of_new_ones_adds_their_uncertainty_to_its_own():
    constant = model_with_errors(Calibration((0.0,), (0.0,)))
    one, two = (of_new(grid(24), constant, n).attributes["uncertainty"] for n in (4.0, 16.0))
    assert np.array_equal(one, two[: len(one)])
    # This model knows the spacing s only. The second pass halves it: hypot(s, s / 2) for the
    # children of new points, and hypot(s / 4, s / 2) for those of measured ones, made among them.
    middle = np.median(one)
    is_of_measured = two[len(one) :] < 0.8 * middle
    assert 0.1 < is_of_measured.mean() < 0.5
    found = [np.median(two[len(one) :][of]) for of in (is_of_measured, ~is_of_measured)]
    assert found == pytest.approx([middle * (5 / 16) ** 0.5, middle * 1.25**0.5], rel=0.1)


def test_the_noise_of_measured_points_is_added_as_far_as_the_calibration_says() -> None:
    points = grid(24)
    noisy = points + 0.1 * np.random.default_rng(0).normal(size=points.shape) * [0, 0, 1]
    for share in (0.0, 2.0):
        model = model_with_errors(Calibration((0.0,), (-1.0,), scatter=share))
        even, rough = (
            np.median(of_new(p, model).attributes["uncertainty"]) for p in (points, noisy)
        )
        expected = np.hypot(np.exp(-1), 0.1 * share) / np.exp(-1)
        assert rough / even == pytest.approx(expected, rel=0.1)


def test_it_depends_on_the_ratio_where_the_calibration_does():
    model = model_with_errors(Calibration((0.0,), (0.0,), 8.0, (1.0,)))
    two, four, eight = (
        np.median(of_new(grid(24), model, ratio).attributes["uncertainty"]) for ratio in (2, 4, 8)
    )
    assert np.log([two / eight, four / eight]) == pytest.approx([1, 1 / 3], abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"oversampling": 2.0}, {"originals": False}],
)
def test_no_point_is_made_beyond_the_largest_uncertainty(options):
    points, model = sheet(500), model_with_errors()
    whole = of_new(points, model, **options).attributes["uncertainty"]
    most = float(np.percentile(whole, 40))
    made = of_new(points, model, max_uncertainty=most, **options)
    assert 0.3 * len(whole) < len(made) <= len(whole)
    assert made.attributes["uncertainty"].max() <= most
    assert len(np.unique(made.positions, axis=0)) == len(made)
    with pytest.raises(ConfigError, match="max uncertainty 1: the model predicts no uncertainty"):
        of_new(points, small_model(), max_uncertainty=1.0)


def test_files_describe_it_and_its_values_do_not_depend_on_tiles(tmp_path, capsys):
    points = (sheet(900) * 10 + UTM).round(2)
    classes = np.where(points[:, 0] < np.quantile(points[:, 0], 0.3), 6, 1)
    write_las(tmp_path / "a.las", points, classification=classes)
    model_with_errors().save_pretrained(tmp_path / "model")

    def made(name: str, *words: object) -> laspy.LasData:
        common = ("--model", tmp_path / "model", "--ratio", 2, *words)
        command = ("upsample", tmp_path / "a.las", "-o", tmp_path / name, *common)
        assert main([str(word) for word in command]) == 0
        return laspy.read(tmp_path / name)

    whole = made("whole.las")
    of_all, of_class = r"(\S+) \(median\), (\S+) \(90 %\)", r"; class {}: (\S+), ([\d.]+)"
    told = re.search(of_all + of_class.format(1) + of_class.format(6), capsys.readouterr().out)
    new = whole.points[900:]
    parts = [new.uncertainty[np.isin(new.classification, of)] for of in ([1, 6], [1], [6])]
    assert told and [float(number) for number in told.groups()] == pytest.approx(
        np.concatenate([np.percentile(part, [50, 90]) for part in parts]), rel=0.06
    )
    tiles = made("tiles.las", "--tile", 60, "--token-budget", 100)
    assert np.array_equal(whole.points.array, tiles.points.array)
    dimension = whole.point_format.dimension_by_name("uncertainty")
    assert dimension.dtype == np.float32
    assert dimension.description.startswith("90 % lie within, in ")
    assert not whole.uncertainty[:900].any() and (whole.uncertainty[900:] > 0).all()
    plain = made("plain.las", "--no-uncertainty")
    names = [name for name in whole.points.array.dtype.names if name != "uncertainty"]
    assert list(plain.points.array.dtype.names) == names
    assert np.array_equal(plain.points.array, whole.points.array[names])


def test_a_model_keeps_its_calibration(tmp_path):
    model = model_with_errors(Calibration((-1.0, 0.0, 2.0), (-3.0, -1.0, 0.5)))
    model.save_pretrained(tmp_path)
    loaded = Upsampler.from_pretrained(tmp_path)
    given = np.linspace(-2, 3, 11)
    assert loaded.calibration and model.calibration
    assert np.array_equal(loaded.calibration.within(given), model.calibration.within(given))
    assert torch.equal(loaded.error.weight, model.error.weight)


def test_the_figures_of_a_class_are_as_exact_as_those_of_all_points():
    uncertainty, found = np.full(1000, 0.252, np.float32), UncertaintyByClass()
    classes = np.repeat([2, 5], 500)
    uncertainty[[0, 999]] = 9.0  # No figure exceeds the largest value, which would hide an error.
    found.add(uncertainty, classes)
    for number, median, most in found.found().values():
        assert number >= 500 and (median, most) == pytest.approx((0.252, 0.252), rel=1e-3)
