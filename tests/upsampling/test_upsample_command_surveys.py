"""`pointup upsample` of several files: those that border on each other are one survey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import laspy
import numpy as np
import pytest
from forked import run_forked
from survey_tiles import made_of, ordered, survey, write_tiles
from typed import Result, digest, is_one_line, positions, write_scaled, write_two_tiles

from pointup.io.files import PointCloud, read_points, write_points
from pointup.model.upsampler import Upsampler


@pytest.mark.parametrize(
    "options",
    [
        ("--ratio", "2.7"),
        ("--ratio", "9", "--no-originals"),
        ("--ratio", "2", "--oversampling", "2"),
    ],
)
def test_a_survey_in_tiles_gives_the_points_of_the_survey_in_one_file(
    options: tuple[str, ...], tmp_path: Path, command: Callable[..., Result]
) -> None:
    las = survey(1500)
    las.write(tmp_path / "whole.laz")
    write_tiles(las, tmp_path / "tiles", side=3)
    whole = command(tmp_path / "whole.laz", "-o", tmp_path / "out.laz", *options)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out" / "deep", *options)
    assert result.status == whole.status == 0 and result.err == ""
    assert result.out.count("points in") == 10
    if "--no-originals" in options:
        whole_file = laspy.read(tmp_path / "out.laz")
        files = [laspy.read(path) for path in sorted((tmp_path / "out" / "deep").rglob("*.laz"))]
        expected = ordered([whole_file.xyz])
        assert len(expected) == 9 * 1300
        assert np.array_equal(ordered([file.xyz for file in files]), expected)
        return
    tiles = sorted((tmp_path / "tiles").rglob("*.laz"))
    found = [
        made_of(tmp_path / "out" / "deep" / tile.relative_to(tmp_path / "tiles"), tile)
        for tile in tiles
    ]
    assert len(found) == 9
    expected = ordered([made_of(tmp_path / "out.laz", tmp_path / "whole.laz")])
    # 200 of the points lie where others do.
    assert len(expected) == round(1300 * float(options[1])) - 1300
    assert np.array_equal(ordered(found), expected)


def test_processes_divide_the_files_of_a_survey(
    tmp_path: Path,
    command: Callable[..., Result],
    model_directory: Path,
) -> None:
    write_tiles(survey(), tmp_path / "tiles")
    (tmp_path / "tiles" / "0" / "2.laz").write_bytes(b"no survey")
    assert command(tmp_path / "tiles", "-o", tmp_path / "one", "--ratio", "2").status == 1
    words = (tmp_path / "tiles", "-o", tmp_path / "two", "--ratio", "2", "--model", model_directory)
    result = run_forked("pointup.cli.main,pointup.cli.upsample.files", "upsample", *words)
    assert result.returncode == 1
    assert (
        result.stdout.count(
            "survey of 4 files: 2,000 points in (200 of them where another one is), 1,800 new"
        )
        == 1
    )
    assert result.stdout.count("points in") == 5 and result.stderr.count("pointup: error") == 1
    for file in (tmp_path / "one").rglob("*.laz"):
        assert digest(file) == digest(tmp_path / "two" / file.relative_to(tmp_path / "one"))


def test_distant_files_and_separate_ones_are_different_surveys(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_tiles(survey(1200), tmp_path / "tiles")
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


def test_shapes_around_the_origin_are_not_mixed(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    (tmp_path / "shapes").mkdir()
    for number in range(3):
        points = np.random.default_rng(number).normal(size=(100, 3)) * (1, 1 + number, 0.5)
        write_points(tmp_path / "shapes" / f"{number}.xyz", PointCloud(points))
    assert command(tmp_path / "shapes", "-o", tmp_path / "out").status == 0
    for number in range(3):
        one = tmp_path / "shapes" / f"{number}.xyz"
        assert command(one, "-o", tmp_path / "one.xyz").status == 0
        assert digest(tmp_path / "out" / one.name) == digest(tmp_path / "one.xyz")


def test_a_tile_without_a_neighbour_of_its_kind_is_reported(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_tiles(survey(1500), tmp_path / "tiles")
    other = tmp_path / "tiles" / "1" / "1.laz"
    las = laspy.read(other)
    las.header.vlrs.append(laspy.VLR("LASF_Projection", 2112, "", b'LOCAL_CS["feet"]'))
    las.write(other)
    result = command(tmp_path / "tiles", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0
    assert result.err.count("\n") == 1 and "1.laz" in result.err
    assert "differ in coordinate system" in result.err and "survey of 3 files" in result.out


def test_a_damaged_tile_is_left_out_and_reported(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
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


def test_two_files_with_the_same_output_are_refused(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_points(tmp_path / folder / "in.npy", PointCloud(positions(20)))
    result = command(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert result.status == 1 and is_one_line(result.err) and "both become" in result.err
    assert not (tmp_path / "out").exists()


def test_what_an_earlier_run_wrote_into_a_folder_is_not_upsampled(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_points(tmp_path / "in" / "deep" / "a.npy", PointCloud(positions(50)))
    for _ in range(2):
        assert command(tmp_path / "in", "-o", tmp_path / "in" / "out", "--redo").status == 0
    out = tmp_path / "in" / "out"
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    records = [".upsampled", ".upsampled/deep", ".upsampled/deep/a.npy.json"]
    assert found == [*records, "deep", "deep/a.npy"]
    assert len(read_points(tmp_path / "in" / "out" / "deep" / "a.npy")) == 200


def test_a_second_call_with_another_configuration_of_the_model_writes_again(
    tmp_path: Path, model_directory: Path, command: Callable[..., Result]
) -> None:
    write_tiles(survey(400), tmp_path / "in")
    model = Upsampler.from_pretrained(model_directory)
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    for exponent, skipped in ((0.0, 0), (0.0, 4), (0.7, 0)):
        model.config = replace(model.config, density_exponent=exponent)
        model.save_pretrained(tmp_path / "model")
        result = command(*words, model=tmp_path / "model")
        assert ("4 skipped" in result.out) == bool(skipped)
        assert ("4 files written" in result.out) == (not skipped)


def test_tiles_of_other_scales_of_an_extra_dimension_are_upsampled_apart(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    (tmp_path / "in").mkdir()
    write_scaled(tmp_path / "in" / "a.las", "uint16", 0.01, np.full(400, 10_000))
    write_scaled(tmp_path / "in" / "b.las", "uint16", 0.1, np.full(400, 30_000), shift=10.0)
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and "differ in attributes" in result.err
    assert set(np.array(laspy.read(tmp_path / "out" / "a.las")["value"])) == {100.0}


def test_a_header_without_an_extent_does_not_stop_the_others(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    content = write_two_tiles(tmp_path / "in")
    content[179:187], content[187:195] = content[187:195], content[179:187]
    (tmp_path / "in" / "b.las").write_bytes(content)
    bounds = ("--bounds", "500000", "4100000", "500010", "4100010")
    result = command(tmp_path / "in", "-o", tmp_path / "out", "--separate", *bounds)
    assert result.status == 1 and "b.las: its header gives x" in result.err
    assert (tmp_path / "out" / "a.las").exists()
