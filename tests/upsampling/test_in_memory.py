"""What `pointup.upsample` takes and refuses: clouds, options, and points of a cloud."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import sheet, small_model

from pointup import upsample
from pointup.errors import ConfigError, DataError, FileError, ModelError
from pointup.io.cloud import PointCloud
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.options import UpsampleOptions


@pytest.mark.parametrize(
    "points",
    [
        sheet(2),
        sheet(5),
        np.arange(40.0)[:, None] * (1.0, 2.0, 3.0),
        np.concatenate([sheet(60), sheet(60), sheet(60)]),
        np.concatenate([np.zeros((500, 3)), sheet(20)]),
        np.concatenate([sheet(100), [[1e6, 1e6, 1e6]]]),
    ],
    ids=["two", "fewer than k", "line", "duplicates", "mostly one place", "outlier"],
)
def test_degenerate_clouds_are_upsampled(points):
    for model in (small_model(), small_model(0.1)):
        made = upsample(points, 4.0, model=model)
        # A place counts once.
        assert len(made) == len(points) + 3 * len(np.unique(points, axis=0))
        assert np.isfinite(made).all()
        assert np.array_equal(made[: len(points)], points)


def test_points_on_a_line_stay_on_it():
    line = np.arange(40.0)[:, None] * (1.0, 2.0, 3.0)
    made = upsample(line, 4.0, model=small_model(0.1))
    assert np.abs(made - made[:, :1] * (1.0, 2.0, 3.0)).max() < 1e-3


def classified(num_points: int, seed: int, name: str = "classification") -> PointCloud:
    rng = np.random.default_rng(seed)
    classes = rng.choice([1, 2, 7, 18], num_points, p=[0.4, 0.4, 0.1, 0.1]).astype(np.uint8)
    withheld = (rng.random(num_points) < 0.1).astype(np.uint8)
    return PointCloud(sheet(num_points, seed=seed), {name: classes, "withheld": withheld})


def of_noise(num_points: int) -> PointCloud:
    return PointCloud(sheet(num_points), {"classification": np.full(num_points, 7, np.uint8)})


NO_CLASS_5 = r"^points: has 0 of 50 points without noise, withheld points and other classes"


def masked_sheet() -> np.ma.MaskedArray[Any, Any]:
    return np.ma.masked_greater(sheet(60), sheet(60).max(axis=0) - 0.1)


@pytest.mark.parametrize(
    ("points", "options", "error", "message"),
    [
        (np.empty((0, 3)), {}, DataError, "^points: has 0 points"),
        (np.zeros((1, 3)), {}, DataError, "^points: has 1 point;"),
        (np.full((9, 3), 7.0), {}, DataError, "^points: all 9 points are in one place"),
        (sheet(60) * 1e-200, {}, DataError, "^points: all 60 points lie within 3.18e-199 of each"),
        (np.array([[0, 0, 0], [1, np.nan, 0]]), {}, FileError, "1 of 2 have NaN"),
        (np.zeros((4, 2)), {}, FileError, r"expected \(N, 3\)"),
        (
            "survey.laz",
            {},
            FileError,
            "^survey.laz: not points; read them by pointup.io.files.read",
        ),
        (sheet(60) + 1j, {}, FileError, "^points: complex coordinates; give real ones"),
        (torch.from_numpy(sheet(60) + 1j), {}, FileError, "^points: complex coordinates"),
        ((sheet(60) + 1j).tolist(), {}, FileError, "^points: complex coordinates"),
        (
            PointCloud(sheet(60), {"time": np.zeros(60, dtype="datetime64[s]")}),
            {},
            DataError,
            r"^points: time is of type datetime64\[s\]; give an array of numbers",
        ),
        (
            PointCloud(sheet(60), {"height": np.zeros(59)}),
            {},
            DataError,
            r"^points: height has shape \(59,\) for 60 points",
        ),
        (
            np.zeros(60, dtype=[("x", "f8"), ("y", "f8"), ("z", "f8")]),
            {},
            FileError,
            r"^points: no array \(N, 3\) of numbers \(.*\); make one$",
        ),
        ([[1, 2, 3], [4, 5]], {}, FileError, r"^points: no array \(N, 3\) of numbers"),
        (sheet(60) > 0, {}, FileError, "^points: true and false, not coordinates"),
        (masked_sheet(), {}, FileError, r"^points: \d of 60 are masked; .* points\[~points\.mask"),
        (PointCloud(masked_sheet()), {}, FileError, r"^points: \d of 60 are masked"),
        (sheet(60), {"ratio": 4.0, "density": 3.0}, ConfigError, "ratio and density: give one"),
        (sheet(50), {"ground_density": 2.0}, ConfigError, "^ground density 2: .* no height here"),
        (sheet(50), {"max_distance": 1e-9}, ConfigError, "^max distance 1e-09: positions are rou"),
        (sheet(50), {"classes": [2]}, DataError, r"^points: has no attribute `classification`"),
        (classified(50, 0), {"classes": [5]}, DataError, NO_CLASS_5),
        (of_noise(50), {}, DataError, "^points: has 0 of 50 points without noise"),
    ],
)
def test_a_cloud_or_an_option_that_does_not_fit_it_is_refused(points, options, error, message):
    with pytest.raises(error, match=message):
        upsample(points, model=small_model(), **options)


def test_an_array_without_masked_points_and_a_number_of_numpy_are_taken():
    points = masked_sheet()
    kept = points[~points.mask.any(axis=1)]
    made = upsample(kept, np.float32(2), model=small_model())
    assert np.array_equal(made, upsample(np.asarray(kept), 2.0, model=small_model()))


def test_tensors_of_any_precision_and_with_gradients_are_taken_as_arrays_are():
    points = torch.from_numpy(sheet(60)).bfloat16()
    made = upsample(points.double().numpy(), 2.0, model=small_model())
    for tensor in (points, points.double().requires_grad_()):
        assert np.array_equal(upsample(tensor, 2.0, model=small_model()), made)
        assert np.array_equal(upsample(PointCloud(tensor), 2, model=small_model()).positions, made)


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.5},
        {"ratio": float("nan")},
        {"density": 0.0},
        {"density": -3.0},
        {"max_distance": -1.0},
        {"oversampling": 0.5},
        {"oversampling": 9.0},
    ],
)
def test_an_option_out_of_its_range_is_refused(options):
    with pytest.raises(ConfigError, match=r"must be"):
        UpsampleOptions(**options)


@pytest.mark.parametrize("value", ["4", torch.tensor([4.0]), np.array([4.0, 4.0]), [4.0]])
def test_an_option_that_is_no_number_is_an_error_that_names_it(value):
    for name in ("ratio", "density", "max_distance", "oversampling"):
        message = rf"^{name.replace('_', ' ')} .*: give a number, such as 4\.0$"
        with pytest.raises(ConfigError, match=message):
            UpsampleOptions(**{name: value})


def test_a_seed_of_none_is_refused():
    with pytest.raises(ConfigError, match=r"^seed None: give a number"):
        UpsampleOptions(seed=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [2**32, 2**63, -(2**32), 0.5, float("nan")])
def test_seeds_that_would_be_the_same_as_another_are_refused(seed):
    with pytest.raises(ConfigError, match=r"must be an integer from 0 to 4294967295"):
        UpsampleOptions(seed=seed)
    assert UpsampleOptions(seed=2**32 - 1)


@pytest.mark.parametrize("classes", [(), (256,), (-1,), ("2",), 2, "2"])
def test_classes_that_are_no_numbers_of_classes_are_refused(classes):
    with pytest.raises(ConfigError, match=r"^class(es)?\b"):
        upsample(sheet(50), classes=classes, model=small_model())


@pytest.mark.parametrize("device", ["foo", "cpu:x", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(device):
    with pytest.raises(ConfigError, match=rf"^device {device}: can't be used \(.*'cpu'$") as raised:
        upsample(np.eye(3), model=small_model(), device=device)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [1e12, -1e20, np.finfo(np.float32).min, 1e160, 1.7e308])
def test_values_for_no_data_among_coordinates_are_refused(value):
    points = np.random.default_rng(0).random((100, 3))
    points[[3, 50], 2] = value
    with pytest.raises(FileError, match=r"^points: 2 of 100 .* 1e12 or more, such as .*remove"):
        upsample(points, model=small_model())


def test_large_coordinates_are_no_values_for_no_data():
    points = np.random.default_rng(0).random((100, 3))
    points[3, 2], points[50, 2] = 1e6, -1e6
    assert len(np.unique(upsample(points, 2.0, model=small_model()), axis=0)) > 190


@given(
    st.integers(0, 1000),
    st.one_of(st.none(), st.sets(st.sampled_from([1, 2, 7, 18]), min_size=1)),
    st.booleans(),
)
def test_a_point_is_selected_by_its_class_and_its_withheld_flag(seed, classes, include_noise):
    cloud = classified(40, seed)
    chosen = None if classes is None else tuple(classes)
    taken = PointFilter(classes=chosen, include_noise=include_noise)(cloud)
    for i in range(40):
        number = int(cloud.attributes["classification"][i])
        wanted = (
            number in classes if classes is not None else include_noise or number not in (7, 18)
        )
        if cloud.attributes["withheld"][i] and not include_noise:
            wanted = False
        assert taken[i] == wanted


@settings(max_examples=3)
@given(st.integers(0, 100), st.floats(1.0, 5.0), st.sampled_from([None, (1,), (2, 7)]))
def test_the_ratio_counts_the_points_that_are_upsampled(seed, ratio, classes):
    cloud, model = classified(50, seed, "Classification"), small_model(0.1)
    taken = PointFilter(classes=classes)(cloud)
    made = upsample(cloud, ratio, model=model, classes=classes)
    assert len(made) == 50 - taken.sum() + round(ratio * taken.sum())
    assert np.array_equal(made.positions[:50], cloud.positions)
    assert taken[made.attributes["parent_index"]][50:].all()
    new = upsample(cloud.select(taken), ratio, model=model, include_noise=True, only_new=True)
    assert np.array_equal(made.positions[50:], new.positions)
    only_model = upsample(cloud, ratio, model=model, classes=classes, originals=False)
    assert len(only_model) == round(ratio * taken.sum())


def test_without_classes_all_points_are_taken():
    assert PointFilter()(PointCloud(sheet(50))).all()


@pytest.mark.parametrize("wrapper", [torch.nn.DataParallel, torch.nn.Sequential])
def test_a_module_around_the_model_is_refused_in_a_line(wrapper):
    with pytest.raises(ModelError, match=rf"^model: a {wrapper.__name__}; give the "):
        upsample(sheet(50), model=wrapper(small_model()))


def test_a_model_in_training_is_left_as_it_was():
    model = small_model().train()
    upsample(sheet(20), model=model)
    assert model.training


def test_autocast_of_the_caller_changes_no_point():
    points, model = sheet(200), small_model(noise=0.1)
    expected = upsample(points, 3.0, model=model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.array_equal(upsample(points, 3.0, model=model), expected)


def test_a_model_in_training_is_used_as_in_evaluation_and_stays_in_training():
    model = small_model(0.1, dropout=0.5)
    expected = upsample(sheet(100), 2.0, model=model)
    assert np.array_equal(upsample(sheet(100), 2.0, model=model.train()), expected)
    assert model.training
