"""Pictures: the depth buffer, the cameras, and whole pages of good and of hopeless clouds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from pointup.errors import FileError
from pointup.pictures import (
    before_after_picture,
    dataset_picture,
    evaluation_picture,
    rendering,
    save_picture,
)
from pointup.pictures.rendering import (
    Camera,
    estimate_normals,
    fit_camera,
    point_spacing,
    render_points,
    splat,
    view_axes,
)


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw at the picture's own resolution, a quarter of the work."""
    monkeypatch.setattr(rendering, "_SUPERSAMPLING", 1)


def sphere(num_points: int, seed: int) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


HOPELESS = {
    "empty": np.zeros((0, 3)),
    "one point": np.array([[1.0, 2.0, 3.0]]),
    "two points": np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
    "one point many times": np.ones((50, 3)),
    "plane": np.random.default_rng(0).random((300, 3)) * (1, 1, 0),
    "vertical line": np.random.default_rng(0).random((300, 3)) * (0, 0, 1),
    "not finite": np.array([[0.0, 0.0, 0.0], [np.nan, 1.0, 0.0], [1.0, np.inf, 2.0], [1, 1, 1]]),
    "blown up": sphere(200, 0) * 3e38,
}


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.floats(0.8, 5))
@settings(max_examples=40, deadline=None)
def test_splat_finds_the_nearest_ball_of_every_pixel(
    seed: int, num_points: int, ball: float
) -> None:
    width, height = 24, 16
    seen = np.random.default_rng(seed).uniform(-14, 14, (num_points, 3))
    index, depth = splat(seen, ball, width, height)
    for row in range(height):
        for column in range(width):
            best = (np.inf, -1)
            for point, (x, y, z) in enumerate(seen):
                dx, dy = np.floor(x + width / 2) - column, np.floor(height / 2 - y) - row
                if abs(x) <= width / 2 and abs(y) < height / 2 and dx**2 + dy**2 <= ball**2:
                    best = min(best, (-z - np.sqrt(ball**2 - dx**2 - dy**2), point))
            assert (index[row, column] == -1) == (best[1] == -1)
            if best[1] >= 0:
                assert depth[row, column] == pytest.approx(best[0], abs=0.02)


@given(st.floats(-180, 180), st.floats(-90, 90), st.sampled_from("yz"))
@settings(max_examples=30, deadline=None)
def test_a_camera_is_a_rotation_and_sees_the_whole_cloud(
    azimuth: float, elevation: float, up: str
) -> None:
    axes = view_axes(azimuth, elevation, up)
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(axes) == pytest.approx(1)
    points = np.random.default_rng(0).normal(size=(50, 3)) * (5, 1, 2) + 400_000
    camera = fit_camera(points, axes, 300, 200)
    seen = (points - camera.centre) @ axes.T * camera.scale
    assert (np.abs(seen[:, :2]) <= np.array([150, 100]) + 1e-6).all()
    assert np.abs(seen[:, :2] / (150, 100)).max() > 0.9


def test_the_view_from_the_side_has_z_up_and_the_view_from_above_has_y_up() -> None:
    np.testing.assert_allclose(view_axes(0, 0), [[1, 0, 0], [0, 0, 1], [0, -1, 0]], atol=1e-12)
    np.testing.assert_allclose(view_axes(0, 90), np.eye(3), atol=1e-12)
    np.testing.assert_allclose(view_axes(0, 0, up="y"), np.eye(3), atol=1e-12)


def test_the_nearer_of_two_points_hides_the_other_whatever_their_order() -> None:
    points = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    colors = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    camera = Camera(view_axes(0, 90), np.zeros(3), 4.0, 80, 80)
    picture = render_points(points, colors, camera, 0.5)
    assert (picture == render_points(points[::-1], colors[::-1], camera, 0.5)).all()
    assert picture[40, 40, 2] > 150 and picture[40, 40, 0] < 50
    assert (picture[0, 0] == 255).all()


def test_point_spacing_is_the_step_of_a_grid_and_is_kept_when_measured_on_a_part() -> None:
    grid = np.stack(np.meshgrid(np.arange(60), np.arange(60), [0]), axis=-1).reshape(-1, 3) * 0.25
    assert point_spacing(grid) == pytest.approx(0.25)
    uneven = np.random.default_rng(0).random((20_000, 3)) * (1, 1, 0)
    assert point_spacing(uneven, max_points=4_000) == pytest.approx(point_spacing(uneven), rel=0.05)
    assert point_spacing(grid[:1]) == point_spacing(grid[:0]) == 0


def test_normals_of_a_sphere_point_along_its_radius() -> None:
    points = sphere(4_000, 1)
    cosine = np.abs((estimate_normals(points, points[::7]) * points[::7]).sum(axis=1))
    assert cosine.min() > 0.97


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("name", HOPELESS)
def test_any_cloud_can_be_drawn(name: str, vertical: bool) -> None:
    cloud, good = HOPELESS[name], sphere(200, 2)
    for source, prediction, target in ((good, cloud, good), (cloud, cloud, cloud)):
        picture = evaluation_picture(source, prediction, target, vertical=vertical)
        assert picture.dtype == np.uint8 and picture.shape[2] == 3
    for before, after in ((good, cloud), (cloud, good)):
        picture = before_after_picture(before, after, vertical=vertical)
        assert picture.dtype == np.uint8 and picture.shape[1:] == (1600, 3)


@pytest.mark.parametrize("vertical", [False, True])
def test_pictures_are_deterministic(vertical: bool) -> None:
    clouds = sphere(300, 1), sphere(900, 2), sphere(900, 3)
    first, second = (evaluation_picture(*clouds, vertical=vertical) for _ in range(2))
    assert (first == second).all()
    first, second = (before_after_picture(*clouds[:2], vertical=vertical) for _ in range(2))
    assert (first == second).all()


def test_the_camera_and_the_error_scale_do_not_follow_the_prediction() -> None:
    source, target = sphere(300, 1), sphere(900, 2)
    good = evaluation_picture(source, sphere(900, 3), target)
    bad = evaluation_picture(source, 1.15 * sphere(900, 3), target)
    quarter = good.shape[1] // 4
    assert (good[:, :quarter] == bad[:, :quarter]).all()
    assert (good[:, 2 * quarter + 20 : 3 * quarter] == bad[:, 2 * quarter + 20 : 3 * quarter]).all()
    bar = slice(good.shape[0] - 60, None)
    assert (good[bar, 3 * quarter :] == bad[bar, 3 * quarter :]).all()
    # Large errors are yellow, small ones violet: the blue of the drawn points falls.
    panel = np.s_[120:-90, 3 * quarter + 20 :]
    blue = [image[panel][(image[panel] < 250).any(axis=2)][:, 2].mean() for image in (good, bad)]
    assert blue[1] < 0.7 * blue[0]


def test_given_errors_are_the_ones_that_are_drawn() -> None:
    source, prediction, target = sphere(300, 1), sphere(900, 3), sphere(900, 2)
    distance = np.linalg.norm(prediction[:, None] - target, axis=2).min(axis=1)
    computed = evaluation_picture(source, prediction, target)
    assert (computed == evaluation_picture(source, prediction, target, distance)).all()
    assert (computed != evaluation_picture(source, prediction, target, 2 * distance)).any()


def test_a_survey_far_from_the_origin_looks_the_same_as_one_near_it() -> None:
    rng = np.random.default_rng(5)
    before = np.round(rng.random((2_000, 3)) * (64, 32, 16) * 256) / 256
    after = np.round(rng.random((6_000, 3)) * (64, 32, 16) * 256) / 256
    away = np.array([500_000.0, 5_400_000.0, 0.0])
    near, far = (before_after_picture(before + o, after + o, vertical=True) for o in (0, away))
    assert np.abs(near.astype(int) - far).mean() < 0.1


def test_one_bird_does_not_flatten_a_survey() -> None:
    ground = np.random.default_rng(0).random((8_000, 3)) * (60, 30, 4)
    bird = np.concatenate([ground, [[30.0, 15.0, 900.0]]])
    assert before_after_picture(bird, bird, vertical=True).shape == (
        before_after_picture(ground, ground, vertical=True).shape
    )


def test_pictures_are_written_as_they_are_returned(tmp_path: Path) -> None:
    picture = before_after_picture(sphere(50, 1), sphere(200, 2), tmp_path / "a.png")
    read = np.round(imread(tmp_path / "a.png")[..., :3] * 255).astype(np.uint8)
    assert (picture == read).all()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    picture = np.zeros((4, 4, 3), dtype=np.uint8)
    with pytest.raises(FileError, match=r"missing/a\.png"):
        save_picture(picture, tmp_path / "missing" / "a.png")
    with pytest.raises(FileError, match=r"a\.gif.*\.png or \.jpg"):
        save_picture(picture, tmp_path / "a.gif")


def test_datasets_of_any_make_up_have_histograms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4_000, 500)
    picture = dataset_picture(sizes, 4 * sizes, rng.random(500), tmp_path / "a.png", unit="m")
    assert picture.shape == (400, 1600, 3) and (tmp_path / "a.png").exists()
    for few in (np.array([], dtype=int), np.array([7]), np.array([100, 100]), np.array([0, 0])):
        assert dataset_picture(few, few, few).shape == (400, 1600, 3)
