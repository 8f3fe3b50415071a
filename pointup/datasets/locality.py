"""Large clouds in an order in which points that are near in space are near in memory."""

from __future__ import annotations

import numpy as np

SORTED_FROM = 16_384
"""Points of a cloud from which on their order matters: smaller ones fit into a cache."""

# Bits of each coordinate, and how they move apart to make room for those of the other two.
_BITS = 16
_STEPS = (
    (32, 0x001F00000000FFFF),
    (16, 0x001F0000FF0000FF),
    (8, 0x100F00F00F00F00F),
    (4, 0x10C30C30C30C30C3),
    (2, 0x1249249249249249),
)


def in_spatial_order(clouds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The clouds of a pair, each of which that is large put in the order of `spatial_order`.

    `target_normals` follow `target`.
    """
    ordered = {}
    for name, points in clouds.items():
        places = clouds["target"] if name == "target_normals" else points
        is_large = len(places) >= SORTED_FROM
        ordered[name] = points[spatial_order(places)] if is_large else points
    return ordered


def spatial_order(points: np.ndarray) -> np.ndarray:
    """Indices (N,) that put points (N, 3) in the order of a Morton curve through their cube.

    Morton 1966, "A computer oriented geodetic data base". Points of one of its 2**48 cells keep
    their order, and so do all where one is not finite.
    """
    if not np.isfinite(points).all():
        return np.arange(len(points))
    low = points.min(axis=0, initial=np.inf)
    side = float((points - low).max(initial=0.0))
    if side == 0.0:
        return np.arange(len(points))
    cells = ((points - low) * ((2**_BITS - 1) / side)).astype(np.int64)
    code = np.zeros(len(points), dtype=np.int64)
    for axis in range(3):
        bits = cells[:, axis]
        for shift, mask in _STEPS:
            bits = (bits | (bits << shift)) & mask
        code |= bits << axis
    return np.argsort(code, kind="stable")
