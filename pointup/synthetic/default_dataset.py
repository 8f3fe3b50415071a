"""The dataset that `train.py` trains on where none is given: procedural shapes and surveys."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from pointup.datasets.meshes import draw_source
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.thinning_patterns import PATTERNS
from pointup.errors import FileError, PointupError
from pointup.geometry.surfaces import Surface
from pointup.synthetic.landscapes import random_scene, scan
from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.shapes import random_surface

# To be raised with every change to what is made: a cache of the old recipe is then left alone.
RECIPE = 1
NUM_TRAIN = 320
NUM_VALIDATION = 32
SCENE_SHARE = 0.35
# A scene that comes out otherwise, all in the dark or all in leaves, is drawn again.
MIN_SOURCE, MAX_TARGET = 150, 14_000
RATIOS = (1.7, 8.2)
MAX_WORKERS = 32

logger = logging.getLogger(__name__)


def default_dataset(
    cache_dir: str | Path | None = None,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_validation: int = NUM_VALIDATION,
    num_workers: int | None = None,
) -> Path:
    """Directory of the default pair dataset, made at the first call and found at every later one.

    It lies below `cache_dir`, else $POINTUP_CACHE, else $XDG_CACHE_HOME/pointup, else
    ~/.cache/pointup. Any number of processes may call at the same time: one makes the dataset, the
    others wait for it. See `default_pairs` for what is in it.
    """
    root = _cache_root() if cache_dir is None else Path(cache_dir)
    directory = root / f"default-{RECIPE}-seed{seed}-{num_train}-{num_validation}"
    if directory.is_dir():
        return directory
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{directory}.lock").acquire()
    except OSError as error:
        raise FileError(
            f"{root}: the cache can't be written ({error.strerror}); set POINTUP_CACHE to another "
            "directory, or give --data"
        ) from error
    with lock:
        if not directory.is_dir():
            # A name of its own, because a network disk may not honour the lock.
            draft = root / f"{directory.name}.{uuid.uuid4().hex}"
            default_pairs(draft, seed, num_train, num_validation, num_workers)
            try:
                draft.rename(directory)
            except OSError:
                shutil.rmtree(draft)
                if not directory.is_dir():
                    raise
    return directory


def _cache_root() -> Path:
    for variable, folder in (("POINTUP_CACHE", ""), ("XDG_CACHE_HOME", "pointup")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / folder
    return Path.home() / ".cache" / "pointup"


def default_pairs(
    directory: str | Path,
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_validation: int = NUM_VALIDATION,
    num_workers: int | None = None,
    scene_share: float = SCENE_SHARE,
) -> None:
    """Write the default pair dataset: about two thirds shapes, one third surveys of landscapes, or
    another share of these.

    Sizes spread over a decade, 200 to about 2500 source points, with two to eight times as many in
    the target, four times in most shapes. Source and target are drawn independently. Validation
    samples have a second sampling and their surface. All follows from the seed, whatever the number
    of workers: one for each core where None.
    """
    logger.info("making %d procedural samples to train on", num_train + num_validation)
    surfaces: dict[str, Surface] = {}

    with _mapping(_num_cores() if num_workers is None else num_workers) as mapping:
        make_train, make_validation = (
            partial(default_sample, seed, split, scene_share=scene_share)
            for split in ("train", "validation")
        )
        train = mapping(make_train, num_train)
        validation = mapping(make_validation, num_validation)

        def with_surfaces() -> Iterator[Pair]:
            for pair, surface in validation:
                surfaces[pair.surface] = surface
                yield pair

        info = {
            "made_by": "pointup, procedurally",
            "recipe": RECIPE,
            "seed": seed,
            "scene_share": scene_share,
        }
        write_pairs((pair for pair, _ in train), with_surfaces(), directory, info, surfaces)


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_WORKERS)


Mapping = Callable[[Callable[[int], tuple[Pair, Surface]], int], Iterator[tuple[Pair, Surface]]]


@contextmanager
def _mapping(num_workers: int) -> Iterator[Mapping]:
    """What applies a function to 0, 1, ..., in order, in that many processes."""

    def shown(
        results: Iterator[tuple[Pair, Surface]], total: int
    ) -> Iterator[tuple[Pair, Surface]]:
        title = "making procedural samples"
        return tqdm(results, desc=title, total=total, leave=False, disable=None)

    if num_workers <= 1:
        yield lambda function, number: shown(map(function, range(number)), number)
        return
    # A forked copy of a process with threads, as torch and Arrow start them, can deadlock.
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    context = get_context(method)
    context.set_forkserver_preload(["__main__", __name__])
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    try:
        yield lambda function, number: shown(pool.map(function, range(number)), number)
    except BrokenProcessPool as error:
        raise PointupError(
            "a process that made samples died: for lack of memory, or because the main script "
            'runs on import; guard it with `if __name__ == "__main__":`'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the parent process alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def default_sample(
    seed: int, split: str, number: int, scene_share: float = SCENE_SHARE
) -> tuple[Pair, Surface]:
    """A sample of the default dataset and its surface, a function of the arguments alone."""
    validation = split == "validation"
    for attempt in count():
        rng = np.random.default_rng([seed, validation, number, attempt])
        make = scene_pair if rng.random() < scene_share else shape_pair
        pair, surface = make(rng, resample=validation)
        num_source, num_target = len(pair.source), len(pair.target)
        in_range = RATIOS[0] * num_source <= num_target <= RATIOS[1] * num_source
        if in_range and num_source >= MIN_SOURCE and num_target <= MAX_TARGET:
            break
    pair.name = f"{pair.name}_{split}_{number:05d}"
    pair.surface = f"{pair.name}.npz" if validation else ""
    return pair, surface


def shape_pair(rng: np.random.Generator, resample: bool) -> tuple[Pair, Surface]:
    """A shape of furthest distance 1; source and target by patterns of their own."""
    surface, family = random_surface(rng)
    num_source = round(log_uniform(rng, 200, 2500))
    ratio = 4.0 if rng.random() < 0.6 else rng.uniform(2, 8)
    num_target = min(round(ratio * num_source), 10_000)
    source = draw_source(surface, num_source, str(rng.choice(PATTERNS, p=[0.3, 0.45, 0.25])), rng)
    draw = surface.poisson_disk if rng.random() < 0.75 else surface.sample
    target, normals = draw(num_target, rng)
    pair = Pair(
        name=family,
        source=source.astype(np.float32),
        target=target.astype(np.float32),
        target_normals=normals.astype(np.float32),
        resample=draw(num_target, rng)[0].astype(np.float32) if resample else None,
        vertical=False,
    )
    return pair, surface


def scene_pair(rng: np.random.Generator, resample: bool) -> tuple[Pair, Surface]:
    """A landscape from an aeroplane and, two to six times as densely, from a drone, in metres."""
    density = log_uniform(rng, 6, 30)
    width = np.sqrt(log_uniform(rng, 300, 2200) / density).clip(6, 16)
    scene = random_scene(rng, width)
    source, _ = scan(scene, density, rng)
    # Returns, not pulses: a wide beam has several of them among trees.
    denser = log_uniform(rng, 2, 6) * len(source) / width**2
    target, normals = scan(scene, denser, rng, from_drone=True)
    second = scan(scene, denser, rng, from_drone=True)[0] if resample else None
    pair = Pair(
        name="scene",
        source=source.astype(np.float32),
        target=target.astype(np.float32),
        target_normals=normals.astype(np.float32),
        resample=None if second is None else second.astype(np.float32),
        vertical=True,
    )
    return pair, scene.surface()
