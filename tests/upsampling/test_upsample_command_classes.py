"""`pointup upsample` of chosen classes, noise, and tiles without points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laspy
import numpy as np
import pytest
from survey_tiles import survey, write_tiles
from typed import Result, is_one_line, left_in, positions, write_las

from pointup.cli import main as cli
from pointup.io.files import PointCloud, write_points


def noisy(path: Path) -> laspy.LasData:
    """A survey of 300 points, of which 40 are noise, 20 withheld, and 100 vegetation."""
    write_las(path)
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
        (("--classes", "5", "--classes", "7"), np.r_[140:160, 200:300]),
        (("--classes", "2", "--include-noise"), np.r_[0:140, 180:200]),
    ],
)
def test_noise_withheld_points_and_other_classes_are_only_copied(
    options: tuple[str, ...],
    taken: np.ndarray,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
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


@pytest.mark.parametrize("classes", [("2", "5"), ("2,5",), ("2,", "5")])
def test_files_may_follow_classes(
    classes: tuple[str, ...], tmp_path: Path, command: Callable[..., Result]
) -> None:
    noisy(tmp_path / "in.las")
    for arguments in (
        (tmp_path / "in.las", "-o", tmp_path / "after.las", "--classes", *classes),
        ("-o", tmp_path / "before.las", "--classes", *classes, tmp_path / "in.las"),
        ("--classes", *classes, tmp_path / "in.las", "-o", tmp_path / "between.las"),
    ):
        assert command(*arguments, "--ratio", "2").status == 0
    made = [(tmp_path / f"{name}.las").read_bytes() for name in ("after", "before", "between")]
    assert made[0] == made[1] == made[2]
    # 240 points of classes 2 and 5 are upsampled.
    assert len(laspy.read(tmp_path / "after.las").points) == 300 + 240


@pytest.mark.parametrize("options", [(), ("--separate",), ("--only-new",)])
def test_a_tile_without_points_is_copied_and_no_failure(
    options: tuple[str, ...], tmp_path: Path, command: Callable[..., Result]
) -> None:
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
    expected = 400 if options == ("--only-new",) else 1000
    assert sum(len(laspy.read(path).points) for path in others) == expected
    # Alone, there is nothing to do.
    result = command(empty, "-o", tmp_path / "alone.laz")
    assert result.status == 1 and is_one_line(result.err) and "no points in it" in result.err


@pytest.fixture
def sparse_tiles(tmp_path: Path) -> Path:
    """A whole tile of ground, and far from it one of 1 point, one of noise, and one of class 6."""
    folder = tmp_path / "tiles"
    folder.mkdir()
    numbers = {"whole": (300, 2), "single": (1, 2), "noise": (50, 7), "roof": (50, 6)}
    for i, (name, (number, classification)) in enumerate(numbers.items()):
        write_las(folder / f"{name}.las", number)
        las = laspy.read(folder / f"{name}.las")
        las.x = las.x + 1000 * i
        las.classification = np.full(number, classification)
        las.write(folder / f"{name}.las")
    return folder


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ((), {"single": 1, "noise": 50}),
        (("--separate",), {"single": 1, "noise": 50}),
        (("--classes", "6"), {"single": 1, "noise": 50, "whole": 300}),
    ],
)
def test_tiles_with_too_few_points_to_upsample_are_copied_and_no_failure(
    options: tuple[str, ...],
    copied: dict[str, int],
    sparse_tiles: Path,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
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
    option: str, sparse_tiles: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
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


@pytest.mark.parametrize(
    ("name", "classes", "message"),
    [
        ("in.las", ("9",), "has 0 of 300 points without noise, withheld points and other classes"),
        ("in.npy", ("2",), "no attribute `classification`"),
        ("in.las", ("256",), "between 0 and 255"),
        ("in.las", ("ground", "2"), "--classes ground 2: give numbers, as in --classes 2,3"),
    ],
)
def test_classes_that_are_absent_or_no_numbers_are_reported(
    name: str,
    classes: tuple[str, ...],
    message: str,
    tmp_path: Path,
    command: Callable[..., Result],
) -> None:
    noisy(tmp_path / "in.las")
    write_points(tmp_path / "in.npy", PointCloud(positions(20)))
    result = command(tmp_path / name, "-o", tmp_path / "out.las", "--classes", *classes)
    assert result.status == 1 and is_one_line(result.err) and message in result.err
    assert not (tmp_path / "out.las").exists()


@pytest.mark.parametrize(
    ("classes", "returns", "options", "named"),
    [
        ([2, 5], 1, (), "40% of the points"),
        ([1, 1], 2, (), "40% of the points"),
        ([1, 1], 1, (), None),
        ([2, 5], 1, ("--model", "lidar"), None),
        ([7, 5], 1, (), "100% of the points"),
    ],
)
def test_the_model_for_vegetation_is_named_where_there_is_much_of_it(
    classes: list[int],
    returns: int,
    options: tuple[str, ...],
    named: str | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_las(tmp_path / "in.las")
    las = laspy.read(tmp_path / "in.las")
    las.classification = np.repeat(classes, [180, 120])
    las.number_of_returns = np.repeat([1, returns], [180, 120])
    las.write(tmp_path / "in.las")
    paths = str(tmp_path / "in.las"), "-o", str(tmp_path / "out.las")
    assert cli.main(["upsample", *paths, "--ratio", "2", *options]) == 0
    notes = [line for line in capfd.readouterr().err.splitlines() if "--model forest" in line]
    assert notes == ([f"note: {named} are vegetation: try --model forest"] if named else [])


def test_points_of_an_earlier_upsampling_are_counted_in_a_note(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    write_las(tmp_path / "in.las")
    result = command(tmp_path / "in.las", "-o", tmp_path / "once.las", "--ratio", "2")
    assert "synthetic" not in result.out
    result = command(tmp_path / "once.las", "-o", tmp_path / "twice.las", "--ratio", "2")
    assert result.status == 0
    assert f"note: {tmp_path / 'once.las'}: 300 points have the synthetic flag" in result.err
