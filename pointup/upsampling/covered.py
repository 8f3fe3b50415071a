"""Places that no pulse from above reaches: below a roof, or inside an embankment.

A surface is closed where the measured points around a place, seen from above, all lie close to one
plane. A crown is not: its returns lie at many heights.
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


def is_covered(region: Region, points: np.ndarray) -> np.ndarray:
    """Whether a closed surface lies above each of the points (Q, 3), by the points of the region.

    The points are in the coordinates of the region's store. The third one is a height. A surface is
    closed if the standard deviation of the `NUM_ABOVE` horizontally nearest points from their plane
    is at most a third of their spacing. A place is covered if it is deeper below that plane, and
    below each of these points, than their spacing. Places around a measured point are not, up to
    the mean distance of its nearest neighbours: its pulse got there, as in a scan from inside. A
    cloud with fewer points covers nothing.
    """
    covered = np.zeros(len(points), dtype=bool)
    if not len(points) or region.num_points < NUM_ABOVE:
        return covered
    distance, nearest = region.neighbors(points, NUM_ABOVE, dims=2)
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
        & (off <= _FARTHEST_MEAN * radius[deep])
    ]
    gap, nearest = region.neighbors(points[deep], 1, dims=3)
    around_nearest, _ = region.neighbors_of(nearest[:, 0], NUM_ABOVE, dims=3)
    covered[deep] = gap[:, 0] > around_nearest[:, 1:].mean(axis=1)
    return covered


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
