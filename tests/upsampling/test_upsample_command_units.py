"""`pointup upsample` of files in degrees, in feet, and in several units."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

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


def test_heights_in_another_unit_are_noted(tmp_path: Path, command: Callable[..., Result]) -> None:
    mixed = write_las(tmp_path / "mixed.las", FEET_ABOVE_METRES)
    result = command(mixed, "-o", tmp_path / "out.las")
    assert result.status == 0 and result.err.count("\n") == 1
    assert result.err.startswith(f"note: {mixed}: by its coordinate system, heights are in another")


def test_a_density_in_feet_is_noted_with_its_value_per_square_metre(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "ft.las", FEET)
    write_las(tmp_path / "m.las", METRES)
    note = (
        "note: the files are in US ft: --density 2 is points per square US ft, "
        "21.53 points per square metre\n"
    )
    output = ("-o", tmp_path / "out.las")
    assert command(tmp_path / "ft.las", *output, "--density", "2") == (0, ANY, note)
    assert command(tmp_path / "ft.las", *output, "--ratio", "2").err == ""
    assert command(tmp_path / "m.las", *output, "--density", "2").err == ""


@pytest.mark.parametrize(
    ("system", "unit"), [(METRES, " m"), (FEET, " US ft"), (FEET_ABOVE_METRES, "")]
)
def test_the_summary_names_the_unit_of_its_distance_if_it_is_known(
    system: str, unit: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    result = command(write_las(tmp_path / "a.las", system), "-o", tmp_path / "out.las")
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


def test_a_damaged_file_among_others_is_reported_and_the_others_are_written(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in" / "a.las", METRES)
    (tmp_path / "in" / "b.las").write_bytes(b"no header")
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--density", "2")
    assert result.status == 1 and is_one_line(result.err) and "b.las" in result.err
    assert left_in(tmp_path / "out") == ["a.las"]


def test_a_geocentric_system_is_noted(tmp_path: Path, command: Callable[..., Result]) -> None:
    """It is not refused: there are surveys in UTM that name one by mistake."""
    named = write_las(tmp_path / "a.las", "EPSG:4978")
    result = command(named, "-o", tmp_path / "b.las")
    assert result.status == 0 and result.err.count("\n") == 1
    assert result.err.startswith(f"note: {named}: by its coordinate system, coordinates are geoc")
    assert left_in(tmp_path) == ["a.las", "b.las"]


@pytest.mark.parametrize("system", ["EPSG:3857", "EPSG:3857+5773"])
def test_a_mercator_projection_is_noted_with_its_stretch(
    system: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
    # 4,100 km north of the equator on the map are 34.5 degrees: 1 / cos(34.5 degrees) is 1.21.
    first = write_las(tmp_path / "in" / "a.las", system)
    write_las(tmp_path / "in" / "b.las", system, shift=1000)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and result.err.count("\n") == 1
    assert result.err.startswith(f"note: {first}: is in a Mercator projection")
    assert "1.21 times those on the ground" in result.err
