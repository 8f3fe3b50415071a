"""The commands that are printed for the user: their options, and that they run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from pointup.cli import next_commands as commands
from pointup.cli.evaluate import EvaluatedPairs
from pointup.cli.next_commands import (
    command_after_upsampling,
    commands_after_training,
    describe_preset,
    preset_of,
    training_command,
)
from pointup.cli.prepare.summary import print_summary
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.shipped import shipped_options
from pointup.training.config import TrainConfig, as_dict, parse_command_line

OFFSET = np.array([5e5, 4e6, 100.0])
MODEL = "runs/pairs/model"


@pytest.fixture(autouse=True)
def without_default_configuration(monkeypatch) -> None:
    monkeypatch.setattr(commands, "default_config_file", "/nowhere/default_config.yaml")


def run_of(folder: Path, data: Path, **info: object) -> TrainConfig:
    """A finished run on a dataset with this pointup.json."""
    data.mkdir(parents=True)
    (data / "pointup.json").write_text(json.dumps(info))
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": [str(data)]}))
    return TrainConfig(data=(str(data),), output_dir=folder)


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, ["accelerate_configs/cpu.yaml"]),
        (1, ["accelerate_configs/1gpu.yaml"]),
        (3, ["accelerate_configs/8gpu.yaml", "--num_processes", "3"]),
        (8, ["accelerate_configs/8gpu.yaml"]),
    ],
)
def test_the_training_command_names_the_configuration_of_the_machine(
    num_gpus, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.chdir(ROOT)
    words = shlex.split(training_command(Path("my pairs")))
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert words[3 : words.index("train.py")] == expected
    config = parse_command_line(words[words.index("train.py") + 1 :], "")
    assert (config.data, config.output_dir) == (("my pairs",), Path("runs/my pairs"))


def test_from_another_folder_files_are_named_in_full_and_runs_that_are_there_are_left_alone(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(training_command(Path("pairs")))
    assert Path(words[3]).parent == ROOT / "accelerate_configs"
    assert words[words.index("--data") - 1] == str(ROOT / "train.py")
    for number in ("", "-2", "-3"):
        assert training_command(Path("pairs")).endswith(f"--output-dir runs/pairs{number}")
        (tmp_path / "runs" / f"pairs{number}").mkdir(parents=True)


def test_a_configuration_of_the_user_needs_no_option(tmp_path, monkeypatch):
    (tmp_path / "default_config.yaml").touch()
    monkeypatch.setattr(commands, "default_config_file", str(tmp_path / "default_config.yaml"))
    assert "--config_file" not in training_command(Path("pairs"))


@pytest.mark.parametrize(
    ("made_by", "ratio", "preset", "length"),
    [
        ("prepare pairs", 5.0, "airborne_to_drone", "100 steps from the included model forest"),
        ("prepare pairs", 1.5, "similar_density", "100 steps from the included model forest"),
        ("prepare passes", 12.0, "airborne_to_drone", "100 steps from the included model forest"),
        ("prepare scenes", 2.0, "forest_scenes", "2,000 steps from random weights"),
        ("prepare meshes", 4.0, "shapes_4x", "7,000 steps from random weights"),
        ("prepare h5", 4.0, "shapes_4x", "7,000 steps from random weights"),
        ("prepare thin", 4.0, None, ""),
        ("prepare join", 4.0, None, ""),
    ],
)
def test_a_dataset_is_trained_on_with_the_preset_for_its_kind(
    made_by, ratio, preset, length, tmp_path
):
    (tmp_path / "pointup.json").write_text(json.dumps({"made_by": f"pointup 1 {made_by}"}))
    assert preset_of(tmp_path, ratio) == preset
    if preset is not None:
        # The first lines of a preset name the commands whose datasets it is for.
        head = shipped_options()[preset].read_text().partition("\n")[2].splitlines()[0]
        assert f"`pointup {made_by}`" in head
        assert describe_preset(preset) == length


@pytest.mark.parametrize(
    ("num_gpus", "start"),
    [
        (0, "pointup train"),
        (1, "accelerate launch --config_file accelerate_configs/1gpu.yaml train.py"),
    ],
)
def test_a_preset_is_given_in_the_form_of_the_guides(num_gpus, start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.chdir(ROOT)
    command = training_command(Path("pairs/"), "airborne_to_drone")
    form = "--config airborne_to_drone --data pairs --output-dir runs/pairs"
    assert command == f"{start} {form}"
    guide = (ROOT / "docs" / "guides" / "training.md").read_text()
    assert f"pointup train {form.replace('pairs -', 'pairs/ -')}\n" in guide


@pytest.mark.parametrize(("made_by", "model"), [("clouds", "shapes"), ("thin", "lidar")])
def test_own_clouds_and_thinned_surveys_fine_tune_an_included_model(made_by, model, tmp_path):
    (tmp_path / "pointup.json").write_text(json.dumps({"made_by": f"pointup 1 prepare {made_by}"}))
    command = shlex.join(["--initial-model", model, "--data", str(tmp_path)])
    assert command in training_command(tmp_path)


def test_the_summary_of_a_dataset_says_how_long_its_preset_trains(tmp_path, capsys):
    rng = np.random.default_rng(0)
    clouds = [rng.random((n, 3)).astype(np.float32) for n in (100, 500)]
    pairs = [Pair(str(i), *clouds) for i in range(3)]
    write_pairs(pairs[:2], pairs[2:], tmp_path / "p", {"made_by": "pointup 1 prepare pairs"})
    print_summary(tmp_path / "p", 0.3, "", 1.0)
    *_, preset, command = capsys.readouterr().out.splitlines()
    assert preset == "preset airborne_to_drone: 100 steps from the included model forest"
    assert command.startswith("next: pointup train --config airborne_to_drone ")


@pytest.mark.parametrize(
    ("num_target", "options", "max_ratio", "expected"),
    [
        (53, {}, 16.0, "--ratio 5.3"),
        (253, {}, 64.0, "--ratio 25"),
        (253, {}, 16.0, "--ratio 16"),
        (5, {}, 16.0, ""),
        (10, {}, 16.0, ""),
        (53, {"ratio": 2.5}, 16.0, "--ratio 2.5"),
    ],
)
def test_after_training_the_survey_is_upsampled_at_the_ratio_of_the_pairs(
    num_target, options, max_ratio, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("als.laz").touch()
    rng = np.random.default_rng(0)
    clouds = [rng.random((n, 3)).astype(np.float32) for n in (10, num_target)]
    pairs = [Pair(str(i), *clouds) for i in range(3)]
    info = {"made_by": "pointup 1 prepare pairs", "source": ["als.laz"]}
    write_pairs(pairs[:2], pairs[2:], Path("pairs"), info)
    Path("a/model").mkdir(parents=True)
    config = TrainConfig(data=("pairs",), output_dir=Path("a"), max_ratio=max_ratio, **options)
    command = "pointup upsample als.laz -o als_dense.laz --model a/model"
    assert commands_after_training(config)[0] == f"{command} {expected}".strip()


def test_after_training_on_a_thinned_survey_it_is_upsampled_at_the_ratio_of_the_thinning(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("als.laz").touch()
    info = {"made_by": "pointup 1 prepare thin", "inputs": ["als.laz"], "ratio": 3.0}
    upsampling = commands_after_training(run_of(Path("a"), Path("pairs"), **info))[0]
    assert upsampling.endswith("--model a/model --ratio 3")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"ratio": 2.5, "max_ratio": 8.0}, "--ratio 2.5 --max-ratio 8"),
        ({"max_ratio": 64.0}, "--max-ratio 64"),
    ],
)
def test_a_model_is_evaluated_at_the_ratio_of_its_training(changes, options, tmp_path, monkeypatch):
    assert EvaluatedPairs.max_ratio == TrainConfig.max_ratio == commands.MAX_RATIO
    assert EvaluatedPairs.ratio is TrainConfig.ratio is None
    monkeypatch.chdir(tmp_path)
    config = replace(run_of(Path("a"), Path("pairs"), made_by="x"), **changes)
    (tmp_path / "a" / "config.json").write_text(json.dumps(as_dict(config)))
    command = f"pointup evaluate pairs pairs --model a/model --as-written {options}"
    assert commands_after_training(config) == [command]
    assert command_after_upsampling("a/model") == command


@pytest.mark.parametrize(
    ("source", "made_by", "output"),
    [
        (["als.laz"], "prepare pairs", "als_dense.laz"),
        (["als.copc.laz"], "prepare pairs", "als_dense.laz"),
        (["als.las"], "prepare thin", "als_dense.las"),
        (["tiles/"], "prepare pairs", "tiles_dense"),
        (["a.laz", "b.laz"], "prepare thin", "surveys_dense"),
    ],
)
def test_after_training_the_survey_is_upsampled_and_the_model_evaluated(
    source, made_by, output, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in source:
        Path(name).mkdir() if name.endswith("/") else Path(name).touch()
    key = "source" if made_by == "prepare pairs" else "inputs"
    config = run_of(Path("runs/a"), Path("pairs"), made_by=f"pointup 1 {made_by}", **{key: source})
    surveys = " ".join(name.rstrip("/") for name in source)
    assert commands_after_training(config) == [
        f"pointup upsample {surveys} -o {output} --model runs/a/model",
        "pointup evaluate pairs pairs --model runs/a/model --as-written",
    ]
    assert command_after_upsampling("runs/a/model") == commands_after_training(config)[1]


def test_only_datasets_with_held_out_pairs_are_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cloud = np.random.default_rng(0).random((20, 3)).astype(np.float32)
    pairs = [Pair(str(i), cloud, cloud) for i in range(4)]
    write_pairs(pairs, [], Path("whole"), {})
    write_pairs(pairs, pairs, Path("split"), {})
    config = replace(run_of(Path("a"), Path("p"), made_by="x"), data=("whole", "split"))
    (tmp_path / "a" / "config.json").write_text(json.dumps(as_dict(config)))
    command = "pointup evaluate pairs split --model a/model --as-written"
    assert commands_after_training(config) == [command]
    assert command_after_upsampling("a/model") == command


def test_a_model_trained_on_noise_is_not_evaluated_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replace(run_of(Path("a"), Path("p"), made_by="x"), noise_spacings=0.5)
    (tmp_path / "a" / "config.json").write_text(json.dumps(as_dict(config)))
    assert commands_after_training(config) == []
    assert command_after_upsampling("a/model") is None


def test_a_model_trained_on_noise_replaces_points_as_in_its_validation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scan.ply").touch()
    info = {"made_by": "pointup 1 prepare clouds", "source": ["scan.ply"]}
    config = replace(run_of(Path("a"), Path("p"), **info), noise_spacings=0.5)
    command = "pointup upsample scan.ply -o scan_dense.ply --model a/model --denoise"
    assert commands_after_training(config) == [command]
    for ratio, words in ((1.0, "1"), (1.02, "1"), (8.0, "8")):
        (line,) = commands_after_training(replace(config, ratio=ratio))
        assert line == f"{command} --ratio {words}"
    config = replace(run_of(Path("b"), Path("q"), **info, ratio=0.98), noise_spacings=0.5)
    (line,) = commands_after_training(config)
    assert line.endswith("--model b/model --denoise --ratio 1")


def test_a_command_with_unknown_paths_is_not_printed(tmp_path):
    gone = run_of(tmp_path / "a", tmp_path / "p", made_by="pointup 1 prepare pairs", source=["x"])
    assert [line.split()[1] for line in commands_after_training(gone)] == ["evaluate"]
    shapes = run_of(tmp_path / "b", tmp_path / "q", made_by="pointup 1 prepare meshes")
    assert [line.split()[1] for line in commands_after_training(shapes)] == ["evaluate"]
    assert commands_after_training(TrainConfig(output_dir=tmp_path)) == []
    (tmp_path / "q" / "pointup.json").write_text("{")
    assert [line.split()[1] for line in commands_after_training(shapes)] == ["evaluate"]
    for model in ("lidar", str(tmp_path / "nothing" / "model")):
        assert command_after_upsampling(model) is None


def printed(output: str) -> Iterator[str]:
    for line in output.splitlines():
        if line.startswith("next: "):
            yield line.removeprefix("next: ")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True], ids=["files", "folders of tiles"])
def test_the_four_commands_run_as_they_are_printed(cut, tmp_path):
    """The test adds only the length of the training, which takes minutes by default."""
    rng = np.random.default_rng(0)
    for name, number in (("sparse", 3_000), ("dense", 12_000)):
        xy = rng.random((number, 2)) * [40, 20]
        points = np.column_stack([xy, np.sin(xy[:, 0] / 3) + xy[:, 1] / 5]) + OFFSET
        if not cut:
            np.save(tmp_path / f"{name}.npy", points.round(3))
            continue
        (tmp_path / name).mkdir()
        for half in range(2):
            inside = (xy[:, 0] > 23) == half
            np.save(tmp_path / name / f"tile_{half}.npy", points[inside].round(3))
    suffix = "" if cut else ".npy"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["HF_HOME"] = str(tmp_path / "hf")

    def run(line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, text=True, timeout=600,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    inputs = f"--source sparse{suffix} --target dense{suffix}"
    (training,) = printed(run(f"pointup prepare pairs {inputs} --tile 10 -o pairs/"))
    upsampling, evaluation = printed(run(f"{training} --steps 3"))
    if cut:
        # The folder has to be there.
        (tmp_path / "sparse_dense").mkdir(exist_ok=True)
    preset = "--config airborne_to_drone"
    assert training == f"pointup train {preset} --data pairs --output-dir runs/pairs"
    outputs = f"-o sparse_dense{suffix} --model {MODEL}"
    assert upsampling == f"pointup upsample sparse{suffix} {outputs} --ratio 4"
    options = "--as-written --max-ratio 64"
    assert evaluation == f"pointup evaluate pairs pairs --model {MODEL} {options}"
    assert list(printed(run(upsampling))) == [evaluation]
    assert "Chamfer" in run(evaluation)
    written = (tmp_path / "sparse_dense").glob("*.npy") if cut else [tmp_path / "sparse_dense.npy"]
    assert sum(len(np.load(path)) for path in written) == 12_000
