"""Fixtures that tests share: a small pair dataset, launches of train.py, small models."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings
from processes import Run, free_port, run_and_watch

# Before torch is imported: small tensors, several processes, two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As in train.py, because runs in this process are compared with launched runs.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Without bytecode each process that a test starts compiles torch and PyG anew, for 12 seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts background jobs with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline, because tests are slow on a busy machine. The same examples in each run, so that a
# change fails by its own faults; `pytest --hypothesis-profile random` draws others.
settings.register_profile("random", deadline=None, max_examples=50)
settings.register_profile("pointup", settings.get_profile("random"), derandomize=True)
settings.load_profile("pointup")

SECONDS_TO_OUTCOME: list[tuple[str, float]] = []
"""Records of the fault tests: a fault with its outcome, and the seconds between them."""

MOST_PROCESSES = 8
"""Each process takes about 0.5 GB, and launches others."""

ROOT = Path(__file__).parent.parent


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for the whole suite; 0 for a few files, which end before processes start."""
    if any(argument.partition("::")[0].endswith(".py") for argument in config.args):
        return 0
    affinity = getattr(os, "sched_getaffinity", None)  # Linux; a batch job may have fewer cores.
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores) if cores > 1 else 0


def pytest_collection_finish() -> None:
    # Imported modules are hundreds of thousands of objects, which every later collection of garbage
    # would visit: half a second each.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # Libraries report what they can't free at the exit.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds to outcome"] = SECONDS_TO_OUTCOME


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A crashed process has no output.
    SECONDS_TO_OUTCOME.extend(getattr(node, "workeroutput", {}).get("seconds to outcome", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if SECONDS_TO_OUTCOME:
        terminalreporter.section("seconds from fault to outcome")
        for outcome, seconds in SECONDS_TO_OUTCOME:
            terminalreporter.write_line(f"{seconds:6.1f}  {outcome}")


@pytest.fixture(autouse=True, scope="session")
def one_fork_server() -> Iterator[None]:
    """The first test that needs workers of the package starts the server, with the modules that
    those of any test need: each worker would import them again, for two seconds."""
    real = BaseContext.set_forkserver_preload
    needed = ["pointup.datasets.batch", "pointup.datasets.meshes"]

    def preload(context: BaseContext, modules: list[str]) -> None:
        real(context, modules + needed * any(name.startswith("pointup.") for name in modules))

    with mock.patch.object(BaseContext, "set_forkserver_preload", preload):
        yield


@pytest.fixture(autouse=True, scope="session")
def coarse_pictures() -> Iterator[None]:
    """Pictures are drawn without supersampling, a quarter of the work."""
    from pointup.visualization import rendering

    with mock.patch.object(rendering, "_SUPERSAMPLING", 1):
        yield


@pytest.fixture(autouse=True, scope="session")
def calibrated_once() -> Iterator[None]:
    """Models that begin with equal weights are calibrated once, which takes longer than to make
    and to use a small one."""
    from pointup.model import upsampler

    real, known = upsampler.calibrate, {}

    def calibrate(model: Any, layers: Any) -> None:
        weights = model.state_dict()
        # The shapes of equal bytes follow from the options.
        stored = (weight.cpu().numpy(force=True).tobytes() for weight in weights.values())
        key = f"{model}{model.config}", *stored
        if key not in known:
            real(model, layers)
            known[key] = {name: weight.clone() for name, weight in weights.items()}
        model.load_state_dict(known[key])

    with mock.patch.object(upsampler, "calibrate", calibrate):
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests make the same model with the same weights, so that `calibrated_once` knows them."""
    import torch

    torch.manual_seed(0)


@contextmanager
def small_pictures() -> Iterator[None]:
    """Panels of 240 pixels, for pictures that nobody looks at."""
    from pointup.visualization import before_after, columns

    with (
        mock.patch.multiple(before_after, SIZE=240, SHAPE_ROWS=190),
        mock.patch.multiple(columns, SIZE=240, CLOSE_ROWS=60, SECTION_ROWS=60),
    ):
        yield


@pytest.fixture
def small_panels() -> Iterator[None]:
    with small_pictures():
        yield


@pytest.fixture
def small_bench(monkeypatch) -> None:
    """Sizes with which every section of the benchmark takes about a second."""
    from pointup.benchmark import section, sections

    monkeypatch.setattr(section, "MOST_ROUNDS", 1)
    monkeypatch.setattr(sections, "QUICK_STEP_SIZES", (60,))
    monkeypatch.setitem(sections.TOKENS, "cpu", 1200)
    monkeypatch.setattr(sections, "QUICK_SEARCH_POINTS", 200)
    monkeypatch.setattr(sections, "QUICK_CLOUD_SIZES", (300,))
    monkeypatch.setattr(sections, "QUICK_PAIRS", 4)


def wavy_pair(name: str, num_source: int, ratio: float, rng: np.random.Generator) -> Any:
    """Two independent samplings of a wavy sheet with normals."""
    from pointup.datasets.pair import Pair

    frequency, phase = rng.uniform(1, 4), rng.uniform(0, 6)

    def sample(number: int) -> tuple[np.ndarray, np.ndarray]:
        xy = rng.random((number, 2))
        z = 0.2 * np.sin(frequency * xy[:, 0] + phase)
        slope = 0.2 * frequency * np.cos(frequency * xy[:, 0] + phase)
        normals = np.stack([-slope, np.zeros(number), np.ones(number)], axis=1)
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        points = np.column_stack([xy, z])
        return points.astype(np.float32), normals.astype(np.float32)

    num_target = round(ratio * num_source)
    target, normals = sample(num_target)
    return Pair(
        name=name,
        source=sample(num_source)[0],
        target=target,
        target_normals=normals,
        resample=sample(num_target)[0],
    )


def write_small_pairs(directory: Path, num_validation: int) -> Path:
    """Write 40 + `num_validation` small pairs, of sizes from 20 to 120 and ratios from 2 to 4."""
    from pointup.datasets.pair_writer import write_pairs

    rng = np.random.default_rng(0)

    def pairs(split: str, number: int) -> Iterator[Any]:
        for i in range(number):
            size, ratio = int(rng.integers(20, 120)), rng.uniform(2, 4)
            yield wavy_pair(f"{split}_{i}", size, ratio, rng)

    validation = pairs("validation", num_validation)
    write_pairs(pairs("train", 40), validation, directory, info={"made_by": "tests"})
    return directory


@pytest.fixture(scope="session")
def pair_directory(tmp_path_factory) -> Path:
    return write_small_pairs(tmp_path_factory.mktemp("data") / "pairs", num_validation=2)


@pytest.fixture(scope="session")
def undisturbed(pair_directory, tmp_path_factory) -> Path:
    """The undisturbed run of one process, with which disturbed runs are compared.

    It runs once for all test processes.
    """
    from disturbed import continues

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run = folder / "undisturbed" / "run"
    with FileLock(folder / "undisturbed.lock"):
        if not run.exists():
            run.parent.mkdir(exist_ok=True)
            continues(pair_directory, run)
    return run


@pytest.fixture
def accelerator(tmp_path) -> Any:
    from runs import TrainConfig, training

    return training.make_accelerator(TrainConfig(output_dir=tmp_path))


@pytest.fixture
def loader() -> Iterator[Callable[..., Any]]:
    """`make_loader`; the workers end with the test. A traceback would keep them for the collector
    of garbage, which breaks their queues first and then waits for each of them."""
    from pointup.datasets.batch import make_loader

    made = []

    def make(*values: Any, **options: Any) -> Any:
        made.append(make_loader(*values, **options))
        return made[-1]

    yield make
    for each in made:
        if each._iterator is not None:
            each._iterator._shutdown_workers()


@pytest.fixture
def launch() -> Callable[..., Run]:
    """Run a script in `num_processes` processes with `accelerate launch`."""

    def run(
        *arguments: str | Path,
        num_processes: int = 1,
        mixed_precision: str = "no",
        script: str | Path = ROOT / "train.py",
        timeout: float = 120,
        **environment: str,
    ) -> Run:
        config = ROOT / "accelerate_configs" / ("cpu.yaml" if num_processes == 1 else "cpu2.yaml")
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", config,
            "--num_processes", num_processes, "--main_process_port", free_port(),
            "--mixed_precision", mixed_precision, script, *arguments,
        ]  # fmt: skip
        return run_and_watch(command, timeout, ACCELERATE_DEBUG_MODE="true", **environment)

    return run


@pytest.fixture
def start(pair_directory, capfd) -> Callable[..., Any]:
    """Run train.py for two steps in this process; returns its status and stderr."""
    from starts import start_in_process

    def run(
        output_dir: Path, *options: object, data: Path | None = pair_directory
    ) -> tuple[int, str]:
        capfd.readouterr()
        return start_in_process(data, output_dir, *options), capfd.readouterr().err

    return run


@pytest.fixture(scope="session")
def saved_run(pair_directory, tmp_path_factory) -> Path:
    """A finished run of two steps, both saved as checkpoints."""
    from starts import start_in_process

    directory = tmp_path_factory.mktemp("saved") / "run"
    assert start_in_process(pair_directory, directory) == 0
    return directory


@pytest.fixture
def run(saved_run, tmp_path) -> Path:
    """A copy of `saved_run` that tests can damage."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    """A small model that moves the children, like a trained model."""
    from sheets import small_model

    directory = tmp_path_factory.mktemp("model")
    small_model(noise=0.1).save_pretrained(directory)
    return directory


@pytest.fixture
def command(model_directory, capfd) -> Callable[..., Any]:
    """Run `pointup upsample` with the small model, in this process."""
    from survey_files import Result

    from pointup.cli import main as cli

    def run(*arguments: str | Path, model: str | Path = model_directory) -> Result:
        words = ["upsample", *map(str, arguments), "--model", str(model)]
        return Result(cli.main(words), *capfd.readouterr())

    return run


@pytest.fixture
def make_store(tmp_path) -> Callable[..., Any]:
    """Makes a store of positions, read in chunks and cut into small blocks."""
    from sheets import in_chunks

    from pointup.io.cloud import PointCloud
    from pointup.upsampling.store.point_store import build_store

    count = iter(range(100))

    def make(points: np.ndarray | PointCloud, block_size: int = 200, chunk_size: int = 500) -> Any:
        directory = tmp_path / str(next(count))
        directory.mkdir()
        cloud = points
        if not isinstance(points, PointCloud):
            cloud = PointCloud(points, {"number": np.arange(len(points))})
        return build_store(in_chunks(cloud, chunk_size), directory, block_size)

    return make


def metrics_of(run_directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
