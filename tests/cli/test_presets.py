"""Included files: from a checkout, and from a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from runs import training

from pointup.cli import main as cli
from pointup.shipped import shipped_file


def test_a_shipped_configuration_is_found_by_its_name(capsys):
    assert cli.main(["config", "8gpu"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == ROOT / "accelerate_configs" / "8gpu.yaml"


def test_without_a_name_all_are_listed_in_a_line_each(capsys):
    assert cli.main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for path in [*ROOT.glob("accelerate_configs/*.yaml"), *ROOT.glob("pointup/presets/*.yaml")]:
        assert any(line.split()[:1] == [path.stem] for line in lines), path
    assert max(map(len, lines)) <= 100


def test_an_unknown_name_is_refused_with_the_nearest_one(capsys):
    assert cli.main(["config", "8gp"]) == 1
    assert "did you mean 8gpu?" in capsys.readouterr().err


def test_pointup_train_is_train_py(capsys):
    assert shipped_file("train.py") == ROOT / "train.py"
    assert cli.main(["train", "--steps", "-1"]) == 1
    assert "pointup train: error: " in capsys.readouterr().err


def test_the_usage_shows_that_a_name_is_optional(capsys):
    with pytest.raises(SystemExit):
        cli.main(["config", "--help"])
    assert capsys.readouterr().out.startswith("usage: pointup config [-h] [NAME]\n")


@pytest.mark.parametrize("prog", ["train.py", "pointup train"])
def test_usage_names_the_program_without_its_path(prog, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/else.py"])
    program = training.main if prog == "train.py" else lambda args: cli.main(["train", *args])
    for words, status in ((["--help"], 0), (["--stpes", "2"], 2)):
        with pytest.raises(SystemExit) as ended:
            program(words)
        printed = capsys.readouterr()
        assert ended.value.code == status
        assert "else.py" not in printed.out + printed.err
        if not status:
            assert printed.out.startswith(f"usage: {prog} [-h]")


@pytest.mark.slow
def test_a_wheel_holds_train_py_and_all_configurations(tmp_path):
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "-q",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(words, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"pointup/accelerate_configs/{p.name}" for p in ROOT.glob("accelerate_configs/*")}
    assert {"pointup/train.py", "pointup/presets/shapes_4x.yaml", *configs} <= names
    assert not any(name.startswith(("tests", "docs")) for name in names)
