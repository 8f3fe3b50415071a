"""The grid that the positions of a cloud are rounded to, the same in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    seeds = _first_by_key(chunks(), lambda points: _hashed(points, low, extent), _NUM_SEEDS)
    distances = []
    for around in _nearest(chunks, seeds):
        distance = np.asarray(cKDTree(around).query(around, k=[2])[0])
        distances.append(distance[(distance > 0) & np.isfinite(distance)])
    apart = np.concatenate(distances)
    spacing = float(np.median(apart)) if len(apart) else float(extent.max())
    # Distances hold 2**26 steps exactly.
    finest = np.log2(extent.max()) - 40
    # Spacings that are a power of two are not to fall on either side of it.
    return float(2.0 ** max(np.floor(np.log2(spacing) + 1e-6) - 14, np.ceil(finest)))


def _nearest(chunks: Callable[[], Iterator[np.ndarray]], seeds: np.ndarray) -> list[np.ndarray]:
    """The points (n, 3) around each seed (S, 3)."""
    nearest = [np.empty((0, 3)) for _ in seeds]
    reach = np.full(len(seeds), np.inf)
    for points in chunks():
        for i, seed in enumerate(seeds):
            squared = _squared(points, seed)
            nearest[i] = _first(
                np.concatenate([nearest[i], points[squared <= reach[i]]]),
                lambda cloud, seed=seed: _squared(cloud, seed),
                _NUM_AROUND,
            )
            if len(nearest[i]) == _NUM_AROUND:
                reach[i] = _squared(nearest[i][-1:], seed)[0]
    return nearest


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


def _first_by_key(
    chunks: Iterator[np.ndarray], key: Callable[[np.ndarray], np.ndarray], number: int
) -> np.ndarray:
    """The points of all chunks that come first by a key (n,), and among equal ones by place."""
    found = np.empty((0, 3))
    for points in chunks:
        found = _first(np.concatenate([found, points]), key, number)
    return found


def _first(
    points: np.ndarray, key: Callable[[np.ndarray], np.ndarray], number: int
) -> np.ndarray:
    """At most `number` points, those first by their key (n,), and among equal ones by place."""
    keys = key(points)
    if len(points) > number:
        may_be = keys <= np.partition(keys, number - 1)[number - 1]
        points, keys = points[may_be], keys[may_be]
    x, y, z = points.T
    return points[np.lexsort((z, y, x, keys))[:number]]
