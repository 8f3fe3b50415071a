"""`pointup upsample` of one file: what it writes, what it prints, and which points it takes."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import ANY

import laspy
import numpy as np
import pytest
import survey_files
from scipy.spatial import cKDTree
from sheets import small_model
from survey_files import WKT, is_one_line, left_in, positions, write_las, write_random_las

from pointup import upsample
from pointup.cli import main as cli
from pointup.cli.upsample import files
from pointup.cli.upsample.notes import summary_lines
from pointup.cli.upsample.plan import check_units
from pointup.errors import DataError
from pointup.io.cloud import PointCloud
from pointup.io.files import read_points, write_points
from pointup.upsampling.new_points import Summary, Uncertain

METRES, FEET, FEET_ABOVE_METRES = "EPSG:32618", "EPSG:2263", "EPSG:32618+6360"
GEOCENTRIC, MERCATOR = "EPSG:4978", "EPSG:3857"


def test_each_kind_of_figure_of_the_new_points_has_a_line():
    uncertain = {"all": Uncertain(900, 0.061, 0.144), "2": Uncertain(5, 1.0, 1.0)}
    uncertain["5"] = Uncertain(895, 0.058, 0.142)
    some = Summary(1000, 1.52, 20, 100, 3.5, 1.05, 0, 5, uncertain)
    assert summary_lines(some, Path("in.laz"), 8.0) == [
        "  new points at most 1.52 from a measured one, 99.9% of them at most 1.05, none beyond 8 "
        "local spacings",
        "  uncertainty 0.061 (median), 0.14 (90 %); class 5: 0.058, 0.14",
        "  100 others on the ground below crowns, at most 3.5 from a measured one",
        "  20 new points lie below all returns around them",
    ]
    few_below = Summary(1000, 1.5, 10, within=1.0, num_beyond=3)
    (line,) = summary_lines(few_below, Path("in.laz"), 1.5)
    assert line.endswith("at most 1, 3 beyond 1.5 local spacings")
    assert summary_lines(Summary(), Path("in.laz"), 8.0) == ["  no new points"]


@pytest.mark.parametrize(("suffix", "point_format"), [(".las", 7), (".laz", 7), (".las", 3)])
def test_las_keeps_every_original_and_adds_synthetic_points(
    suffix, point_format, tmp_path, command
):
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    before = write_random_las(source, point_format=point_format)
    result = command(source, "-o", target, "--ratio", "2.5")
    assert result.status == 0 and result.err == ""
    first, *others = result.out.splitlines()
    assert first.startswith(f"{source}: 300 points in, 750 out")
    assert others and all(re.match(r"  [\w,]+", line) for line in others)
    made = laspy.read(target)
    assert len(made.points) == 750
    raw = made.points.array
    for name in before.dtype.names:
        assert np.array_equal(raw[name][:300], before[name]), name
    original = laspy.read(source)
    assert made.header.point_format.id == point_format
    assert np.array_equal(made.header.scales, original.header.scales)
    assert np.array_equal(made.header.offsets, original.header.offsets)
    assert any(WKT.record_data in vlr.record_data_bytes() for vlr in made.header.vlrs)
    assert np.asarray(made.synthetic).tolist() == [0] * 300 + [1] * 450
    assert np.array_equal(made.parent_index[:300], np.arange(300))
    distance, nearest = cKDTree(original.xyz).query(made.xyz[300:], k=2)
    assert np.allclose(made.distance_to_measured[300:], distance[:, 0], atol=0.02)
    is_clear = distance[:, 0] < distance[:, 1] - 0.03
    for name in ("classification", "return_number", "gps_time", "height"):
        values = np.asarray(made[name])[300:][is_clear]
        expected = np.asarray(original[name])[nearest[is_clear, 0]]
        # The class of new points is not always that of the nearest point.
        is_ground = (name == "classification") & ((values == 2) | (expected == 2))
        assert np.array_equal(values[~is_ground], expected[~is_ground]), name
        assert np.mean(is_ground) < 0.3
    assert len(set(np.asarray(made.intensity)[300:]) - set(np.asarray(original.intensity))) > 100


@pytest.mark.parametrize(
    "suffix",
    [
        ".laz",
        ".csv",
        *(pytest.param(name, marks=pytest.mark.slow) for name in (".ply", ".npz", ".xyz")),
    ],
)
def test_attributes_are_kept_and_what_is_written_can_be_upsampled_again(suffix, tmp_path, command):
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    cloud = PointCloud(positions(50), {"label": np.arange(50), "weight": np.arange(50) / 7})
    write_points(source, cloud)
    assert command(source, "-o", target).status == 0
    before, after = read_points(source), read_points(target)
    assert len(after) == 200
    assert np.array_equal(after.positions[:50], before.positions)
    for name, values in before.attributes.items():
        if name != "synthetic":
            assert np.array_equal(after.attributes[name][:50], values)
            assert np.isin(after.attributes[name][50:], values).all()
    assert after.attributes["synthetic"].sum() == 150
    added = {"synthetic", "parent_index", "distance_to_measured"}
    assert set(after.attributes) == set(before.attributes) | added
    # Text formats and NumPy read the attributes in wider types than those that are written.
    assert command(target, "-o", tmp_path / "again.las", "--ratio", "1.5").status == 0
    las = laspy.read(tmp_path / "again.las")
    assert len(las.points) == 300 and np.asarray(las.synthetic).sum() == 250
    assert las.parent_index.dtype == np.uint32 and las.distance_to_measured.dtype == np.float32
    assert np.array_equal(las.parent_index[:200], after.attributes["parent_index"])
    again = upsample(after, 1.5, model=small_model())
    assert again.attributes["parent_index"].dtype == np.uint32


def test_a_wider_parent_index_of_a_las_file_is_kept(tmp_path, command):
    index = np.arange(40)[::-1].astype(np.int64)
    write_points(tmp_path / "a.las", PointCloud(positions(40), {"parent_index": index}))
    assert command(tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "b.las")
    assert las.parent_index.dtype == np.int64 and np.array_equal(las.parent_index[:40], index)
    assert las.parent_index[40:].max() < 40


def test_no_new_point_is_a_key_point_at_the_edge_of_a_flight_line_or_has_a_waveform(
    tmp_path, command
):
    flags = {"key_point": np.ones(40, np.uint8), "edge_of_flight_line": np.ones(40, np.uint8)}
    overlap = {"overlap": np.ones(40, np.uint8)}
    write_points(tmp_path / "a.las", PointCloud(positions(40), flags | overlap))
    assert command(tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2").status == 0
    las = laspy.read(tmp_path / "b.las")
    is_new = np.arange(80) >= 40
    for name in flags:
        assert np.array_equal(las[name] == 1, ~is_new)
    assert np.array_equal(las["overlap"], np.ones(80))
    # PDAL and text files have other names.
    ones = dict.fromkeys(("KeyPoint", "wavepacket_index"), flags["key_point"])
    cloud = upsample(PointCloud(positions(40), ones), 2.0, model=small_model(), only_new=True)
    assert not any(cloud.attributes[name].any() for name in ones)


def test_a_las_output_has_the_whole_extent_of_a_file_of_another_format(tmp_path, command):
    cloud = PointCloud(np.concatenate([1e-3 * positions(30), 1e3 * positions(30, seed=1)]))
    write_points(tmp_path / "in.npy", cloud)
    assert command(tmp_path / "in.npy", "-o", tmp_path / "out.laz").status == 0
    extent = np.ptp(cloud.positions)
    made = laspy.read(tmp_path / "out.laz").xyz
    assert np.abs(made[:60] - cloud.positions).max() < 1e-6 * extent
    assert np.asarray(laspy.read(tmp_path / "out.laz").synthetic).sum() == 180


def test_originals_or_new_points_can_be_left_out(tmp_path, command):
    write_random_las(tmp_path / "in.las")
    for name, options in (("all", []), ("new", ["--only-new"]), ("model", ["--no-originals"])):
        assert command(tmp_path / "in.las", "-o", tmp_path / f"{name}.las", *options).status == 0
    every, new, model = (laspy.read(tmp_path / f"{name}.las") for name in ("all", "new", "model"))
    assert np.array_equal(every.points.array[300:], new.points.array)
    assert len(model.points) == 1200 and np.asarray(model.synthetic).all()


def test_the_command_and_python_make_the_same_points(tmp_path, command, model_directory):
    write_points(tmp_path / "in.npy", PointCloud(positions(200)))
    options = ("--density", "8", "--max-distance", "0.4", "--seed", "3")
    assert command(tmp_path / "in.npy", "-o", tmp_path / "out.npy", *options).status == 0
    made = upsample(positions(200), density=8.0, max_distance=0.4, seed=3, model=model_directory)
    assert 600 < len(made) < 900
    assert np.array_equal(read_points(tmp_path / "out.npy").positions, made)


def test_the_largest_distance_holds_after_rounding_to_the_scale_of_the_file(tmp_path, command):
    # Points 5 cm apart, so that there is room for new ones.
    points = positions(600) * (0.1, 0.1, 0.02) + (4.5e5, 3.59e6, 0)
    survey_files.write_las(tmp_path / "in.las", points, scale=0.01)
    words = tmp_path / "in.las", "-o", tmp_path / "out.las", "--ratio", "3", "--max-distance"
    assert command(*words, "0.02").status == 0
    made = laspy.read(tmp_path / "out.las")
    is_new = np.asarray(made.synthetic) == 1
    assert is_new.sum() > 100
    distance = cKDTree(made.xyz[~is_new]).query(made.xyz[is_new])[0]
    assert distance.max() <= 0.02 + 1e-9
    result = command(*words, "0.005")
    assert result.status == 1 and is_one_line(result.err)
    assert "rounded by up to 0.00866" in result.err and "give a larger one" in result.err


def test_the_share_of_the_area_that_misses_a_density_is_noted(tmp_path, command):
    # Half of the area has 1 point in a square unit, which becomes 16; the rest has 6. A point
    # far away adds no area.
    rng = np.random.default_rng(0)
    sparse, dense = rng.random((800, 2)) * (20, 40), rng.random((4800, 2)) * (20, 40) + (20, 0)
    points = np.pad(np.concatenate([sparse, dense, [[1000.0, 0.0]]]), ((0, 0), (0, 1)))
    write_points(tmp_path / "in.npy", PointCloud(points))
    words = tmp_path / "in.npy", "-o", tmp_path / "out.npy"
    result = command(*words, "--density", "40", "--only-new")
    found = re.search(r"was not reached: .* at most 16, too few on (\d+)% of the area", result.out)
    assert found and abs(int(found[1]) - 50) <= 5
    assert "not reached" not in command(*words, "--density", "6", "--only-new").out


@pytest.mark.parametrize(
    ("points", "expected", "words"),
    [
        (positions(3), 12, "3 points in, 12 out"),
        (np.repeat(positions(30), 2, axis=0), 150, "60 points in (30 of them where another one "),
        (np.arange(50.0)[:, None] * (1, 2, 0.5) + 5e5, 200, "50 points in, 200 out"),
    ],
    ids=["few", "each twice", "a line"],
)
def test_degenerate_clouds_are_upsampled(points, expected, words, tmp_path, command):
    write_points(tmp_path / "in.npy", PointCloud(points))
    result = command(tmp_path / "in.npy", "-o", tmp_path / "out.laz")
    assert result == (0, ANY, "") and words in result.out
    assert len(laspy.read(tmp_path / "out.laz").points) == expected


def test_a_ratio_beyond_the_largest_needs_force(tmp_path, command, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_RATIO", 2.0)
    write_points(tmp_path / "in.npy", PointCloud(positions(20)))
    words = tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--ratio", "2.5"
    result = command(*words)
    assert result.status == 1 and is_one_line(result.err)
    assert "50 points of 20, about 5 kB; lower it, or add --force" in result.err
    assert command(*words, "--force").status == 0
    assert len(read_points(tmp_path / "out.npy")) == 50


def test_what_looks_like_degrees_is_upsampled_with_force(tmp_path, command):
    random = np.random.default_rng(0).random((40, 3))
    degrees = random * [1e-3, 1e-3, 20] + [11.3, 48.1, 400]
    write_las(tmp_path / "in.las", degrees, scale=1e-6, offset=np.zeros(3))
    words = tmp_path / "in.las", "-o", tmp_path / "out.las"
    assert "with --force" in command(*words).err
    assert command(*words, "--force", model="lidar").status == 0
    assert len(laspy.read(tmp_path / "out.las").points) == 160


def noisy(path: Path) -> laspy.LasData:
    """A survey of 300 points, of which 40 are noise, 20 withheld, and 100 vegetation."""
    write_random_las(path)
    las = laspy.read(path)
    las.classification = np.repeat([2, 7, 18, 2, 5], [140, 20, 20, 20, 100])
    las.withheld = np.repeat([0, 1, 0], [180, 20, 100])
    las.write(path)
    return las


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ((), np.r_[0:140, 200:300]),
        (("--include-noise",), np.r_[0:300]),
        (("--classes", "5,7"), np.r_[140:160, 200:300]),
        (("--classes", "2", "--include-noise"), np.r_[0:140, 180:200]),
    ],
)
def test_noise_withheld_points_and_other_classes_are_only_copied(options, taken, tmp_path, command):
    las = noisy(tmp_path / "in.las")
    result = command(tmp_path / "in.las", "-o", tmp_path / "out.las", "--ratio", "3.3", *options)
    assert result.status == 0
    rest = 300 - len(taken)
    assert f"300 points in{f' ({rest} of them not upsampled)' if rest else ''}, " in result.out
    made = laspy.read(tmp_path / "out.las")
    assert len(made.points) == rest + round(3.3 * len(taken))
    for name in las.points.array.dtype.names:
        assert np.array_equal(made.points.array[name][:300], las.points.array[name])
    assert np.isin(made.parent_index[300:], taken).all()
    # The new points equal those of a file with the selected points only.
    alone = laspy.LasData(las.header)
    alone.points = las.points[taken]
    alone.write(tmp_path / "alone.las")
    everything = (*options, "--include-noise")
    result = command(
        tmp_path / "alone.las", "-o", tmp_path / "o.las", "--ratio", "3.3", *everything
    )
    assert result.status == 0
    new = laspy.read(tmp_path / "o.las").points.array[len(taken) :]
    for name in las.points.array.dtype.names:
        assert np.array_equal(made.points.array[name][300:], new[name])
    assert np.array_equal(made.parent_index[300:], taken[new["parent_index"]])


@pytest.mark.parametrize(
    ("words", "classes", "inputs"),
    [
        ("in.las --classes 2 5", (2, 5), ["in.las"]),
        ("in.las --classes 2,5", (2, 5), ["in.las"]),
        ("in.las --classes 5 --classes 7", (5, 7), ["in.las"]),
        ("--classes 2, 5 a.las b.las", (2, 5), ["a.las", "b.las"]),
        ("a.las --classes 2 ground", (2,), ["a.las", "ground"]),
        ("in.las", None, ["in.las"]),
    ],
)
def test_files_may_follow_classes(words, classes, inputs):
    for options in (["-o", "out", *words.split()], [*words.split(), "-o", "out"]):
        expected = classes, tuple(map(Path, inputs))
        assert cli.parse(["upsample", *options]).classes_and_inputs() == expected


@pytest.mark.parametrize(
    ("values", "options", "notes"),
    [
        (
            {"classification": [2, 5]},
            (),
            ["in.las: 40% of the points are vegetation: try --model forest"],
        ),
        (
            {"classification": [7, 5]},
            (),
            ["in.las: 100% of the points are vegetation: try --model forest"],
        ),
        (
            {"number_of_returns": [1, 2]},
            (),
            ["in.las: 40% of the points are vegetation: try --model"],
        ),
        (
            {"classification": [2, 1], "number_of_returns": [2, 2]},
            (),
            ["in.las: 40% of the points are vegetation: try --model forest"],
        ),
        ({"classification": [2, 6], "number_of_returns": [2, 2]}, (), []),
        ({"classification": [2, 6]}, (), []),
        ({"number_of_returns": [1, 1]}, (), []),
        ({"classification": [2, 5]}, ("--model", "lidar"), []),
        ({"synthetic": [0, 1]}, (), ["in.las: 120 points have the synthetic flag"]),
    ],
)
def test_points_that_want_other_options_are_noted_before_the_work(
    values, options, notes, tmp_path, capfd
):
    write_random_las(tmp_path / "in.las")
    las = laspy.read(tmp_path / "in.las")
    values = {"classification": [1, 1], "number_of_returns": [1, 1], **values}
    for name, (most, rest) in values.items():
        las[name] = np.repeat([most, rest], [180, 120])
    las.write(tmp_path / "in.las")
    paths = str(tmp_path / "in.las"), "-o", str(tmp_path / "out.las")
    assert cli.main(["upsample", *paths, "--ratio", "1", *options]) == 0
    found = capfd.readouterr().err.splitlines()
    assert len(found) == len(notes)
    for line, note in zip(found, notes, strict=True):
        assert line.startswith("note: ") and note in line


def in_system(path: Path, system: str, shift: float = 0.0) -> Path:
    """Write a survey, moved by `shift` along x, in a coordinate system."""
    points = positions(100) + np.array([shift, 0, 0])
    return survey_files.write_las(path, points, scale=0.01, system=system)


def test_coordinates_that_are_no_lengths_are_refused_before_any_file_is_written(tmp_path, command):
    in_system(tmp_path / "in" / "a.las", METRES)
    refused = in_system(tmp_path / "in" / "b.las", "EPSG:4326", shift=1000)
    result = command(tmp_path / "in", "-o", tmp_path / "out")
    assert result.status == 1 and is_one_line(result.err)
    assert f"{refused}: its coordinates are in degrees" in result.err
    assert "reproject it" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("system", "option", "unit", "note"),
    [
        (METRES, "--density", " m", ""),
        (FEET, "--density", " US ft", "the files are in US ft: --density 2 is points per square "),
        (FEET, "--ratio", " US ft", ""),
        (FEET_ABOVE_METRES, "--ratio", "", "by its coordinate system, heights are in another"),
    ],
)
def test_the_summary_names_the_unit_if_it_is_known_and_a_note_what_is_unusual(
    system, option, unit, note, tmp_path, command
):
    source = in_system(tmp_path / "a.las", system)
    result = command(source, "-o", tmp_path / "out.las", option, "2")
    assert result.status == 0 and result.err.count("\n") == bool(note)
    assert note in result.err and result.err.startswith("note: " if note else "")
    assert ("21.53 points per square metre\n" in result.err) == ("density 2" in note)
    assert re.search(rf"new points at most [\d.]+{unit} from a measured one", result.out)


def test_the_summary_says_that_there_are_no_new_points(tmp_path, command):
    source = in_system(tmp_path / "a.las", METRES)
    result = command(source, "-o", tmp_path / "out.las", "--ratio", "1")
    assert "no new points" in result.out and "at most" not in result.out
    assert result.err == ""
    options = ("--ratio", "2", "--max-uncertainty", "1e-9")
    result = command(source, "-o", tmp_path / "none.las", *options, model="lidar")
    assert "no new points" in result.out
    assert "note: no new point is within --max-uncertainty 1e-09; give a larger one" in result.out


@pytest.mark.parametrize(
    ("system", "note"),
    [
        # It is not refused: there are surveys in UTM that name one by mistake.
        (GEOCENTRIC, r"a\.las: by its coordinate system, coordinates are geocentric"),
        # 4,100 km north of the equator on the map are 34.5 degrees: 1 / cos(34.5 degrees) is 1.21.
        (MERCATOR, r"a\.las: is in a Mercator projection, .* 1\.21 times those on the ground"),
        (f"{MERCATOR}+5773", r"a\.las: is in a Mercator projection, .* 1\.21 times"),
    ],
)
def test_an_unusual_system_is_noted_once(system, note, tmp_path):
    paths = [in_system(tmp_path / f"{name}.las", system) for name in "ab"]
    (found,) = check_units(paths, None, False)
    assert re.search(note, found)


def test_files_of_several_units_may_have_a_ratio_and_no_length(tmp_path, command):
    metres = in_system(tmp_path / "in" / "a.las", METRES)
    feet = in_system(tmp_path / "in" / "b.las", FEET, shift=1000)
    with pytest.raises(DataError, match=r"b\.las: is in US ft.*reproject one of them"):
        check_units([metres, feet], 3.0, False)
    words = tmp_path / "in", "-o", tmp_path / "out"
    result = command(*words, "--max-distance", "3")
    assert result.status == 1 and is_one_line(result.err) and "b.las: is in US ft" in result.err
    assert command(*words, "--ratio", "2").status == 0
    assert left_in(tmp_path / "out") == ["a.las", "b.las"]


def test_coordinates_that_float32_has_rounded_get_a_note_and_others_none(tmp_path, command):
    points = positions(300) * [0.1, 1, 1] + [0, 4.1e6, 0]
    exact, near = tmp_path / "exact.npy", tmp_path / "near.npy"
    np.save(exact, points)
    np.save(near, (points - points.mean(axis=0)).astype(np.float32))
    rounded = tmp_path / "rounded.ply"
    write_points(rounded, PointCloud(points.astype(np.float32).astype(float)))
    for path in (exact, near, rounded):
        result = command(path, "-o", tmp_path / f"out{path.suffix}", "--ratio", "2")
        assert result.status == 0
        found = "note: rounded.ply: coordinates are rounded to 0.5, coarse" in result.err
        assert found == ("float32" in result.err) == (path == rounded), result.err


def test_coordinates_of_six_digits_get_a_note_and_a_grid_none(tmp_path, command):
    """CloudCompare, Open3D and PCL write text PLY so: 4.10001e+06 for 4100014.25."""
    points = positions(300) * [0.1, 1, 1] + [0, 4.1e6, 0]
    rounded, grid = tmp_path / "rounded.xyz", tmp_path / "grid.xyz"
    np.savetxt(rounded, points, "%.6g")
    x, y = np.meshgrid(np.arange(0, 200, 10.0), 4.1e6 + np.arange(0, 200, 10.0))
    np.savetxt(grid, np.column_stack([x.ravel(), y.ravel(), np.sin(x.ravel())]), "%.6g")
    for path in (rounded, grid):
        result = command(path, "-o", tmp_path / "out.xyz", "--ratio", "2")
        assert result.status == 0
        found = "note: rounded.xyz: coordinates are rounded to 10, coarse" in result.err
        assert found == ("six digits" in result.err) == (path == rounded), result.err
