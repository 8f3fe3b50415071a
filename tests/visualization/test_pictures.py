"""Pictures: the depth buffer, cameras, and pages of regular and degenerate clouds."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.image import imread
from PIL import Image

from pointup.errors import FileError
from pointup.visualization import rendering
from pointup.visualization.before_after import before_after_picture, find_section
from pointup.visualization.columns import evaluation_picture
from pointup.visualization.page import Page, dataset_picture, reliability_picture, save_picture
from pointup.visualization.rendering import (
    HEIGHTS,
    Camera,
    estimate_normals,
    fit_camera,
    point_spacing,
    render_points,
    splat,
    view_axes,
)


def sphere(num_points: int, seed: int) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


DEGENERATE = {
    "empty": np.zeros((0, 3)),
    "one point": np.array([[1.0, 2.0, 3.0]]),
    "two points": np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
    "duplicates": np.ones((50, 3)),
    "plane": np.random.default_rng(0).random((300, 3)) * (1, 1, 0),
    "vertical line": np.random.default_rng(0).random((300, 3)) * (0, 0, 1),
    "not finite": np.array([[0.0, 0.0, 0.0], [np.nan, 1.0, 0.0], [1.0, np.inf, 2.0], [1, 1, 1]]),
    "diverged": sphere(200, 0) * 3e38,
}


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.floats(0.8, 5))
@settings(max_examples=20, deadline=None)
def test_splat_finds_the_nearest_ball_of_each_pixel(seed, num_points, ball):
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
def test_a_camera_is_a_rotation_and_shows_the_whole_cloud(azimuth, elevation, up):
    axes = view_axes(azimuth, elevation, up)
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(axes) == pytest.approx(1)
    points = np.random.default_rng(0).normal(size=(50, 3)) * (5, 1, 2) + 400_000
    camera = fit_camera(points, axes, 300, 200)
    seen = (points - camera.centre) @ axes.T * camera.scale
    assert (np.abs(seen[:, :2]) <= np.array([150, 100]) + 1e-6).all()
    assert np.abs(seen[:, :2] / (150, 100)).max() > 0.9


def test_the_view_from_the_side_has_z_up_and_the_view_from_above_has_y_up():
    np.testing.assert_allclose(view_axes(0, 0), [[1, 0, 0], [0, 0, 1], [0, -1, 0]], atol=1e-12)
    np.testing.assert_allclose(view_axes(0, 90), np.eye(3), atol=1e-12)
    np.testing.assert_allclose(view_axes(0, 0, up="y"), np.eye(3), atol=1e-12)


def test_the_nearer_of_two_points_hides_the_other_whatever_their_order():
    points = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    colors = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    camera = Camera(view_axes(0, 90), np.zeros(3), 4.0, 80, 80)
    picture = render_points(points, colors, camera, 0.5)
    assert (picture == render_points(points[::-1], colors[::-1], camera, 0.5)).all()
    assert picture[40, 40, 2] > 150 and picture[40, 40, 0] < 50
    assert (picture[0, 0] == 255).all()


def test_a_pixel_is_the_mean_of_four_at_twice_the_size(monkeypatch):
    points = sphere(300, 0)
    small = fit_camera(points, view_axes(30, 20), 80, 60)
    large = replace(small, scale=2 * small.scale, width=160, height=120)
    colors = np.random.default_rng(0).random((300, 3))
    expected = render_points(points, colors, large, radius=0.1).reshape(60, 2, 80, 2, 3)
    monkeypatch.setattr(rendering, "_SUPERSAMPLING", 2)
    found = render_points(points, colors, small, radius=0.1)
    np.testing.assert_allclose(found, expected.mean(axis=(1, 3)), atol=1)


def test_point_spacing_is_the_step_of_a_grid_and_the_same_on_a_subset():
    grid = np.stack(np.meshgrid(np.arange(60), np.arange(60), [0]), axis=-1).reshape(-1, 3) * 0.25
    assert point_spacing(grid) == pytest.approx(0.25)
    uneven = np.random.default_rng(0).random((20_000, 3)) * (1, 1, 0)
    assert point_spacing(uneven, max_points=4_000) == pytest.approx(point_spacing(uneven), rel=0.05)
    assert point_spacing(grid[:1]) == point_spacing(grid[:0]) == 0


def test_normals_of_a_sphere_point_along_its_radius():
    points = sphere(4_000, 1)
    cosine = np.abs((estimate_normals(points, points[::7]) * points[::7]).sum(axis=1))
    assert cosine.min() > 0.97


@pytest.mark.parametrize(
    ("name", "vertical"),
    [
        # Each cloud once.
        pytest.param(name, vertical, marks=pytest.mark.slow if vertical != place % 2 else ())
        for place, name in enumerate(DEGENERATE)
        for vertical in (False, True)
    ],
)
def test_any_cloud_can_be_drawn_before_and_after(name, vertical, small_panels):
    cloud, good = DEGENERATE[name], sphere(200, 2)
    for before, after in ((good, cloud), (cloud, good)):
        picture = before_after_picture(before, after, vertical=vertical)
        assert picture.dtype == np.uint8 and picture.shape[1:] == (2 * 240 + 3 * 16, 3)


@pytest.mark.parametrize("vertical", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pictures_are_deterministic(vertical, small_panels):
    clouds = sphere(300, 1), sphere(900, 2), sphere(900, 3)
    first, second = (evaluation_picture(*clouds, vertical=vertical) for _ in range(2))
    assert (first == second).all()
    first, second = (before_after_picture(*clouds[:2], vertical=vertical) for _ in range(2))
    assert (first == second).all()


def test_camera_and_error_scale_do_not_depend_on_the_prediction(small_panels):
    source, target = sphere(300, 1), sphere(900, 2)
    good = evaluation_picture(source, sphere(900, 3), target)
    bad = evaluation_picture(source, 1.15 * sphere(900, 3), target)
    column, gap = 240, 16
    assert (good[:, : column + gap] == bad[:, : column + gap]).all()
    bar = slice(good.shape[0] - 60, None)
    assert (good[bar] == bad[bar]).all()
    # Large errors are yellow, small ones violet: the blue of the drawn points falls.
    panel = np.s_[-84 - 60 : -84, 2 * gap + column : 2 * (gap + column)]
    blue = [image[panel][(image[panel] < 250).any(axis=2)][:, 2].mean() for image in (good, bad)]
    assert blue[1] < 0.7 * blue[0]


def test_captions_of_an_evaluation_state_distances_and_points_that_are_not_finite(
    written, small_panels
):
    source, target = sphere(100, 1), sphere(300, 2)
    prediction = np.concatenate([sphere(300, 3), [[np.nan, 0, 0]]])
    evaluation_picture(source, prediction, target, unit="m", baseline=target)
    distance = np.linalg.norm(prediction[:300, None] - target, axis=2)
    chamfer = distance.min(axis=0).mean() + distance.min(axis=1).mean()
    assert f"300 points; Chamfer {chamfer:.3g} m, 1 not finite" in written
    assert "300 points; Chamfer 0 m" in written and "midpoint baseline" in written


def test_a_survey_far_from_the_origin_looks_the_same_as_one_near_it(small_panels):
    rng = np.random.default_rng(5)
    before = np.round(rng.random((2_000, 3)) * (64, 32, 16) * 256) / 256
    after = np.round(rng.random((6_000, 3)) * (64, 32, 16) * 256) / 256
    away = np.array([500_000.0, 5_400_000.0, 0.0])
    near, far = (before_after_picture(before + o, after + o, vertical=True) for o in (0, away))
    assert np.abs(near.astype(int) - far).mean() < 0.1


def test_an_outlier_does_not_change_the_range_of_heights():
    ground = np.random.default_rng(0).random((8_000, 3)) * (60, 30, 4)
    bird = np.concatenate([ground, [[30.0, 15.0, 900.0]]])
    assert before_after_picture(bird, bird, vertical=True).shape == (
        before_after_picture(ground, ground, vertical=True).shape
    )


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """All texts written on a page."""
    texts: list[str] = []
    write = Page.write

    def note(self: Page, left: float, bottom: float, text: str, *rest: Any, **font: Any) -> float:
        texts.append(text)
        return write(self, left, bottom, text, *rest, **font)

    monkeypatch.setattr(Page, "write", note)
    return texts


def test_captions_state_the_sizes_of_cloud_window_and_section(written):
    rng = np.random.default_rng(0)
    before = rng.random((30_000, 3)) * (4000, 400, 2)
    after = np.concatenate([before, rng.random((60_000, 3)) * (4000, 400, 2)])
    before_after_picture(before, after, vertical=True, unit="ft", totals=(7_000_000, 21_000_000))
    assert "7,000,000 points" in written and "21,000,000 points" in written
    windows = [text for text in written if text.startswith("from above; shown: ")]
    sections = [text for text in written if text.startswith("cross-section: ")]
    assert len(windows) == len(sections) == 2
    for panel, (text, section) in enumerate(zip(windows, sections, strict=True)):
        num_window, num_section = (
            int(caption.split(": ")[1].split(" ")[0].replace(",", ""))
            for caption in (text, section)
        )
        # The window is part of the cloud, the section part of the window.
        assert 0 < num_section < num_window < (30_000, 90_000)[panel]
        density = float(text.split(", ")[-1].split(" ")[0])
        assert text.endswith("points/ft\u00b2")
        assert density == pytest.approx((30_000, 90_000)[panel] / 1_600_000, rel=0.15)
        assert section.endswith("ft deep")


def test_a_cloud_shown_whole_has_one_count(written):
    cloud = np.random.default_rng(0).random((900, 3)) * (20, 10, 3)
    before_after_picture(cloud, np.concatenate([cloud, cloud]), vertical=True)
    assert "900 points" in written and "1,800 points" in written
    assert not any("shown" in text for text in written)
    before_after_picture(cloud, cloud, totals=(4_000, 9_000))
    assert "4,000 points, 900 of them shown" in written
    assert "9,000 points, 900 of them shown" in written


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_the_cross_section_goes_through_the_object_on_the_ground(seed):
    rng = np.random.default_rng(seed)
    ground = np.column_stack([rng.random((8_000, 2)) * (200, 100), rng.normal(0, 0.02, 8_000)])
    trunk = rng.uniform([30, 20], [170, 80])
    tree = np.column_stack([trunk + rng.normal(0, 2, (400, 2)), rng.uniform(2, 15, 400)])
    section = find_section(np.concatenate([ground, tree]))
    assert ((section.low[:2] <= trunk + 4) & (trunk - 4 <= section.high[:2])).all()
    assert section.high[2] - section.low[2] > 8
    # Much wider than deep, so that points don't hide each other.
    width, depth = (section.high - section.low)[:2]
    assert depth < 0.1 * width
    cut = section.cut(ground)
    inside = ((ground[:, :2] >= section.low[:2]) & (ground[:, :2] <= section.high[:2])).all(axis=1)
    assert len(cut) == inside.sum() > 0


def test_a_written_picture_equals_the_returned_one(tmp_path):
    picture = before_after_picture(sphere(50, 1), sphere(200, 2), tmp_path / "a.png")
    assert picture.shape == (680, 1600, 3)
    read = np.round(imread(tmp_path / "a.png")[..., :3] * 255).astype(np.uint8)
    assert (picture == read).all()


def test_an_error_about_a_picture_names_its_file(tmp_path):
    picture = np.zeros((4, 4, 3), dtype=np.uint8)
    with pytest.raises(FileError, match=r"missing/a\.png"):
        save_picture(picture, tmp_path / "missing" / "a.png")
    with pytest.raises(FileError, match=r"a\.gif.*\.png or \.jpg"):
        save_picture(picture, tmp_path / "a.gif")


def test_datasets_of_any_sizes_have_histograms():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4_000, 500)
    picture = dataset_picture(sizes, 4 * sizes, rng.random(500), unit="m")
    assert picture.shape == (400, 1600, 3)
    for few in (np.array([], dtype=int), np.array([7]), np.array([100, 100]), np.array([0, 0])):
        assert dataset_picture(few, few, few).shape == (400, 1600, 3)


def test_the_picture_of_reliability_has_a_bar_for_the_share_of_each_tenth():
    shares = np.array([100, 90, 80, 70, 60, 50, 40, 30, 20, 0])
    lengths = dict.fromkeys(
        ("uncertainty_by_decile", "distance_90_by_decile", "distance_by_decile"), [0.0, 0.1] * 5
    )
    picture = reliability_picture({"within": 54.0, "within_by_decile": shares, **lengths}, "m")
    red, _, blue = np.moveaxis(picture[84:, 72:512].astype(int), 2, 0)
    heights = (blue - red > 60).sum(axis=0)
    middles = np.flatnonzero(heights > 10)[0] + 16 + 42.1 * np.arange(10)
    assert heights[middles.astype(int)] == pytest.approx(2.4 * shares, abs=6)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((1650.1, 1650.9), ["1,650.1", "1,650.4", "1,650.7"]),
        ((12_010.0, 12_030.0), ["12,016", "12,024"]),
        ((0.0, 150_000.0), ["0", "50,000", "100,000", "150,000"]),
        ((0.0, 0.012), ["0", "0.004", "0.008", "0.012"]),
        ((-2.0, 2.0), ["\N{MINUS SIGN}1.5", "0", "1.5"]),
    ],
)
def test_the_ticks_of_a_colour_bar_are_told_apart(span, expected):
    page = Page(900, 120)
    page.color_bar(20, 800, HEIGHTS, span, "height")
    page.pixels()
    axes = page.figure.axes[0]
    labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [text.get_text() for x, text in labels if span[0] <= x <= span[1]] == expected


def test_a_picture_of_the_docs_keeps_the_colours_of_a_small_scale(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.normal(150, 40, (400, 400, 1)) + rng.normal(0, 6, (400, 400, 3))
    pixels[390:394, :256] = colormaps["plasma"](np.arange(256), bytes=True)[:, :3]
    pixels = pixels.clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path := tmp_path / "a.png")
    runpy.run_path(str(ROOT / "docs" / "pictures.py"))["with_few_colours"](path)
    off = np.abs(np.asarray(Image.open(path).convert("RGB")).astype(int) - pixels)
    assert Image.open(path).mode == "P" and off[390:394, :256].max() < 20
