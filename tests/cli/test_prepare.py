from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk

from pointup import processes
from pointup.cli.main import main
from pointup.cli.prepare import new_dataset as newdataset
from pointup.datasets import pair_writer

OFFSET = np.array([500_000.0, 4_000_000.0, 100.0])
TETRAHEDRON = "OFF\n4 4 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"


def ground(number: int, seed: int, width: float = 80.0) -> np.ndarray:
    points = np.random.default_rng(seed).random((number, 3)) * [width, width, 3]
    return OFFSET + points.round(3)


def run(*arguments: object) -> int:
    return main(["prepare", *(str(argument) for argument in arguments)])


def read(path: Path, split: str) -> dict[str, dict[str, Any]]:
    """The pairs of a split by name; points are sorted, in the coordinates of the files."""
    pairs = {}
    for row in load_from_disk(path).get(split, ()):
        for side in ("source", "target"):
            points = (np.reshape(row[side], (-1, 3)) + row["origin"]).round(3)
            row[side] = points[np.lexsort(points.T)]
        pairs[str(row["name"])] = dict(row)
    return pairs


def both(path: Path) -> dict[str, dict[str, Any]]:
    return read(path, "train") | read(path, "validation")


def same(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name][side], other[name][side])
        for name in one
        for side in ("source", "target")
    )


def write_surveys(folder: Path) -> Path:
    """sparse/ in two overlapping files, dense/ in three, and each as one file."""
    sparse, dense = ground(4_000, 0), ground(12_000, 1)
    east = sparse[:, 0] > OFFSET[0] + 33
    parts = {"sparse/a": sparse[east], "sparse/b": sparse[~east]}
    parts |= {f"dense/{i}": dense[i::3] for i in range(3)}
    parts |= {"sparse_in_one": sparse, "dense_in_one": dense}
    for name, points in parts.items():
        path = folder / f"{name}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, points)
    return folder


@pytest.fixture
def surveys(tmp_path) -> Path:
    return write_surveys(tmp_path)


def test_pairs_are_tiles_of_both_surveys(surveys):
    files = [surveys / f"{name}_in_one.npy" for name in ("sparse", "dense")]
    out = surveys / "out"
    options = ["--source", files[0], "--target", files[1], "--tile", 16, "--strip", 0]
    assert run("pairs", *options, "-o", out) == 0
    sparse, dense = (np.load(file) for file in files)
    pairs = both(out)
    assert len(pairs) == 25
    for name, pair in pairs.items():
        corner = 16 * np.array([int(number) for number in name.split("_")[-2:]])
        for side, survey in (("source", sparse), ("target", dense)):
            inside = ((survey[:, :2] >= corner) & (survey[:, :2] < corner + 16)).all(axis=1)
            expected = survey[inside]
            np.testing.assert_array_equal(pair[side], expected[np.lexsort(expected.T)].round(3))
        assert pair["vertical"]


def test_pairs_do_not_depend_on_how_a_survey_is_split_into_files(surveys):
    options = ["--tile", 16, "-o"]
    folders = ["--source", surveys / "sparse", "--target", surveys / "dense"]
    one = ["--source", surveys / "sparse_in_one.npy", "--target", surveys / "dense_in_one.npy"]
    assert run("pairs", *folders, *options, surveys / "x") == 0
    assert run("pairs", *one, *options, surveys / "y") == 0
    renamed = {name.replace("dense_in_one", "tile"): p for name, p in both(surveys / "y").items()}
    assert same(both(surveys / "x"), renamed)


def test_separate_surveys_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", ground(2_000, ord(name), width=30))
    options = ["--tile", 15, "--min-points", 10, "--strip", 0, "-o"]
    inputs = [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert run("thin", *inputs, *options, tmp_path / "one") == 0
    assert run("thin", *inputs, "--separate", *options, tmp_path / "two") == 0
    num_tiles = len(both(tmp_path / "one"))
    names = [name.split("_")[0] for name in both(tmp_path / "two")]
    assert names.count("a") == names.count("b") == num_tiles


@pytest.fixture
def shapes(tmp_path) -> Path:
    """Two folders of the same shapes, a to e, at places of their own: coarse/ and fine/more/."""
    (tmp_path / "coarse").mkdir()
    (tmp_path / "fine" / "more").mkdir(parents=True)
    for number, name in enumerate("abcde"):
        points = ground(400, number, width=9) + np.array([0, 0, 50 * number])
        np.save(tmp_path / "coarse" / f"{name}.npy", points[::4])
        np.savetxt(tmp_path / "fine" / "more" / f"{name}.xyz", points)
    return tmp_path


def separate_pairs(folder: Path, *options: object) -> int:
    sides = ("--source", folder / "coarse", "--target", folder / "fine" / "more")
    sizes = ("--tile", 1e4, "--min-points", 4, "--strip", 0)
    return run("pairs", *sides, "--separate", *sizes, "-o", folder / "out", *options)


def test_separate_files_are_paired_by_their_names(shapes):
    # With a sixth name the order of both sides would differ.
    assert separate_pairs(shapes) == 0
    pairs = both(shapes / "out")
    assert sorted(name.split("_")[0] for name in pairs) == list("abcde")
    for name, pair in pairs.items():
        middle = [np.round((pair[side][:, 2].mean() - 100) / 50) for side in ("source", "target")]
        assert middle[0] == middle[1], name


def test_shapes_that_the_borders_of_tiles_cut_are_noted(shapes, capsys):
    note = "note: a and others are smaller than a tile, and are cut at multiples of 10"
    assert separate_pairs(shapes) == 0
    assert "smaller than a tile" not in capsys.readouterr().err
    for path in (*shapes.glob("coarse/*.npy"), *shapes.glob("fine/more/*.xyz")):
        points = np.load(path) if path.suffix == ".npy" else np.loadtxt(path)
        centred = points - points.mean(axis=0)
        np.save(path, centred) if path.suffix == ".npy" else np.savetxt(path, centred)
    assert separate_pairs(shapes, "--tile", 10, "--overwrite") == 0
    assert note in capsys.readouterr().err


def test_whole_clouds_are_paired_by_their_names_without_tiles(shapes, capsys):
    sides = ("--source", shapes / "coarse", "--target", shapes / "fine" / "more")
    options = ("--validation", 0.2, "-o", shapes / "whole")
    twice = np.load(shapes / "coarse" / "a.npy")
    np.save(shapes / "coarse" / "a.npy", np.concatenate([twice, twice[:5]]))
    assert run("clouds", *sides, *options) == 0
    pairs = both(shapes / "whole")
    assert len(read(shapes / "whole", "validation")) == 1
    assert sorted(pairs) == list("abcde")
    for name, pair in pairs.items():
        once = np.load(shapes / "coarse" / f"{name}.npy")[: len(twice)]
        dense = np.loadtxt(shapes / "fine" / "more" / f"{name}.xyz")
        np.testing.assert_allclose(pair["source"], once[np.lexsort(once.T)], atol=1e-3)
        np.testing.assert_allclose(pair["target"], dense[np.lexsort(dense.T)], atol=1e-3)
        assert not pair["vertical"]
    printed = capsys.readouterr()
    assert "--initial-model shapes" in printed.out
    assert "note: left out 5 points that are at the position of another point" in printed.err
    (shapes / "coarse" / "b.npy").unlink()
    assert run("clouds", *sides, *options, "--overwrite") == 1
    assert "1 of 5 names are on one side only" in capsys.readouterr().err
    np.save(shapes / "coarse" / "b.npy", np.zeros((9, 3)))
    assert run("clouds", *sides, *options, "--overwrite") == 1
    assert "left out: " in (message := capsys.readouterr().err)
    assert "b.npy: has 1 points; at least 4 are needed" in message
    assert len(both(shapes / "whole")) == 4


def test_separate_files_that_are_read_as_one_survey_are_noted(shapes, capsys):
    sides = ("--source", shapes / "coarse", "--target", shapes / "fine", "--tile", 1e4)
    note = "note: 5 files of each side have the same names, and nearly the same place: they become"
    assert run("pairs", *sides, "-o", shapes / "out") == 0
    assert note in capsys.readouterr().err
    # Files side by side are those of one survey.
    for number, name in enumerate("abcde"):
        for side, suffix in (("coarse", "npy"), ("fine", "npy")):
            points = ground(200, 0, width=9) + np.array([9 * number, 0, 0])
            np.save(shapes / side / f"{name}.{suffix}", points)
    assert run("pairs", *sides, "-o", shapes / "out", "--overwrite") == 0
    assert "same names" not in capsys.readouterr().err


def test_names_without_a_partner_are_listed_and_pair_in_order_only_on_request(shapes, capsys):
    (shapes / "coarse" / "b.npy").unlink()
    (shapes / "fine" / "more" / "d.xyz").unlink()
    assert separate_pairs(shapes) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and not (shapes / "out").exists()
    for text in ("2 of 5 names", "fine/more/b.xyz", "coarse/d.npy", "with --by-order"):
        assert text in message
    assert separate_pairs(shapes, "--by-order") == 0
    assert sorted(name.split("_")[0] for name in both(shapes / "out")) == list("abce")
    (shapes / "coarse" / "a.npy").unlink()
    assert separate_pairs(shapes, "--by-order", "--overwrite") == 1
    assert "--source has 3 files and --target 4" in capsys.readouterr().err


def test_files_of_one_name_on_one_side_and_an_order_of_no_pairs_are_refused(shapes, capsys):
    np.savetxt(shapes / "coarse" / "a.txt", np.eye(3))
    assert separate_pairs(shapes) == 1
    assert "a.npy and" in (message := capsys.readouterr().err) and "same name" in message
    sides = ("--source", shapes / "coarse", "--target", shapes / "fine")
    assert run("pairs", *sides, "--by-order", "-o", shapes / "out") == 1
    assert "add --separate" in capsys.readouterr().err


def test_validation_takes_whole_blocks(surveys):
    dense, out = surveys / "dense_in_one.npy", surveys / "out"
    options = ["--tile", 5, "--min-points", 2, "--block", 2, "--validation", 0.2, "--strip", 1]
    assert run("thin", dense, *options, "-o", out) == 0

    def blocks(split: str) -> list[tuple[int, ...]]:
        return [tuple(int(n) // 2 for n in name.split("_")[-2:]) for name in read(out, split)]

    train, validation = blocks("train"), blocks("validation")
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / len(train + validation) < 0.3


def test_thinned_pairs_have_the_ratio_and_share_no_point(surveys):
    dense = surveys / "dense_in_one.npy"
    assert run("thin", dense, "--ratio", 3, "--tile", 20, "-o", surveys / "out") == 0
    for pair in both(surveys / "out").values():
        assert len(pair["target"]) == pytest.approx(3 * len(pair["source"]), abs=4)
        assert not set(map(tuple, pair["source"])) & set(map(tuple, pair["target"]))


def test_a_bad_file_among_good_ones_is_named_and_left_out(surveys, capsys):
    bad = surveys / "dense" / "bad.laz"
    bad.write_bytes(b"no LAZ at all")
    assert run("thin", surveys / "dense", "--tile", 20, "-o", surveys / "out") == 1
    captured = capsys.readouterr()
    assert f"left out: {bad}" in captured.err
    assert "next: accelerate launch --config_file" in captured.out
    assert len(both(surveys / "out")) == 16
    info = json.loads((surveys / "out" / "pointup.json").read_text())
    assert str(bad) in info["left_out"][0]


def assert_nothing_is_left(folder: Path, before: set[Path]) -> None:
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["thin", "bad.laz"], "bad.laz"),
        (["thin", "missing.laz"], "missing.laz: no such file"),
        (["thin", "empty"], "empty: no files in it"),
        (["thin"], "no input"),
        (["thin", "far.npy", "--tile", "0.001"], "try a larger --tile"),
        (
            ["pairs", "--source", "far.npy", "--target", "near.npy"],
            "are the coordinate systems the same",
        ),
        (["meshes", "bad.off"], "bad.off"),
        (["h5", "bad.h5"], "bad.h5"),
        (["thin", "near.npy", "--validation", "1.5"], "--validation 1.5"),
    ],
)
def test_what_gives_no_pairs_is_one_line_and_leaves_nothing(
    arguments, reason, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    np.save("near.npy", ground(500, 0))
    np.save("far.npy", ground(500, 0) + 1000)
    Path("empty").mkdir()
    for name in ("bad.laz", "bad.off", "bad.h5"):
        Path(name).write_text("hello")
    before = set(tmp_path.iterdir())
    assert run(*arguments, "-o", "out") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error
    assert_nothing_is_left(tmp_path, before)


def test_a_dataset_is_replaced_only_on_request(surveys, capsys):
    out, dense = surveys / "out", surveys / "dense_in_one.npy"
    assert run("thin", dense, "--tile", 20, "-o", out) == 0
    assert run("thin", dense, "--tile", 40, "-o", out) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert len(both(out)) == 16
    assert run("thin", dense, "--tile", 40, "-o", out, "--overwrite") == 0
    assert len(both(out)) < 16


def test_other_files_are_never_replaced(surveys):
    keep = surveys / "home"
    keep.mkdir()
    (keep / "thesis.txt").write_text("years of work")
    assert run("thin", surveys / "dense", "-o", keep, "--overwrite") == 1
    assert (keep / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("folder", [".", "..", "/proc"])
def test_a_folder_that_can_not_be_replaced_is_refused_before_the_work(
    folder, surveys, monkeypatch, capsys
):
    (surveys / "here").mkdir()
    monkeypatch.chdir(surveys / "here")
    monkeypatch.setattr(newdataset, "call_each", None)
    assert run("thin", surveys / "dense", "-o", folder, "--overwrite") == 1
    error = capsys.readouterr().err
    assert error.endswith(f"{folder}: can't be replaced as a whole; name a folder in it\n")


def test_a_place_where_no_folder_can_be_made_is_refused_before_the_work(
    surveys, monkeypatch, capsys
):
    shut, file = surveys / "shut", surveys / "dense_in_one.npy"
    shut.mkdir()
    # A superuser, who may run the tests, can write in spite of permissions.
    monkeypatch.setattr(os, "access", lambda path, mode: path != shut)
    for parent, text in (
        (shut, "can't be written to"),
        (file, "is a file, and a folder is needed"),
    ):
        assert run("thin", file, "-o", parent / "new" / "pairs") == 1
        assert f"error: {parent}: {text}; choose another" in capsys.readouterr().err
    assert not any(shut.iterdir())


def test_an_interrupt_leaves_the_old_dataset_and_nothing_else(surveys, monkeypatch):
    out, dense = surveys / "out", surveys / "dense_in_one.npy"
    assert run("thin", dense, "--tile", 20, "-o", out) == 0
    before = set(surveys.iterdir())

    def interrupted(calls: Any, num_workers: int) -> Any:
        for number, call in enumerate(calls):
            if number == 2:
                raise KeyboardInterrupt
            yield call()

    monkeypatch.setattr(newdataset, "call_each", interrupted)
    assert run("thin", dense, "--tile", 5, "--min-points", 2, "-o", out, "--overwrite") == 130
    assert_nothing_is_left(surveys, before)
    assert len(both(out)) == 16


def test_an_error_of_the_disk_that_names_no_file_names_the_dataset(surveys, monkeypatch, capsys):
    def full(*_: Any) -> None:
        raise OSError(28, "Error writing bytes to file. Detail: No space left on device")

    monkeypatch.setattr(pair_writer, "assemble", full)
    before, out = set(surveys.iterdir()), surveys / "out"
    assert run("thin", surveys / "dense_in_one.npy", "--tile", 20, "-o", out) == 1
    assert f"error: {out}: can't be written: Error writing" in capsys.readouterr().err
    assert set(surveys.iterdir()) == before


def write_meshes(folder: Path) -> Path:
    for name in ("a/tetra", "b/tetra", "b/other", "b/cad_1"):
        path = folder / f"{name}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TETRAHEDRON)
    return folder


@pytest.fixture
def meshes(tmp_path) -> Path:
    return write_meshes(tmp_path / "meshes")


SMALL = ["--num-source", 40, "--ratio", 2]


def test_workers_change_nothing(meshes, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_ALONE", 0.0)
    for number in (1, 2):
        options = [*SMALL, "--num-workers", number, "-o", tmp_path / f"with_{number}"]
        assert run("meshes", meshes, *options) == 0
    assert same(both(tmp_path / "with_1"), both(tmp_path / "with_2"))
    assert list(both(tmp_path / "with_1")) == list(both(tmp_path / "with_2"))


@pytest.mark.parametrize(
    "make, note",
    [
        (lambda: (ground(400, 0), ground(9_000, 1)), "has only"),
        (lambda: (ground(9_000, 0), ground(4_000, 1)), "swapped"),
        (
            lambda: tuple(ground(n, n).astype(np.float32) for n in (2_000, 9_000)),
            "note: coordinates are rounded to 0.25, coarse beside the spacing",
        ),
        (
            lambda: (ground(4_000, 0), ground(9_000, 1) + np.array([0, 0, 167])),
            "pairs can't be used: t_",
        ),
        (
            lambda: (ground(999, 0, width=4), ground(999, 1, width=4)),
            "no pair is held out for validation",
        ),
        (
            lambda: (ground(4_000, 0) - [0, 0, 32], ground(12_000, 1)),
            "note: the lowest points of the source are 32 unit below those of the target",
        ),
    ],
)
def test_notes_name_what_looks_wrong(make, note, tmp_path, capsys):
    for name, points in zip(("s", "t"), make(), strict=True):
        np.save(tmp_path / f"{name}.npy", points)
    files = ["--source", tmp_path / "s.npy", "--target", tmp_path / "t.npy"]
    assert run("pairs", *files, "--tile", 25, "-o", tmp_path / "out") == 0
    assert note in capsys.readouterr().err


def test_heights_are_compared_without_a_validation_split_too(tmp_path, capsys):
    np.save(tmp_path / "s.npy", ground(4_000, 0) - [0, 0, -32])
    np.save(tmp_path / "t.npy", ground(12_000, 1))
    files = ["--source", tmp_path / "s.npy", "--target", tmp_path / "t.npy"]
    assert run("pairs", *files, "--tile", 25, "--validation", 0, "-o", tmp_path / "out") == 0
    assert "the source are 32 unit above those of the target" in capsys.readouterr().err


def test_points_on_the_edges_of_tiles_leave_no_negative_share(tmp_path, capsys):
    # Tiles of 9 x 9 points; those at x = 10, 30, ... belong to the next tile, which has too few.
    x, y = np.meshgrid(np.arange(2, 11), np.arange(1, 10))
    tile = np.column_stack([x.ravel(), y.ravel(), np.zeros(81)])
    corners = 20 * np.indices((6, 6, 1)).reshape(3, -1).T
    survey = (corners[:, None] + tile).reshape(-1, 3)
    for name, height in (("sparse", 0), ("dense", 0.001)):
        np.save(tmp_path / f"{name}.npy", survey + np.array([0, 0, height]))
    sides = ("--source", tmp_path / "sparse.npy", "--target", tmp_path / "dense.npy")
    assert run("pairs", *sides, "-o", tmp_path / "out", "--strip", 1, "--block", 1) == 0
    assert "a strip of 1 around them left out (0%)" in capsys.readouterr().out
