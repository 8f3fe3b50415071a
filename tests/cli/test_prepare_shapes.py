"""`pointup prepare` of meshes, HDF5 patches and the default dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.spatial import cKDTree
from test_prepare import SMALL, both, read, run, write_meshes

from pointup.datasets.pair import Pair
from pointup.geometry.surfaces import Surface
from pointup.synthetic import default_dataset
from pointup.synthetic.shapes import random_surface


@pytest.fixture
def meshes(tmp_path) -> Path:
    return write_meshes(tmp_path / "meshes")


def test_all_pairs_of_a_mesh_are_in_the_same_split(meshes, tmp_path):
    options = [*SMALL, "--samples-per-mesh", 2, "--samples-for", "cad_*=1"]
    assert run("meshes", meshes, *options, "--validation", 0.3, "-o", tmp_path / "out") == 0
    train = [name.rpartition("/")[0] for name in read(tmp_path / "out", "train")]
    validation = read(tmp_path / "out", "validation")
    # One sample of each pattern, and the truth.
    assert len(validation) == 3
    (held_out,) = {name.rpartition("/")[0] for name in validation}
    assert held_out not in train
    expected = {"tetra": 2, "b/tetra": 2, "other": 2, "cad_1": 1}
    expected.pop(held_out)
    assert {name: train.count(name) for name in train} == expected
    for pair in validation.values():
        surface = Surface.load(tmp_path / "out" / "surfaces" / pair["surface"])
        assert surface.distance(np.reshape(pair["resample"], (-1, 3))).max() < 1e-6
        assert len(pair["target_normals"]) == len(pair["target"]) == 80


def test_a_rule_for_meshes_that_are_not_there_is_noted(meshes, tmp_path, capsys):
    rules = ("--samples-for", "cda_*=1", "cad_*=1")
    assert run("meshes", meshes, *SMALL, *rules, "-o", tmp_path / "out") == 0
    message = capsys.readouterr().err
    assert "note: --samples-for cda_*=1: no training mesh has such a name" in message
    assert message.count("--samples-for") == 1


def test_validation_meshes_can_be_named(meshes, tmp_path):
    options = [*SMALL, "--validation-meshes", meshes / "a", "--pattern", "random"]
    assert run("meshes", meshes, *options, "-o", tmp_path / "out") == 0
    assert list(read(tmp_path / "out", "validation")) == ["tetra/0-random"]
    train = {name.rpartition("/")[0] for name in read(tmp_path / "out", "train")}
    assert train == {"b/tetra", "other", "cad_1"}


def test_two_files_of_one_mesh_are_one_mesh(meshes, tmp_path, capsys):
    corners = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\n"
    faces = "f 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"
    for name in ("a/tetra.obj", "b/other.obj", "b/lonely.obj"):
        (meshes / name).write_text(corners + faces)
    options = [*SMALL, "--validation-meshes", meshes / "a" / "tetra.obj"]
    assert run("meshes", meshes, *options, "-o", tmp_path / "out") == 0
    train = {name.rpartition("/")[0] for name in read(tmp_path / "out", "train")}
    assert train == {"b/tetra", "other", "cad_1", "lonely"}
    reported = " ".join(capsys.readouterr().err.split())
    assert "note: 2 files are of a mesh that another file is of, too" in reported


def test_sources_of_meshes_can_have_noise(meshes, tmp_path):
    for noise in ("0", "0.01:0.02"):
        options = [*SMALL, "--validation-meshes", meshes / "a", "--noise", noise]
        assert run("meshes", meshes, *options, "-o", tmp_path / noise) == 0
    for split in ("train", "validation"):
        clean, noisy = (read(tmp_path / noise, split) for noise in ("0", "0.01:0.02"))
        for name, pair in clean.items():
            moved = cKDTree(pair["source"]).query(noisy[name]["source"])[0]
            assert 0.01 < np.sqrt(np.mean(moved**2)) < 0.04
            assert np.array_equal(noisy[name]["target"], pair["target"])


@pytest.mark.parametrize("noise", ["much", "1:2:3", "-1", "0.3:0.1"])
def test_impossible_noise_is_refused(noise, meshes, tmp_path, capsys):
    assert run("meshes", meshes, f"--noise={noise}", "-o", tmp_path / "out") != 0
    assert "noise" in capsys.readouterr().err


def test_patch_files_are_split_by_shape(tmp_path, capsys):
    rng = np.random.default_rng(0)
    target = rng.random((40, 16, 3))
    target[9] = np.inf
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["poisson_256"] = rng.random((40, 4, 3))
        file["poisson_1024"] = target
        file["name"] = np.repeat([b"cat", b"dog", b"hen", b"cow"], 10)
    assert run("h5", tmp_path / "a.h5", "-o", tmp_path / "out") == 1
    assert "a/0/9: coordinates that are not finite" in capsys.readouterr().err
    shapes = {
        split: {int(name.split("/")[2]) // 10 for name in read(tmp_path / "out", split)}
        for split in ("train", "validation")
    }
    assert len(shapes["train"]) == 3
    assert len(shapes["validation"]) == 1
    assert not shapes["train"] & shapes["validation"]


def test_a_shape_that_two_patch_files_name_is_in_one_split(tmp_path, capsys):
    shapes = {"one": list("abcdefgh"), "two": list("efghijkl")}
    for name, own in shapes.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["poisson_256"], file["poisson_1024"] = np.ones((16, 4, 3)), np.ones((16, 16, 3))
            file["name"] = np.repeat(np.array(own, dtype="S"), 2)

    def shown(folder: Path, split: str) -> set[str]:
        pairs = [name.split("/")[-3:] for name in read(folder, split)]
        return {shapes[file][int(place)] for file, place, _ in pairs}

    files = [tmp_path / f"{name}.h5" for name in shapes]
    assert run("h5", *files, "--validation", 0.3, "-o", tmp_path / "together") == 0
    train, validation = (shown(tmp_path / "together", split) for split in ("train", "validation"))
    assert validation and not train & validation
    # So it is if the files are prepared one by one, and joined.
    for path in files:
        assert run("h5", path, "--validation", 0.4, "-o", tmp_path / path.stem) == 0
    capsys.readouterr()
    joined = [tmp_path / name for name in shapes]
    assert run("join", *joined, "-o", tmp_path / "joined") == 0
    assert "training pairs sharing a shape with validation pairs of" in capsys.readouterr().err
    train, validation = (shown(tmp_path / "joined", split) for split in ("train", "validation"))
    assert validation and not train & validation


def test_files_of_one_name_give_pairs_of_other_names(meshes, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / "h5" / folder).mkdir(parents=True)
        with h5py.File(tmp_path / "h5" / folder / "a.h5", "w") as file:
            file["poisson_256"], file["poisson_1024"] = np.ones((20, 4, 3)), np.ones((20, 16, 3))
    assert run("h5", tmp_path / "h5", "-o", tmp_path / "patches") == 0
    names = [name for s in ("train", "validation") for name in read(tmp_path / "patches", s)]
    assert len(names) == len(set(names)) == 40
    # A mesh for validation beside another one of the same file name.
    options = [*SMALL, "--validation-meshes", meshes / "b" / "tetra.off"]
    assert run("meshes", meshes / "a", *options, "-o", tmp_path / "shapes") == 0
    train, validation = (set(read(tmp_path / "shapes", s)) for s in ("train", "validation"))
    assert {name.rpartition("/")[0] for name in train} == {"tetra"}
    assert {name.rpartition("/")[0] for name in validation} == {"b/tetra"}


def test_the_default_dataset_has_the_requested_size(tmp_path):
    options = ["--num-pairs", 4, "--validation", 0.25, "--num-workers", 1]
    assert run("default", *options, "-o", tmp_path / "out") == 0
    assert len(read(tmp_path / "out", "train")) == 3
    assert len(read(tmp_path / "out", "validation")) == 1


@pytest.mark.parametrize(("share", "all_are_scenes"), [(0, False), (1, True)])
def test_the_default_dataset_has_the_requested_share_of_scenes(
    tmp_path, share, all_are_scenes, monkeypatch
):
    def quick_scene(rng: np.random.Generator, resample: bool) -> tuple[Pair, Surface]:
        pair, surface = default_dataset.shape_pair(rng, resample)
        return replace(pair, name="scene"), surface

    monkeypatch.setattr(default_dataset, "scene_pair", quick_scene)
    options = ["--num-pairs", 3, "--validation", 0, "--num-workers", 1, "--scene-share", share]
    assert run("default", *options, "-o", tmp_path / "out") == 0
    are_scenes = [name.startswith("scene_") for name in both(tmp_path / "out")]
    assert are_scenes == [all_are_scenes] * 3


@pytest.mark.parametrize(("share", "expected"), [(0, [0]), (0.5, range(4, 17)), (1, [20])])
def test_the_default_dataset_has_the_requested_share_of_close_sides(
    tmp_path, share, expected, monkeypatch
):
    surface, _ = random_surface(np.random.default_rng(0))

    def quick_shape(
        rng: np.random.Generator, resample: bool, close_sides: bool
    ) -> tuple[Pair, Surface]:
        source, target = surface.sample(200, rng)[0], surface.sample(800, rng)[0]
        return Pair("close" if close_sides else "any", source, target), surface

    monkeypatch.setattr(default_dataset, "shape_pair", quick_shape)
    options = ["--num-pairs", 20, "--validation", 0, "--num-workers", 1, "--scene-share", 0]
    assert run("default", *options, "--close-sides", share, "-o", tmp_path / "out") == 0
    assert sum(name.startswith("close") for name in both(tmp_path / "out")) in expected


def test_a_share_of_close_sides_beyond_one_is_refused(tmp_path, capsys):
    assert run("default", "--close-sides", 1.5, "-o", tmp_path / "out") != 0
    assert "--close-sides 1.5: must lie in [0, 1]" in capsys.readouterr().err
