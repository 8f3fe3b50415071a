"""Points that `pointup prepare pairs` and `thin` leave out: repeated ones, ground of one survey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import survey_files
from datasets import load_from_disk

from pointup.cli.main import main
from pointup.datasets import regions

CORNER = np.array([500_000.0, 4_000_000.0, 100.0])
FIVE_BLOCKS_EACH_WAY = ["--tile", "5", "--block", "2", "--min-points", "4", "--strip", "0"]


def survey(number: int, seed: int, width: float = 50.0) -> np.ndarray:
    """Distinct points on a lattice of 1 cm, off its borders."""
    points = 0.01 + np.random.default_rng(seed).random((number, 3)) * (width - 0.02)
    return CORNER + np.unique(points.round(2), axis=0)


def write_las(path: Path, points: np.ndarray, offset: np.ndarray) -> Path:
    return survey_files.write_las(path, points, point_format=0, scale=0.01, offset=offset)


def prepare(*words: object) -> int:
    return main(["prepare", *map(str, words)])


def points_of(folder: Path, side: str) -> np.ndarray:
    rows = [row for split in load_from_disk(folder).values() for row in split]
    return np.concatenate([np.reshape(row[side], (-1, 3)) + row["origin"] for row in rows])


def rows(points: np.ndarray) -> set[tuple[float, ...]]:
    return set(map(tuple, points.round(2).tolist()))


@pytest.mark.parametrize("is_large", [False, True])
def test_pairs_have_no_points_where_only_one_survey_was_flown(
    is_large, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(regions, "LARGE_BYTES", 0 if is_large else 10**9)
    sparse, plot = survey(6_000, 0), survey(20_000, 1)
    plot = plot[np.hypot(*(plot - CORNER)[:, :2].T - 25) < 18]
    files = [write_las(tmp_path / f"{i}.las", p, CORNER) for i, p in enumerate((sparse, plot))]
    out = tmp_path / "pairs"
    words = ["pairs", "--source", files[0], "--target", files[1], *FIVE_BLOCKS_EACH_WAY]
    assert prepare(*words, "-o", out, "--num-workers", 1) == 0
    away = np.hypot(*(points_of(out, "source") - CORNER)[:, :2].T - 25)
    # A cell is about 0.7 m wide: two point spacings of the plot.
    assert away.max() < 18 + 1.5
    near = np.hypot(*(sparse - CORNER)[:, :2].T - 25) < 15
    assert rows(sparse[near]) <= rows(points_of(out, "source"))
    assert "on ground that only one survey covers" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["own_offsets", "one_file"])
def test_a_point_that_is_in_the_files_twice_is_in_one_side_of_one_pair(how, tmp_path, capsys):
    points = survey(8_000, 0, width=20.0)
    folder = tmp_path / "survey"
    folder.mkdir()
    x = points[:, 0] - CORNER[0]
    if how == "own_offsets":
        parts = [points[x < 12], points[x > 7.63]]
        # The lower corner of each file, as some programs write them: the last bits differ.
        for number, part in enumerate(parts):
            write_las(folder / f"{number}.las", part, part.min(axis=0))
        num_repeated = int(((x > 7.63) & (x < 12)).sum())
    else:
        write_las(folder / "merged.las", np.concatenate([points, points[::2]]), CORNER)
        num_repeated = len(points[::2])
    out = tmp_path / "pairs"
    assert prepare("thin", folder, *FIVE_BLOCKS_EACH_WAY, "--validation", 0, "-o", out) == 0
    source, target = points_of(out, "source"), points_of(out, "target")
    assert len(source) + len(target) == len(points)
    assert rows(source) | rows(target) == rows(points)
    assert f"left out {num_repeated:,} points that are at the position" in capsys.readouterr().err


def test_separate_files_that_overlap_are_named(tmp_path, capsys):
    for name, shift in (("a", 0), ("b", 20), ("c", 70)):
        write_las(tmp_path / f"{name}.las", survey(4_000, shift) + np.array([shift, 0, 0]), CORNER)
    files = [tmp_path / f"{name}.las" for name in "abc"]
    for number, (inputs, is_named) in enumerate(((files, True), (files[1:], False))):
        words = ["thin", *inputs, "--separate", "--tile", 20, "-o", tmp_path / f"out{number}"]
        assert prepare(*words, "--num-workers", 1) == 0
        assert ("note: a and b overlap" in capsys.readouterr().err) == is_named
    assert main(["inspect", str(tmp_path / "out0")]) == 0
    assert "from every training point of the same file" in capsys.readouterr().out


def test_a_file_whose_name_is_not_utf8_is_prepared_and_inspected(tmp_path, capsys):
    path = tmp_path / "caf\udce9.las"
    try:
        write_las(path, survey(4_000, 0), CORNER)
    except OSError:
        pytest.skip("the file system has names in UTF-8 only")
    assert prepare("thin", path, "-o", tmp_path / "out", "--num-workers", 1) == 0
    names = load_from_disk(tmp_path / "out")["train"]["name"]
    assert names and all(name.startswith("caf\\xe9_") for name in names)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "caf\\xe9.las" in capsys.readouterr().out


def test_a_large_survey_that_leaves_no_pairs_is_tried_again_with_other_options(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(regions, "LARGE_BYTES", 0)
    path = write_las(tmp_path / "plot.las", survey(4_000, 0, width=40.0), CORNER)
    words = ["thin", path, "--tile", 20, "--num-workers", 1, "-o", tmp_path / "out", "--strip"]
    assert prepare(*words, 100) == 1
    assert "no training pairs are left; try a smaller --tile, --strip" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    assert prepare(*words, 2) == 0


def test_control_characters_in_names_are_shown_escaped(tmp_path, capsys):
    name = "a\x1b[2J\rb"
    np.savetxt(file := tmp_path / f"{name}.xyz", survey(3_000, 0))
    np.savetxt(tmp_path / f"bad{name}.xyz", [[1, 2]])
    out, page = tmp_path / f"pairs{name}", tmp_path / f"{name}.html"
    # Standard output and error each show a name: of the dataset, of files left out, in errors.
    for words, status in (
        (("prepare", "thin", tmp_path, "--tile", 20, "-o", out), 1),
        (("inspect", out), 0),
        (("view", file, "-o", page), 0),
        (("prepare", "thin", tmp_path / f"no{name}"), 2),
        (("prepare", "thin", tmp_path / f"no{name}", "-o", tmp_path / "x"), 1),
    ):
        assert main_status([*map(str, words)]) == status, words
        shown = "".join(capsys.readouterr())
        assert not {"\x1b", "\r"} & set(shown) and (r"\x1b[2J\rb" in shown or status == 2), words


def main_status(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)
