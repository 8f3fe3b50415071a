"""Other formats written as LAS: names, intensities and colours, and what LAS can't hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pytest
from typed import Result, is_one_line, left_in, positions, write_las

from pointup.io.files import PointCloud, open_writer, read_points, write_points

NUM = 60


def cloud(**attributes: np.ndarray) -> PointCloud:
    return PointCloud(positions(NUM), attributes)


@pytest.mark.parametrize("suffix", [".ply", ".csv"])
def test_intensities_and_colours_from_0_to_1_keep_their_differences(
    suffix: str, tmp_path: Path, command: Callable[..., Result]
) -> None:
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
def test_colours_of_8_bits_are_multiplied_by_256_whatever_their_type(
    dtype: type, tmp_path: Path
) -> None:
    colour = np.append(200, np.arange(NUM - 1)).astype(dtype)
    write_points(tmp_path / "a.las", cloud(red=colour, green=colour // 2, blue=colour // 3))
    las = laspy.read(tmp_path / "a.las")
    assert np.array_equal(las.red, 256 * colour.astype(int))
    assert np.array_equal(las.blue, 256 * (colour.astype(int) // 3))
    dark = {"red": colour.astype(np.uint16), "blue": colour.astype(np.uint16) * 300}
    write_points(tmp_path / "b.las", cloud(**dark))
    assert np.array_equal(laspy.read(tmp_path / "b.las").red, colour)


def test_names_of_dimensions_match_whatever_their_case(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    rows = np.column_stack([positions(NUM), np.arange(NUM) * 7, np.arange(NUM) % 5, np.arange(NUM)])
    names = "X Y Z Intensity Classification ReturnAngle"
    np.savetxt(tmp_path / "a.xyz", rows, fmt="%.2f", header=names, comments="//")
    assert command(tmp_path / "a.xyz", "-o", tmp_path / "a.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "a.las")
    assert np.array_equal(las.intensity[:NUM], rows[:, 3])
    assert np.array_equal(las.classification[:NUM], rows[:, 4])
    extra = set(las.point_format.extra_dimension_names)
    assert "ReturnAngle" in extra and not {"Intensity", "Classification"} & extra


def test_values_that_las_cannot_hold_are_refused_before_any_work(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointup.cli.upsample.files.run_passes", None)
    values = np.linspace(-2048, 2047, NUM).astype(np.int16)
    write_points(tmp_path / "a.ply", cloud(intensity=values))
    result = command(tmp_path / "a.ply", "-o", tmp_path / "a.laz")
    assert result.status == 1 and is_one_line(result.err)
    assert "intensity: values -2048 to 2047 don't fit uint16" in result.err
    assert "shift, scale or remove them" in result.err
    assert left_in(tmp_path) == ["a.ply"]


def test_bytes_that_are_no_ascii_stay_in_header_and_records(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "a.las")
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
def test_names_of_columns_keep_their_letters(tmp_path: Path, encoding: str) -> None:
    text = "x,y,z,H\u00f6he\n" + "".join(f"{i},{i * i % 7},0,{i}\n" for i in range(9))
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    read = read_points(tmp_path / "a.csv")
    assert list(read.attributes) == ["H\u00f6he"]
    write_points(tmp_path / "b.csv", read)
    assert (tmp_path / "b.csv").read_text(encoding="utf-8").startswith("x,y,z,H\u00f6he\n")


def test_scan_angles_in_degrees_and_times_of_no_week_become_those_of_las(tmp_path: Path) -> None:
    angle = np.linspace(-12.5, 12.5, 60)
    attributes = {"Scan Angle": angle, "GpsTime": 3e8 + np.arange(60)}
    write_points(tmp_path / "a.las", PointCloud(positions(60), attributes))
    las = laspy.read(tmp_path / "a.las")
    assert np.abs(las.scan_angle * 0.006 - angle).max() <= 0.0031
    assert las.header.global_encoding.gps_time_type == 1
    raw = {"scan_angle": np.arange(60, dtype=np.int16) * 30}
    write_points(tmp_path / "b.las", PointCloud(positions(60), raw))
    assert np.array_equal(laspy.read(tmp_path / "b.las").scan_angle, raw["scan_angle"])


def test_names_of_cloudcompare_are_those_of_las(tmp_path: Path) -> None:
    attributes = {"scalar_Classification": np.arange(60, dtype=np.float32) % 5}
    write_points(tmp_path / "a.las", PointCloud(positions(60), attributes))
    assert np.array_equal(laspy.read(tmp_path / "a.las").classification, np.arange(60) % 5)


def errors_in_las(points: np.ndarray, path: Path) -> np.ndarray:
    write_points(path, PointCloud(points))
    return np.abs(laspy.read(path).xyz - points)


def test_a_point_far_from_all_others_moves_them_by_a_millimetre_at_most_and_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = positions(NUM) + np.random.default_rng(0).random((NUM, 3))
    points[7] = 0
    assert errors_in_las(points, tmp_path / "a.las").max() <= 0.001 + 1e-9
    assert "a.las: coordinates are rounded to multiples of 0.002" in caplog.text
    assert "remove points that lie far from all others" in caplog.text


@pytest.mark.parametrize("extent", [0.004, 30, 20_000, 400_000, 2e6])
@pytest.mark.parametrize("corner", [-7.3, 0.9, 5e5])
def test_coordinates_keep_seven_digits_of_the_extent_and_a_survey_its_millimetres(
    extent: float, corner: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = corner + extent * np.random.default_rng(0).random((NUM, 3))
    # New points may lie outside of the measured ones.
    like = PointCloud(np.append(points[:-2], [points.min(0), points.max(0)], axis=0))
    with open_writer(tmp_path / "a.las", like) as writer:
        writer.write(PointCloud(points))
        writer.write(PointCloud(points + extent * np.array([0.4, -0.4, 0.0])))
    error = np.abs(laspy.read(tmp_path / "a.las").xyz[:NUM] - points).max()
    assert error <= 0.5 * min(1e-7 * extent, 0.001) + 1e-9 * min(1, extent)
    assert caplog.text == ""


def test_millimetres_of_a_text_file_are_those_of_the_las_file(tmp_path: Path) -> None:
    points = positions(NUM) + np.arange(NUM)[:, None] / 1000
    assert errors_in_las(points, tmp_path / "a.las").max() < 2e-9


@pytest.mark.parametrize("name", ["ScanAngleRank", "Scan_Angle_Rank", "scalar_Scan_Angle_Rank"])
@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32])
def test_scan_angle_ranks_are_degrees(name: str, dtype: type, tmp_path: Path) -> None:
    degrees = np.arange(NUM) - 30
    write_points(tmp_path / "a.las", cloud(**{name: degrees.astype(dtype)}))
    las = laspy.read(tmp_path / "a.las")
    assert np.abs(las.scan_angle * 0.006 - degrees).max() <= 0.0031
    assert not list(las.point_format.extra_dimension_names)


def test_columns_r_g_b_are_colours_and_r_alone_is_not(tmp_path: Path) -> None:
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


def test_points_without_return_numbers_are_only_returns(tmp_path: Path) -> None:
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
def test_times_before_or_after_a_week_are_standard_times(
    first: float, is_standard: bool, tmp_path: Path
) -> None:
    # Adjusted standard times are seconds since 2011-09-14 00:01:46 UTC.
    write_points(tmp_path / "a.las", cloud(gps_time=first + np.arange(NUM)))
    kind = laspy.read(tmp_path / "a.las").header.global_encoding.gps_time_type
    assert kind == int(is_standard)
