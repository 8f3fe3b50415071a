"""The grid that the positions of a cloud are rounded to, the same in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from scipy.spatial import cKDTree

_NUM_SEEDS, _NUM_AROUND = 8, 512
# Steps in the extent that positions are hashed in, coarse against errors of their coordinates.
_HASHED_STEPS = 2.0**20


def grid_resolution(
    chunks: Callable[[], Iterator[np.ndarray]], low: np.ndarray, extent: np.ndarray
) -> float:
    """A power of two, thousands of times finer than the points are apart.

    On this grid differences of positions are exact: equal distances are seen to be equal, and the
    noise in coordinates of a cloud that was shifted far off is gone.

    `chunks` gives the positions (n, 3) of the cloud, again and again; low, extent: (3,). What is
    measured are the nearest points of a few seeds, chosen by a hash of their place. So the result
    depends neither on the order of the points nor on how they are cut into files.
    """
    (seeds,) = _first(chunks(), [partial(_hashed, low=low, extent=extent)], _NUM_SEEDS)
    distances = []
    for around in _first(chunks(), [partial(_squared, seed=seed) for seed in seeds], _NUM_AROUND):
        distance = np.asarray(cKDTree(around).query(around, k=[2])[0])
        distances.append(distance[np.isfinite(distance)])
    apart = np.concatenate(distances)
    spacing = float(np.median(apart)) if len(apart) else float(extent.max())
    # Distances hold 2**26 steps exactly.
    finest = np.log2(extent.max()) - 40
    # Spacings that are a power of two are not to fall on either side of it.
    return float(2.0 ** max(np.floor(np.log2(spacing) + 1e-6) - 14, np.ceil(finest)))


def _squared(points: np.ndarray, seed: np.ndarray) -> np.ndarray:
    x, y, z = (points - seed).T
    return np.asarray(x * x + y * y + z * z)


def _hashed(points: np.ndarray, low: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Numbers (n,) that look random and depend on the place of a point alone."""
    key = np.zeros(len(points), np.uint64)
    for axis in range(3):
        steps = np.rint((points[:, axis] - low[axis]) * (_HASHED_STEPS / extent.max()))
        key = (key ^ steps.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _first(
    chunks: Iterator[np.ndarray],
    keys: Sequence[Callable[[np.ndarray], np.ndarray]],
    number: int,
) -> list[np.ndarray]:
    """For each of the keys (n,) the different points that come first by it, `number` at most.

    Among points with equal keys, those first by their coordinates.
    """
    found = [np.empty((0, 3)) for _ in keys]
    for points in chunks:
        for i, key in enumerate(keys):
            values = key(points)
            if len(found[i]) == number:
                may_be = values <= key(found[i][-1:])[0]
                nearby, values = points[may_be], values[may_be]
            else:
                nearby = points
            both = np.concatenate([found[i], nearby])
            found[i] = _different(both, np.append(key(found[i]), values), number)
    return found


def _different(points: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    """The first `number` different points by their keys (n,), and among equal ones by place."""
    looked_at = 2 * number
    while True:
        may_be = np.ones(len(keys), bool)
        if len(keys) > looked_at:
            may_be = keys <= np.partition(keys, looked_at)[looked_at]
        x, y, z = points[may_be].T
        ordered = points[may_be][np.lexsort((z, y, x, keys[may_be]))]
        is_new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(ordered)]
        different = ordered[is_new][:number]
        if len(different) == number or may_be.all():
            return different
        # Many are in one place.
        looked_at *= 8
