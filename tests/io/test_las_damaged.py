"""Damaged LAS and LAZ files, and files that can't be copied exactly, raise one-line errors."""

from __future__ import annotations

import re
from struct import pack_into, unpack_from

import laspy
import lazrs
import numpy as np
import pytest
from survey_files import write_two_tiles
from test_las import make_las

from pointup.errors import FileError
from pointup.io.files import iter_points, read_first, read_points, write_points


def damage_cut(data: bytearray) -> bytearray:
    return data[: len(data) * 2 // 3]


def damage_one_byte(data: bytearray) -> bytearray:
    return data[:-1]


def damage_header(data: bytearray) -> bytearray:
    return data[:200]


def damage_count_of_records(data: bytearray) -> bytearray:
    pack_into("<I", data, 100, 2**31)
    return data


def damage_size_of_chunks(data: bytearray) -> bytearray:
    pack_into("<I", data, data.rindex(b"http://laszip.org") + 32 + 12, 2**31 - 5)
    return data


def damage_count_of_chunks(data: bytearray) -> bytearray:
    table = unpack_from("<q", data, unpack_from("<I", data, 96)[0])[0]
    pack_into("<I", data, table + 4, 2**31)
    return data


def damage_size_of_a_layer(data: bytearray, layer: int = 1, chunk_start: int = 0) -> bytearray:
    # The sizes follow the offset of the chunk table, the first point and the number of points.
    start = unpack_from("<I", data, 96)[0] + 8 + chunk_start
    size = laspy.PointFormat(7).size + 2
    pack_into("<I", data, start + size + 4 + 4 * layer, 2**32 - 1)
    return data


def damage_number_of_points(data: bytearray) -> bytearray:
    pack_into("<Q", data, 247, 501)
    return data


DAMAGES = [damage_cut, damage_header, damage_count_of_records, damage_number_of_points]
DAMAGES_OF_LAZ = [damage_size_of_chunks, damage_count_of_chunks, damage_size_of_a_layer]


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".las", damage) for damage in [*DAMAGES, damage_one_byte]]
    + [(".laz", damage) for damage in [*DAMAGES, *DAMAGES_OF_LAZ]],
)
def test_damaged_files_raise_one_line_with_the_name_and_the_remedy(tmp_path, suffix, damage):
    path = tmp_path / f"survey{suffix}"
    make_las(path)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(FileError) as raised:
        read_points(path)
    message = str(raised.value)
    reason = r"(not a whole LAS/LAZ file: .*|laspy can't read it .*)"
    assert re.fullmatch(rf"{re.escape(str(path))}: {reason}again.*", message)


# Nine layers of coordinates and flags, one of colours, and one for each of two extra bytes.
@pytest.mark.parametrize("layer", [0, 8, 9, 10, 11])
def test_a_layer_longer_than_its_chunk_is_reported_before_memory_is_allocated(tmp_path, layer):
    path = tmp_path / "a.laz"
    make_las(path)
    path.write_bytes(damage_size_of_a_layer(bytearray(path.read_bytes()), layer))
    with pytest.raises(FileError, match="chunk 1 of 1 has layers longer than itself"):
        next(iter_points(path))


def test_the_first_points_are_read_without_a_look_at_later_chunks(tmp_path):
    path = tmp_path / "a.laz"
    make_las(path, count=50_010)
    whole = read_points(path)
    with laspy.open(path) as reader, path.open("rb") as stream:
        stream.seek(reader.header.offset_to_point_data)
        vlr = lazrs.LazVlr(reader.header.vlrs.get("LasZipVlr")[0].record_data)
        first, _ = lazrs.read_chunk_table(stream, vlr)
    path.write_bytes(damage_size_of_a_layer(bytearray(path.read_bytes()), 1, first[1]))
    with pytest.raises(FileError, match="chunk 2 of 2 has layers longer than itself"):
        next(iter_points(path, 3))
    found = read_first(path, 3)
    assert np.array_equal(found.positions, whole.positions[:3])
    assert found.attributes.keys() == whole.attributes.keys()
    for name, values in found.attributes.items():
        assert np.array_equal(values, whole.attributes[name][:3]), name

    path.write_bytes(damage_size_of_a_layer(bytearray(path.read_bytes())))
    with pytest.raises(FileError, match="chunk 1 of 2 has layers longer than itself"):
        read_first(path, 3)


def test_a_truncated_file_is_reported_before_its_first_points(tmp_path):
    path = tmp_path / "a.las"
    make_las(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match=r"has \d+ of \d+ bytes"):
        next(iter_points(path, chunk_size=10))


def test_a_file_without_points_is_an_error(tmp_path):
    path = tmp_path / "a.las"
    with laspy.open(path, "w", header=laspy.LasHeader(version="1.4", point_format=6)):
        pass
    with pytest.raises(FileError, match=r"a\.las: no points in it"):
        read_points(path)


def test_files_that_cannot_be_copied_exactly_are_refused(tmp_path):
    make_las(tmp_path / "a.las", point_format=9)
    cloud = read_points(tmp_path / "a.las")
    with pytest.raises(FileError, match=r"waveforms can't be compressed exactly; name it \.las"):
        write_points(tmp_path / "b.laz", cloud)
    cloud.header.global_encoding.waveform_data_packets_internal = True  # type: ignore[attr-defined]
    with pytest.raises(FileError, match="waveforms inside the original can't be carried over"):
        write_points(tmp_path / "b.las", cloud)


def test_points_that_only_the_old_field_counts_are_not_taken_for_none(tmp_path, command):
    content = write_two_tiles(tmp_path / "in")
    pack_into("<I", content, 107, 400)
    pack_into("<Q", content, 247, 0)
    (tmp_path / "in" / "b.las").write_bytes(content)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 1 and "b.las: " in result.err and "counts 400 points" in result.err
    assert not (tmp_path / "out" / "b.las").exists()
