"""Outputs of pointup are, byte for byte, those that were recorded in digests.json.

They are made through the command line and read with other packages, so that modules can be moved
and renamed without a change here. On a machine without records the tests are skipped and say how to
record.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import inputs
import pytest
from conftest import ROOT
from digests import check, of_dataset, of_file, of_json, of_weights
from processes import free_port

from pointup.cli.main import main

pytestmark = pytest.mark.slow

UPSAMPLED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "las with extra dimensions": (inputs.survey, "out.las", "--ratio 3"),
    "las to laz, some classes, new points": (
        inputs.survey,
        "out.laz",
        "--classes 2 6 --only-new --max-distance 0.8",
    ),
    "las by the model forest": (inputs.survey, "out.las", "--model forest --ratio 4"),
    "density": (inputs.survey, "out.las", "--density 4"),
    "part of a COPC file": (
        inputs.copc,
        "out.laz",
        "--bounds 500005 4100005 500020 4100018 --ratio 3",
    ),
    "two bordering tiles": (inputs.tiles, "out/", "--ratio 3"),
    "shape at ratio 2.5": (inputs.shape, "out.ply", "--ratio 2.5"),
    "shape at ratio 12 in two passes": (inputs.shape, "out.xyz", "--ratio 12"),
    "denoised shape": (inputs.noisy_shape, "out.ply", "--denoise"),
    "oversampling": (inputs.shape, "out.npz", "--oversampling 2 --seed 1"),
}
"""Input, name of the output, and options. The digests are of the time before points were made on
the ground, and had an uncertainty."""
WITH_UNCERTAINTY = {
    "las by the model forest, with uncertainty": (
        inputs.survey,
        "out.las",
        "--model forest --ratio 4",
    ),
    "shape at ratio 12, with uncertainty": (inputs.shape, "out.ply", "--ratio 12"),
}
MESHES = "--num-workers 1 --validation 0.3"
PREPARED = {
    "pairs": "pairs --source surveys/sparse.las --target surveys/dense.las "
    "--tile 10 --block 1 --min-points 8 --validation 0.2 --num-workers 1",
    "thin": "thin surveys/dense.las --tile 12 --block 1 --min-points 16 --pattern mixed "
    "--ratio 3 --validation 0.2 --num-workers 1",
    "thin, all points": "thin surveys/dense.las --tile 15 --block 1 --min-points 16 "
    "--pattern poisson --target all --include-noise --strip 1 --validation 0.2 --num-workers 1",
    "pairs by regions": "pairs --source large/sparse --target large/dense "
    "--tile 10 --block 200 --min-points 4 --validation 0.2 --num-workers 2",
    "thin by regions": "thin large/dense --tile 10 --block 200 --min-points 8 "
    "--pattern mixed --validation 0.2 --num-workers 1",
    "meshes": "meshes shapes/ --num-source 64 --samples-per-mesh 3 --noise 0:0.02 " + MESHES,
    "patches of meshes": "meshes shapes/ --num-source 256 --patches 3 --patch-size 48 " + MESHES,
    "h5": "h5 patches/ --validation 0.2 --num-workers 1",
    "scenes": "scenes --num-pairs 9 --tile 4 --target-density 40 --movement 0:0.7 "
    "--validation 0.3 --num-workers 1",
    "default": "default --num-pairs 8 --close-sides 0.3 --validation 0.2 --num-workers 1",
}
"""Options of `pointup prepare`."""
INPUTS = {
    "surveys/": inputs.sparse_and_dense,
    "large/": inputs.large_survey,
    "shapes/": inputs.meshes,
    "patches/": inputs.patches,
}
"""What writes the folders that are named in the options."""
SHARD = PREPARED["thin by regions"] + " --shard"
TRAINED = (
    "--steps 12 --save-every 6 --eval-every 6 --log-every 1 --num-pictures 0 --num-workers 0 "
    "--token-budget 800 --warmup-steps 2 --ema-decay 0.9 --noise-spacings 0.1 "
    "--model.feature-dim 16 --model.k 6 --model.num-layers 1 --model.heads 2 --model.child-heads 2 "
    "--model.position-hidden 8 --model.predict-error --model.dropout 0.1"
)
EVALUATED = {
    "pairs": "pairs pairs --model forest",
    "pairs as written": "pairs thin --model lidar --as-written --oversampling 2",
    "lidar, thinned": "lidar --thin surveys/dense.las --model lidar --ratio 3 --ground-density 0",
    "lidar, two surveys": "lidar --ground-density 0 --source surveys/sparse.las --reference "
    "surveys/dense.las --model forest --metres-per-unit 1",
    "shapes": "shapes --meshes shapes/ --num-source 200 --model shapes",
    "noisy shapes": "shapes --meshes shapes/ --num-source 200 --noise 0.02 --pattern random "
    "--denoise --model noisy --protocol half --seeds 2",
}


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The current directory; outputs have the same paths, relative to it, in each run."""
    folder = tmp_path / "golden"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def pointup(command: str) -> None:
    assert main(command.split()) == 0


def launch(num_processes: int, *words: object) -> None:
    """Launch a script or module in one or two processes."""
    config = ROOT / "accelerate_configs" / ("cpu.yaml" if num_processes == 1 else "cpu2.yaml")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", config,
        "--main_process_port", free_port(), *words,
    ]  # fmt: skip
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def files_of(output: Path) -> list[Path]:
    """A file, or those of a folder without hidden ones and their list."""
    return [output] if output.is_file() else sorted(output.glob("[!.]*.la[sz]"))


def write_inputs(options: str, folder: Path) -> None:
    """Write the folders of INPUTS that the options name."""
    for name, write in INPUTS.items():
        if f" {name}" in options and not (folder / name).exists():
            write(folder / name)


def prepare(case: str, folder: Path) -> Path:
    """Make a dataset of PREPARED, and its inputs, in the folder."""
    options = PREPARED.get(case, SHARD + case.removeprefix("shard"))
    write_inputs(options, folder)
    name = case.replace(" ", "_").replace("/", "_of_")
    pointup(f"prepare {options} -o {name}")
    return folder / name


@pytest.mark.parametrize("processes", ["1 process", "1 process, in tiles", "2 processes, in tiles"])
@pytest.mark.parametrize("case", UPSAMPLED | WITH_UNCERTAINTY)
def test_upsampled_files_are_the_recorded_ones(case, processes, work):
    write, output, options = (UPSAMPLED | WITH_UNCERTAINTY)[case]
    command = f"upsample {write(work / 'in').relative_to(work)} -o {output} {options}"
    command += " --no-uncertainty --ground-density 0" if case in UPSAMPLED else ""
    if "in tiles" in processes:
        command += f" --tile {0.7 if 'in/shape' in command else 8} --token-budget 700"
    if processes.startswith("2"):
        launch(2, "-m", "pointup", *command.split())
    else:
        pointup(command)
    check(f"upsample: {case}", {path.name: of_file(path) for path in files_of(work / output)})


@pytest.mark.parametrize("case", PREPARED)
def test_prepared_datasets_are_the_recorded_ones(case, work):
    check(f"prepare: {case}", of_dataset(prepare(case, work)))


def test_joined_shards_are_the_recorded_dataset(work):
    for shard in ("shard 1/2", "shard 2/2"):
        check(f"prepare: {shard}", of_dataset(prepare(shard, work)))
    pointup("prepare join shard_1_of_2 shard_2_of_2 -o joined")
    check("prepare: join of shards", of_dataset(work / "joined"))


def test_joined_datasets_are_the_recorded_ones(work):
    for case in ("thin", "meshes", "patches of meshes"):
        prepare(case, work)
    pointup("prepare join thin meshes patches_of_meshes meshes -o joined")
    check("prepare: join", of_dataset(work / "joined"))


@pytest.mark.parametrize(
    "slots", ["1 process x 4", "2 processes x 2", "1 process x 4, stopped", "2 x 2, then 1 x 4"]
)
def test_trained_weights_are_the_recorded_ones(slots, work):
    data = prepare("pairs", work)
    first = 2 if slots.startswith("2") else 1
    stop = ["--target-chamfer", 100] if "stopped" in slots or "then" in slots else []

    def train(num_processes: int, *more: object) -> None:
        launch(
            num_processes, ROOT / "train.py", "--data", data.name, "--output-dir", "run",
            "--accumulation-steps", 4 // num_processes, *TRAINED.split(), *more,
        )  # fmt: skip

    train(first, *stop)
    if stop:
        assert (work / "run" / "checkpoints" / "LATEST").read_text().strip() == "step_6"
        train(1)
    # All runs have the same weights: they are compared with one record.
    weights = sorted(path.relative_to(work) for path in work.rglob("step_12/*.safetensors"))
    weights.append(Path("run/model/model.safetensors"))
    check("train", {str(path): of_weights(work / path) for path in weights})


@pytest.mark.parametrize("case", EVALUATED)
def test_figures_of_evaluations_are_the_recorded_ones(case, work):
    for dataset in ("pairs", "thin"):
        if f" {dataset} " in EVALUATED[case]:
            prepare(dataset, work)
    write_inputs(EVALUATED[case], work)
    pointup(f"evaluate {EVALUATED[case]} --json out.json --markdown out.md")
    check(
        f"evaluate: {case}",
        {"json": of_json(work / "out.json"), "markdown": of_file(work / "out.md")},
    )


@pytest.mark.parametrize("name", ["shapes", "noisy", "lidar", "forest"])
def test_weights_of_included_models_are_the_recorded_ones(name):
    path = ROOT / "pointup" / "weights" / name / "model.safetensors"
    check(f"weights: {name}", {"tensors": of_weights(path)})
