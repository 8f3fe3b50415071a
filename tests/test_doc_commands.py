"""Every command of the README and the guides that a CPU can run succeeds, on small data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import trimesh
from conftest import ROOT
from test_docs import README, command_lines

from pointup.io.cloud import PointCloud
from pointup.io.files import write_points

pytestmark = pytest.mark.slow
PAGES = [
    README,
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
# What a CPU can't do, what is tested elsewhere (.ci/run, tests/cli/test_report.py), what runs until
# it is stopped, and the jobs of a cluster.
SKIPPED = re.compile(r"1gpu|8gpu|train\.py$|--max_restarts|\.\.\.|pointup report|\$K|shards/\*")
STARTS = ("pointup ", "accelerate launch ")
# Fewer pairs and steps than the page says.
SHORTER = {
    "--num-pairs 500": "--num-pairs 12",
    "--num-pairs 400": "--num-pairs 4",
    "--num-pairs 135": "--num-pairs 5",
    "--num-source 2048": "--num-source 256",
    "--density 300": "--density 8",
    # Trained by this page.
    "push runs/default": "push runs/both",
}
SHORT_RUN = " --steps 2 --eval-every 2 --num-pictures 0 --num-workers 0"


def survey(width: float, depth: float, density: float, seed: int) -> PointCloud:
    rng = np.random.default_rng(seed)
    x, y = rng.random((2, int(width * depth * density))) * [[width], [depth]]
    z = np.sin(x / 7) + np.cos(y / 5) + rng.normal(0, 0.02, len(x))
    return PointCloud(np.column_stack([x + 500_000, y + 4_100_000, z]))


@pytest.fixture
def folder(tmp_path) -> Path:
    """The files that the pages name, made small."""
    rng = np.random.default_rng(0)
    for name in ("tiles", "dense", "scans", "meshes"):
        (tmp_path / name).mkdir()
    write_points(tmp_path / "survey.laz", survey(20, 20, 20, 1))
    tile = survey(20, 20, 20, 1)
    for number, rows in enumerate(np.array_split(np.argsort(tile.positions[:, 0]), 2)):
        for name in ("tiles", "dense"):
            write_points(tmp_path / name / f"{number}.laz", tile.select(rows))
    write_points(tmp_path / "airborne.laz", survey(120, 80, 1, 2))
    for name in ("drone.laz", "dense.laz"):
        write_points(tmp_path / name, survey(120, 80, 4, 3))
    ball = rng.normal(size=(800, 3))
    scan = PointCloud(ball / np.linalg.norm(ball, axis=1, keepdims=True))
    for path in ("scan.ply", "scans/one.ply", "scans/two.xyz"):
        write_points(tmp_path / path, scan)
    for number in range(4):
        mesh = trimesh.creation.box(rng.uniform(0.5, 2, 3)).subdivide().subdivide()
        mesh.export(tmp_path / "meshes" / f"{number}.off")
    with h5py.File(tmp_path / "PUGAN_poisson_256_poisson_1024.h5", "w") as file:
        file["poisson_256"] = rng.random((12, 256, 3), dtype=np.float32)
        file["poisson_1024"] = rng.random((12, 1024, 3), dtype=np.float32)
    # Models that the pages take to be trained.
    for run in ("default", "pairs"):
        shutil.copytree(ROOT / "pointup" / "weights" / "lidar", tmp_path / "runs" / run / "model")
    return tmp_path


def runnable(page: Path) -> list[str]:
    lines = [line.strip() for line in command_lines(page)]
    return [line for line in lines if line.startswith(STARTS) and not SKIPPED.search(line)]


def shortened(line: str) -> str:
    for before, after in SHORTER.items():
        line = line.replace(before, after)
    return line + SHORT_RUN if "pointup train" in line else line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_page_run(page, folder):
    lines = runnable(page)
    assert lines or page.stem == "clusters"
    prepared = " ".join(lines)
    for name, make in {
        "pairs": "pointup prepare pairs --source airborne.laz --target drone.laz -o pairs/",
        "shapes": "pointup prepare meshes meshes/ --num-source 256 -o shapes/",
        "scenes": "pointup prepare scenes --num-pairs 4 --tile 5 -o scenes/",
    }.items():
        if f"-o {name}/" not in prepared:
            lines.insert(0, make)
    for name in ("city", "forest"):
        if f"--data {name}/" in prepared:
            lines.insert(0, f"pointup prepare meshes meshes/ --num-source 256 -o {name}/")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "POINTUP_CACHE": str(folder / "cache"),
    }
    for line in map(shortened, lines):
        if "--output-dir runs/pairs" in line:
            shutil.rmtree(folder / "runs" / "pairs", ignore_errors=True)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
