"""Places without a surface: below a roof, inside an embankment, or in empty air.

A surface is closed where the measured points around a place, seen from above, all lie close to
one plane. A crown is not: its returns lie at many heights. No pulse from above reaches what is
below a closed surface, and pulses that come back from below a place met nothing there.
"""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.region import Region

NUM_ABOVE = 12
"""Number of measured points, the nearest in the horizontal plane, that describe what is above."""

NEAR = 0.5
"""Places within this many local spacings of a measured point are not covered, see `is_covered`, so
that most new points need no search."""

# In horizontal spacings of these points: the largest standard deviation of a closed surface, and
# the depth below it from which a place is covered.
_ROUGHEST, _LEAST_DEPTH = 1 / 3, 1.0
# Largest distance from a place to the mean of these points, in distances to the farthest of them. A
# wall stands below the edge of a roof, where the mean is off.
_FARTHEST_MEAN = 0.25
# Points on a line do not determine the slope across it: the least squared sine between directions.
_LEAST_SPREAD = 0.01


Neighbors = tuple[np.ndarray, np.ndarray]


def neighbors_beside(region: Region, points: np.ndarray) -> Neighbors:
    """The `NUM_ABOVE` horizontally nearest points of each of the points (Q, 3): their distances
    (Q, `NUM_ABOVE`) and places in the region, inf and -1 in a cloud with fewer points."""
    return region.neighbors(points, NUM_ABOVE, dims=2)


def is_covered(
    region: Region, points: np.ndarray, beside: Neighbors, farthest_mean: float = _FARTHEST_MEAN
) -> np.ndarray:
    """Whether a closed surface lies above each of the points (Q, 3), by the points of the region.

    The points are in the coordinates of the region's store. The third one is a height. A surface is
    closed if the standard deviation of the `NUM_ABOVE` horizontally nearest points from their plane
    is at most a third of their spacing. A place is covered if it is deeper below that plane, and
    below each of these points, than their spacing. Places around a measured point are not, up to
    the mean distance of its nearest neighbours: its pulse got there, as in a scan from inside. A
    cloud with fewer points covers nothing. The horizontal distance to the mean of these points is
    at most `farthest_mean` times that to the farthest of them. For `beside` see `neighbors_beside`.
    """
    covered = np.zeros(len(points), dtype=bool)
    distance, nearest = beside
    radius = distance[:, -1]
    spacing = radius * np.sqrt(np.pi / NUM_ABOVE)
    around = region.rows["position"]
    # Most points are near the measured surface, and need no plane.
    deep = np.flatnonzero(
        (around[:, 2][nearest].min(axis=1) - points[:, 2] > _LEAST_DEPTH * spacing) & (radius > 0)
    )
    relative = around[nearest[deep]] - points[deep, None]
    depth, deviation, off = _plane(relative)
    deep = deep[
        (depth > _LEAST_DEPTH * spacing[deep])
        & (deviation <= _ROUGHEST * spacing[deep])
        & (off <= farthest_mean * radius[deep])
    ]
    gap, nearest = region.neighbors(points[deep], 1, dims=3)
    around_nearest, _ = region.neighbors_of(nearest[:, 0], NUM_ABOVE, dims=3)
    covered[deep] = gap[:, 0] > around_nearest[:, 1:].mean(axis=1)
    return covered


# A place is afloat above so many of the points around it from these distances to the nearest point
# on: in horizontal spacings of these points, and in local spacings.
_ABOVE_FEW, _ABOVE_MOST = (2, 3.5, 1.0), (8, 2.5, 0.75)
# It is beside all points from these distances to the horizontally nearest one on: in horizontal
# spacings around that point, and in local spacings. Points of a wall are close, seen from above.
_BESIDE = (1.75, 0.6)


def is_afloat(
    region: Region,
    points: np.ndarray,
    beside: Neighbors,
    distance: np.ndarray,
    spacing: np.ndarray,
) -> np.ndarray:
    """Whether each of the points (Q, 3) is in empty air, by the points of the region.

    Pulses from above that come back from below a place passed it, and met nothing there. A place is
    afloat if two or more of the `NUM_ABOVE` horizontally nearest points are below it, and none is
    near: the nearest is farther than 3.5 times their spacing, and than the local spacing. If eight
    of them are below it, 2.5 times their spacing and 0.75 local spacings are enough.

    Nothing is known of a place beside all points: the horizontally nearest one is, in the
    horizontal plane, farther away than 1.75 times the spacing around that point, and than 0.6 local
    spacings. In a cloud with fewer than `NUM_ABOVE` points nothing is afloat. For `beside` see
    `neighbors_beside`.

    distance: (Q,) to the nearest measured point, spacing: (Q,) the local spacing there.
    """
    across, nearest = beside
    in_spacings = np.sqrt(np.pi / NUM_ABOVE)
    num_below = (region.rows["position"][:, 2][nearest] < points[:, 2:]).sum(axis=1)
    afloat = np.zeros(len(points), dtype=bool)
    for number, horizontally, locally in (_ABOVE_FEW, _ABOVE_MOST):
        least = np.maximum(horizontally * in_spacings * across[:, -1], locally * spacing)
        afloat |= (num_below >= number) & (distance > least)
    horizontally, locally = _BESIDE
    # By the triangle inequality, no other place can be beside all points.
    least = np.maximum(across[:, -1] / (1 + 1 / (horizontally * in_spacings)), locally * spacing)
    rows = np.flatnonzero(across[:, 0] > least)
    around, _ = region.neighbors_of(nearest[rows, 0], NUM_ABOVE, dims=2)
    afloat[rows] |= across[rows, 0] > horizontally * in_spacings * around[:, -1]
    return afloat


def _plane(relative: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The least-squares plane of the heights of points (Q, K, 3), relative to a place.

    Returns the distance (Q,) from the place up to the plane, the standard deviation (Q,) of the
    points from it, inf where they are on a line, and the horizontal distance (Q,) to their mean.
    """
    mean = relative.mean(axis=1)
    x, y, z = (relative - mean[:, None]).transpose(2, 0, 1)
    cxx, cxy, cyy = (x * x).sum(axis=1), (x * y).sum(axis=1), (y * y).sum(axis=1)
    cxz, cyz = (x * z).sum(axis=1), (y * z).sum(axis=1)
    determinant = cxx * cyy - cxy * cxy
    is_plane = determinant > _LEAST_SPREAD * cxx * cyy
    safe = np.where(is_plane, determinant, 1.0)
    a, b = (cxz * cyy - cyz * cxy) / safe, (cyz * cxx - cxz * cxy) / safe
    rest = z - a[:, None] * x - b[:, None] * y
    # Perpendicular to the plane, so that the slope of a roof does not matter.
    cosine = 1 / np.sqrt(1 + a * a + b * b)
    deviation = cosine * np.sqrt(np.square(rest).sum(axis=1) / (relative.shape[1] - 3))
    depth = cosine * (mean[:, 2] - a * mean[:, 0] - b * mean[:, 1])
    return depth, np.where(is_plane, deviation, np.inf), np.hypot(mean[:, 0], mean[:, 1])
