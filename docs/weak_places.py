"""Measures `shapes` where it is weak, and draws it: sheets close together, and a fork.

    python docs/weak_places.py [--model shapes] [--picture docs/weak_places.png]

Surfaces are sampled evenly and upsampled 4x. Widths are in spacings, the mean distance of the input
points to their nearest neighbours. A new point is *between* two sides if it lies in the middle half
of the gap.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from scipy.spatial import cKDTree

from pointup import Upsampler, upsample
from pointup.geometry.surfaces import Surface
from pointup.upsampling.in_memory import load_model

NUM_SEEDS = 4
PLATES, FORKS = (0.3, 0.6, 1.0, 1.5), (1.0, 1.5, 2.0, 3.0)
TINE, DEPTH, BASE, THICKNESS = 0.4, 1.0, 0.4, 0.4


def surface_of(rectangles: list[np.ndarray]) -> Surface:
    """The union of rectangles (4, 3)."""
    corners = 4 * np.arange(len(rectangles))[:, None, None]
    return Surface(
        np.concatenate(rectangles), (np.array([[0, 1, 2], [0, 2, 3]]) + corners).reshape(-1, 3)
    )


def plates(gap: float) -> Surface:
    """Two unit squares, one above the other."""
    square = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], float)
    return surface_of([square, square + np.array([0, 0, gap])])


def fork(gap: float) -> Surface:
    """A solid with two prongs and a gap between them, open at the top (y)."""
    a, b, end, top = TINE, TINE + gap, 2 * TINE + gap, BASE + DEPTH
    outline = [(0, 0), (end, 0), (end, top), (b, top), (b, BASE), (a, BASE), (a, top), (0, top)]
    sides = [
        np.array([[*p, 0], [*q, 0], [*q, THICKNESS], [*p, THICKNESS]], float)
        for p, q in zip(outline, [*outline[1:], outline[0]], strict=True)
    ]
    boxes = [(0, end, 0, BASE), (0, a, BASE, top), (b, end, BASE, top)]
    faces = [
        np.array([[x, y, z] for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], float)
        for x0, x1, y0, y1 in boxes
        for z in (0, THICKNESS)
    ]
    return surface_of(sides + faces)


def spacing(points: np.ndarray) -> float:
    return float(cKDTree(points).query(points, k=2)[0][:, 1].mean())


def new_points(surface: Surface, number: int, seed: int, model: Upsampler) -> np.ndarray:
    points = surface.poisson_disk(number, np.random.default_rng(seed))[0]
    return upsample(points, 4.0, model=model, only_new=True)


def between_plates(new: np.ndarray, gap: float) -> np.ndarray:
    return (np.abs(new[:, 2] / gap - 0.5) < 0.25) & (np.abs(new[:, :2] - 0.5) < 0.47).all(1)


def across_fork(new: np.ndarray, gap: float) -> np.ndarray:
    """Not at the root, where the surface itself crosses the gap."""
    middle = np.abs((new[:, 0] - TINE) / gap - 0.5) < 0.25
    return middle & (new[:, 1] > BASE + gap / 4) & (new[:, 1] < BASE + DEPTH + gap)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    model = load_model(options.model, torch.device("cpu"))
    cases = [
        ("sheets", plates, between_plates, 1024, PLATES),
        ("prongs of a fork", fork, across_fork, 2048, FORKS),
    ]
    shown = []
    print("| gap, in spacings | sides | new points between them |\n|---|---|---:|")
    for name, surface_at, is_between, number, widths in cases:
        unit = spacing(surface_at(0.05).poisson_disk(number, np.random.default_rng(0))[0])
        for width in widths:
            gap = width * unit
            clouds = [new_points(surface_at(gap), number, seed, model) for seed in range(NUM_SEEDS)]
            share = np.mean([is_between(new, gap).mean() for new in clouds])
            print(f"| {width} | {name} | {share:.2%} |", flush=True)
            shown.append((f"{name}, {width} spacings apart", clouds[0], is_between(clouds[0], gap)))
    if options.picture:
        draw(shown[4:7], options.picture)


def draw(shown: list[tuple[str, np.ndarray, np.ndarray]], path: Path) -> None:
    """New points of forks from above, those between the prongs in red."""
    matplotlib.use("Agg")
    figure, panels = pyplot.subplots(1, len(shown), figsize=(12, 5), dpi=100, layout="constrained")
    for panel, (name, new, is_between) in zip(panels, shown, strict=True):
        near = (new[:, 1] > 0.7 * BASE) & (np.abs(new[:, 0] - new[:, 0].mean()) < 0.3)
        for chosen, color, size in ((~is_between, "0.55", 4), (is_between, "tab:red", 24)):
            panel.scatter(*new[near & chosen][:, :2].T, s=size, c=color, linewidths=0)
        panel.set_title(name, fontsize=13)
        panel.set_aspect("equal")
        panel.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    main()
