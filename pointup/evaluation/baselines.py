"""No-network baselines for surveys: random midpoints, jitter, plane.

The midpoint baseline is thinned by farthest-point sampling, so that its points are evenly spaced;
the returns of another survey are not. These three baselines are not thinned, and are harder to
surpass on surveys. Each makes new points; the measured points are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

import numpy as np
from scipy.spatial import cKDTree

MIDPOINT_NEIGHBORS = 8
JITTER_SHARE = 0.5
PLANE_NEIGHBORS, SPACING_NEIGHBORS = 10, 4
PLANE_SHARE, PLANE_PULL = 0.6, 0.5


def random_midpoints(
    source: np.ndarray, num_points: int, generator: np.random.Generator
) -> np.ndarray:
    """Midpoints of random points and a random one of their 8 nearest; (num_points, 3) float64."""
    rows = generator.integers(len(source), size=num_points)
    _, index = _neighbors(source, rows, MIDPOINT_NEIGHBORS)
    column = generator.integers(index.shape[1], size=num_points)
    return (source[rows] + source[index[np.arange(num_points), column]]) / 2


def jitter(
    source: np.ndarray, num_points: int, generator: np.random.Generator, share: float = JITTER_SHARE
) -> np.ndarray:
    """Random points, each moved by Gaussian noise; (num_points, 3) float64.

    The standard deviation along each axis is a share of the distance to the nearest other point.
    """
    rows = generator.integers(len(source), size=num_points)
    distance, _ = _neighbors(source, rows, 1)
    return source[rows] + share * distance * generator.standard_normal((num_points, 3))


def plane(
    source: np.ndarray, num_points: int, generator: np.random.Generator, share: float = PLANE_SHARE
) -> np.ndarray:
    """Random points, each moved along the plane through its 10 nearest; (num_points, 3) float64.

    The standard deviation along both axes of the plane is a share of the mean distance to the 4
    nearest others. Each point also moves halfway towards the plane.
    """
    rows = generator.integers(len(source), size=num_points)
    distance, index = _neighbors(source, rows, PLANE_NEIGHBORS)
    near = source[index]
    centre = near.mean(axis=1)
    near = near - centre[:, None]
    # Ascending eigenvalues: the normal comes first.
    _, axes = np.linalg.eigh(near.transpose(0, 2, 1) @ near)
    normal = axes[:, :, 0]
    step = share * distance[:, :SPACING_NEIGHBORS].mean(axis=1, keepdims=True)
    offset = step * generator.standard_normal((num_points, 3))
    # Noise is projected onto the plane. Noise along the two axes would depend on their signs, which
    # are arbitrary.
    offset -= (offset * normal).sum(axis=1, keepdims=True) * normal
    above = ((source[rows] - centre) * normal).sum(axis=1, keepdims=True)
    return source[rows] + offset - PLANE_PULL * above * normal


BASELINES: dict[str, Callable[..., np.ndarray]] = {
    "random_midpoints": random_midpoints,
    "jitter": jitter,
    "plane": plane,
}


FITTED = {"jitter_fitted": (jitter, JITTER_SHARE), "plane_fitted": (plane, PLANE_SHARE)}
"""The baselines whose noise can be fitted to a reference, with the share to begin with."""
STEP, MOST_STEPS = 1.25, 12


def baseline_clouds(
    source: np.ndarray, num_points: int, seed: int = 0, name: str = ""
) -> dict[str, np.ndarray]:
    """The cloud of each baseline: the source (N, 3), then new points, `num_points` >= N in all.

    The random numbers depend on the seed, the baseline and `name`, the name of the cloud.
    Coordinates may be far from the origin. The source has at least two points.
    """
    return {key: _with_new_points(source, num_points, seed, name, key) for key in BASELINES}


def _with_new_points(
    source: np.ndarray, num_points: int, seed: int, name: str, key: str, *share: float
) -> np.ndarray:
    """The cloud of the baseline `key`, with this `share` of noise or else the usual one."""
    source = np.asarray(source, dtype=np.float64)
    origin = source.mean(axis=0)
    generator = generator_of(seed, name, key)
    new = BASELINES[key](source - origin, num_points - len(source), generator, *share)
    return np.concatenate([source, new + origin])


def fitted_clouds(
    source: np.ndarray,
    num_points: int,
    error: Callable[[np.ndarray], float],
    seed: int = 0,
    name: str = "",
) -> dict[str, tuple[np.ndarray, float]]:
    """The clouds of jitter and plane with the noise of the lowest `error`, and this noise.

    `error` measures a cloud (M, 3) against the reference. The noise is a share of the distances to
    the nearest points; it is changed by factors of 1.25 while the error falls. With its usual share
    the cloud would be that of `baseline_clouds`, whose other arguments these are.
    """
    fitted = {}
    for key, (_, share) in FITTED.items():
        baseline = key.removesuffix("_fitted")
        cloud = partial(_with_new_points, source, num_points, seed, name, baseline)
        best = error(cloud(share))
        for factor in (STEP, 1 / STEP):
            before = share
            for _ in range(MOST_STEPS):
                if (found := error(cloud(share * factor))) >= best:
                    break
                best, share = found, share * factor
            if share != before:
                break
        fitted[key] = cloud(share), share
    return fitted


def generator_of(seed: int, name: str, key: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(name.encode()), crc32(key.encode())])


def _neighbors(source: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and indices, (R, k) each, of the k nearest other points of the points `rows` (R,).

    k is smaller for a cloud of at most k points. A coincident point can take the place of the point
    itself.
    """
    distinct, place = np.unique(rows, return_inverse=True)
    k = min(k, len(source) - 1)
    distance, index = cKDTree(source).query(source[distinct], k=list(range(2, k + 2)))
    return np.asarray(distance)[place], np.asarray(index)[place]
