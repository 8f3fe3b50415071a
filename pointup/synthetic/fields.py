"""Random numbers, rotations and smooth fields, and the zero level sets of fields as triangle soups.

A field whose level set is a surface is negative inside the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Field = Callable[[np.ndarray], np.ndarray]


def isosurface(field: Field, low: np.ndarray, high: np.ndarray, cell: float) -> np.ndarray:
    """The zero level set (F, 3, 3) of a field that is positive on the border of the box.

    The box is `low` (3,) to `high` (3,), the grid spacing `cell`.
    """
    import igl

    axes = [np.arange(a - cell, b + 2 * cell, cell) for a, b in zip(low, high, strict=True)]
    points = _lattice(axes)
    vertices, faces, _ = igl.marching_cubes(field(points), points, *map(len, axes), 0.0)
    return vertices[faces]


def _lattice(axes: Sequence[np.ndarray]) -> np.ndarray:
    """The points (N, 3) of a grid with these coordinates along x, y and z, x fastest."""
    z, y, x = np.meshgrid(*axes[::-1], indexing="ij")
    return np.stack([x, y, z], axis=-1).reshape(-1, 3)


def round_cones(
    starts: np.ndarray, ends: np.ndarray, radii: np.ndarray, blend: float, cell: float
) -> np.ndarray:
    """Smooth union of round cones, (F, 3, 3).

    `starts` and `ends` are (B, 3), `radii` (B, 2) at both ends. `blend` is the width of the smooth
    transition, `cell` the grid spacing.
    """
    import igl

    margin = 2 * blend + 2 * cell
    reach = radii.max(axis=1, keepdims=True) + margin
    lows, highs = np.minimum(starts, ends) - reach, np.maximum(starts, ends) + reach
    origin = lows.min(axis=0)
    shape = np.ceil((highs.max(axis=0) - origin) / cell).astype(int) + 1
    field = np.full(shape[::-1], margin)
    for a, b, (ra, rb), low, high in zip(starts, ends, radii, lows, highs, strict=True):
        # Outside this box, the cone is beyond the reach of the blend and changes nothing.
        begin = np.floor((low - origin) / cell).astype(int)
        stop = np.minimum(np.ceil((high - origin) / cell).astype(int) + 1, shape)
        x, y, z = (origin[i] + cell * np.arange(begin[i], stop[i]) - a[i] for i in range(3))
        along = b - a
        share = x * along[0] + (y[:, None] * along[1] + z[:, None, None] * along[2])
        share = (share / (along @ along + 1e-12)).clip(0, 1)
        squared = np.square(x - share * along[0])
        squared += np.square(y[:, None] - share * along[1])
        squared += np.square(z[:, None, None] - share * along[2])
        distance = np.sqrt(squared) - (ra + share * (rb - ra))
        box = tuple(slice(begin[i], stop[i]) for i in (2, 1, 0))
        field[box] = smooth_minimum(field[box], distance, blend)
    points = _lattice([origin[i] + cell * np.arange(shape[i]) for i in range(3)])
    vertices, faces, _ = igl.marching_cubes(field.ravel(), points, *map(int, shape), 0.0)
    return vertices[faces]


def smooth_minimum(a: np.ndarray, b: np.ndarray, blend: float) -> np.ndarray:
    """Smooth minimum of two fields (Quilez, 2013): exact if they differ by `blend` or more."""
    share = (blend - np.abs(a - b)).clip(0) / blend
    return np.minimum(a, b) - 0.25 * blend * share * share


def log_uniform(rng: np.random.Generator, low: float, high: float, size: Any = None) -> Any:
    """Random numbers between `low` and `high`, uniform in the logarithm."""
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def waves(rng: np.random.Generator, frequency: float, dimension: int = 3) -> Field:
    """A smooth random field of unit variance; `frequency` is in radians per unit of length."""
    num_waves = 12
    directions = rng.normal(size=(dimension, num_waves)) * frequency
    phases = rng.uniform(0, 2 * np.pi, num_waves)
    scale = (2 / num_waves) ** 0.5
    return lambda points: scale * np.cos(points @ directions + phases).sum(axis=-1)


def rotation(rng: np.random.Generator) -> np.ndarray:
    """A uniformly random rotation matrix (3, 3)."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q if np.linalg.det(q) > 0 else q[:, [1, 0, 2]]


def displace(
    points: np.ndarray, rng: np.random.Generator, frequency: float, strength: float
) -> np.ndarray:
    """Displace points (..., 3) by a smooth random vector field, so that equal points stay equal."""
    fields = [waves(rng, frequency) for _ in range(3)]
    return points + strength * np.stack([field(points) for field in fields], axis=-1)
