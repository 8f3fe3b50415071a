"""Surfaces whose sides are about as far apart as the points of a sparse sampling.

Parallel sheets, solids with slots and notches, and rods side by side are rare among other shapes,
so `pointup prepare default --close-sides` makes more of them.
"""

from __future__ import annotations

import numpy as np

from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.tessellation import cells, circle, extrude, grid, sweep
from pointup.synthetic.thin import grid_normals, sheet


def parallel_sheets(rng: np.random.Generator) -> np.ndarray:
    """Two or three open sheets, one above the other; some gaps widen to one side."""
    lowest = sheet(rng)
    if rng.random() < 0.5:
        lowest = np.concatenate([lowest[..., :2], np.zeros_like(lowest[..., :1])], axis=-1)
    widening = rng.choice([0, 0, rng.uniform(0, 3)]) * np.linspace(0, 1, len(lowest))
    gap = log_uniform(rng, 0.012, 0.12) * (1 + widening)[:, None, None] * grid_normals(lowest)
    return np.concatenate([grid(lowest + level * gap) for level in range(rng.choice([2, 2, 3]))])


def slotted_block(rng: np.random.Generator) -> np.ndarray:
    """A block with one to four narrow slots between prongs, like a fork or a comb."""
    num_slots = rng.integers(1, 5)
    lengths = np.empty(2 * num_slots + 1)
    lengths[::2] = log_uniform(rng, 0.1, 0.6, num_slots + 1)
    lengths[1::2] = log_uniform(rng, 0.02, 0.25, num_slots)
    depths = np.concatenate([[log_uniform(rng, 0.1, 0.5)], log_uniform(rng, 0.1, 0.6, 3)])
    height = log_uniform(rng, 0.08, 0.8)
    occupied = np.ones((len(lengths), len(depths), 1), dtype=bool)
    for slot in range(num_slots):
        occupied[2 * slot + 1, rng.integers(1, len(depths)) :] = False
    edges = [np.concatenate([[0], np.cumsum(steps)]) for steps in (lengths, depths)]
    return cells(occupied, [*edges, np.array([0, height])])


def notched_prism(rng: np.random.Generator) -> np.ndarray:
    """A prism with one to three notches in the form of a V."""
    num_notches = rng.integers(1, 4)
    width = rng.uniform(0.5, 1) * num_notches
    outline = [(0.0, -1.0), (width, -1.0), (width, 0.0)]
    for notch in range(num_notches)[::-1]:
        half, deep = log_uniform(rng, 0.03, 0.2), rng.uniform(0.2, 0.85)
        middle = (notch + rng.uniform(0.4, 0.6)) * width / num_notches
        outline += [(middle + half, 0.0), (middle + rng.uniform(-1, 1) * half, -deep)]
        outline += [(middle - half, 0.0)]
    loop = np.array([*outline, (0.0, 0.0)]) - [width / 2, -0.5]
    height = log_uniform(rng, 0.1, 1)
    return extrude([loop], np.array([-height / 2, height / 2]), np.ones(2), spacing=0.02)


def side_by_side(rng: np.random.Generator) -> np.ndarray:
    """Two to five bent rods, side by side without contact, like fingers, cables or tines."""
    along = np.linspace(0, 1, 24)
    bend = rng.uniform(-0.3, 0.3, (2, 1)) * np.square(along)
    rods, position = [], 0.0
    for _ in range(rng.integers(2, 6)):
        radius = log_uniform(rng, 0.04, 0.15)
        length = rng.uniform(0.7, 1.1)
        radii = radius * np.sqrt(np.clip(1 - ((along - 0.5) * 2) ** 8, 0.05, 1))
        centres = np.stack([position + radius + bend[0], bend[1], length * along], axis=1)
        rods.append(sweep(centres, radii, circle(16)))
        position += 2 * radius + log_uniform(rng, 0.015, 0.15)
    return np.concatenate(rods)


CLOSE_SIDES = {parallel_sheets: 2, slotted_block: 2, notched_prism: 1, side_by_side: 1}
"""Families and their weights, see `pointup.synthetic.shapes.FAMILIES`."""
