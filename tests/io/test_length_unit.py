"""Units of length and coordinate systems of a file and of several files."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import laspy
import numpy as np
import pytest
import survey_files
from laspy.vlrs.known import WktCoordinateSystemVlr
from pyproj import CRS

from pointup.errors import DataError, FileError
from pointup.io.length_unit import (
    ANGLES,
    METRE,
    MIXED,
    UNKNOWN,
    common_unit,
    different_systems,
    length_unit,
    names_geocentric,
    unit_of,
    units_of_readable,
)


def las(path: Path, system: str | int | None) -> Path:
    return survey_files.write_las(path, np.empty((0, 3)), system=system)


@pytest.mark.parametrize(
    ("system", "name", "metres"),
    [
        (32618, "m", 1.0),
        (2154, "m", 1.0),
        ("EPSG:32618+5703", "m", 1.0),
        (2994, "ft", 0.3048),
        (2263, "US ft", 1200 / 3937),
        ("EPSG:2263+6360", "US ft", 1200 / 3937),
        ("EPSG:2992+6360", "ft", 0.3048),
        (4978, "m", 1.0),
    ],
)
def test_the_unit_is_that_of_the_coordinate_system(system, name, metres, tmp_path):
    unit = length_unit(las(tmp_path / "a.las", system))
    assert unit.name == name and unit.metres == metres
    assert unit.of_metres(1) == pytest.approx(1 / metres)


@pytest.mark.parametrize(
    ("units", "unit"),
    [
        ({3076: 9001}, METRE),
        ({3076: 9003, 4099: 9003}, unit_of(1200 / 3937)),
        ({3076: 9003, 4099: 9002}, unit_of(1200 / 3937)),
        ({3076: 9001, 4099: 9999}, UNKNOWN),
        ({3076: 9001, 4099: 9002}, MIXED),
        ({3076: 32767}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_a_projection_without_a_code_is_not_taken_for_its_geographic_base(units, unit, tmp_path):
    write_with_keys(tmp_path / "a.las", {1024: 1, 2048: 4269, 3072: 32767, **units})
    assert length_unit(tmp_path / "a.las") == unit


def test_angles_mixed_and_unknown_units_are_recognized(tmp_path):
    for system in (4326, "EPSG:4807", "EPSG:4326+5773"):
        assert length_unit(las(tmp_path / "a.las", system)) == ANGLES
    assert length_unit(las(tmp_path / "b.las", "EPSG:32618+6360")) == MIXED
    assert length_unit(las(tmp_path / "c.las", None)) == UNKNOWN
    assert length_unit(tmp_path / "d.ply") == UNKNOWN


def test_lengths_are_printed_in_metres_and_in_the_unit():
    assert METRE.described(0.5) == "0.5 m"
    assert unit_of(0.3048).described(0.5) == "0.5 m (1.64 ft)"
    assert UNKNOWN.described(0.5) == "0.5 unit"
    assert unit_of(0.01).name == "unit of 0.01 m"


def test_files_have_one_common_unit_or_the_exception_is_named(tmp_path):
    metres, feet = las(tmp_path / "m.las", 32618), las(tmp_path / "ft.las", 2994)
    unknown, degrees = tmp_path / "a.xyz", las(tmp_path / "deg.las", 4326)
    assert common_unit([unknown, metres, unknown]) == METRE
    assert common_unit([unknown]) == common_unit([]) == UNKNOWN
    with pytest.raises(DataError, match=r"ft\.las: is in ft, .*m\.las in m; reproject"):
        common_unit([metres, unknown, feet])
    with pytest.raises(DataError, match=r"deg\.las: its coordinates are in degrees"):
        common_unit([metres, degrees])
    damaged = tmp_path / "damaged.las"
    damaged.write_bytes(b"no header")
    with pytest.raises(FileError, match=r"damaged\.las"):
        common_unit([metres, damaged])
    assert units_of_readable([damaged, metres]) == {metres: METRE}


US_FOOT = unit_of(1200 / 3937)


def write_with_keys(path: Path, keys: dict[int, int]) -> None:
    """Write a survey whose coordinate system is described by GeoTIFF keys."""
    write_las(path, geo_keys(keys), point_format=3)


@pytest.mark.parametrize(
    ("keys", "unit"),
    [
        ({3072: 26915, 4099: 9003}, MIXED),
        ({3072: 26915, 4096: 6360}, MIXED),
        ({3072: 26915, 4096: 5703, 4099: 9001}, METRE),
        ({3072: 26915, 3076: 9003, 4099: 9003}, US_FOOT),
        ({3072: 2263, 4096: 6360}, US_FOOT),
        ({3072: 26915}, METRE),
    ],
)
def test_units_beside_the_code_of_a_projection_count(keys, unit, tmp_path):
    write_with_keys(tmp_path / "a.las", keys)
    assert length_unit(tmp_path / "a.las") == unit


@pytest.mark.parametrize(
    ("keys", "unit", "is_geocentric"),
    [
        ({1024: 2, 2048: 32767, 2054: 9102}, ANGLES, False),
        ({1024: 2, 2054: 9102}, ANGLES, False),
        ({1024: 2, 2048: 32767, 3072: 0}, ANGLES, False),
        ({1024: 2, 2048: 4326}, ANGLES, False),
        ({1024: 3, 2048: 32767}, UNKNOWN, True),
        ({1024: 3, 2048: 4326}, UNKNOWN, True),
        ({1024: 3, 2048: 4978}, METRE, True),
        ({1024: 2, 3072: 25832}, METRE, False),
        ({1024: 3, 3072: 25832}, METRE, False),
        ({1024: 2, 3072: 32767, 3076: 9001}, METRE, False),
        ({1024: 1, 2054: 9102}, UNKNOWN, False),
    ],
)
def test_keys_say_that_coordinates_are_geographic_or_geocentric_also_without_a_code(
    keys, unit, is_geocentric, tmp_path
):
    write_with_keys(tmp_path / "a.las", keys)
    assert length_unit(tmp_path / "a.las") == unit
    assert names_geocentric(tmp_path / "a.las") == is_geocentric


def write_las(path: Path, *records: laspy.VLR, point_format: int = 6) -> Path:
    las = survey_files.las_data(np.empty((0, 3)), point_format)
    las.header.vlrs.extend(records)
    las.write(path)
    return path


def wkt(text: str) -> laspy.VLR:
    return WktCoordinateSystemVlr(text)


def geo_keys(values: dict[int, int]) -> laspy.VLR:
    entries = b"".join(struct.pack("<4H", key, 0, 1, value) for key, value in values.items())
    content = struct.pack("<4H", 1, 1, 0, len(values)) + entries
    return laspy.VLR("LASF_Projection", 34735, "", content)


# The north is first in EPSG:31467.
@pytest.mark.parametrize("code", [25832, 2263, 31467])
def test_a_system_is_the_same_however_a_header_writes_it(code, tmp_path):
    system = CRS.from_epsg(code)
    gdal = system.to_wkt("WKT1_GDAL")
    plain = re.sub(r',(AUTHORITY\["[^"]*","[^"]*"\]|AXIS\[[^\]]*\])', "", gdal)
    texts = {
        **{version: system.to_wkt(version) for version in ("WKT1_GDAL", "WKT1_ESRI", "WKT2_2019")},
        "plain": plain,
        "renamed": plain.replace(system.name, "of a site"),
        "towgs84": plain.replace("],PRIMEM", ",TOWGS84[0,0,0,0,0,0,0]],PRIMEM"),
        "with_heights": CRS(f"EPSG:{code}+5773").to_wkt("WKT1_GDAL"),
        "on_ellipsoid": system.to_3d().to_wkt("WKT2_2019"),
    }
    files = [write_las(tmp_path / f"{name}.las", wkt(text)) for name, text in texts.items()]
    files.append(write_las(tmp_path / "keys.las", geo_keys({1024: 1, 3072: code})))
    assert different_systems(files) == {files[0]: system.name}
    # Each way of writing is understood: it differs from another system.
    other = write_las(tmp_path / "other.las", geo_keys({3072: 25833}))
    assert all(len(different_systems([file, other])) == 2 for file in files)


def test_systems_of_other_zones_datums_or_units_are_different(tmp_path):
    codes = [25832, 25833, 32632, 2263, 32118, 4326, 4978]
    files = [write_las(tmp_path / f"{code}.las", wkt(CRS(code).to_wkt())) for code in codes]
    found = different_systems([*files, *files])
    assert found == {file: CRS(code).name for file, code in zip(files, codes, strict=True)} | {
        files[-1]: "WGS 84 with other parameters"
    }


def test_files_without_a_known_system_are_left_out(tmp_path):
    damaged = tmp_path / "damaged.las"
    damaged.write_bytes(b"no header")
    files = [
        damaged,
        tmp_path / "a.xyz",
        write_las(tmp_path / "none.las"),
        write_las(tmp_path / "broken.las", wkt('PROJCS["foo",')),
        write_las(tmp_path / "local.las", wkt('LOCAL_CS["site",UNIT["metre",1]]')),
        # laspy takes the geographic base for the system.
        write_las(tmp_path / "own.las", geo_keys({1024: 1, 2048: 4269, 3072: 32767})),
    ]
    assert different_systems(files) == {}


def test_an_unknown_datum_is_any_on_its_ellipsoid(tmp_path):
    unknown = CRS("+proj=utm +zone=32 +ellps=GRS80 +type=crs").to_wkt()
    files = [
        write_las(tmp_path / "a.las", wkt(unknown)),
        write_las(tmp_path / "b.las", geo_keys({3072: 25832})),
    ]
    assert list(different_systems(files)) == files[:1]
