"""Man-made objects of landscapes: houses, walls, fences, poles, wires, cars. Metres, z up.

Each function returns triangle soups (F, 3, 3) float64. Houses, fences, cars and poles are placed at
the origin, with the ground at z = 0. All but cars reach `FOUNDATION` below it, so that they also
stand on slopes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pointup.synthetic.tessellation import cells, circle, hull, sweep

FOUNDATION = 1.5


def box(low: ArrayLike, high: ArrayLike) -> np.ndarray:
    """A box between two opposite corners (3,)."""
    return hull(np.where(np.indices((2, 2, 2)).reshape(3, -1).T, high, low).astype(float))


def house(rng: np.random.Generator) -> np.ndarray:
    """A house with a flat, lean-to, gable or hip roof, some with a chimney or an annex."""
    length, depth = rng.uniform(5, 14), rng.uniform(4, 9)
    eaves_height = rng.uniform(2.3, 3.2) * rng.integers(1, 4)
    half = np.array([length, depth]) / 2
    parts = [box([*-half, -FOUNDATION], [*half, eaves_height])]
    parts += roof(rng, half, eaves_height)
    if rng.random() < 0.5:
        place = rng.uniform(-0.35, 0.35, 2) * [length, depth]
        size = rng.uniform(0.25, 0.5, 2)
        top = eaves_height + rng.uniform(0.4, 0.5) * depth + 0.3
        parts.append(box([*place - size, eaves_height], [*place + size, top]))
    if rng.random() < 0.4:
        wing = half * rng.uniform(0.3, 0.6, 2)
        lower = eaves_height * rng.uniform(0.5, 0.9)
        annex = [box([*-wing, -FOUNDATION], [*wing, lower]), *roof(rng, wing, lower)]
        shift = np.array([*(half + wing * 0.9) * [rng.choice([-1, 1]), 0], 0])
        parts += [part + shift for part in annex]
    return np.concatenate(parts)


def roof(rng: np.random.Generator, half: np.ndarray, height: float) -> list[np.ndarray]:
    """The solids of a roof at `height`, on walls of half size `half` (2,); the ridge is along x."""
    kind, pitch = rng.integers(5), rng.uniform(0.3, 1.0)
    if kind == 0:  # flat, with a parapet
        rim = np.ones((3, 3, 1), dtype=bool)
        rim[1, 1] = False
        sides = [np.array([-size, 0.25 - size, size - 0.25, size]) for size in half]
        return [cells(rim, [*sides, np.array([height, height + rng.uniform(0.1, 0.8)])])]
    eaves = half + rng.uniform(0.1, 0.6)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * eaves
    base = [[*corner, height + lift] for corner in corners for lift in (0, 0.12)]
    rise = pitch * eaves[1]
    if kind == 1:  # lean-to
        ridge = [[-eaves[0], eaves[1], height + rise], [eaves[0], eaves[1], height + rise]]
    else:
        end = eaves[0] - (eaves[1] * rng.uniform(0.6, 1) if kind == 2 else 0)
        ridge = [[-max(end, 0), 0, height + rise], [max(end, 0), 0, height + rise]]
    return [hull(np.array(base + ridge))]


def fence(rng: np.random.Generator) -> np.ndarray:
    """A wall, a board fence or a trimmed hedge: a box."""
    length, height = rng.uniform(5, 20), rng.uniform(0.7, 2.2)
    thick = rng.choice([0.05, 0.25, 0.8])
    return box([-length / 2, -thick / 2, -FOUNDATION], [length / 2, thick / 2, height])


def car(rng: np.random.Generator) -> np.ndarray:
    """A car or a van made of two wedges."""
    length, width, height = rng.uniform([3.8, 1.6, 1.4], [5.5, 2.0, 2.4])
    bonnet, waist = rng.uniform(0.05, 0.3), 0.55 * height

    def wedge(low: float, high: float, back: float, front: float, inset: float) -> np.ndarray:
        sides = np.array([[-back, -1], [front, -1], [front, 1], [-back, 1]]) / 2
        bottom = np.column_stack([sides * [length, width], np.full(4, low)])
        top = np.column_stack([sides * [length * inset, width * inset], np.full(4, high)])
        return hull(np.concatenate([bottom, top]))

    return np.concatenate(
        [wedge(0.25, waist, 1, 1, 0.95), wedge(waist, height, 1, 1 - 2 * bonnet, 0.85)]
    )


def pole(rng: np.random.Generator, height: float) -> np.ndarray:
    """A lamp post or power pole of this height, with a cross-arm along y."""
    thick = rng.uniform(0.05, 0.16)
    shaft = sweep(
        np.linspace([0, 0, -FOUNDATION], [0, 0, height], 4), np.ones(4), circle(8) * thick
    )
    arm = box([-0.06, -1, height - 0.5], [0.06, 1, height - 0.35])
    return np.concatenate([shaft, arm])


def wires(start: np.ndarray, end: np.ndarray, sag: float) -> np.ndarray:
    """Three parallel wires between two pole heads (3,), with a sag in metres at mid-span."""
    share = np.linspace(0, 1, 24)[:, None]
    line = start + share * (end - start) - [0, 0, 4 * sag] * share * (1 - share)
    along = (end - start)[:2] / np.linalg.norm((end - start)[:2])
    aside = np.array([-along[1], along[0], 0])
    ones = np.ones(len(line))
    return np.concatenate(
        [sweep(line + shift * aside, ones, circle(4) * 0.02) for shift in (-0.9, 0.0, 0.9)]
    )
