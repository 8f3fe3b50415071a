"""Flight passes: found by pauses in gps_time and by ids, as a brute force finds them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointup.datasets.flight_passes import (
    LARGEST_GAP,
    FlightPasses,
    find_passes,
    merged,
    passes_of,
    time_and_id,
)
from pointup.errors import DataError
from pointup.io.cloud import PointCloud


def flown(
    heading: float, start: float, count: int, seed: int, width: float = 40.0, speed: float = 20.0
) -> tuple[np.ndarray, np.ndarray]:
    """Times and positions of a pass over a square of this width, in random order."""
    positions = np.random.default_rng(seed).random((count, 3)) * [width, width, 5]
    along = [np.sin(np.radians(heading)), np.cos(np.radians(heading))]
    return start + positions[:, :2] @ along / speed, positions


def found_in(*passes: tuple[np.ndarray, np.ndarray, int]) -> FlightPasses:
    """The passes of points with these times, positions and ids."""
    time, positions = (np.concatenate([each[k] for each in passes]) for k in (0, 1))
    return find_passes(
        time, np.repeat([each[2] for each in passes], [len(p[0]) for p in passes]), positions
    )


def brute_force(time: np.ndarray, ids: np.ndarray) -> list[list[int]]:
    """Sets of points, joined while any two are of one id or overlap in time, without a pause
    between them."""
    sets = [[point] for point in range(len(time))]

    def are_one(a: list[int], b: list[int]) -> bool:
        first, last = sorted((time[a[0]], time[b[0]]))
        between = np.sort(time[(time >= first) & (time <= last)])
        if (np.diff(between) > LARGEST_GAP).any():
            return False
        overlap = time[a].min() < time[b].max() and time[b].min() < time[a].max()
        return bool(set(ids[a]) & set(ids[b]) or overlap)

    while True:
        pair = next((p for p in combinations(sets, 2) if are_one(*p)), None)
        if pair is None:
            return sorted(map(sorted, sets))
        sets = [each for each in sets if each is not pair[0] and each is not pair[1]]
        sets.append(pair[0] + pair[1])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=14))
def test_passes_are_those_of_a_brute_force(points):
    # Each point has a time of its own, and all lie in one cell, so that no pass is too small.
    time = np.array([second for second, _ in points]) + np.arange(len(points)) * 1e-3
    ids = np.array([number for _, number in points])
    positions = np.random.default_rng(0).random((len(points), 3))
    found = find_passes(time, ids, positions)
    sets = [np.flatnonzero(found.label == k).tolist() for k in range(len(found.passes))]
    assert sorted(sets) == brute_force(time, ids)
    assert [each.start for each in found.passes] == sorted(time[each].min() for each in sets)


def test_passes_do_not_depend_on_the_order_of_the_points():
    passes = [(*flown(90 * k, 100.0 * k, 500, k), 3) for k in range(3)]
    time, positions = (np.concatenate([each[k] for each in passes]) for k in (0, 1))
    order = np.random.default_rng(1).permutation(len(time))
    ids = np.full(len(time), 3)
    found, again = (
        find_passes(time, ids, positions),
        find_passes(time[order], ids, positions[order]),
    )
    assert again.label.tolist() == found.label[order].tolist()
    assert [replace(p, course=(0.0, 0.0)) for p in again.passes] == [
        replace(p, course=(0.0, 0.0)) for p in found.passes
    ]


def test_a_pass_has_its_ids_time_density_and_flying_direction():
    found = found_in((*flown(30, 50, 3000, 0), 7), (*flown(210, 400, 1000, 1), 8))
    first, second = found.passes
    assert (first.ids, second.ids) == ((7,), (8,))
    assert 50 <= first.start < first.end < 54
    assert (first.num_points, second.num_points) == (3000, 1000)
    assert first.density == pytest.approx(3000 / 40**2, rel=0.1)
    assert found.area == pytest.approx(40**2, rel=0.1)
    assert [each.azimuth for each in found.passes] == pytest.approx([30, 210], abs=1)


def test_the_ids_of_channels_that_scan_at_one_time_are_one_pass():
    time, positions = flown(0, 0, 900, 0)
    channels = np.arange(900) % 3
    later, others = flown(180, 60, 900, 1)
    found = find_passes(
        np.concatenate([time, later]),
        np.concatenate([channels, channels]),
        np.concatenate([positions, others]),
    )
    assert [each.ids for each in found.passes] == [(0, 1, 2), (0, 1, 2)]
    assert found.label.tolist() == [0] * 900 + [1] * 900


def test_without_times_of_pulses_a_pass_is_an_id():
    positions = np.random.default_rng(0).random((5000, 3)) * 40
    ids = np.random.default_rng(1).integers(4, 7, 5000)
    for time in (np.zeros(5000), (ids * 0.01).round(1)):
        found = find_passes(time, ids, positions)
        assert [each.ids for each in found.passes] == [(4,), (5,), (6,)]
        assert (found.label == ids - 4).all()
        assert found.passes[0].azimuth is None or time.any()


def test_small_passes_and_copies_are_left_out():
    time, positions = flown(0, 0, 2000, 0)
    corner = flown(90, 100, 60, 1, width=4)
    copied = (time + 1e6, positions + 1e-13)
    found = found_in(
        (time, positions, 1), (*corner, 1), (*copied, 1), (*flown(90, 500, 2000, 2), 1)
    )
    assert [each.left_out for each in found.passes] == ["", "too small", "", "copy"]
    assert np.bincount(found.label + 1).tolist() == [60 + 2000, 2000, 0, 2000]
    # A point that two passes have is in the first of them only.
    other = flown(90, 500, 2000, 3)
    other[1][:100] = positions[:100]
    found = found_in((time, positions, 1), (*other, 1))
    assert np.bincount(found.label + 1).tolist() == [100, 2000, 1900]
    assert not any(each.left_out for each in found.passes)


def test_passes_over_parts_of_the_ground_are_joined():
    passes = [(*flown(20 + 180 * k, 300.0 * k, 4000, k), 0) for k in range(2)]
    whole = found_in(*passes)
    halves = []
    for x in (0, 20):
        inside = [(positions[:, 0] >= x) & (positions[:, 0] < x + 20) for _, positions, _ in passes]
        of_half = zip(passes, inside, strict=True)
        halves.append(found_in(*[(time[m], xyz[m], number) for (time, xyz, number), m in of_half]))
    found = merged(each for half in halves for each in half.passes)
    assert [each.num_points for each in found] == [each.num_points for each in whole.passes]
    assert [(each.ids, each.start, each.end) for each in found] == [
        (each.ids, each.start, each.end) for each in whole.passes
    ]
    assert [each.azimuth for each in found] == pytest.approx([20, 200], abs=2)
    areas = [each.area for each in whole.passes]
    assert [each.area for each in found] == pytest.approx(areas, rel=0.15)
    assert sum(half.area for half in halves) == pytest.approx(whole.area, rel=0.15)


def test_a_survey_of_one_pass_is_refused():
    time, positions = flown(0, 0, 500, 0)
    few = flown(0, 60, 5, 1, width=2)
    for part, also in ((slice(500), ""), (slice(None), ", another is too small")):
        cloud = PointCloud(
            np.concatenate([positions, few[1]])[part],
            {"gps_time": np.concatenate([time, few[0]])[part]},
            path=Path("a.las"),
        )
        expected = f"a.las: only one flight pass{also}: gps_time has no pause of 3 s, and the"
        with pytest.raises(DataError, match=expected):
            passes_of(cloud)


def test_times_and_ids_are_read_by_the_names_of_other_programs():
    cloud = PointCloud(np.zeros((2, 3)), {"GpsTime": np.array([1.0, 2]), "X": np.zeros(2)})
    time, ids = time_and_id(cloud)
    assert time.tolist() == [1, 2] and ids.tolist() == [0, 0]
    with pytest.raises(DataError, match="neither gps_time nor point_source_id"):
        time_and_id(PointCloud(np.zeros((2, 3))))
