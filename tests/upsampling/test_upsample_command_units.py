"""`pointup upsample` of files in degrees, in feet, and in several units."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pyproj
import pytest
from typed import Result, is_one_line, left_in, positions

METRES, FEET, FEET_ABOVE_METRES = "EPSG:32618", "EPSG:2263", "EPSG:32618+6360"
DEGREES, GRADS = "EPSG:4326", "EPSG:4807"


def write_las(path: Path, system: str, shift: float = 0.0) -> Path:
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.scales, header.offsets = np.full(3, 0.01), np.array([5e5, 4e6, 0.0])
    header.add_crs(pyproj.CRS.from_user_input(system))
    las = laspy.LasData(header)
    las.xyz = positions(100) + np.array([shift, 0, 0])
    path.parent.mkdir(exist_ok=True)
    las.write(path)
    return path


@pytest.mark.parametrize("angles", [DEGREES, GRADS])
def test_coordinates_that_are_no_lengths_are_refused_before_any_file_is_written(
    angles: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in" / "a.las", METRES)
    refused = write_las(tmp_path / "in" / "b.las", angles, shift=1000)
    for source in (refused, tmp_path / "in"):
        result = command(source, "-o", tmp_path / "out")
        assert result.status == 1 and is_one_line(result.err)
        assert f"{refused}: its coordinates are in degrees" in result.err
        assert "reproject it" in result.err
        assert not (tmp_path / "out").exists()


BY_SYSTEM = "{path}: by its coordinate system, "
MERCATOR = "{path}: is in a Mercator projection, where lengths are "
DENSITY_IN_FEET = (
    "the files are in US ft: --density 2 is points per square US ft, 21.53 points per square metre"
)


@pytest.mark.parametrize(
    ("system", "options", "note", "unit"),
    [
        (METRES, ("--density", "2"), None, " m"),
        (FEET, ("--ratio", "2"), None, " US ft"),
        (FEET, ("--density", "2"), DENSITY_IN_FEET, " US ft"),
        (FEET_ABOVE_METRES, (), BY_SYSTEM + "heights are in another unit", ""),
        # There are surveys in UTM that name a geocentric system by mistake.
        ("EPSG:4978", (), BY_SYSTEM + "coordinates are geocentric", " m"),
        # 4,100 km north of the equator on the map are 34.5 degrees: 1 / cos(34.5 degrees) is 1.21.
        (
            "EPSG:3857",
            (),
            "{path}: is in a Mercator projection, where lengths are 1.21 times",
            " m",
        ),
        ("EPSG:3857+5773", (), "{path}: is in a Mercator projection", " m"),
    ],
)
def test_a_system_that_the_user_may_not_expect_is_noted_once_and_the_unit_is_named(
    system: str,
    options: tuple[str, ...],
    note: str | None,
    unit: str,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
    first = write_las(tmp_path / "in" / "a.las", system)
    result = command(first, "-o", tmp_path / "out.las", *options)
    assert result.status == 0
    assert result.err.count("\n") == (note is not None)
    assert result.err.startswith(f"note: {note.format(path=first)}" if note else "")
    assert re.search(rf"new points at most [\d.]+{unit} from a measured one", result.out)


def test_files_of_several_units_may_have_a_ratio_and_no_length(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in" / "a.las", METRES)
    feet = write_las(tmp_path / "in" / "b.las", FEET, shift=1000)
    for option in ("--density", "--max-distance"):
        result = command(tmp_path / "in", "-o", tmp_path / "out", option, "3")
        assert result.status == 1 and is_one_line(result.err)
        assert f"{feet}: is in US ft" in result.err and "reproject one of them" in result.err
    assert command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2").status == 0
    assert left_in(tmp_path / "out") == ["a.las", "b.las"]
