"""Sorts large clouds along a Morton curve, so that neighbours in space are near in memory."""

from __future__ import annotations

import numpy as np

SORTED_FROM = 16_384
"""Smallest cloud that is sorted. Smaller clouds fit into a cache, so that their order does not
matter."""

# Bits per coordinate, and the shifts and masks that spread them to every third bit.
_BITS = 16
_STEPS = (
    (32, 0x001F00000000FFFF),
    (16, 0x001F0000FF0000FF),
    (8, 0x100F00F00F00F00F),
    (4, 0x10C30C30C30C30C3),
    (2, 0x1249249249249249),
)


def in_spatial_order(clouds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sort each cloud of a pair that has at least `SORTED_FROM` points by `spatial_order`.

    `target_normals` get the order of `target`.
    """
    ordered = {}
    for name, points in clouds.items():
        positions = clouds["target"] if name == "target_normals" else points
        is_large = len(positions) >= SORTED_FROM
        ordered[name] = points[spatial_order(positions)] if is_large else points
    return ordered


def spatial_order(points: np.ndarray) -> np.ndarray:
    """Indices (N,) that sort points (N, 3) along a Morton curve through their bounding cube.

    Morton 1966, "A computer oriented geodetic data base". The curve has 2**48 cells; points of one
    cell keep their order. If any coordinate is not finite, all points keep their order.
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
