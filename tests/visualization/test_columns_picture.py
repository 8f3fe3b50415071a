"""Columns of clouds and maps: what is shown, in which colours, also of degenerate clouds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from test_pictures import DEGENERATE, sphere
from test_pictures import written as written

from pointup.visualization.before_after import turned
from pointup.visualization.columns import (
    _badly_covered,
    _Rows,
    _within,
    columns_picture,
    maps_picture,
)
from pointup.visualization.page import beside, stacked
from pointup.visualization.rendering import fit_camera, view_axes


def forest(number: int, seed: int = 0) -> np.ndarray:
    """Flat ground of 40 by 10 with a tree of height 8 at (30, 5)."""
    rng = np.random.default_rng([seed, number])
    ground = np.column_stack([rng.random((number, 2)) * (40, 10), rng.normal(0, 0.02, number)])
    height = rng.uniform(1, 8, number // 4)
    tree = np.column_stack([rng.normal((30, 5), 0.6, (len(height), 2)), height])
    return np.concatenate([ground, tree])


@pytest.mark.parametrize(
    ("name", "vertical"),
    [
        # Each cloud once. Two points are few and duplicates are in one place, as one point is.
        pytest.param(
            name,
            vertical,
            marks=pytest.mark.slow
            if vertical != place % 2 or name in ("two points", "duplicates")
            else (),
        )
        for place, name in enumerate(DEGENERATE)
        for vertical in (False, True)
    ],
)
def test_any_cloud_can_be_a_column(name, vertical, small_panels):
    cloud, good = DEGENERATE[name], sphere(200, 2)
    for clouds, reference in (({"source": good, "model": cloud}, good), ({"source": cloud}, good)):
        picture = columns_picture(clouds, reference, vertical=vertical)
        assert picture.dtype == np.uint8 and picture.shape[1] == 16 + 256 * (len(clouds) + 1)
    assert columns_picture({"source": good}, cloud, vertical=vertical, errors=False).size


@pytest.mark.parametrize("name", ["one point", "two points", "duplicates", "plane"])
def test_any_survey_has_maps(name, small_panels):
    good = np.random.default_rng(0).random((500, 3)) * (10, 5, 2)
    for clouds, reference in (({"a": DEGENERATE[name]}, good), ({"a": good}, DEGENERATE[name])):
        picture = maps_picture(clouds, reference, unit="m")
        assert picture.dtype == np.uint8 and picture.shape[1] == 16 + 256 * 2


def test_a_survey_is_shown_as_overview_section_close_up_and_errors(written):
    source, model, reference = forest(300), forest(1200, 1), forest(1200, 2)
    columns_picture(
        {"source": source, "model": model}, reference, unit="ft", title="tile 7",
        notes={"model": "Chamfer 0.3 ft"},
    )  # fmt: skip
    assert "tile 7" in written
    assert "1,500 points; Chamfer 0.3 ft" in written
    assert sum(text.startswith("cross-section, ") and text.endswith("ft deep") for text in written)
    assert written.count("distance to reference") == 2 and "distance to model" in written
    shown = [int(m[1].replace(",", "")) for t in written if (m := re.match("close-up: (.+) p", t))]
    assert len(shown) == 3
    assert 0 < shown[0] < shown[1]


def test_the_close_up_shows_what_the_source_lacks():
    rng = np.random.default_rng(1)
    source = forest(400)
    source = source[source[:, 2] < 1]
    rows = _Rows({"source": source, "reference": forest(400)}, "source", "reference", True)
    assert abs(rows.close.centre[2] - 4.5) < 2.5
    camera = fit_camera(source, view_axes(0, 0), 100, 60)
    patch = np.column_stack([rng.uniform((7, 3), (8, 4), (30, 2)), np.full(30, 20.0)])
    centre = _badly_covered(np.concatenate([source, patch]), source, camera, 3.0)
    np.testing.assert_allclose(centre, patch.mean(axis=0), atol=0.8)


def test_errors_are_scaled_to_those_that_are_shown():
    source, reference = forest(300), forest(1200, 2)
    for factor in (1.0, 1000.0):
        model = reference + np.array([0, 0, 0.001])
        clouds = {"source": source, "model": model, "reference": reference}
        clouds = {name: factor * cloud for name, cloud in clouds.items()}
        found, limit = _Rows(clouds, "source", "reference", True).errors()
        # The distances of the source, a hundred times as large, do not count.
        assert limit == pytest.approx(0.001 * factor, rel=0.05)
        assert found["source"].max() > 20 * limit


def test_maps_show_where_points_and_errors_are(written):
    sparse, dense = forest(2_000), forest(32_000, 1)
    picture = maps_picture({"sparse": sparse, "dense": dense}, dense, unit="m")
    medians = [float(t.split()[2]) for t in written if t.startswith("density, median")]
    assert medians[1] == pytest.approx(16 * medians[0], rel=0.25)
    assert "distance to reference, mean 0 m" in written
    # The tree is the densest place; the brightest colours lie in its cells.
    bright = np.abs(picture.astype(int) - [221, 226, 24]).sum(axis=2) < 60
    column = np.nonzero(bright[: picture.shape[0] // 2])[1]
    assert abs(np.median((column - 16) % 408) / 392 - 0.75) < 0.1


def test_surveys_are_turned_together():
    tall, wide = np.array([[0.0, 0, 1], [1, 9, 2]]), np.array([[0.0, 0, 3], [4, 1, 4]])
    assert turned({"wide": wide})["wide"] is wide
    found = turned({"tall": tall, "wide": wide})
    assert np.ptp(found["tall"][:, 0]) == 9
    np.testing.assert_allclose(found["wide"][:, 2], [3, 4])
    # A rotation, no mirror image.
    before, after = (np.stack([a[1, :2], b[1, :2]]) for a, b in ((tall, wide), found.values()))
    assert np.linalg.det(after) == pytest.approx(np.linalg.det(before))


def test_pictures_are_put_together_on_white():
    small, large = np.zeros((2, 3, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)
    picture: Any = stacked([small, large])
    assert picture.shape == (6, 5, 3)
    assert (picture[:2, 3:] == 255).all() and (picture[2:] == 0).all()
    assert beside([small, large]).shape == (4, 8, 3)
    assert (beside([small, large])[2:, :3] == 255).all()


def test_the_window_of_a_camera_holds_what_it_draws():
    cloud = forest(400)
    camera = fit_camera(cloud, view_axes(0, 0), 200, 60)
    assert _within(cloud, camera).all()
    assert not _within(cloud + np.array([100, 0, 0]), camera).any()
