"""Horizontal coordinate systems of files, which are the same however a header writes them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import laspy
import pytest
from laspy.vlrs.known import WktCoordinateSystemVlr
from pyproj import CRS

from pointup.io.length_unit import different_systems


def write_las(path: Path, *records: laspy.VLR) -> Path:
    header = laspy.LasHeader(point_format=6, version="1.4")
    header.vlrs.extend(records)
    laspy.LasData(header).write(path)
    return path


def wkt(text: str) -> laspy.VLR:
    return WktCoordinateSystemVlr(text)


def geo_keys(**values: int) -> laspy.VLR:
    entries = b"".join(struct.pack("<4H", int(key[1:]), 0, 1, v) for key, v in values.items())
    content = struct.pack("<4H", 1, 1, 0, len(values)) + entries
    return laspy.VLR("LASF_Projection", 34735, "", content)


# The north is first in EPSG:31467.
@pytest.mark.parametrize("code", [25832, 2263, 31467])
def test_a_system_is_the_same_however_a_header_writes_it(code: int, tmp_path: Path) -> None:
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
    files.append(write_las(tmp_path / "keys.las", geo_keys(k1024=1, k3072=code)))
    assert different_systems(files) == {files[0]: system.name}
    # Each way of writing is understood: it differs from another system.
    other = write_las(tmp_path / "other.las", geo_keys(k3072=25833))
    assert all(len(different_systems([file, other])) == 2 for file in files)


def test_systems_of_other_zones_datums_or_units_are_different(tmp_path: Path) -> None:
    codes = [25832, 25833, 32632, 2263, 32118, 4326, 4978]
    files = [write_las(tmp_path / f"{code}.las", wkt(CRS(code).to_wkt())) for code in codes]
    found = different_systems([*files, *files])
    assert found == {file: CRS(code).name for file, code in zip(files, codes, strict=True)} | {
        files[-1]: "WGS 84 with other parameters"
    }


def test_files_without_a_known_system_are_left_out(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.las"
    damaged.write_bytes(b"no header")
    files = [
        damaged,
        tmp_path / "a.xyz",
        write_las(tmp_path / "none.las"),
        write_las(tmp_path / "broken.las", wkt('PROJCS["foo",')),
        write_las(tmp_path / "local.las", wkt('LOCAL_CS["site",UNIT["metre",1]]')),
        # laspy takes the geographic base for the system.
        write_las(tmp_path / "own.las", geo_keys(k1024=1, k2048=4269, k3072=32767)),
    ]
    assert different_systems(files) == {}


def test_an_unknown_datum_is_any_on_its_ellipsoid(tmp_path: Path) -> None:
    unknown = CRS("+proj=utm +zone=32 +ellps=GRS80 +type=crs").to_wkt()
    files = [
        write_las(tmp_path / "a.las", wkt(unknown)),
        write_las(tmp_path / "b.las", geo_keys(k3072=25832)),
    ]
    assert list(different_systems(files)) == files[:1]
