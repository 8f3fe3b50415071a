from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
# Each room imports only from itself and from rooms before it.
ORDER = (
    "errors",
    "terminal",
    "option_help",
    "shipped",
    "disk",
    "processes",
    "progress",
    "geometry",
    "io",
    "losses",
    "metrics",
    "model",
    "datasets",
    "synthetic",
    "visualization",
    "upsampling",
    "evaluation",
    "training",
    "benchmark",
    "cli",
)
MODULES = sorted((ROOT / "pointup").rglob("*.py"))
HEAVY = {"torch", "datasets", "laspy", "matplotlib", "accelerate", "scipy", "h5py", "trimesh"}


@cache
def imported_names(path: Path) -> list[str]:
    """Full names of all modules that a file imports, at its top or inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: import absolutely"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def room(path: Path) -> str:
    return path.relative_to(ROOT / "pointup").parts[0].removesuffix(".py")


def subroom(path: Path) -> str:
    """The folder within a room; a file directly in a room is its own subroom."""
    parts = path.relative_to(ROOT / "pointup").with_suffix("").parts
    return ".".join(parts if len(parts) <= 2 else parts[:-1])


def test_imports_between_rooms_point_one_way():
    offenders = []
    for path in MODULES:
        if path.parent == ROOT / "pointup" and path.stem in ("__init__", "__main__"):
            continue
        assert room(path) in ORDER, f"add {room(path)} to ORDER"
        for name in imported_names(path):
            parts = name.split(".")
            is_room = parts[0] == "pointup" and len(parts) > 1 and parts[1] in ORDER
            if is_room and ORDER.index(parts[1]) > ORDER.index(room(path)):
                offenders.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_imports_between_subrooms_have_no_cycle():
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    imports: dict[str, set[str]] = {}
    for path in MODULES:
        if path.stem in ("__init__", "__main__"):
            continue
        imported = {subroom(paths[name]) for name in imported_names(path) if name in paths}
        imports.setdefault(subroom(path), set()).update(imported - {subroom(path)})
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_only_commands_and_training_import_accelerate():
    for path in MODULES:
        imports = any(name.split(".")[0] == "accelerate" for name in imported_names(path))
        assert not imports or room(path) in ("cli", "training"), path


def test_datasets_files_and_geometry_import_no_networks():
    for path in MODULES:
        if room(path) in ("datasets", "geometry", "io", "synthetic"):
            assert not any(name.startswith("torch.nn") for name in imported_names(path)), path


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_has_the_public_names_and_imports_nothing_heavy_for_help():
    code = """
import sys
import pointup
print("NAMES", *dir(pointup), "NAMES")
from pointup.cli.main import main
for args in (["--help"], ["prepare", "--help"], ["prepare", "thin", "--help"]):
    try:
        main(args)
    except SystemExit as end:
        assert end.code == 0
print("MODULES", *sys.modules)
"""
    printed = run_python(code)
    assert printed.split("NAMES")[1].split() == [
        "TokenBudgetBatchSampler", "Upsampler", "__version__", "chamfer_distance", "upsample",
    ]  # fmt: skip
    assert not HEAVY & set(printed.split("MODULES")[1].split())


def test_help_takes_less_than_a_second():
    seconds: list[float] = []
    # Again where the first ones were slow: files may not be in memory yet.
    while len(seconds) < 3 and not any(taken < 1.0 for taken in seconds):
        before = psutil.Process().cpu_times()
        subprocess.run(
            [sys.executable, "-m", "pointup.cli.main", "--help"], capture_output=True, check=True
        )
        after = psutil.Process().cpu_times()
        user = after.children_user - before.children_user
        seconds.append(user + after.children_system - before.children_system)
    # CPU time hardly depends on other programs; importing torch alone takes more than 1 s.
    assert min(seconds) < 1.0, seconds


# Windows lacks these, where psutil does without them.
WITHOUT_UNIX = """
import os, psutil, signal, sys
del os.fork, signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2
sys.modules.update(dict.fromkeys(["fcntl", "grp", "pwd", "resource"]))
"""


def test_no_name_stands_for_several_things():
    modules = Counter(path.stem for path in MODULES if path.stem != "__init__")
    classes = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert "command" not in modules
    assert [name for name, number in modules.items() if number > 2] == []
    assert [name for name, number in classes.items() if number > 1] == []


def test_training_and_upsampling_import_nothing_of_each_other_and_no_more_than_they_need():
    code = """
import sys, train
print(*sys.modules)
for name in [name for name in sys.modules if name.partition(".")[0] == "pointup"]:
    del sys.modules[name]
"""
    # In the same process, because libraries take seconds: upsampling and evaluation import nothing
    # of Unix, and upsampling no libraries of training and no client of the Hub.
    upsampling = """
names = ("torch_geometric", "datasets", "tensorboard", "huggingface_hub")
of_training = {name: sys.modules.get(name) for name in names}
sys.modules.update(dict.fromkeys(of_training))
import pointup.cli.upsample.written_files, pointup.cli.view
sys.modules.update(of_training)
"""
    evaluation = """
import pointup.evaluation.lidar, pointup.evaluation.pu_gcn, pointup.evaluation.rasters
import pointup.cli.evaluate.pairs, pointup.cli.dataset_statistics
"""
    loaded = run_python(code + WITHOUT_UNIX + upsampling + evaluation).split()
    own = [name for name in loaded if name.partition(".")[0] == "pointup"]
    assert len(own) <= 100, f"{len(own)} modules"
    formats = ("files", "las", "las_writer", "ply", "pcd", "pts", "e57", "text_tables")
    rooms = ("upsampling", "visualization", "synthetic", *(f"io.{name}" for name in formats))
    forbidden = {"matplotlib", "laspy", *(f"pointup.{room}" for room in rooms)}
    assert not forbidden & set(loaded)


@pytest.mark.slow
def test_loading_a_model_imports_no_compiler_and_no_symbolic_mathematics():
    """They take more than a second and 100 MB, and operations on the meta device import them."""
    code = """
import sys, torch
from pointup.upsampling.in_memory import load_model
load_model("forest", torch.device("cpu"))
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""
    assert run_python(code).split() == ["False", "False"]


def test_the_picture_of_the_rooms_is_the_one_that_the_script_draws():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    drawn = pictures["rooms_picture"]()
    assert (ROOT / "docs" / "rooms.svg").read_text() == drawn
    boxes = [name for name in ORDER if name != "shipped"]
    assert all(f">{name}/<" in drawn or f"{name}.py" in drawn for name in boxes)
