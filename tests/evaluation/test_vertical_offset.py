"""The note on surveys whose heights are in different systems."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.evaluation.common_extent import (
    common_extent,
    notes_on_heights,
    vertical_offset,
    whole_extent,
)
from pointup.io.length_unit import unit_of


def forest(num_points: int, seed: int) -> np.ndarray:
    """A slope below crowns up to 20 m high; a tenth of the returns come from the ground."""
    rng = np.random.default_rng(seed)
    xy = rng.random((num_points, 2)) * 50
    above = np.where(rng.random(num_points) < 0.1, 0.0, rng.uniform(5, 20, num_points))
    return np.column_stack([xy, 0.3 * xy[:, 0] + above])


@pytest.mark.parametrize("shift", [0.0, 47.0, -47.0])
@pytest.mark.parametrize("feet", [False, True])
def test_surveys_in_different_height_systems_are_noted(shift: float, feet: bool) -> None:
    unit = unit_of(0.3048 if feet else 1.0)
    source, reference = forest(8_000, 0), forest(60_000, 1)
    source[:, 2] += shift
    source, reference = source * unit.of_metres(1.0), reference * unit.of_metres(1.0)
    extent = common_extent({"source": source, "reference": reference}, unit.of_metres(1.0))
    notes = notes_on_heights(source, reference, extent, unit)
    assert len(notes) == (shift != 0)
    if shift:
        assert ("above" if shift > 0 else "below") in notes[0].partition("reference")[0]


def test_the_offset_is_the_median_over_squares_that_both_surveys_have() -> None:
    lowest = {(0, 0): 3, (10, 0): 4, (20, 0): 9, (-10, 0): 0}
    source = [(x + 1, y + 1, low + up) for (x, y), low in lowest.items() for up in (0, 5)]
    reference = [(x + 2, y + 2, up) for x, y in list(lowest)[:3] for up in (0, 7, 8)]
    one, other = np.array(source, float), np.array(reference, float)
    extent = whole_extent(np.concatenate([one, other]), 1.0)
    assert vertical_offset(one, other, extent, 10.0) == 4.0
    assert vertical_offset(one[6:], other, extent, 10.0) == 0.0
