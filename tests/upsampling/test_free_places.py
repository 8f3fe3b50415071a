"""New points of a file with a coarse scale: each has a place of its own where there is room."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest

from pointup.upsampling.free_places import _SHIFTS, _apart
from pointup.upsampling.store.point_store import exact_positions

SCALE = np.array([0.1, 0.1, 0.2])


def one_by_one(steps: np.ndarray, taken: set[tuple[float, ...]]) -> tuple[np.ndarray, int]:
    """Rank by rank as `_apart`, point by point."""
    places, left = np.rint(steps), list(range(len(steps)))
    for attempt in range(27):
        still = []
        for point in left:
            nearest = np.rint(steps[point])
            gaps = np.square((nearest + _SHIFTS - steps[point]) * SCALE).sum(axis=1)
            order = np.argsort(gaps, kind="stable")
            tried = nearest + (_SHIFTS[order[attempt - 1]] if attempt else 0)
            if tuple(tried) in taken:
                still.append(point)
            else:
                places[point] = tried
                taken.add(tuple(tried))
        left = still
    return places, len(left)


@pytest.mark.parametrize("extent", [3.0, 12.0])
def test_points_take_the_nearest_free_place_as_one_by_one(extent):
    rng = np.random.default_rng(0)
    steps = extent * rng.random((150, 3))
    measured = np.rint(extent * rng.random((40, 3)))
    expected, num_left = one_by_one(steps, set(map(tuple, measured.tolist())))
    places, is_left = _apart(steps, exact_positions(measured), SCALE)
    assert np.array_equal(places, expected) and is_left.sum() == num_left
    assert (num_left > 0) == (extent == 3.0)
    assert abs(places - steps).max() <= 1.5


def write_coarse(path: Path, scale: float, shift: float = 0.0) -> None:
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.scales, header.offsets = np.full(3, scale), np.array([5e5, 4.1e6, 0.0])
    las = laspy.LasData(header)
    x, y = 4 * np.random.default_rng(0).random((2, 200))
    las.xyz = header.offsets + np.stack([x + shift, y, np.sin(x)], axis=1)
    las.write(path)


def places_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    las = laspy.read(path)
    places = np.stack([las.X, las.Y, las.Z], axis=1)
    is_new = np.asarray(las.synthetic) == 1
    return places[~is_new], places[is_new]


def test_no_new_point_is_where_another_one_is_and_tiles_change_nothing(tmp_path, command):
    write_coarse(tmp_path / "in.las", 0.1)
    assert command(tmp_path / "in.las", "-o", tmp_path / "a.las").status == 0
    assert command(tmp_path / "in.las", "-o", tmp_path / "b.las", "--tile", "2").status == 0
    assert (tmp_path / "a.las").read_bytes() == (tmp_path / "b.las").read_bytes()
    measured, new = places_of(tmp_path / "a.las")
    assert len(np.unique(new, axis=0)) == len(new)
    assert not set(map(tuple, new.tolist())) & set(map(tuple, measured.tolist()))
    gap = np.linalg.norm(0.1 * (new[:, None] - measured[None]), axis=2).min(axis=1)
    distance = laspy.read(tmp_path / "a.las").distance_to_measured[len(measured) :]
    assert np.abs(gap - distance).max() <= 0.1 * 3**0.5 / 2 + 1e-6


def test_a_negative_scale_has_the_places_of_the_positive_one(tmp_path, command):
    outputs = []
    for sign in (1, -1):
        write_coarse(tmp_path / "in.las", 0.1)
        las = laspy.read(tmp_path / "in.las")
        las.points.scales = las.header.scales = sign * las.header.scales
        for axis in "XYZ":
            las.points.array[axis] *= sign
        las.write(tmp_path / "in.las")
        assert command(tmp_path / "in.las", "-o", tmp_path / "out.las").status == 0
        outputs.append(laspy.read(tmp_path / "out.las").xyz)
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-6


def test_points_that_find_no_place_are_told_with_the_scale(tmp_path, command):
    write_coarse(tmp_path / "in.las", 1.0)
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las")
    assert result.status == 0
    assert "are where another point is" in result.out and "a scale of 1, too coarse" in result.out


def test_tiles_of_unlike_scales_have_places_in_the_coarsest(tmp_path, command):
    (tmp_path / "in").mkdir()
    write_coarse(tmp_path / "in" / "a.las", 0.001)
    write_coarse(tmp_path / "in" / "b.las", 0.1, shift=4.0)
    write_coarse(tmp_path / "in" / "c.las", 0.01, shift=8.0)
    assert command(tmp_path / "in", "-o", tmp_path / "out").status == 0
    for name in ("a.las", "b.las", "c.las"):
        measured, new = places_of(tmp_path / "out" / name)
        assert len(new) > 400
        assert not set(map(tuple, new.tolist())) & set(map(tuple, measured.tolist())), name
        assert len(np.unique(new, axis=0)) == len(new), name
    for name in ("a.las", "b.las"):
        write_coarse(tmp_path / "in" / name, 0.001 if name == "a.las" else 1.0, 4.0 * (name > "b"))
    result = command(tmp_path / "in", "-o", tmp_path / "out")
    assert f"{tmp_path / 'out' / 'b.las'} has a scale of 1, too coarse" in result.out
