"""Chooses the grid that positions are rounded to; it does not depend on the order of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from scipy.spatial import cKDTree

from pointup.errors import FileError

LARGEST_COORDINATE = 1e12

_NUM_SEEDS, _NUM_AROUND = 8, 512
# Grid steps per extent that positions are hashed on, coarse compared to errors of coordinates.
_HASHED_STEPS = 2.0**20


def check_magnitudes(positions: np.ndarray, what: str) -> None:
    """Raise FileError if coordinates (N, 3) are 1e12 or more; the message begins with `what`.

    They are those of missing points, such as -3.4e38 in rasters of GDAL. One of them makes the grid
    coarser than the spacing of the points.
    """
    largest = float(max(positions.min(), positions.max(), key=abs))
    if abs(largest) >= LARGEST_COORDINATE:
        bad = int(np.count_nonzero((np.abs(positions) >= LARGEST_COORDINATE).any(axis=1)))
        raise FileError(
            f"{what}: {bad} of {len(positions)} have coordinates of 1e12 or more, such as "
            f"{largest:g}; remove them if that stands for no data, else use a larger unit"
        )


def grid_resolution(chunks: Callable[[], Iterator[np.ndarray]], extent: np.ndarray) -> float:
    """Step of the grid: a power of two, thousands of times smaller than the spacing of the points.

    On this grid differences of positions are exact: equal distances compare equal, and rounding
    errors in the coordinates of a cloud far from the origin vanish.

    `chunks` returns a new iterator over the positions (n, 3) of the cloud, relative to its lowest
    corner, at each call; extent: (3,). The spacing is measured among the nearest points of a few
    seeds, which are chosen by a hash of their position. So the result depends neither on the order
    of the points nor on the files.
    """
    (seeds,) = _first(chunks(), [partial(_hashed, extent=extent)], _NUM_SEEDS)
    distances = []
    for around in _first(chunks(), [partial(_squared, seed=seed) for seed in seeds], _NUM_AROUND):
        distance = np.asarray(cKDTree(around).query(around, k=[2])[0])
        distances.append(distance[np.isfinite(distance)])
    apart = np.concatenate(distances)
    spacing = float(np.median(apart)) if len(apart) else float(extent.max())
    # Distances hold 2**26 steps exactly.
    finest = np.log2(extent.max()) - 40
    # The 1e-6 makes spacings that are powers of two up to rounding give the same result.
    return float(2.0 ** max(np.floor(np.log2(spacing) + 1e-6) - 14, np.ceil(finest)))


def _squared(points: np.ndarray, seed: np.ndarray) -> np.ndarray:
    x, y, z = (points - seed).T
    return np.asarray(x * x + y * y + z * z)


def _hashed(points: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Hashes (n,) uint64 of the positions of points."""
    key = np.zeros(len(points), np.uint64)
    for axis in range(3):
        steps = np.rint(points[:, axis] * (_HASHED_STEPS / extent.max()))
        key = (key ^ steps.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _first(
    chunks: Iterator[np.ndarray],
    keys: Sequence[Callable[[np.ndarray], np.ndarray]],
    number: int,
) -> list[np.ndarray]:
    """For each key function, the `number` distinct points with the smallest keys, or fewer.

    Points with equal keys are ordered by their coordinates.
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
    """The first `number` distinct points by their keys (n,), ties ordered by coordinates."""
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
        # Many points coincide.
        looked_at *= 8
