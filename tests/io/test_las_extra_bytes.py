"""LAS extra bytes: several records, missing descriptions, no-data values and statistics."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR
from test_las import ADDED, WKT, raw_vlrs
from typed import write_scaled

from pointup.errors import DataError
from pointup.io.files import (
    copy_points,
    open_writer,
    read_points,
    write_points,
)


def test_several_extra_bytes_records_are_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "a.las"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.add_extra_dims([laspy.ExtraBytesParams(n, "uint8") for n in ("one", "two")])
    records = laspy.ScaleAwarePointRecord.zeros(3, header=header)
    records["two"] = [7, 8, 9]
    both = header.vlrs.extract("ExtraBytesVlr")[0].extra_bytes_structs
    header.vlrs.extend(
        VLR("LASF_Spec", 4, "", bytes(ExtraBytesStruct(s.name, s.data_type))) for s in both
    )
    with laspy.open(path, "w", header=header) as writer:
        writer.write_points(records)
    assert raw_vlrs(path).keys() == {(b"LASF_Spec", 4)}
    assert read_points(path).attributes["two"].tolist() == [7, 8, 9]


def test_a_description_of_missing_extra_bytes_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.las"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.vlrs.extend([VLR("LASF_Spec", 4, "", bytes(ExtraBytesStruct(b"height", 4))), WKT])
    with laspy.open(path, "w", header=header) as writer:
        writer.write_points(laspy.ScaleAwarePointRecord.zeros(3, header=header))
    write_points(tmp_path / "b.las", read_points(path))
    assert raw_vlrs(tmp_path / "b.las") == {(b"LASF_Projection", 2112): WKT.record_data}


def test_extra_bytes_without_a_description_can_be_followed_by_others(tmp_path: Path) -> None:
    original, path = tmp_path / "a.las", tmp_path / "b.las"
    header = laspy.LasHeader(version="1.2", point_format=0)
    header.add_extra_dim(laspy.ExtraBytesParams("secret", "5u1"))
    records = laspy.ScaleAwarePointRecord.zeros(3, header=header)
    records["secret"] = np.arange(15).reshape(3, 5)
    header.vlrs.extract("ExtraBytesVlr")
    with laspy.open(original, "w", header=header) as writer:
        writer.write_points(records)
    with open_writer(path, read_points(original), ADDED) as writer:
        copy_points(original, writer)
    after = laspy.read(path)
    assert np.array_equal(after["ExtraBytes"], np.arange(15).reshape(3, 5))
    assert after["parent"].tolist() == [0, 1, 2]


def test_names_in_latin_1_are_read_and_their_bytes_are_kept(tmp_path: Path) -> None:
    original, path = tmp_path / "a.las", tmp_path / "b.las"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.add_extra_dim(laspy.ExtraBytesParams("H_he", "uint8", "in cm_"))
    records = laspy.ScaleAwarePointRecord.zeros(3, header=header)
    records["H_he"] = [7, 8, 9]
    with laspy.open(original, "w", header=header) as writer:
        writer.write_points(records)
    name, description = b"H\xf6he", b"in cm\xb2"
    content = original.read_bytes().replace(b"H_he", name).replace(b"in cm_", description)
    original.write_bytes(content)
    with open_writer(path, read_points(original), ADDED) as writer:
        copy_points(original, writer)
    for written in (original, path):
        assert read_points(written).attributes["H\u00f6he"].tolist() == [7, 8, 9]
        record = raw_vlrs(written)[b"LASF_Spec", 4]
        assert record[4:36].rstrip(b"\0") == name and record[160:192].rstrip(b"\0") == description
    assert read_points(path).attributes["parent"].tolist() == [0, 1, 2]


def test_no_data_values_are_kept_and_stale_statistics_are_removed(tmp_path: Path) -> None:
    original, path = tmp_path / "a.las", tmp_path / "b.las"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.add_extra_dim(laspy.ExtraBytesParams("height", "int16", no_data=[-99]))
    records = laspy.ScaleAwarePointRecord.zeros(3, header=header)
    with laspy.open(original, "w", header=header) as writer:
        writer.write_points(records)
    with open_writer(path, read_points(original), ADDED) as writer:
        copy_points(original, writer)
    described = ExtraBytesVlr()
    described.parse_record_data(raw_vlrs(path)[b"LASF_Spec", 4])
    height = described.extra_bytes_structs[0]
    assert height.no_data == [-99]
    assert height.min is None
    assert height.max is None


def test_a_scaled_float_is_not_rounded_to_an_integer(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    write_scaled(tmp_path / "a.las", "float32", 1.0, values)
    write_points(tmp_path / "b.las", read_points(tmp_path / "a.las"))
    assert np.array_equal(laspy.read(tmp_path / "b.las").points.array["value"], values)


def test_a_value_beyond_a_scaled_dimension_is_an_error_of_the_file(tmp_path: Path) -> None:
    write_scaled(tmp_path / "a.las", "uint16", 0.01, np.full(50, 100))
    cloud = read_points(tmp_path / "a.las")
    cloud.attributes["value"] += 3000.0
    with pytest.raises(DataError, match=r"value: values .* don't fit uint16"):
        write_points(tmp_path / "b.las", cloud)
