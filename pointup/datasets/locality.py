"""Sorts large clouds along a Morton curve, so that neighbours in space are near in memory."""

from __future__ import annotations

import numpy as np

from pointup.geometry.morton import morton_codes

SORTED_FROM = 16_384
"""Smallest cloud that is sorted. Smaller clouds fit into a cache, so that their order does not
matter."""

_BITS = 16


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
    return np.argsort(morton_codes(cells), kind="stable")
