"""LAS and LAZ: exact copies, extra bytes, added points, and clouds of other formats as LAS."""

from __future__ import annotations

from pathlib import Path
from struct import pack_into, unpack_from

import laspy
import lazrs
import numpy as np
import pytest
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR
from survey_files import is_one_line, left_in, positions, write_random_las, write_scaled

from pointup.errors import DataError, FileError
from pointup.io.cloud import ExtraDimension, PointCloud
from pointup.io.files import copy_points, iter_points, open_writer, read_points, write_points

ADDED = [
    ExtraDimension("parent", "uint32", "nearest original point", default="index"),
    ExtraDimension("distance", "float32"),
]
# Without the null byte that laspy would append.
WKT = VLR("LASF_Projection", 2112, "WKT", b'LOCAL_CS["somewhere"]')


def make_las(path: Path, point_format: int = 7, version: str = "1.4", count: int = 500) -> None:
    """Writes a file of random point records, with a CRS and an extra dimension."""
    rng = np.random.default_rng(point_format)
    header = laspy.LasHeader(version=version, point_format=point_format)
    header.scales, header.offsets = np.array([0.001, 0.001, 0.01]), np.array([4e5, 5.1e6, -7.0])
    header.add_extra_dim(laspy.ExtraBytesParams("height", "int16", scales=[0.1], offsets=[5.0]))
    header.vlrs.append(WKT)
    records = laspy.ScaleAwarePointRecord.zeros(count, header=header)
    raw = rng.integers(0, 256, (count, records.array.dtype.itemsize), dtype=np.uint8)
    records.array[:] = raw.view(records.array.dtype)[:, 0]
    with laspy.open(path, "w", header=header) as writer:
        writer.write_points(records)


def raw_points(path: Path) -> np.ndarray:
    records = laspy.read(path).points.array
    return records.view(np.uint8).reshape(len(records), -1)


def raw_vlrs(path: Path) -> dict[tuple[bytes, int], bytes]:
    data, found = path.read_bytes(), {}
    start, count = unpack_from("<H", data, 94)[0], unpack_from("<I", data, 100)[0]
    for _ in range(count):
        key = data[start + 2 : start + 18].rstrip(b"\0"), unpack_from("<H", data, start + 18)[0]
        end = start + 54 + unpack_from("<H", data, start + 20)[0]
        found[key], start = data[start + 54 : end], end
    return found


def formats() -> list[tuple[str, int, str]]:
    known = [("1.2", i) for i in range(4)] + [("1.3", 4)] + [("1.4", i) for i in range(6, 9)]
    return [(version, i, suffix) for version, i in known for suffix in (".las", ".laz")]


@pytest.mark.parametrize(("version", "point_format", "suffix"), formats())
def test_points_are_written_bit_for_bit_as_they_were_read(tmp_path, version, point_format, suffix):
    original, copy = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    make_las(original, point_format, version)
    write_points(copy, read_points(original))
    assert np.array_equal(raw_points(original), raw_points(copy))
    before, after = laspy.read(original).header, laspy.read(copy).header
    assert (before.version, before.point_format) == (after.version, after.point_format)
    assert np.array_equal(before.scales, after.scales)
    assert np.array_equal(before.offsets, after.offsets)
    assert np.array_equal(before.number_of_points_by_return, after.number_of_points_by_return)
    assert raw_vlrs(copy)[b"LASF_Projection", 2112] == WKT.record_data


@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_generated_points_follow_the_unchanged_original(tmp_path, suffix):
    original, path = tmp_path / "a.laz", tmp_path / f"b{suffix}"
    make_las(original)
    before = raw_points(original)
    cloud = read_points(original)
    generated = cloud.select(slice(0, 40))
    generated.positions = generated.positions + 0.1234567
    generated.attributes |= {
        "synthetic": np.ones(40, np.uint8),
        "parent": np.arange(40) * 2,
        "distance": np.full(40, 0.25),
    }
    with open_writer(path, cloud, ADDED) as writer:
        copy_points(original, writer, chunk_size=130)
        writer.write(generated)
    after = laspy.read(path)
    assert np.array_equal(raw_points(path)[:500, : before.shape[1]], before)
    assert np.array_equal(after["parent"], np.append(np.arange(500), np.arange(40) * 2))
    assert np.array_equal(after["distance"], np.repeat([0, 0.25], [500, 40]))
    assert np.array_equal(after["height"][500:], after["height"][:40])
    assert (np.asarray(after["synthetic"])[500:] == 1).all()
    rounding = np.abs(after.xyz[500:] - generated.positions) / after.header.scales
    assert rounding.max() <= 0.5 + 1e-4
    assert raw_vlrs(path)[b"LASF_Projection", 2112] == WKT.record_data


def test_a_file_that_has_the_added_dimensions_keeps_their_values(tmp_path):
    first, second = tmp_path / "a.laz", tmp_path / "b.laz"
    make_las(first, count=10)
    cloud = read_points(first)
    cloud.attributes |= {"parent": np.arange(10)[::-1].astype(np.uint32)}
    write_points(first, cloud)
    cloud = read_points(first)
    with open_writer(second, cloud, ADDED) as writer:
        copy_points(first, writer)
    assert np.array_equal(laspy.read(second)["parent"], np.arange(10)[::-1])
    with pytest.raises(FileError, match="'parent' of another type"):
        open_writer(second, cloud, [ExtraDimension("parent", "float64")])


def test_copc_records_are_removed_and_other_evlrs_are_kept(tmp_path):
    original, path = tmp_path / "a.laz", tmp_path / "b.laz"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.vlrs.append(VLR("copc", 10000, "", b"extents"))
    header.evlrs = laspy.vlrs.vlrlist.VLRList([VLR("copc", 1, "", b"x"), VLR("me", 9, "", b"kept")])
    with laspy.open(original, "w", header=header) as writer:
        writer.write_points(laspy.ScaleAwarePointRecord.zeros(3, header=header))
        writer.write_evlrs(header.evlrs)
    write_points(path, read_points(original))
    assert {user for user, _ in raw_vlrs(path)} == {b"laszip encoded"}
    assert [(e.user_id, e.record_data) for e in laspy.read(path).evlrs] == [("me", b"kept")]
    with pytest.raises(FileError, match=r"COPC files can't be written; name it \.laz"):
        write_points(tmp_path / "b.copc.laz", read_points(original))


def test_chunks_concatenate_to_the_whole_file(tmp_path):
    path = tmp_path / "a.laz"
    make_las(path)
    whole, chunks = read_points(path), list(iter_points(path, chunk_size=170))
    assert [len(chunk) for chunk in chunks] == [170, 170, 160]
    assert np.array_equal(np.concatenate([c.positions for c in chunks]), whole.positions)
    assert np.array_equal(np.asarray(laspy.read(path).xyz), whole.positions)
    for name, values in whole.attributes.items():
        joined = np.concatenate([c.attributes[name] for c in chunks])
        assert joined.tobytes() == values.tobytes()


def test_positions_are_the_same_without_attributes(tmp_path):
    path = tmp_path / "a.laz"
    make_las(path)
    bare = read_points(path, attributes=False)
    assert not bare.attributes
    assert np.array_equal(bare.positions, read_points(path).positions)


def test_points_beyond_the_range_of_32_bits_are_refused(tmp_path):
    path = tmp_path / "a.laz"
    make_las(path)
    far = PointCloud(np.array([[4e5, 5.1e6, 0.0], [3e6, 5.1e6, 0.0]]))
    with (
        pytest.raises(FileError, match=r"b\.laz: x from .* is beyond .* coarser scale"),
        open_writer(tmp_path / "b.laz", read_points(path)) as writer,
    ):
        writer.write(far)
    assert [p.name for p in tmp_path.iterdir()] == ["a.laz"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("classification", [300], "values 300 to 300 don't fit uint8"),
        ("return_number", [16], "16 doesn't fit the 4 bits"),
        ("intensity", [np.nan], "don't fit uint16"),
        ("unknown", [1], "no dimension 'unknown'"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(tmp_path, name, values, message):
    path = tmp_path / "a.laz"
    make_las(path)
    with (
        pytest.raises(DataError, match=message),
        open_writer(tmp_path / "b.laz", read_points(path)) as writer,
    ):
        writer.write(PointCloud(np.array([[4e5, 5.1e6, 0.0]]), {name: np.array(values)}))


def test_records_of_another_scale_are_refused(tmp_path):
    original, other = tmp_path / "a.laz", tmp_path / "b.laz"
    make_las(original)
    write_points(other, PointCloud(np.zeros((2, 3)), {"red": np.zeros(2)}))
    with (
        pytest.raises(DataError, match="open the writer like the file they come from"),
        open_writer(tmp_path / "c.laz", read_points(other)) as writer,
    ):
        copy_points(original, writer)


def test_other_clouds_become_las_with_extra_dimensions(tmp_path):
    rng = np.random.default_rng(0)
    cloud = PointCloud(
        rng.random((50, 3)) * 800 + [4e5, 5e6, 100],
        {
            "red": np.arange(50, dtype=np.uint8),
            "normal": rng.random((50, 3)),
            "roughness": rng.random(50).astype(np.float32),
            "classification": np.full(50, 2),
        },
    )
    write_points(tmp_path / "a.laz", cloud)
    after = read_points(tmp_path / "a.laz")
    assert np.abs(after.positions - cloud.positions).max() < 1e-4
    assert np.array_equal(after.attributes["red"], np.arange(50) * 256)
    assert np.array_equal(after.attributes["normal_2"], cloud.attributes["normal"][:, 2])
    assert np.array_equal(after.attributes["roughness"], cloud.attributes["roughness"])
    assert (after.attributes["classification"] == 2).all()


@pytest.mark.parametrize("suffix", [".las", ".laz"])
@pytest.mark.parametrize("point_format", [1, 3, 5])
def test_las_1_4_of_older_point_formats_keeps_its_legacy_counts(tmp_path, point_format, suffix):
    path = tmp_path / f"a{suffix}"
    make_las(path, point_format, "1.4")
    cloud = read_points(path)
    cloud.attributes["return_number"] = np.clip(cloud.attributes["return_number"], 1, 5)
    cloud = cloud.select(slice(0, 400))
    write_points(path, cloud)
    returns = [np.count_nonzero(cloud.attributes["return_number"] == i) for i in range(1, 6)]
    assert list(unpack_from("<6I", path.read_bytes(), 107)) == [400, *returns]
    assert laspy.read(path).header.point_count == 400
    # The standard requires 0 for the newer point formats.
    make_las(path, 6)
    write_points(path, read_points(path))
    assert not any(unpack_from("<6I", path.read_bytes(), 107))


@pytest.mark.parametrize("date", [(0, 0), (366, 2019), (17, 1998), (999, 2020)])
@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_the_creation_date_is_not_changed(tmp_path, date, suffix):
    path = tmp_path / f"a{suffix}"
    make_las(path)
    data = bytearray(path.read_bytes())
    pack_into("<2H", data, 90, *date)
    path.write_bytes(data)
    copy = tmp_path / f"b{suffix}"
    with open_writer(copy, next(iter_points(path, 2)), ADDED) as writer:
        copy_points(path, writer)
    assert unpack_from("<2H", copy.read_bytes(), 90) == date


def test_an_error_of_lazrs_names_the_file(tmp_path, monkeypatch):
    write_scaled(tmp_path / "a.las", "uint16", 0.01, np.full(50, 100))
    cloud = read_points(tmp_path / "a.las")

    def fails(*_: object) -> None:
        raise lazrs.LazrsError("Failed to call write")

    with (
        pytest.raises(FileError, match=r"b\.laz: can't be written: Failed to call write"),
        open_writer(tmp_path / "b.laz", cloud) as writer,
    ):
        monkeypatch.setattr(writer._writer, "write_points", fails)
        copy_points(tmp_path / "a.las", writer)
    assert [path.name for path in tmp_path.iterdir()] == ["a.las"]


NUM = 60


def cloud(**attributes: np.ndarray) -> PointCloud:
    return PointCloud(positions(NUM), attributes)


@pytest.mark.parametrize("suffix", [".ply", ".csv"])
def test_intensities_and_colours_from_0_to_1_keep_their_differences(suffix, tmp_path, command):
    rng = np.random.default_rng(0)
    names = ("intensity", "red", "green", "blue")
    values = {name: rng.random(NUM).astype(np.float32) for name in names}
    write_points(tmp_path / f"a{suffix}", cloud(**values))
    result = command(tmp_path / f"a{suffix}", "-o", tmp_path / "a.laz", "--ratio", "2")
    assert result.status == 0 and result.err == ""
    las = laspy.read(tmp_path / "a.laz")
    for name in names:
        assert np.array_equal(las[name][:NUM], np.rint(values[name].astype(float) * 65535))
        assert las[name][NUM:].max() > 255


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_colours_of_8_bits_are_multiplied_by_256_whatever_their_type(dtype, tmp_path):
    colour = np.append(200, np.arange(NUM - 1)).astype(dtype)
    write_points(tmp_path / "a.las", cloud(red=colour, green=colour // 2, blue=colour // 3))
    las = laspy.read(tmp_path / "a.las")
    assert np.array_equal(las.red, 256 * colour.astype(int))
    assert np.array_equal(las.blue, 256 * (colour.astype(int) // 3))
    dark = {"red": colour.astype(np.uint16), "blue": colour.astype(np.uint16) * 300}
    write_points(tmp_path / "b.las", cloud(**dark))
    assert np.array_equal(laspy.read(tmp_path / "b.las").red, colour)


def test_names_of_dimensions_match_whatever_their_case(tmp_path, command):
    rows = np.column_stack([positions(NUM), np.arange(NUM) * 7, np.arange(NUM) % 5, np.arange(NUM)])
    names = "X Y Z Intensity Classification ReturnAngle"
    np.savetxt(tmp_path / "a.xyz", rows, fmt="%.2f", header=names, comments="//")
    assert command(tmp_path / "a.xyz", "-o", tmp_path / "a.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "a.las")
    assert np.array_equal(las.intensity[:NUM], rows[:, 3])
    assert np.array_equal(las.classification[:NUM], rows[:, 4])
    extra = set(las.point_format.extra_dimension_names)
    assert "ReturnAngle" in extra and not {"Intensity", "Classification"} & extra


def test_values_that_las_cannot_hold_are_refused_before_any_work(tmp_path, command, monkeypatch):
    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", None)
    values = np.linspace(-2048, 2047, NUM).astype(np.int16)
    write_points(tmp_path / "a.ply", cloud(intensity=values))
    result = command(tmp_path / "a.ply", "-o", tmp_path / "a.laz")
    assert result.status == 1 and is_one_line(result.err)
    assert "intensity: values -2048 to 2047 don't fit uint16" in result.err
    assert "shift, scale or remove them" in result.err
    assert left_in(tmp_path) == ["a.ply"]


def test_bytes_that_are_no_ascii_stay_in_header_and_records(tmp_path, command):
    write_random_las(tmp_path / "a.las")
    content = bytearray((tmp_path / "a.las").read_bytes())
    software = "RiPROCESS\xae 1.8".encode("latin-1").ljust(32, b"\0")
    content[58:90] = software
    record = content.index(b"LASF_Projection") - 2
    content[record + 22 : record + 25] = b"\xe9t\xe9"
    (tmp_path / "a.las").write_bytes(content)
    assert command(tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2").status == 0
    written = (tmp_path / "b.las").read_bytes()
    assert written[58:90] == software and b"\xe9t\xe9" in written[:2000]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_names_of_columns_keep_their_letters(tmp_path, encoding):
    text = "x,y,z,H\u00f6he\n" + "".join(f"{i},{i * i % 7},0,{i}\n" for i in range(9))
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    read = read_points(tmp_path / "a.csv")
    assert list(read.attributes) == ["H\u00f6he"]
    write_points(tmp_path / "b.csv", read)
    assert (tmp_path / "b.csv").read_text(encoding="utf-8").startswith("x,y,z,H\u00f6he\n")


def test_scan_angles_in_degrees_and_times_of_no_week_become_those_of_las(tmp_path):
    angle = np.linspace(-12.5, 12.5, 60)
    attributes = {"Scan Angle": angle, "GpsTime": 3e8 + np.arange(60)}
    write_points(tmp_path / "a.las", PointCloud(positions(60), attributes))
    las = laspy.read(tmp_path / "a.las")
    assert np.abs(las.scan_angle * 0.006 - angle).max() <= 0.0031
    assert las.header.global_encoding.gps_time_type == 1
    raw = {"scan_angle": np.arange(60, dtype=np.int16) * 30}
    write_points(tmp_path / "b.las", PointCloud(positions(60), raw))
    assert np.array_equal(laspy.read(tmp_path / "b.las").scan_angle, raw["scan_angle"])


def test_names_of_cloudcompare_are_those_of_las(tmp_path):
    attributes = {"scalar_Classification": np.arange(60, dtype=np.float32) % 5}
    write_points(tmp_path / "a.las", PointCloud(positions(60), attributes))
    assert np.array_equal(laspy.read(tmp_path / "a.las").classification, np.arange(60) % 5)


def errors_in_las(points: np.ndarray, path: Path) -> np.ndarray:
    write_points(path, PointCloud(points))
    return np.abs(laspy.read(path).xyz - points)


def test_a_point_far_from_all_others_moves_them_by_a_millimetre_at_most_and_is_noted(
    tmp_path, caplog
):
    points = positions(NUM) + np.random.default_rng(0).random((NUM, 3))
    points[7] = 0
    assert errors_in_las(points, tmp_path / "a.las").max() <= 0.001 + 1e-9
    assert "a.las: coordinates are rounded to multiples of 0.002" in caplog.text
    assert "remove points that lie far from all others" in caplog.text


@pytest.mark.parametrize("extent", [0.004, 30, 20_000, 400_000, 2e6])
@pytest.mark.parametrize("corner", [-7.3, 0.9, 5e5])
def test_coordinates_keep_seven_digits_of_the_extent_and_a_survey_its_millimetres(
    extent, corner, tmp_path, caplog
):
    points = corner + extent * np.random.default_rng(0).random((NUM, 3))
    # New points may lie outside of the measured ones.
    like = PointCloud(np.append(points[:-2], [points.min(0), points.max(0)], axis=0))
    with open_writer(tmp_path / "a.las", like) as writer:
        writer.write(PointCloud(points))
        writer.write(PointCloud(points + extent * np.array([0.4, -0.4, 0.0])))
    error = np.abs(laspy.read(tmp_path / "a.las").xyz[:NUM] - points).max()
    assert error <= 0.5 * min(1e-7 * extent, 0.001) + 1e-9 * min(1, extent)
    assert caplog.text == ""


def test_millimetres_of_a_text_file_are_those_of_the_las_file(tmp_path):
    points = positions(NUM) + np.arange(NUM)[:, None] / 1000
    assert errors_in_las(points, tmp_path / "a.las").max() < 2e-9


@pytest.mark.parametrize("name", ["ScanAngleRank", "Scan_Angle_Rank", "scalar_Scan_Angle_Rank"])
@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32])
def test_scan_angle_ranks_are_degrees(name, dtype, tmp_path):
    degrees = np.arange(NUM) - 30
    write_points(tmp_path / "a.las", cloud(**{name: degrees.astype(dtype)}))
    las = laspy.read(tmp_path / "a.las")
    assert np.abs(las.scan_angle * 0.006 - degrees).max() <= 0.0031
    assert not list(las.point_format.extra_dimension_names)


def test_columns_r_g_b_are_colours_and_r_alone_is_not(tmp_path):
    header = "//X Y Z R G B"
    colours = np.arange(3 * NUM).reshape(NUM, 3)
    rows = np.column_stack([positions(NUM), colours])
    np.savetxt(tmp_path / "a.txt", rows, fmt="%.2f %.2f %.2f %d %d %d", header=header, comments="")
    write_points(tmp_path / "a.las", read_points(tmp_path / "a.txt"))
    las = laspy.read(tmp_path / "a.las")
    assert not list(las.point_format.extra_dimension_names)
    assert np.array_equal(np.column_stack([las.red, las.green, las.blue]), 256 * colours)
    write_points(tmp_path / "b.las", cloud(r=colours[:, 0]))
    assert list(laspy.read(tmp_path / "b.las").point_format.extra_dimension_names) == ["r"]


def test_points_without_return_numbers_are_only_returns(tmp_path):
    def returns(**attributes: np.ndarray) -> tuple[list[int], list[int]]:
        write_points(tmp_path / "a.las", cloud(**attributes))
        las = laspy.read(tmp_path / "a.las")
        assert las.header.number_of_points_by_return.sum() == NUM
        columns = (np.asarray(las.return_number), np.asarray(las.number_of_returns))
        return columns[0].tolist(), columns[1].tolist()

    ones, several = [1] * NUM, (np.arange(NUM) % 4 + 1).tolist()
    assert returns() == (ones, ones)
    assert returns(NumberOfReturns=np.array(several)) == (ones, several)
    assert returns(ReturnNumber=np.array(several)) == (several, several)


@pytest.mark.parametrize(
    ("first", "is_standard"), [(-4e7, True), (3e8, True), (0.0, False), (6e5, False)]
)
def test_times_before_or_after_a_week_are_standard_times(first, is_standard, tmp_path):
    # Adjusted standard times are seconds since 2011-09-14 00:01:46 UTC.
    write_points(tmp_path / "a.las", cloud(gps_time=first + np.arange(NUM)))
    kind = laspy.read(tmp_path / "a.las").header.global_encoding.gps_time_type
    assert kind == int(is_standard)


def test_several_extra_bytes_records_are_read_as_one(tmp_path):
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


def test_a_description_of_missing_extra_bytes_is_dropped(tmp_path):
    path = tmp_path / "a.las"
    header = laspy.LasHeader(version="1.4", point_format=6)
    header.vlrs.extend([VLR("LASF_Spec", 4, "", bytes(ExtraBytesStruct(b"height", 4))), WKT])
    with laspy.open(path, "w", header=header) as writer:
        writer.write_points(laspy.ScaleAwarePointRecord.zeros(3, header=header))
    write_points(tmp_path / "b.las", read_points(path))
    assert raw_vlrs(tmp_path / "b.las") == {(b"LASF_Projection", 2112): WKT.record_data}


def test_extra_bytes_without_a_description_can_be_followed_by_others(tmp_path):
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


def test_names_in_latin_1_are_read_and_their_bytes_are_kept(tmp_path):
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


def test_no_data_values_are_kept_and_stale_statistics_are_removed(tmp_path):
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


def test_a_scaled_float_is_not_rounded_to_an_integer(tmp_path):
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    write_scaled(tmp_path / "a.las", "float32", 1.0, values)
    write_points(tmp_path / "b.las", read_points(tmp_path / "a.las"))
    assert np.array_equal(laspy.read(tmp_path / "b.las").points.array["value"], values)


def test_a_value_beyond_a_scaled_dimension_is_an_error_of_the_file(tmp_path):
    write_scaled(tmp_path / "a.las", "uint16", 0.01, np.full(50, 100))
    cloud = read_points(tmp_path / "a.las")
    cloud.attributes["value"] += 3000.0
    with pytest.raises(DataError, match=r"value: values .* don't fit uint16"):
        write_points(tmp_path / "b.las", cloud)
