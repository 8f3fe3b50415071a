"""The files that commands find in folders: at any depth, through links, without lists and notes."""

from __future__ import annotations

from pathlib import Path

import pytest
from survey_files import left_in, write_random_las

from pointup.cli.input_files import find_inputs
from pointup.cli.main import command_class, main

EXTENSIONS = (".las", ".laz", ".xyz", ".txt", ".csv")


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path):
    disk, survey = tmp_path / "disk", tmp_path / "survey"
    for folder in (disk / "north", survey / "south"):
        folder.mkdir(parents=True)
        (folder / "a.las").touch()
    (survey / "linked").symlink_to(disk)
    (survey / "a_again").symlink_to(survey / "south")
    (survey / "south" / "loop").symlink_to(survey)
    found = [survey / "linked" / "north" / "a.las", survey / "south" / "a.las"]
    assert find_inputs([survey], EXTENSIONS) == found


def test_broken_links_are_reported_as_missing_files(tmp_path, command):
    folder = tmp_path / "tiles"
    folder.mkdir()
    write_random_las(folder / "whole.las")
    (folder / "moved.las").symlink_to(tmp_path / "elsewhere.las")
    (folder / "other_disk").symlink_to(tmp_path / "unmounted")
    (folder / "circle.las").symlink_to(folder / "circle.las")
    result = command(folder, "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 1 and left_in(tmp_path / "out") == ["whole.las"]
    for name in ("moved.las", "other_disk", "circle.las"):
        assert f"{folder / name}: no such file" in result.err
    assert result.err.count("\n") == 3


@pytest.fixture
def delivery(tmp_path) -> Path:
    """Two tiles, with a list of the tiles, control points, and a text."""
    folder = tmp_path / "delivery"
    (folder / "las").mkdir(parents=True)
    write_random_las(folder / "las" / "tile.laz", 400)
    (folder / "index.csv").write_text("tile,points\ntile.laz,400\n")
    (folder / "gcp.csv").write_text("x,y,z\n500001,4100001,3\n500002,4100003,4\n500003,4100002,5\n")
    (folder / "readme.txt").write_text("Coordinates are in UTM 32N.\n")
    return folder


def test_text_files_beside_las_files_are_left_out_with_a_note(delivery, tmp_path, command):
    result = command(delivery, "-o", tmp_path / "out", "--ratio", "2")
    assert result.status == 0 and result.err.count("\n") == 1
    assert "gcp.csv, index.csv, readme.txt. To take one, give it by name" in result.err
    assert left_in(tmp_path / "out") == ["las"]
    # A file that is named is taken, and so is one of a folder without LAS files.
    result = command(delivery, delivery / "gcp.csv", "-o", tmp_path / "both", "--ratio", "2")
    assert result.status == 0 and left_in(tmp_path / "both") == ["gcp.csv", "las"]
    for path in (delivery / "las").iterdir():
        path.rename(tmp_path / path.name)
    names = ["gcp.csv", "index.csv", "readme.txt"]
    assert find_inputs([delivery], EXTENSIONS) == [delivery / name for name in names]


def test_pairs_are_not_made_of_the_control_points_beside_a_survey(delivery, tmp_path, capsys):
    out = tmp_path / "pairs"
    words = ("--ratio", 2, "--tile", 5, "--min-points", 4, "--num-workers", 1, "-o", out)
    assert main(["prepare", "thin", str(delivery), *map(str, words)]) == 0
    error = capsys.readouterr().err
    assert "text files in it are left out" in error
    # Files that cannot be read, as the other two, would be named here.
    assert f"left out: {delivery}" not in error


@pytest.mark.parametrize(
    "words",
    ["upsample {} -o out.las", "view here.las --reference {} -o out.html", "prepare thin {} -o out",
     "prepare pairs --source here.las --target {} -o out", "report here.las {} -o out.html"],
)  # fmt: skip
def test_a_missing_input_is_told_before_a_command_starts(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here.las").touch()
    started: list[object] = []
    monkeypatch.setattr(
        command_class(words.split()[0]), "run", lambda self: bool(started.append(self))
    )
    assert main(words.format("missing.las").split()) == 1
    assert "missing.las: no such file or folder" in capsys.readouterr().err
    assert main(words.format("here.las").split()) == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    "words",
    ["inspect missing", "evaluate pairs missing", "train --run run --data here missing --lr 0.1"],
)
def test_a_missing_dataset_is_told_before_a_command_starts(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    monkeypatch.setattr(command_class(words.split()[0]), "run", None)
    monkeypatch.setattr("pointup.cli.train.spec_from_file_location", None)
    assert main(words.split()) == 1
    assert "missing: no such directory" in capsys.readouterr().err
