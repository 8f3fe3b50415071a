"""The common extent of surveys, and grids on it, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from test_lidar_metrics import lattice, whole

from pointup.errors import DataError
from pointup.evaluation.common_extent import (
    common_extent,
    height_grids,
    notes_on_heights,
    vertical_offset,
    whole_extent,
)
from pointup.io.length_unit import unit_of


def test_grids_hold_the_lowest_and_highest_point_of_each_cell():
    points = np.array([[0.2, 0.2, 3], [0.9, 0.1, -1], [0.5, 0.5, 2], [1.5, 1.5, 7], [5, 5, 99.0]])
    low, high = height_grids(points, whole(2, 2))
    np.testing.assert_array_equal(low, [[-1, np.nan], [np.nan, 7]])
    np.testing.assert_array_equal(high, [[3, np.nan], [np.nan, 7]])


def test_the_common_extent_is_what_both_surveys_cover():
    extent = common_extent({"a": lattice(10, 6), "b": lattice(10, 6) + np.array([4, 0, 0])})
    assert extent.area == pytest.approx(5 * 5)
    points = np.array([[4.0, 1, 0], [9.9, 1, 0], [3.9, 1, 0], [5.0, 4.0, 9]])
    assert extent.contains(points).tolist() == [False, False, False, True]


def test_only_whole_cells_belong_to_the_common_extent():
    survey = lattice(10, 10, step=0.1)
    assert common_extent({"a": survey}, cell=1.0).covered.shape == (9, 9)
    # From 0 to 3.9998, three places short of a whole number, as surveys are cut.
    cut = lattice(4, 4, step=0.1) * (4 - 2e-4) / 3.9
    assert common_extent({"a": cut}, cell=1.0).covered.shape == (4, 4)


@pytest.mark.parametrize(("width", "belongs"), [(1, True), (3, True), (4, False)])
def test_holes_of_up_to_three_cells_belong_to_a_survey(width, belongs):
    survey = lattice(40, 40, step=0.5)
    hole = ((survey[:, :2] >= 15.25) & (survey[:, :2] < 15.25 + width)).all(axis=1)
    extent = common_extent({"survey": survey[~hole]})
    middle = np.array([[15.25 + width / 2, 15.25 + width / 2, 0]])
    assert extent.contains(middle).tolist() == [belongs]
    # Nothing that has points is lost.
    assert extent.contains(survey[(survey[:, :2] < 39).all(axis=1) & ~hole]).all()


def test_surveys_elsewhere_are_refused_with_their_coordinates():
    with pytest.raises(DataError, match="don't overlap: a x 0 to 10, y 0 to 10; b x 500 to 510"):
        common_extent({"a": lattice(10, 10), "b": lattice(10, 10) + np.array([500, 0, 0])})
    corners = lattice(40, 40, step=20.0)
    with pytest.raises(DataError, match="no ground in common"):
        common_extent({"a": corners[[0, 3]], "b": corners[[1, 2]]})
    stray = np.concatenate([lattice(10, 10), [[1e9, 1e9, 0]]])
    with pytest.raises(DataError, match="stray points"):
        common_extent({"a": stray, "b": stray})


def forest(num_points: int, seed: int) -> np.ndarray:
    """A slope below crowns up to 20 m high; a tenth of the returns come from the ground."""
    rng = np.random.default_rng(seed)
    xy = rng.random((num_points, 2)) * 50
    above = np.where(rng.random(num_points) < 0.1, 0.0, rng.uniform(5, 20, num_points))
    return np.column_stack([xy, 0.3 * xy[:, 0] + above])


@pytest.mark.parametrize("shift", [0.0, 47.0, -47.0])
@pytest.mark.parametrize("feet", [False, True])
def test_surveys_in_different_height_systems_are_noted(shift, feet):
    unit = unit_of(0.3048 if feet else 1.0)
    source, reference = forest(8_000, 0), forest(60_000, 1)
    source[:, 2] += shift
    source, reference = source * unit.of_metres(1.0), reference * unit.of_metres(1.0)
    extent = common_extent({"source": source, "reference": reference}, unit.of_metres(1.0))
    notes = notes_on_heights(source, reference, extent, unit)
    assert len(notes) == (shift != 0)
    if shift:
        assert ("above" if shift > 0 else "below") in notes[0].partition("reference")[0]


def test_the_offset_is_the_median_over_squares_that_both_surveys_have():
    lowest = {(0, 0): 3, (10, 0): 4, (20, 0): 9, (-10, 0): 0}
    source = [(x + 1, y + 1, low + up) for (x, y), low in lowest.items() for up in (0, 5)]
    reference = [(x + 2, y + 2, up) for x, y in list(lowest)[:3] for up in (0, 7, 8)]
    one, other = np.array(source, float), np.array(reference, float)
    extent = whole_extent(np.concatenate([one, other]), 1.0)
    assert vertical_offset(one, other, extent, 10.0) == 4.0
    assert vertical_offset(one[6:], other, extent, 10.0) == 0.0
