"""Measures the density of a cloud on the ground, and the ratios that reach a target density."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region

NUM_IN_CIRCLE = 32
"""Number of neighbours in the circle in which the density around a point is measured."""

# Distance from the centre of the circle to the mean of its points, in radii: by chance in a full
# circle, and in a half circle at the straight edge of a survey.
_OFF_BY_CHANCE = (2 * NUM_IN_CIRCLE) ** -0.5
_OFF_AT_EDGE = 4 / (3 * np.pi)


def ground_density(query: np.ndarray, distance: np.ndarray, neighbors: np.ndarray) -> np.ndarray:
    """Points per unit of area around each query, (Q,); inf where all neighbours coincide.

    Points are counted in the circle through the last neighbour. At the edge of a survey the circle
    is partly empty and the mean of its points lies off the centre; the area is reduced by that.

    query: (Q, 2), distance: (Q, k) ascending horizontal distances to `neighbors` (Q, k, 2), the
    first of which is the query itself.
    """
    radius = distance[:, -1]
    mean = (neighbors[:, 1:] - query[:, None]).mean(axis=1)
    off = np.divide(
        np.linalg.norm(mean, axis=1), radius, out=np.zeros(len(query)), where=radius > 0
    )
    missing = (off - _OFF_BY_CHANCE) / (_OFF_AT_EDGE - _OFF_BY_CHANCE)
    area = np.pi * radius**2 * (1 - 0.5 * missing.clip(0.0, 1.5))
    # The last neighbour lies on the circle and the first is the query: both are not counted.
    count = max(distance.shape[1] - 2, 1)
    return np.divide(count, area, out=np.full(len(query), np.inf), where=area > 0)


def ratios_for_density(store: Store, block: int, density: float, largest: float) -> np.ndarray:
    """The ratio (N,), 1 to `largest`, that reaches a density on the ground, for each point of a
    block."""
    region = Region(store, block, block + 1, dims=2)
    places = region.places(block)
    distance, near = region.neighbors_of(places, min(NUM_IN_CIRCLE + 1, len(store)))
    positions = region.rows["position"][:, :2]
    there = ground_density(positions[places], distance, positions[near])
    return (density / there).clip(1.0, largest)
