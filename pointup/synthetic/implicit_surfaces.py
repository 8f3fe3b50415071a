"""Zero level sets of scalar fields as triangle soups, extracted by marching cubes.

Fields are negative inside the body.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Field = Callable[[np.ndarray], np.ndarray]


def isosurface(field: Field, low: np.ndarray, high: np.ndarray, cell: float) -> np.ndarray:
    """The zero level set (F, 3, 3) of a field that is positive on the border of the box.

    The box is `low` (3,) to `high` (3,), the grid spacing `cell`.
    """
    import igl

    axes = [np.arange(a - cell, b + 2 * cell, cell) for a, b in zip(low, high, strict=True)]
    z, y, x = np.meshgrid(*axes[::-1], indexing="ij")
    points = np.stack([x, y, z], axis=-1).reshape(-1, 3)
    vertices, faces, _ = igl.marching_cubes(field(points), points, *map(len, axes), 0.0)
    return vertices[faces]


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
    z, y, x = np.meshgrid(
        *(origin[i] + cell * np.arange(shape[i]) for i in (2, 1, 0)), indexing="ij"
    )
    points = np.stack([x, y, z], axis=-1).reshape(-1, 3)
    vertices, faces, _ = igl.marching_cubes(field.ravel(), points, *map(int, shape), 0.0)
    return vertices[faces]


def smooth_minimum(a: np.ndarray, b: np.ndarray, blend: float) -> np.ndarray:
    """Smooth minimum of two fields (Quilez, 2013): exact if they differ by `blend` or more."""
    share = (blend - np.abs(a - b)).clip(0) / blend
    return np.minimum(a, b) - 0.25 * blend * share * share
