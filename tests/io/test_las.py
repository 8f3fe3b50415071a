"""LAS and LAZ: the original is copied without a change, and added points are readable."""

from __future__ import annotations

from pathlib import Path
from struct import pack_into, unpack_from

import laspy
import lazrs
import numpy as np
import pytest
from laspy.vlrs.vlr import VLR
from typed import write_scaled

from pointup.errors import DataError, FileError
from pointup.io.files import (
    ExtraDimension,
    PointCloud,
    copy_points,
    iter_points,
    open_writer,
    read_points,
    write_points,
)

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
def test_points_are_written_bit_for_bit_as_they_were_read(
    tmp_path: Path, version: str, point_format: int, suffix: str
) -> None:
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
def test_generated_points_follow_the_unchanged_original(tmp_path: Path, suffix: str) -> None:
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


def test_a_file_that_has_the_added_dimensions_keeps_their_values(tmp_path: Path) -> None:
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


def test_copc_records_are_removed_and_other_evlrs_are_kept(tmp_path: Path) -> None:
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


def test_chunks_concatenate_to_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.laz"
    make_las(path)
    whole, chunks = read_points(path), list(iter_points(path, chunk_size=170))
    assert [len(chunk) for chunk in chunks] == [170, 170, 160]
    assert np.array_equal(np.concatenate([c.positions for c in chunks]), whole.positions)
    assert np.array_equal(np.asarray(laspy.read(path).xyz), whole.positions)
    for name, values in whole.attributes.items():
        joined = np.concatenate([c.attributes[name] for c in chunks])
        assert joined.tobytes() == values.tobytes()


def test_positions_are_the_same_without_attributes(tmp_path: Path) -> None:
    path = tmp_path / "a.laz"
    make_las(path)
    bare = read_points(path, attributes=False)
    assert not bare.attributes
    assert np.array_equal(bare.positions, read_points(path).positions)


def test_points_beyond_the_range_of_32_bits_are_refused(tmp_path: Path) -> None:
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
def test_attributes_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, values: list[float], message: str
) -> None:
    path = tmp_path / "a.laz"
    make_las(path)
    with (
        pytest.raises(DataError, match=message),
        open_writer(tmp_path / "b.laz", read_points(path)) as writer,
    ):
        writer.write(PointCloud(np.array([[4e5, 5.1e6, 0.0]]), {name: np.array(values)}))


def test_records_of_another_scale_are_refused(tmp_path: Path) -> None:
    original, other = tmp_path / "a.laz", tmp_path / "b.laz"
    make_las(original)
    write_points(other, PointCloud(np.zeros((2, 3)), {"red": np.zeros(2)}))
    with (
        pytest.raises(DataError, match="open the writer like the file they come from"),
        open_writer(tmp_path / "c.laz", read_points(other)) as writer,
    ):
        copy_points(original, writer)


def test_other_clouds_become_las_with_extra_dimensions(tmp_path: Path) -> None:
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
def test_las_1_4_of_older_point_formats_keeps_its_legacy_counts(
    tmp_path: Path, point_format: int, suffix: str
) -> None:
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
def test_the_creation_date_is_not_changed(
    tmp_path: Path, date: tuple[int, int], suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    make_las(path)
    data = bytearray(path.read_bytes())
    pack_into("<2H", data, 90, *date)
    path.write_bytes(data)
    copy = tmp_path / f"b{suffix}"
    with open_writer(copy, next(iter_points(path, 2)), ADDED) as writer:
        copy_points(path, writer)
    assert unpack_from("<2H", copy.read_bytes(), 90) == date


def test_an_error_of_lazrs_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
