"""The dataset that `train.py` uses without `--data`: procedural shapes and simulated surveys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from pointup.datasets.block_pairs import PATTERNS
from pointup.datasets.meshes import draw_source
from pointup.datasets.opening import cache_root
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.disk import acquire_lock, written_whole
from pointup.errors import FileError
from pointup.geometry.surfaces import Surface
from pointup.processes import num_cores, results_of
from pointup.progress import tracked
from pointup.synthetic.fields import log_uniform
from pointup.synthetic.landscapes import random_scene, scan
from pointup.synthetic.shapes import random_surface

# Increase this number with each change of the samples, so that cached datasets are not reused.
RECIPE = 3
NUM_TRAIN = 48
NUM_VALIDATION = 12
SCENE_SHARE = 0.35
# Samples outside these bounds are drawn again, such as scenes that are hidden from the scanner or
# consist of leaves only.
MIN_SOURCE, MAX_TARGET = 150, 5_000
RATIOS = (1.7, 8.2)
MAX_WORKERS = 32

logger = logging.getLogger(__name__)


def default_dataset() -> Path:
    """The directory of the default pair dataset, in `cache_root`; the first call creates it.

    Several processes may call this at the same time: one creates the dataset, the others wait for
    it. `default_pairs` describes its content. Raises FileError if the cache can't be written.
    """
    root = cache_root()
    directory = root / f"default-{RECIPE}-seed0-{NUM_TRAIN}-{NUM_VALIDATION}"
    if directory.is_dir():
        return directory
    try:
        root.mkdir(parents=True, exist_ok=True)
        with acquire_lock(Path(f"{directory}.lock")):
            if not directory.is_dir():
                with written_whole(directory) as staging:
                    default_pairs(staging, 0, NUM_TRAIN, NUM_VALIDATION)
    except OSError as error:
        # Another process was first, on a network file system where locks don't work.
        if not directory.is_dir():
            raise FileError(
                f"{root}: the default dataset can't be written ({error}); free some space, set "
                "POINTUP_CACHE to another directory, or give --data"
            ) from error
    return directory


def default_pairs(
    directory: str | Path,
    seed: int,
    num_train: int,
    num_validation: int,
    num_workers: int | None = None,
    scene_share: float = SCENE_SHARE,
    close_sides: float = 0.0,
) -> None:
    """Write the default pair dataset: shapes, and a share of `scene_share` surveys of landscapes.

    A share of `close_sides` of the shapes are surfaces whose sides are close to each other.

    Sources have about 200 to 2500 points. Targets have about two to eight times as many, in most
    shapes four times, and at most 5,000. Source and target are sampled independently. Validation
    samples have a second sampling and their surface. The dataset depends on the seed, not on the
    number of workers. `num_workers=None` starts one worker per core, at most 32.
    """
    total = num_train + num_validation
    logger.info("making %d procedural samples for training", total)
    make = partial(default_sample, seed, scene_share=scene_share, close_sides=close_sides)
    samples = results_of(
        [
            *(partial(make, "train", number) for number in range(num_train)),
            *(partial(make, "validation", number) for number in range(num_validation)),
        ],
        min(num_cores(), MAX_WORKERS) if num_workers is None else num_workers,
        remedy="for lack of memory, or because the main script runs on import; guard it with "
        '`if __name__ == "__main__":`',
    )
    made = tracked(samples, total, "making procedural samples")
    surfaces: dict[str, Surface] = {}

    def with_surfaces() -> Iterator[Pair]:
        for pair, surface in made:
            surfaces[pair.surface] = surface
            yield pair

    info = {
        "made_by": "pointup, procedurally",
        "recipe": RECIPE,
        "seed": seed,
        "scene_share": scene_share,
    }
    info |= {"close_sides": close_sides} if close_sides else {}
    train = (pair for pair, _ in islice(made, num_train))
    write_pairs(train, with_surfaces(), directory, info, surfaces)


def default_sample(
    seed: int, split: str, number: int, scene_share: float = SCENE_SHARE, close_sides: float = 0.0
) -> tuple[Pair, Surface]:
    """A sample of the default dataset and its surface; both depend only on the arguments."""
    validation = split == "validation"
    for attempt in count():
        rng = np.random.default_rng([seed, validation, number, attempt])
        if rng.random() < scene_share:
            pair, surface = scene_pair(rng, validation)
        else:
            # Without close sides no number is drawn, so that datasets stay as they were.
            close = bool(close_sides) and rng.random() < close_sides
            pair, surface = shape_pair(rng, validation, close)
        num_source, num_target = len(pair.source), len(pair.target)
        in_range = RATIOS[0] * num_source <= num_target <= RATIOS[1] * num_source
        if in_range and num_source >= MIN_SOURCE and num_target <= MAX_TARGET:
            break
    pair.name = f"{pair.name}_{split}_{number:05d}"
    pair.surface = f"{pair.name}.npz" if validation else ""
    return pair, surface


def shape_pair(
    rng: np.random.Generator, resample: bool, close_sides: bool = False
) -> tuple[Pair, Surface]:
    """A pair of a shape with a largest distance of 1 from its centre, and its surface.

    Source and target have separately drawn sampling patterns.
    """
    surface, family = random_surface(rng, close_sides)
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
    """A pair of a landscape in metres, and its surface.

    The source is a simulated aeroplane survey, the target a drone survey that is two to six times
    as dense.
    """
    density = log_uniform(rng, 6, 30)
    width = np.sqrt(log_uniform(rng, 300, 2200) / density).clip(6, 16)
    scene = random_scene(rng, width)
    source = scan(scene, density, rng).points
    # The density counts returns, not pulses: a wide beam has several returns among trees.
    denser = log_uniform(rng, 2, 6) * len(source) / width**2
    target = scan(scene, denser, rng, from_drone=True)
    second = scan(scene, denser, rng, from_drone=True).points if resample else None
    pair = Pair(
        name="scene",
        source=source.astype(np.float32),
        target=target.points.astype(np.float32),
        target_normals=target.normals.astype(np.float32),
        resample=None if second is None else second.astype(np.float32),
        vertical=True,
    )
    return pair, scene.surface()
