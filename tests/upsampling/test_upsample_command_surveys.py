"""`pointup upsample` of several files: those that border on each other are one survey."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest
from forked import run_forked
from scipy.spatial import cKDTree
from survey_files import (
    digest,
    left_in,
    made_of,
    ordered,
    positions,
    survey,
    write_las,
    write_random_las,
    write_scaled,
    write_tiles,
    write_two_tiles,
)

from pointup.cli import main as cli
from pointup.io.cloud import PointCloud
from pointup.io.files import read_points, write_points


@pytest.mark.parametrize(
    "options",
    [
        ("--ratio", "2.7"),
        pytest.param(("--ratio", "9", "--no-originals"), marks=pytest.mark.slow),
        ("--ratio", "2", "--oversampling", "2"),
    ],
)
def test_a_survey_in_tiles_gives_the_points_of_the_survey_in_one_file(options, tmp_path, command):
    las = survey(900)
    las.write(tmp_path / "whole.laz")
    write_tiles(las, tmp_path / "tiles", side=3)
    whole = command(tmp_path / "whole.laz", "-o", tmp_path / "out.laz", *options)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out" / "deep", *options)
    assert result.status == whole.status == 0 and result.err == ""
    assert result.out.count("points in") == 10
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    made = [tmp_path / "out" / "deep" / tile.relative_to(tmp_path / "tiles") for tile in tiles]
    # 200 of the points lie where others do.
    num_new = round(700 * float(options[1]))
    if "--no-originals" in options:
        expected = ordered([laspy.read(tmp_path / "out.laz").xyz])
        found = [laspy.read(path).xyz for path in made]
    else:
        num_new -= 700
        expected = ordered([made_of(tmp_path / "out.laz", tmp_path / "whole.laz")])
        found = [made_of(path, tile) for path, tile in zip(made, tiles, strict=True)]
    assert len(found) == 9 and len(expected) == num_new
    assert np.array_equal(ordered(found), expected)


def test_tiles_and_processes_give_the_same_files(tmp_path, command, model_directory):
    """Two processes divide the blocks and the files of a survey; one file is damaged."""
    tiles, options = tmp_path / "tiles", ["--ratio", "1.5"]
    # Points enough for several blocks.
    write_tiles(survey(9000), tiles)
    (tiles / "0" / "2.laz").write_bytes(b"no survey")
    assert command(tiles, "-o", tmp_path / "one", *options, "--tile", "12").status == 1
    modules = "pointup.cli.main,pointup.cli.upsample.files"
    words = (tiles, "-o", tmp_path / "two", "--model", model_directory, *options)
    result = run_forked(modules, "upsample", *words)
    assert result.returncode == 1
    of_all = "survey of 4 files: 9,000 points in (200 of them where another one is), 4,400 new"
    assert result.stdout.count(of_all) == 1
    assert result.stdout.count("points in") == 5 and result.stderr.count("pointup: error") == 1
    files = sorted((tmp_path / "one").rglob("*.laz"))
    assert len(files) == 4
    for file in files:
        assert digest(file) == digest(tmp_path / "two" / file.relative_to(tmp_path / "one"))
    assert left_in(tmp_path / "two") == ["0", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_directory) -> Path:
    """A survey in one file, in.laz, and what is made of it, out.laz."""
    folder = tmp_path_factory.mktemp("whole")
    las = survey()
    # A file also contains points that are equal in everything.
    las.points.array[:100] = las.points.array[200:300]
    las.write(folder / "in.laz")
    words = ["upsample", folder / "in.laz", "-o", folder / "out.laz", "--model", model_directory]
    assert cli.main([str(word) for word in words]) == 0
    return folder


def in_tiles_with_buffers(whole: Path, folder: Path) -> list[Path]:
    write_tiles(laspy.read(whole / "in.laz"), folder, buffer=3.0)
    return sorted(folder.rglob("*.laz"))


def test_points_in_the_buffers_of_tiles_count_once_and_are_the_same_in_each_tile(
    whole, tmp_path, command
):
    tiles = in_tiles_with_buffers(whole, tmp_path / "tiles")
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 5,400 new" in result.out
    found = [made_of(tmp_path / "out" / t.relative_to(tmp_path / "tiles"), t) for t in tiles]
    expected = made_of(whole / "out.laz", whole / "in.laz")
    assert len(np.concatenate(found)) > 1.2 * len(expected)
    assert np.array_equal(np.unique(np.concatenate(found), axis=0), np.unique(expected, axis=0))
    # Each tile has all new points of its points, those in the buffer included.
    for tile, rows in zip(tiles, found, strict=True):
        before = laspy.read(tile)
        names = before.points.array.dtype.names
        own = np.column_stack([np.asarray(before.points.array[n], np.float64) for n in names])
        parents = cKDTree(own).query(expected[:, -len(names) :], distance_upper_bound=1e-9)[0] == 0
        assert parents.sum() == len(rows)


def test_points_of_buffers_count_once_where_tiles_have_values_of_their_own(
    whole, tmp_path, command
):
    tiles = in_tiles_with_buffers(whole, tmp_path / "tiles")
    for number, path in enumerate(tiles):
        tile = laspy.read(path)
        tile.user_data = np.full(len(tile.points), number, np.uint8)
        tile.write(path)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 5,400 new" in result.out
    found = [laspy.read(tmp_path / "out" / path.relative_to(tmp_path / "tiles")) for path in tiles]
    made = [file.xyz[np.asarray(file.synthetic) == 1] for file in found]
    in_one = laspy.read(whole / "out.laz")
    expected = in_one.xyz[np.asarray(in_one.synthetic) == 1]
    assert len(np.concatenate(made)) > 1.2 * len(expected)
    assert np.array_equal(np.unique(np.concatenate(made), axis=0), np.unique(expected, axis=0))
    # New points beside a point of the first file have its values, in every file.
    measured = in_one.xyz[np.asarray(in_one.synthetic) == 0]
    in_first = cKDTree(laspy.read(tiles[0]).xyz).query(measured)[0] == 0
    for las, points in zip(found, made, strict=True):
        beside = in_first[cKDTree(measured).query(points)[1]]
        given = np.asarray(las.user_data)[np.asarray(las.synthetic) == 1]
        assert np.mean((given == 0) == beside) > 0.99  # Some points are as far from two others.


def test_returns_of_two_pulses_in_one_place_count_once_and_all_are_kept(tmp_path, command):
    write_tiles(survey(600), tmp_path / "tiles", buffer=3.0)
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    for number, path in enumerate(tiles):
        tile = laspy.read(path)
        tile.gps_time = np.asarray(tile.gps_time) + number
        tile.write(path)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out")
    assert result.status == 0 and "where another one is), 1,200 new" in result.out
    for path in tiles:
        # Checks that the points of the tile are unchanged.
        made_of(tmp_path / "out" / path.relative_to(tmp_path / "tiles"), path)


def test_distant_files_and_separate_ones_are_different_surveys(tmp_path, command):
    write_tiles(survey(600), tmp_path / "tiles")
    alone = tmp_path / "tiles" / "0" / "0.laz"
    assert command(alone, "-o", tmp_path / "alone.laz", "--ratio", "2").status == 0
    result = command(tmp_path / "tiles", "-o", tmp_path / "out", "--ratio", "2", "--separate")
    assert result.status == 0 and "survey" not in result.out
    assert digest(tmp_path / "out/0/0.laz") == digest(tmp_path / "alone.laz")
    # Of four tiles, two opposite ones touch in a corner only; without it they are apart.
    far = laspy.read(tmp_path / "tiles" / "1" / "1.laz")
    far.x = np.asarray(far.x) + 200
    far.write(tmp_path / "far.laz")
    result = command(alone, tmp_path / "far.laz", "-o", tmp_path / "apart", "--ratio", "2")
    assert result.status == 0 and "survey" not in result.out
    assert digest(tmp_path / "apart/0.laz") == digest(tmp_path / "alone.laz")


def test_shapes_around_the_origin_are_not_mixed(tmp_path, command):
    (tmp_path / "shapes").mkdir()
    for number in range(2):
        points = np.random.default_rng(number).normal(size=(60, 3)) * (1, 1 + number, 0.5)
        write_points(tmp_path / "shapes" / f"{number}.xyz", PointCloud(points))
    assert command(tmp_path / "shapes", "-o", tmp_path / "out").status == 0
    for number in range(2):
        one = tmp_path / "shapes" / f"{number}.xyz"
        assert command(one, "-o", tmp_path / "one.xyz").status == 0
        assert digest(tmp_path / "out" / one.name) == digest(tmp_path / "one.xyz")


def test_tiles_of_other_scales_of_an_extra_dimension_are_upsampled_apart(tmp_path, command):
    (tmp_path / "in").mkdir()
    write_scaled(tmp_path / "in" / "a.las", "uint16", 0.01, np.full(400, 10_000))
    write_scaled(tmp_path / "in" / "b.las", "uint16", 0.1, np.full(400, 30_000), shift=10.0)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and result.err.count("\n") == 1
    assert "a.las and " in result.err and "differ in attributes" in result.err
    assert set(np.array(laspy.read(tmp_path / "out" / "a.las")["value"])) == {100.0}


def test_a_note_counts_unlike_tiles_and_names_what_differs(tmp_path, command):
    for number in range(4):
        points = positions(300) + np.array([10.0 * number, 0, 0])
        write_las(tmp_path / "in" / f"{number}.las", points, point_format=1 + 2 * (number % 2))
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and result.err.count("\n") == 1
    assert "0.las and " in result.err and "1.las (and 2 other pairs) border on" in result.err
    assert "differ in attributes (blue, green, red): such files" in result.err


def test_a_note_names_overlapping_tiles_of_unlike_scales(tmp_path, command):
    points = positions(600)
    points = points[np.argsort(points[:, 0])]
    for name, tile, scale in (("a", points[:400], 0.001), ("b", points[300:], 0.01)):
        write_las(tmp_path / "in" / f"{name}.las", tile, scale=scale)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and result.err.count("\n") == 1
    assert "b.las overlap and have different scales (0.001 and 0.01): a point" in result.err
    write_las(tmp_path / "in" / "b.las", points[400:], scale=0.01)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and not result.err


def test_a_note_names_overlapping_tiles_whose_offsets_are_no_whole_steps_apart(tmp_path, command):
    points = positions(600)
    points = points[np.argsort(points[:, 0])]
    write_las(tmp_path / "in" / "a.las", points[:400], scale=0.1, offset=(5e5, 4e6, 0))
    for shift in (0.05, 0.3):
        offset = (5e5 + shift, 4e6, 0)
        write_las(tmp_path / "in" / "b.las", points[300:], scale=0.1, offset=offset)
        result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
        told = "offsets that are no whole steps of the scale 0.1 apart: a point" in result.err
        assert result.status == 0 and told == (shift == 0.05)


def test_a_damaged_tile_is_left_out_and_reported(tmp_path, command):
    write_tiles(survey(1500), tmp_path / "tiles", side=3)
    damaged = tmp_path / "tiles" / "1" / "1.laz"
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = np.random.default_rng(0).bytes(400)
    damaged.write_bytes(content)
    wrong = tmp_path / "tiles" / "2" / "2.laz"
    las = laspy.read(wrong)
    las.write(wrong)
    header = bytearray(wrong.read_bytes())
    # The largest x in the header is halved.
    header[179:187] = np.array([5e5 + 30.0]).tobytes()
    wrong.write_bytes(header)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 1 and result.err.count("pointup: error: ") == 2
    assert str(damaged) in result.err and "outside of the extent in its header" in result.err
    assert "survey of 7 files" in result.out
    assert len(list((tmp_path / "out").rglob("*.laz"))) == 7
    assert [p.name for p in (tmp_path / "out").rglob(".*")] == [".upsampled"]
    corner = ("--bounds", "500027", "4000027", "500040", "4000040")
    part = command(wrong, "-o", tmp_path / "part.laz", *corner)
    assert "repair the header\n" in part.err and "--separate" not in part.err


def test_synthetic_points_of_a_file_that_is_left_out_are_not_counted(
    tmp_path, command, monkeypatch
):
    points = positions(300)
    write_las(tmp_path / "in" / "a.las", points, scale=0.01)
    points = points[np.argsort(points[:, 0])] + [10, 0, 0]
    wrong = write_las(tmp_path / "in" / "b.las", points, scale=0.01, synthetic=np.ones(300, int))
    header = bytearray(wrong.read_bytes())
    # The largest x in the header: only the first part of the points lies within it.
    header[179:187] = np.array([points[150, 0]]).tobytes()
    wrong.write_bytes(header)
    monkeypatch.setattr("pointup.cli.upsample.reading.CHUNK_SIZE", 100)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert "b.las: has points outside of the extent" in result.err
    assert left_in(tmp_path / "out") == ["a.las"] and "synthetic flag" not in result.err


@pytest.mark.parametrize(
    ("options", "num_points"), [((), 1000), (("--separate", "--only-new"), 400)]
)
def test_a_tile_without_points_is_copied_and_no_failure(options, num_points, tmp_path, command):
    las = survey(600)
    write_tiles(las, tmp_path / "tiles")
    empty = tmp_path / "tiles" / "2" / "0.laz"
    empty.parent.mkdir()
    las.points = las.points[:0]
    las.write(empty)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out", "--ratio", "2", *options)
    assert result.status == 0 and result.err == ""
    copied = tmp_path / "out" / "2" / "0.laz"
    assert result.out.count(f"{empty}: no points in it, copied: {copied}\n") == 1
    assert copied.read_bytes() == empty.read_bytes()
    others = [path for path in (tmp_path / "out").rglob("*.laz") if path != copied]
    # 200 of the points lie where others do.
    assert sum(len(laspy.read(path).points) for path in others) == num_points


@pytest.fixture
def sparse_tiles(tmp_path) -> Path:
    """A whole tile of ground, and far from it one of 1 point, one of noise, and one of class 6."""
    folder = tmp_path / "tiles"
    folder.mkdir()
    numbers = {"whole": (300, 2), "single": (1, 2), "noise": (50, 7), "roof": (50, 6)}
    for i, (name, (number, classification)) in enumerate(numbers.items()):
        write_random_las(folder / f"{name}.las", number)
        las = laspy.read(folder / f"{name}.las")
        las.x = las.x + 1000 * i
        las.classification = np.full(number, classification)
        las.write(folder / f"{name}.las")
    return folder


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ((), {"single": 1, "noise": 50}),
        (("--separate", "--classes", "6"), {"single": 1, "noise": 50, "whole": 300}),
    ],
)
def test_tiles_with_too_few_points_to_upsample_are_copied_and_no_failure(
    options, copied, sparse_tiles, tmp_path, command
):
    out = tmp_path / "out"
    words = (sparse_tiles, "-o", out, "--ratio", "2", *options)
    result = command(*words)
    assert result.status == 0 and result.err == ""
    assert left_in(out) == left_in(sparse_tiles)
    for path in sorted(sparse_tiles.iterdir()):
        is_copied = path.stem in copied
        assert ((out / path.name).read_bytes() == path.read_bytes()) == is_copied
        if is_copied:
            few = f"{path}: {copied[path.stem]} points in, fewer than 2 of them to upsample"
            assert result.out.count(f"{few}, copied: {out / path.name}\n") == 1
    assert "4 files written: from 401 to" in result.out
    assert "0 files written, 4 skipped" in command(*words).out


@pytest.mark.parametrize("option", ["--only-new", "--no-originals"])
def test_tiles_with_nothing_to_write_are_skipped_and_no_failure(
    option, sparse_tiles, tmp_path, command
):
    # A tile of noise that borders on the whole one, too: both are one survey.
    las = laspy.read(sparse_tiles / "noise.las")
    las.x = las.x - 1990
    las.write(sparse_tiles / "beside.las")
    result = command(sparse_tiles, "-o", tmp_path / "out", "--ratio", "2", option)
    assert result.status == 0 and result.err == ""
    assert left_in(tmp_path / "out") == ["roof.las", "whole.las"]
    for name in ("single", "noise", "beside"):
        assert result.out.count(f"{sparse_tiles / name}.las: ") == 1
    assert result.out.count("nothing to write, skipped\n") == 3
    again = command(sparse_tiles, "-o", tmp_path / "out", "--ratio", "2", option)
    assert "0 files written, 5 skipped" in again.out


def test_what_an_earlier_run_wrote_into_a_folder_is_not_upsampled(tmp_path, command):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_points(tmp_path / "in" / "deep" / "a.npy", PointCloud(positions(50)))
    for _ in range(2):
        assert command(tmp_path / "in", "-o", tmp_path / "in" / "out", "--redo").status == 0
    out = tmp_path / "in" / "out"
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    records = [".upsampled", ".upsampled/deep", ".upsampled/deep/a.npy.json"]
    assert found == [*records, "deep", "deep/a.npy"]
    assert len(read_points(tmp_path / "in" / "out" / "deep" / "a.npy")) == 200


def test_a_header_without_an_extent_does_not_stop_the_others(tmp_path, command):
    content = write_two_tiles(tmp_path / "in")
    content[179:187], content[187:195] = content[187:195], content[179:187]
    (tmp_path / "in" / "b.las").write_bytes(content)
    bounds = ("--bounds", "500000", "4100000", "500010", "4100010")
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--separate", *bounds)
    assert result.status == 1 and "b.las: its header gives x" in result.err
    assert (tmp_path / "out" / "a.las").exists()


def test_a_note_says_that_a_forest_without_classes_gets_hardly_any_ground(tmp_path, command):
    points, told = positions(400), []
    for number, classes in ((2, 1), (2, np.arange(400) % 2 + 1), (1, 1)):
        several = np.full(400, number)
        dimensions = {"return_number": several, "number_of_returns": several}
        write_las(tmp_path / "a.las", points, classification=np.full(400, classes), **dimensions)
        for words in ((), ("--ground-density", "0"), ("--classes", "1")):
            options = "--ratio", "2", "--above-ground", *words
            result = command(tmp_path / "a.las", "-o", tmp_path / "b.las", *options)
            told.append("note: no point that is upsampled has class 2, ground: few" in result.out)
    assert told == [True] + 8 * [False]
