"""How dense a cloud is on the ground, place by place."""

from __future__ import annotations

import numpy as np

NUM_IN_CIRCLE = 32
"""Neighbours that the density around a point is measured with."""

_NUM_SECTORS = 8


def ground_density(
    query: np.ndarray, distance: np.ndarray, neighbors: np.ndarray
) -> np.ndarray:
    """Points per unit of area around each query, (Q,), inf where they share one place.

    They are counted in a circle to the last neighbour, whose sectors without any are left out: at
    the edge of a survey the circle is not filled.

    query: (Q, 2), distance: (Q, k) ascending horizontal distances to `neighbors` (Q, k, 2).
    """
    direction = neighbors - query[:, None]
    angle = np.arctan2(direction[..., 1], direction[..., 0])
    sector = np.floor((angle / (2 * np.pi) + 0.5) * _NUM_SECTORS).astype(np.int64) % _NUM_SECTORS
    # The first one is the query itself or a point in its place.
    seen = (sector[:, 1:, None] == np.arange(_NUM_SECTORS)).any(axis=1).sum(axis=1)
    area = np.pi * distance[:, -1] ** 2 * seen / _NUM_SECTORS
    # The last one lies on the circle, not in it.
    count = distance.shape[1] - 2
    return np.divide(count, area, out=np.full(len(query), np.inf), where=area > 0)
