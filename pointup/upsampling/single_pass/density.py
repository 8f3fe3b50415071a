"""Measures the density of a cloud on the ground, the ratios that reach a target density, and the
area where none does."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.block_files import BlockFiles
from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region

NUM_IN_CIRCLE = 32
"""Number of neighbours in the circle in which the density around a point is measured."""

# Distance from the centre of the circle to the mean of its points, in radii: by chance in a full
# circle, and in a half circle at the straight edge of a survey.
_OFF_BY_CHANCE = (2 * NUM_IN_CIRCLE) ** -0.5
_OFF_AT_EDGE = 4 / (3 * np.pi)

# Largest area that a point counts for, in areas of a point where the density is just reached: a
# point far from the survey has its neighbours there, and would count for all the land between.
_LARGEST_AREA = 16.0


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


def ratios_for_density(store: Store, block: int, density: float) -> np.ndarray:
    """The ratio (N,) that reaches a density on the ground, 0 or more, for each point of a block."""
    region = Region(store, block, block + 1, dims=2)
    places = region.places(block)
    distance, near = region.neighbors_of(places, min(NUM_IN_CIRCLE + 1, len(store)))
    positions = region.rows["position"][:, :2]
    return density / ground_density(positions[places], distance, positions[near])


class UnreachedArea:
    """The share of a survey's area where no possible ratio reaches the target density.

    The first pass saves it block by block in the store's directory, for all processes.
    """

    def __init__(self, measured: Store) -> None:
        self._files = BlockFiles(measured.directory)
        self._num_blocks = measured.num_blocks

    def save(self, block: int, ratio: np.ndarray, largest: float) -> None:
        """Save the areas of a block, from the ratios (N,) of `ratios_for_density`."""
        # The area of a point is proportional to the ratio that it needs.
        area = np.minimum(ratio, _LARGEST_AREA * largest)
        areas = np.array([area[ratio > largest].sum(), area.sum()])
        self._files.save(block, "areas", areas=areas)

    def share(self) -> float:
        """The share, 0 to 1."""
        total = np.zeros(2)
        for block in range(self._num_blocks):
            with self._files.load(block, "areas") as saved:
                total += saved["areas"]
        return float(total[0] / total[1]) if total[1] else 0.0
