"""`pointup prepare join`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_prepare import SMALL, read, run, same, write_meshes, write_surveys

from pointup.datasets.opening import open_samples, open_together
from pointup.datasets.samples import JoinedSamples
from pointup.errors import DataError
from pointup.geometry.surfaces import Surface
from pointup.training.datasets import without_held_out_elsewhere


@pytest.fixture
def meshes(tmp_path) -> Path:
    return write_meshes(tmp_path / "meshes")


@pytest.fixture
def surveys(tmp_path) -> Path:
    return write_surveys(tmp_path)


def test_joined_datasets_keep_their_pairs_surfaces_and_splits(meshes, surveys, tmp_path):
    shapes, tiles, joined = tmp_path / "shapes", tmp_path / "tiles", tmp_path / "joined"
    one = ("--num-workers", 1)
    assert run("meshes", meshes, *SMALL, "--validation", 0.3, "-o", shapes, *one) == 0
    assert run("thin", surveys / "dense_in_one.npy", "--tile", 20, "-o", tiles, *one) == 0
    assert run("join", shapes, tiles, shapes, "-o", joined) == 0
    for split, parts in (("train", (shapes, tiles, shapes)), ("validation", (shapes, tiles))):
        expected = {
            f"{number}-{part.name}/{name}": pair
            for number, part in enumerate(parts)
            for name, pair in read(part, split).items()
        }
        found = read(joined, split)
        assert same(found, expected)
        for name, pair in found.items():
            original = expected[name]
            for column in ("target_normals", "resample", "vertical", "origin"):
                assert pair[column] == original[column]
            if original["surface"]:
                stored = Surface.load(joined / "surfaces" / pair["surface"])
                assert stored.area == Surface.load(shapes / "surfaces" / original["surface"]).area


def test_a_dataset_that_is_spelled_in_two_ways_is_validated_on_once(surveys, tmp_path, monkeypatch):
    tiles, joined = tmp_path / "tiles", tmp_path / "joined"
    assert run("thin", surveys / "dense_in_one.npy", "--tile", 20, "-o", tiles) == 0
    (tmp_path / "link").symlink_to(tiles)
    monkeypatch.chdir(tmp_path)
    assert run("join", "tiles", tiles, tmp_path / "link", "-o", joined) == 0
    assert len(read(joined, "train")) == 3 * len(read(tiles, "train"))
    assert len(read(joined, "validation")) == len(read(tiles, "validation")) > 0


def test_joined_datasets_of_the_same_meshes_train_on_no_validation_mesh(meshes, tmp_path, capsys):
    for name in ("a", "b"):
        (meshes / name).mkdir(exist_ok=True)
        options = (*SMALL, "--validation-meshes", meshes / name, "--num-workers", 1)
        assert run("meshes", meshes, *options, "-o", tmp_path / f"without_{name}") == 0
    folders = [tmp_path / "without_a", tmp_path / "without_b"]
    # A mesh of the first is held out by the second, and reverse: nothing is left to train on.
    assert run("join", *folders, "-o", tmp_path / "none") == 1
    assert "no training pairs are left" in capsys.readouterr().err
    options = (*SMALL, "--validation-meshes", meshes / "b" / "other.off", "--num-workers", 1)
    assert run("meshes", meshes, *options, "-o", tmp_path / "most") == 0
    assert run("join", tmp_path / "most", "-o", tmp_path / "first") == 0
    assert run("join", tmp_path / "first", folders[0], "-o", tmp_path / "joined") == 0
    reported = capsys.readouterr().err
    assert "first: left out 4 training pairs sharing a shape with validation pairs of" in reported
    found = {
        split: {
            name.split("/", 1)[1].rpartition("/")[0] for name in read(tmp_path / "joined", split)
        }
        for split in ("train", "validation")
    }
    assert found["train"] == {"0-most/b/tetra", "0-most/cad_1", "b/tetra", "cad_1"}
    assert found["validation"] == {"0-most/other", "tetra"}


def test_a_dataset_whose_training_pairs_another_one_holds_out_is_named(meshes, tmp_path, capsys):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, held_out in zip(folders, ("other.off", "tetra.off"), strict=True):
        kept = (meshes / "b" / "other.off", meshes / "b" / "tetra.off")
        given = (meshes,) if held_out == "other.off" else kept
        options = (*SMALL, "--validation-meshes", meshes / "b" / held_out, "--num-workers", 1)
        assert run("meshes", *given, *options, "-o", folder) == 0
    assert run("join", *folders, "-o", tmp_path / "joined") == 1
    error = capsys.readouterr().err
    assert f"{folders[1]}: no training pairs are left: all touch" in error
    with pytest.raises(DataError, match="b: no training pairs are left: all touch"):
        opened = (open_together(folders, split) for split in ("train", "validation"))
        without_held_out_elsewhere(*(JoinedSamples(("a", "b"), tuple(each)) for each in opened))


def test_a_dataset_without_validation_pairs_is_joined_for_training_only(meshes, tmp_path, capsys):
    split, whole = tmp_path / "split", tmp_path / "whole"
    options = ("--num-workers", 1, "--validation-meshes", meshes / "a" / "tetra.off")
    assert (
        run("meshes", meshes / "a", meshes / "b" / "other.off", *SMALL, *options, "-o", split) == 0
    )
    assert run("meshes", meshes / "b", *SMALL, "--validation", 0, "-o", whole) == 0
    assert run("join", split, whole, "-o", tmp_path / "joined") == 0
    assert "left out" not in capsys.readouterr().err
    for name in ("train", "validation"):
        found = {pair.split("/", 1)[1] for pair in read(tmp_path / "joined", name)}
        expected = set(read(split, name))
        if name == "train":
            expected |= set(read(whole, "train")) | set(read(whole, "validation"))
        assert found == expected
    # Of datasets that all have none, a tenth of each is drawn.
    assert run("join", whole, "-o", tmp_path / "drawn") == 0
    drawn, opened = read(tmp_path / "drawn", "validation"), open_samples(whole, "validation")
    assert len(drawn) == len(opened) > 0


def test_a_directory_that_is_not_a_dataset_is_not_joined(surveys, tmp_path, capsys):
    assert run("join", tmp_path / "missing", "-o", tmp_path / "out") == 1
    assert "missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_joining_has_no_options_of_a_split(surveys, tmp_path, capsys):
    tiles, joined = tmp_path / "tiles", tmp_path / "joined"
    words = ("--tile", 20, "--num-workers", 1, "--validation", 0)
    assert run("thin", surveys / "dense_in_one.npy", *words, "-o", tiles) == 0
    for option in ("--validation", "--seed", "--num-workers"):
        with pytest.raises(SystemExit) as wrong:
            run("join", tiles, "-o", joined, option, 1)
        assert wrong.value.code == 2 and option in capsys.readouterr().err
    assert run("join", tiles, "-o", joined) == 0
    assert "no pair is held out" not in capsys.readouterr().err
    assert "seed" not in json.loads((joined / "pointup.json").read_text())
