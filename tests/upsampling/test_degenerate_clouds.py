"""Clouds that are hardly clouds are upsampled or refused; invalid options are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sheets import sheet, small_model
from typed import Result, is_one_line, left_in, positions

from pointup import upsample
from pointup.errors import ConfigError, DataError, FileError
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points
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
def test_degenerate_clouds_are_upsampled(points: np.ndarray) -> None:
    for model in (small_model(), small_model(0.1)):
        made = upsample(points, 4.0, model=model)
        # A place counts once.
        assert len(made) == len(points) + 3 * len(np.unique(points, axis=0))
        assert np.isfinite(made).all()
        assert np.array_equal(made[: len(points)], points)


def test_points_on_a_line_stay_on_it() -> None:
    line = np.arange(40.0)[:, None] * (1.0, 2.0, 3.0)
    made = upsample(line, 4.0, model=small_model(0.1))
    assert np.abs(made - made[:, :1] * (1.0, 2.0, 3.0)).max() < 1e-3


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (np.empty((0, 3)), DataError, "^points: has 0 points"),
        (np.zeros((1, 3)), DataError, "^points: has 1 point;"),
        (np.full((9, 3), 7.0), DataError, "^points: all 9 points are in one place"),
        (np.array([[0, 0, 0], [1, np.nan, 0]]), FileError, "1 of 2 have NaN"),
        (np.zeros((4, 2)), FileError, r"expected \(N, 3\)"),
    ],
)
def test_an_invalid_cloud_is_an_error(
    points: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        upsample(points, model=small_model())


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.5},
        {"ratio": float("nan")},
        {"density": 0.0},
        {"max_distance": -1.0},
        {"oversampling": 0.5},
    ],
)
def test_invalid_options_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        UpsampleOptions(**options)


def test_masked_points_are_refused_with_the_remedy() -> None:
    points = np.ma.masked_greater(sheet(60), sheet(60).max(axis=0) - 0.1)
    masked = points.mask.any(axis=1)
    message = rf"^points: {masked.sum()} of 60 are masked; leave them out: points\[~points\.mask"
    for given in (points, PointCloud(points)):
        with pytest.raises(FileError, match=message):
            upsample(given, 2.0, model=small_model())
    made = upsample(points[~points.mask.any(axis=1)], 2.0, model=small_model())
    assert np.array_equal(made, upsample(sheet(60)[~masked], 2.0, model=small_model()))


def test_complex_coordinates_are_refused() -> None:
    for given in (sheet(60) + 1j, torch.from_numpy(sheet(60) + 1j), (sheet(60) + 1j).tolist()):
        with pytest.raises(FileError, match=r"^points: complex coordinates; give real ones"):
            upsample(given, 2.0, model=small_model())


@pytest.mark.parametrize("value", ["4", torch.tensor([4.0]), np.array([4.0, 4.0]), [4.0]])
def test_an_option_that_is_no_number_is_an_error_that_names_it(value: object) -> None:
    for name in ("ratio", "density", "max_distance", "oversampling"):
        message = rf"^{name.replace('_', ' ')} .*: give a number, such as 4\.0$"
        with pytest.raises(ConfigError, match=message):
            upsample(sheet(60), model=small_model(), **{name: value})
    assert len(upsample(sheet(60), np.float32(2), model=small_model())) == 120


def test_ratio_and_density_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="ratio and density: give one of them"):
        upsample(sheet(60), 4.0, density=3000.0, model=small_model())
    assert len(upsample(sheet(60), model=small_model())) == 240


@pytest.mark.parametrize("device", ["foo", "cpu:x", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"^device {device}: can't be used \(.*'cpu'$") as raised:
        upsample(np.eye(3), model=small_model(), device=device)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [1e12, -1e20, np.finfo(np.float32).min, 1e160, 1.7e308])
def test_values_for_no_data_among_coordinates_are_refused(value: float) -> None:
    points = np.random.default_rng(0).random((100, 3))
    points[[3, 50], 2] = value
    with pytest.raises(FileError, match=r"^points: 2 of 100 .* 1e12 or more, such as .*remove"):
        upsample(points, model=small_model())
    points[[3, 50], 2] = 1e6 * np.sign(value)
    made = upsample(points, 2.0, model=small_model())
    assert len(np.unique(made, axis=0)) > 190


@pytest.mark.parametrize("name", ["a.xyz", "a.npy"])
def test_a_file_with_values_for_no_data_is_refused_and_named(
    name: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    points = positions(60)
    points[::20, 2] = -3.4028e38
    write_points(tmp_path / name, PointCloud(points))
    result = command(tmp_path / name, "-o", tmp_path / "b.xyz")
    assert result.status == 1 and is_one_line(result.err) and left_in(tmp_path) == [name]
    assert f"{name}: points: 3 of 60 have coordinates of 1e12 or more, such as -3.4" in result.err
