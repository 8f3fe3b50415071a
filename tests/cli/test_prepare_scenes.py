"""`pointup prepare scenes`: what it writes, and which options it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import load_from_disk

from pointup.cli.main import main
from pointup.cli.prepare.scenes import ALL_KINDS
from pointup.datasets.dataset_units import dataset_unit
from pointup.geometry.surfaces import Surface
from pointup.io.length_unit import METRE
from pointup.synthetic.landscapes import KINDS, SHARES

SMALL = ["--tile", "5", "--target-density", "40", "--num-workers", "1"]


def run(*arguments: object) -> int:
    return main(["prepare", "scenes", *(str(argument) for argument in arguments)])


def test_kinds_of_the_command_are_those_of_the_landscapes():
    assert ALL_KINDS == KINDS
    assert sum(SHARES) == pytest.approx(1)
    assert len(SHARES) == len(KINDS)


def test_validation_scenes_have_a_second_survey_and_their_surface(tmp_path):
    options = ["--num-pairs", 4, "--validation", 0.5, "--kinds", "field", "shrubs"]
    assert run(*options, *SMALL, "-o", tmp_path / "out") == 0
    for split in ("train", "validation"):
        rows = list(load_from_disk(tmp_path / "out")[split])
        assert [str(row["name"]) for row in rows] == [
            f"field_{split}_00000",
            f"shrubs_{split}_00001",
        ]
        for row in rows:
            assert len(row["target"]) / 25 == pytest.approx(40, rel=0.1)
            assert 0.9 * 6 <= len(row["source"]) / 25 <= 1.1 * 22
            assert len(row["target_normals"]) == len(row["target"])
            assert bool(row["resample"]) == bool(row["surface"]) == (split == "validation")
            if row["surface"]:
                surface = Surface.load(tmp_path / "out" / "surfaces" / row["surface"])
                assert np.median(surface.distance(np.array(row["resample"]))) < 0.02
    assert dataset_unit(tmp_path / "out") == METRE
    info = json.loads((tmp_path / "out" / "pointup.json").read_text())
    assert info["source_density"] == "6:22"
    assert info["kinds"] == ["field", "shrubs"]


@pytest.mark.slow
def test_scenes_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("pointup.processes.SECONDS_ALONE", 0.0)
    options = ["--num-pairs", 3, "--validation", 0, "--kinds", "field", *SMALL]
    assert run(*options, "-o", tmp_path / "one") == 0
    assert run(*options, "--num-workers", 2, "-o", tmp_path / "two") == 0
    one, two = (
        load_from_disk(tmp_path / name)["train"].with_format("arrow")[:] for name in ("one", "two")
    )
    assert one == two


@pytest.mark.parametrize(
    "options",
    [
        ["--source-density", "22:6"],
        ["--source-density", "many"],
        ["--source-density", "1:2:3"],
        ["--source-density", "nan"],
        ["--movement", "0.8:0"],
        ["--movement", "-1"],
        ["--movement", "a year"],
        ["--target-density", "0"],
        ["--tile", "1"],
        ["--ratio", "0.5"],
        ["--num-pairs", "0"],
        ["--tile", "4", "--source-density", "0.5"],
        ["--kinds"],
    ],
)
def test_options_that_make_no_scene_are_refused_in_one_line(tmp_path, capsys, options):
    assert run(*options, "-o", tmp_path / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert options[0] in line
    assert not (tmp_path / "out").exists()
