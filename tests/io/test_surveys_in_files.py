"""A survey in several files is treated as one cloud: its store, its extents, adjacent files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import laspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import UTM, grid, in_chunks, sheet
from typed import WKT

from pointup.errors import FileError
from pointup.io.extents import MAX_GAP, FileExtent, find_surveys, read_extent
from pointup.io.files import PointCloud, write_points
from pointup.upsampling.store.point_store import Store, build_survey_store, grid_resolution


def store_of(files: list[PointCloud], chunk_size: int = 100) -> Store:
    with TemporaryDirectory() as folder:
        chunks = [in_chunks(file, chunk_size) for file in files]
        store = build_survey_store(chunks, Path(folder), block_size=50)
        rows, repeated = store.read(0, len(store)), store._read_repeated
        read = [repeated(block) for block in range(store.num_blocks)]
        store.read = lambda start, stop: rows[start:stop]  # type: ignore[method-assign]
        store._read_repeated = lambda block: read[block]  # type: ignore[method-assign]
        return store


def coarse_cloud(seed: int, num_points: int = 300) -> PointCloud:
    """300 points in fewer places, some of them with equal attributes."""
    rng = np.random.default_rng(seed)
    points = np.floor(8 * rng.random((num_points, 3))) / (1, 1, 4) + UTM
    return PointCloud(points, {"class": rng.integers(0, 3, num_points), "t": rng.random(300) > 0.5})


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_splitting_into_files_and_shuffling_change_no_point_of_a_store(
    seed: int, num_files: int
) -> None:
    cloud, rng = coarse_cloud(seed), np.random.default_rng(seed)
    order = rng.permutation(300)
    # Equal points stay in one file, so that none is stored as a repeated point.
    place = np.unique(cloud.positions, axis=0, return_inverse=True)[1].ravel()
    of_file = [order[place[order] % num_files == file] for file in range(num_files)]
    whole, cut = store_of([cloud]), store_of([cloud.select(index) for index in of_file])
    assert len(whole) == len(cut) == place.max() + 1
    for name in ("position", "key", "attributes"):
        assert np.array_equal(whole.read(0, 300)[name], cut.read(0, 300)[name])
    assert np.array_equal(whole.block_ptr, cut.block_ptr)
    rows = np.arange(len(cut))
    for file, index in enumerate(of_file):
        found = cut.places_in_file(rows, file)
        assert set(place[index[found[found >= 0]]]) == set(place[index])
        there = cloud.select(index[found[found >= 0]])
        kept = cut.read(0, 300)[found >= 0]
        assert np.array_equal(kept["position"] + cut.frame.origin, there.positions)
        assert np.array_equal(kept["attributes"]["class"], there.attributes["class"])


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(2, 4))
def test_a_point_of_several_files_is_stored_once_and_found_in_each(
    seed: int, num_files: int
) -> None:
    cloud, rng = coarse_cloud(seed), np.random.default_rng(seed)
    of_file = [np.flatnonzero(rng.random(300) < 0.6) for _ in range(num_files)]
    store = store_of([cloud.select(index) for index in of_file])
    full = np.column_stack([cloud.positions, *cloud.attributes.values()])
    content = np.unique(cloud.positions, axis=0, return_inverse=True)[1].ravel()
    first_file = np.full(content.max() + 1, -1)
    for number in np.unique(content):
        has = [(content[index] == number).any() for index in of_file]
        first_file[number] = has.index(True) if any(has) else -1
    assert len(store) == np.count_nonzero(first_file >= 0)
    rows = store.read(0, len(store))
    for file, index in enumerate(of_file):
        place = store.places_in_file(np.arange(len(store)), file)
        inside = place[place >= 0]
        assert len(np.unique(inside)) == len(inside)
        there, kept = full[index[inside]], rows[place >= 0]
        assert np.array_equal(kept["position"] + store.frame.origin, there[:, :3])
        is_first = first_file[content[index[inside]]] == file
        assert np.array_equal(kept["attributes"]["class"][is_first], there[is_first, 3])
        assert np.array_equal(kept["attributes"]["t"][is_first], there[is_first, 4])
        assert len(np.unique(content[index])) == len(np.unique(content[index[inside]]))
    for block in range(store.num_blocks):
        among = np.arange(store.block_ptr[block], store.block_ptr[block + 1])
        has = [file for file in range(num_files) if (store.places_in_file(among, file) >= 0).any()]
        assert store.files_of(block).tolist() == has


@settings(max_examples=10)
@given(st.integers(0, 100), st.sampled_from([1e-3, 1.0, 1e5]))
def test_the_grid_is_thousands_of_times_finer_than_the_point_spacing(
    seed: int, scale: float
) -> None:
    points, rng = scale * sheet(3000, seed=seed), np.random.default_rng(seed)
    points -= points.min(axis=0)
    extent = points.max(axis=0)

    def resolution(cloud: np.ndarray, size: int) -> float:
        return grid_resolution(
            lambda: (cloud[i : i + size] for i in range(0, len(cloud), size)), extent
        )

    whole = resolution(points, 3000)
    assert np.log2(whole) == np.floor(np.log2(whole))
    assert 2**13 < scale * 0.3 / whole < 2**15
    twice = np.concatenate([points, points[:2000]])
    assert resolution(rng.permutation(twice), 900) == whole


def test_the_grid_does_not_depend_on_the_order_of_the_points() -> None:
    cloud = np.concatenate([sheet(2000, side=1.0), 100 + sheet(2000, side=60.0)])
    cloud -= cloud.min(axis=0)
    found = {
        grid_resolution(lambda points=points: iter(np.split(points, 4)), cloud.max(axis=0))
        for points in (cloud, cloud[::-1], np.roll(cloud, 1000, axis=0))
    }
    assert len(found) == 1


def test_the_resolution_of_a_regular_grid_does_not_depend_on_its_position() -> None:
    points = grid(60)
    for shift in (0.0, 1e5 / 3, 1e7 / 7):
        there = points + shift
        there -= there.min(axis=0)
        assert grid_resolution(lambda there=there: iter([there]), there.max(axis=0)) == 2**-14


def extent(
    x: tuple[float, float], y: tuple[float, float], name: str = "a/t.las", **known: object
) -> FileExtent:
    low, high = np.array([x[0], y[0]]), np.array([x[1], y[1]])
    values = {"num_points": 10_000, "crs": (), "attributes": (), "scale": np.zeros(2)} | known
    return FileExtent(Path(name), low, high, **values)  # type: ignore[arg-type]


def groups(*extents: FileExtent, kinds: str = "") -> list[list[int]]:
    return find_surveys(extents, kinds or "l" * len(extents)).groups


def test_adjacent_tiles_are_one_survey_and_gaps_separate_surveys() -> None:
    # The mean point spacing is 1.
    tiles = [
        extent((100 * i, 100 * i + 99.5), (100 * j, 100 * j + 99)) for i in (0, 1) for j in (0, 1)
    ]
    assert groups(*tiles) == [[0, 1, 2, 3]]
    beyond = 199.5 + MAX_GAP
    assert groups(*tiles, extent((beyond - 0.1, 300), (0, 100))) == [[0, 1, 2, 3, 4]]
    assert groups(*tiles, extent((beyond + 0.1, 310), (0, 100))) == [[0, 1, 2, 3], [4]]
    # A common corner, a common strip, and a small tile beside a large one.
    assert groups(extent((0, 100), (0, 100)), extent((100, 200), (101, 200))) == [[0, 1]]
    assert groups(extent((0, 100), (0, 100)), extent((80, 180), (0, 100))) == [[0, 1]]
    assert groups(extent((0, 900), (0, 900)), extent((900, 950), (400, 450))) == [[0, 1]]
    # Tiles at the edge of a survey, with points only in the overlap with other tiles.
    assert groups(extent((0, 120), (0, 120)), extent((90, 118), (-20, 110))) == [[0, 1]]
    assert groups(extent((0, 120), (0, 120)), extent((110, 119), (112, 120))) == [[0, 1]]
    # Files are joined through other files.
    row = [extent((100 * i, 100 * i + 100), (0, 100)) for i in (0, 2, 1, 5, 6)]
    assert groups(*row) == [[0, 1, 2], [3, 4]]


def test_files_on_top_of_each_other_are_separate_surveys() -> None:
    shapes = [extent((-1, 1), (-0.5 * i, 0.5 * i)) for i in (1, 2, 3)]
    assert groups(*shapes) == [[0], [1], [2]]
    # Shapes are not always in the centre of their extent.
    lamps = [extent((low, low + 1), (-0.1, 0.2), "lamp.ply") for low in (-0.3, -0.7)]
    assert groups(*lamps) == [[0], [1]]
    beside = [extent((low, low + 1), (-0.1, 0.2), "tile.ply") for low in (0, 1, 1.9)]
    assert groups(*beside) == [[0, 1, 2]]
    # Each survey of a place has its own folder.
    years = [
        extent((i, i + 100), (0, 100), f"{year}/t{i}.las") for year in (21, 22) for i in (0, 100)
    ]
    assert groups(*years) == [[0, 1], [2, 3]] and find_surveys(years, "llll").by_folder
    together = [replace(extent, path=Path(f"all/{i}.las")) for i, extent in enumerate(years)]
    assert find_surveys(together, "llll").stacked == [0, 1, 2, 3]
    # Files on top of each other in one folder leave tiles of other folders joined.
    others = [extent((i, i + 100), (0, 100), f"{i}/t.las") for i in (200, 300)]
    found = find_surveys([*together[::2], *others], "llll")
    assert found.groups == [[0], [1], [2, 3]] and found.stacked == [0, 1] and not found.by_folder


def test_adjacent_files_that_differ_are_not_joined_and_the_difference_is_reported() -> None:
    one = extent((0, 100), (0, 100))
    for name, value, difference in (
        ("crs", (b"feet",), "coordinate system"),
        ("attributes", (("red", "<u2", ()),), "attributes"),
    ):
        found = find_surveys([one, extent((100, 200), (0, 100), **{name: value})], "ll")
        assert found.groups == [[0], [1]]
        assert found.unlike == (0, 1) and found.difference == difference
    found = find_surveys([one, extent((100, 200), (0, 100))], "ls")
    assert found.groups == [[0], [1]] and found.unlike is None


@pytest.mark.parametrize("suffix", [".laz", ".ply"])
def test_the_extent_equals_that_of_the_points(suffix: str, tmp_path: Path) -> None:
    points = np.round(sheet(500), 2) + UTM
    write_points(tmp_path / f"in{suffix}", PointCloud(points, {"weight": np.ones(500)}))
    read = read_extent(tmp_path / f"in{suffix}")
    assert np.allclose(
        [read.low, read.high], [points[:, :2].min(0), points[:, :2].max(0)], atol=1e-4
    )
    assert read.num_points == 500 and ("weight", "<f8", ()) in read.attributes
    assert read.holds(points)
    assert not read.holds(points + np.array([1.0, 0.0, 0.0]))
    with pytest.raises(FileError, match="no such file"):
        read_extent(tmp_path / "missing.las")


def test_the_coordinate_system_is_that_of_the_file(tmp_path: Path) -> None:
    def written(name: str, *records: laspy.VLR) -> FileExtent:
        las = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
        las.xyz = np.round(sheet(20), 2)
        las.header.vlrs.extend(records)
        las.write(tmp_path / name)
        return read_extent(tmp_path / name)

    padded = laspy.VLR("LASF_Projection", 2112, "", WKT.record_data + b"\0\0")
    other = laspy.VLR("LASF_Projection", 2112, "", b'LOCAL_CS["elsewhere"]')
    assert written("a.las", WKT).crs == written("b.las", padded).crs != ()
    assert written("c.las", other).crs != written("a.las", WKT).crs
    assert written("d.las").crs == ()


def test_the_spacing_of_a_line_is_measured_along_it() -> None:
    assert extent((0, 100), (5, 5), num_points=100).spacing == 1.0
    assert extent((3, 3), (5, 5), num_points=1).spacing == 0.0
