"""Surveys of the evaluation: points that are not measured, thinning, and the part to upsample."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest
from survey_files import write_las

from pointup import Upsampler
from pointup.errors import DataError
from pointup.evaluation.baselines import BASELINES
from pointup.evaluation.lidar import (
    MARGIN,
    near_reference,
    read_survey,
    split_passes,
    thin_survey,
    upsampled_surveys,
)
from pointup.io.cloud import PointCloud
from pointup.io.virtual_clouds import write_virtual_cloud


def square(num_points: int, side: float) -> PointCloud:
    """Random points of a square in the xy plane, from the origin on."""
    xy = np.random.default_rng(0).random((num_points, 2)) * side
    points = np.column_stack([xy, np.zeros(num_points)])
    return PointCloud(points, path=Path("square.las"))


def write_upsampled(path: Path) -> None:
    """A file of 30 measured and 70 synthetic points; 10 of each are noise."""
    points, number = np.random.default_rng(0).random((100, 3)), np.arange(100)
    classes = np.where((number >= 20) & (number < 40), 7, 1)
    write_las(path, points, offset=np.zeros(3), synthetic=number >= 30, classification=classes)


def test_new_points_of_an_earlier_upsampling_are_named_or_left_out(tmp_path):
    path = tmp_path / "a.las"
    write_upsampled(path)
    noise = f"{path}: 20 points left out: noise (classes 7 and 18) or withheld"
    named = f"{path}: 60 points have the synthetic flag: they are not measured, "
    notes: list[str] = []
    assert len(read_survey(path, notes)) == 80
    assert notes == [noise, named + "but count as measured here"]
    notes.clear()
    survey = read_survey(path, notes, synthetic="drop")
    assert np.allclose(survey.positions, laspy.read(path).xyz[:20])
    assert notes == [noise, named + "left out"]
    notes.clear()
    assert len(read_survey(path, notes, synthetic="keep")) == 80 and notes == [noise]


def test_a_file_of_synthetic_points_alone_has_nothing_to_thin(tmp_path):
    write_upsampled(tmp_path / "a.las")
    las = laspy.read(tmp_path / "a.las")
    las.points = las.points[30:]
    las.write(tmp_path / "a.las")
    with pytest.raises(DataError, match=r"a.las: all 70 points are noise, withheld or synthetic"):
        read_survey(tmp_path / "a.las", [], synthetic="drop")


def test_passes_are_split_into_source_reference_and_a_second_one(tmp_path):
    rng = np.random.default_rng(0)
    numbers, widths = (900, 700, 1500, 400), (20, 18, 19, 3)
    # The passes begin 100 s after each other and cover 20, 18, 19 and 3 of 20 m.
    points = [rng.random((n, 3)) * [w, 20, 1] for n, w in zip(numbers, widths, strict=True)]
    flown = [np.sort(100 * i + 10 * rng.random(n)) for i, n in enumerate(numbers)]
    write_las(
        tmp_path / "all.las",
        np.concatenate(points),
        gps_time=np.concatenate(flown),
        number_of_returns=np.full(3500, 1),
        offset=(0, 0, 0),
    )
    lines: list[str] = []
    source, reference, second = split_passes(tmp_path / "all.las", 0, lines)

    def rows(survey: PointCloud) -> set[tuple[float, ...]]:
        return set(map(tuple, survey.positions.round(3).tolist()))

    given = [set(map(tuple, each.round(3).tolist())) for each in points]
    assert rows(source) == given[1]
    assert rows(reference) == given[2] | given[3]
    assert second is not None and rows(second) < given[0]
    # Of the density of the source, 700 on 360 m2.
    assert len(second.positions) / 400 == pytest.approx(700 / 360, rel=0.1)
    assert set(source.attributes) == {"classification", "number_of_returns"}
    assert lines[-1].startswith("source: pass 2; resampled: pass 1")


@pytest.mark.parametrize("pattern", ["random", "poisson", "scanline"])
@pytest.mark.parametrize(("num_points", "ratio"), [(1, 4.0), (1500, 5000.0)])
def test_too_few_points_to_thin_are_reported_with_the_remedy(num_points, ratio, pattern):
    message = f"square.las: {num_points:,} points thinned .* leave 0 .* smaller ratio"
    with pytest.raises(DataError, match=message):
        thin_survey(square(num_points, 1.0), ratio, pattern, 0)


def test_points_that_several_tiles_hold_are_read_once(tmp_path):
    points = np.random.default_rng(0).random((100, 3)).round(3)
    files = [tmp_path / "a.las", tmp_path / "b.las"]
    for path, rows in zip(files, (slice(0, 60), slice(40, 100)), strict=True):
        write_las(path, points[rows], offset=np.zeros(3))
    write_virtual_cloud(tmp_path / "all.vpc", files)
    notes: list[str] = []
    assert np.allclose(read_survey(tmp_path / "all.vpc", notes).positions, points)
    assert notes == [f"{tmp_path / 'all.vpc'}: 20 points left out: where another one is"]


def test_no_point_of_a_thinned_survey_is_in_both_source_and_reference():
    once = square(400, 10.0)
    source, reference = thin_survey(once.select(np.tile(np.arange(400), 2)), 3.0, "random", 0)
    assert (len(source.positions), len(reference.positions)) == (100, 300)
    both = np.concatenate([source.positions, reference.positions])
    assert len(np.unique(both, axis=0)) == 400


def test_a_source_is_cut_to_a_strip_around_the_reference_only_if_it_is_larger():
    source = square(10_000, 100)  # A mean spacing of 1.
    corner = np.array([[90.0, 90, 0], [99, 99, 0]])
    near = near_reference(source, corner)
    low = 90 - MARGIN
    inside = (source.positions[:, :2] > low).all(axis=1)
    # The spacing follows from the extent of the points, which is slightly below 100.
    assert len(near.positions) == pytest.approx(inside.sum(), rel=0.01)
    assert (near.positions[:, :2] > low - 0.1).all()
    assert near_reference(source, source.positions) is source
    assert near_reference(source, np.array([[40.0, 40, 0], [60, 60, 0]])) is source


@pytest.mark.parametrize("largest", [8.0, pytest.param(64.0, marks=pytest.mark.slow)])
def test_at_a_density_the_baselines_have_as_many_points_as_the_model(largest):
    source = square(200, 10)
    # 2 points per unit of area become 80: 40 of one, which the model makes if its limit allows it.
    # By default the limit is 16.
    upsampler = Upsampler(max_pass_ratio=largest, feature_dim=8, heads=2, child_heads=2, k=6)
    surveys = upsampled_surveys(source, 1.0, 80.0, upsampler)
    assert len(surveys["model"]) == pytest.approx(200 * min(40, max(16, largest)), rel=0.25)
    # Midpoints have 12 neighbours and this model 6, so that their numbers differ a little.
    assert len(surveys["midpoints"]) == pytest.approx(len(surveys["model"]), rel=0.2)
    for name in BASELINES:
        assert len(surveys[name]) == len(surveys["model"])


def test_without_a_model_the_baselines_have_as_many_points_as_the_midpoints():
    surveys = upsampled_surveys(square(100, 10), 3.0)
    assert list(surveys) == ["midpoints", *BASELINES]
    assert {len(points) for points in surveys.values()} == {300}
