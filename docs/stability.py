"""Measures how stable `shapes` is: beyond borders, and on changed input.

    python docs/stability.py --meshes meshes/ [--model shapes] [--num-meshes 6]

*Stable* is a new point of the original input whose nearest new point of the changed input, moved
back, is within a hundredth of the spacing of the output. The changed input is computed in float64,
and given as it is, or rounded to float32 as in most files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation
from weak_places import spacing, surface_of

from pointup import Upsampler, upsample
from pointup.geometry.surfaces import Surface
from pointup.io.mesh_files import read_triangles
from pointup.upsampling.in_memory import load_model

Change = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
"""A change of the input points, and its inverse for the output."""

NUM_SEEDS = 3
NUM_SOURCE = 2048
FAR = 0.1


def square() -> Surface:
    return surface_of([np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], float)])


def cube() -> Surface:
    faces = []
    for axis in range(3):
        for level in (0.0, 1.0):
            corners = np.full((4, 3), level)
            corners[:, [i for i in range(3) if i != axis]] = [[0, 0], [1, 0], [1, 1], [0, 1]]
            faces.append(corners)
    return surface_of(faces)


def outside(points: np.ndarray, axes: slice) -> np.ndarray:
    """Distance of points from the unit square or cube, 0 inside."""
    beyond = np.maximum(np.maximum(-points[:, axes], points[:, axes] - 1), 0)
    return np.linalg.norm(beyond, axis=1)


def changes(rng: np.random.Generator) -> dict[str, Change]:
    turn = Rotation.random(random_state=rng.integers(2**31)).as_matrix()
    move, factor = np.array([12.5, -3.2, 0.7]), 3.7
    order = rng.permutation(NUM_SOURCE)
    again = np.append(order, order[::3])

    def same(points: np.ndarray) -> np.ndarray:
        return points

    return {
        "moved": (lambda p: p + move, lambda p: p - move),
        "scaled": (lambda p: p * factor, lambda p: p / factor),
        "turned": (lambda p: p @ turn.T, lambda p: p @ turn),
        "shuffled": (lambda p: p[order], same),
        "a third of the points repeated": (lambda p: p[again], same),
    }


def share_stable(
    source: np.ndarray, change: Change, ratio: float, model: Upsampler, dtype: type
) -> float:
    changed = change[0](source)
    before = upsample(source, ratio, model=model, only_new=True)
    after = change[1](upsample(changed.astype(dtype), ratio, model=model, only_new=True))
    distance = cKDTree(after).query(before)[0]
    return float(np.mean(distance < 0.01 * spacing(before)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--meshes", type=Path, required=True)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--num-meshes", type=int, default=6)
    options = parser.parse_args()
    model = load_model(options.model, torch.device("cpu"))
    print("| surface | beyond it by more than 0.1 spacings | farthest, in spacings |")
    print("|---|---:|---:|")
    for name, surface, axes in (("square", square(), slice(2)), ("cube", cube(), slice(3))):
        far = []
        for seed in range(NUM_SEEDS):
            source = surface.poisson_disk(NUM_SOURCE, np.random.default_rng(seed))[0]
            new = upsample(source, 4.0, model=model, only_new=True)
            far.append(outside(new, axes) / spacing(source))
        share = np.mean(np.concatenate(far) > FAR)
        print(f"| {name} | {share:.2%} | {np.concatenate(far).max():.2f} |", flush=True)
    paths = sorted(options.meshes.iterdir())
    paths = paths[:: max(1, len(paths) // options.num_meshes)][: options.num_meshes]
    print("\n| input | ratio | stable, float64 | stable, float32 |\n|---|---:|---:|---:|")
    for ratio in (4.0, 16.0):
        shares: dict[str, list[tuple[float, ...]]] = {}
        for path in paths:
            rng = np.random.default_rng(0)
            source = read_triangles(path).poisson_disk(NUM_SOURCE, rng)[0].astype(np.float32)
            for name, change in changes(rng).items():
                if ratio == 4.0 or name == "turned":
                    shares.setdefault(name, []).append(
                        tuple(
                            share_stable(source.astype(np.float64), change, ratio, model, dtype)
                            for dtype in (np.float64, np.float32)
                        )
                    )
        for name, values in shares.items():
            least = np.min(values, axis=0)
            print(f"| {name} | {ratio:g} | {least[0]:.2%} | {least[1]:.2%} |", flush=True)


if __name__ == "__main__":
    main()
