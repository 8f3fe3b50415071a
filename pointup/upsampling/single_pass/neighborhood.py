"""Neighbourhoods: all points of a store on which the children of some of its points depend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.model.config import ModelConfig
from pointup.upsampling.store.region import Region


@dataclass(frozen=True)
class Neighborhood:
    """C core points, and all other points that their children depend on.

    Attributes:
        pos: (N, 3) float32, the core points first, relative to the median of these.
        index: (N, K) int64 neighbours, each point itself first; -1 where no child depends on them.
        squared: (N, K) float32 squared distances.
        slot_index: (C, R) int64, the neighbour that each slot of each core point belongs to.
        places: (N,) int64, indices of the points in `Region.rows`.
        columns: (n, S) int64, the horizontally nearest points of the first n points, which are
            those that children attend to in columns; S is 0 for a model without column layers.
    """

    pos: np.ndarray
    index: np.ndarray
    squared: np.ndarray
    slot_index: np.ndarray
    places: np.ndarray
    columns: np.ndarray


class _Neighborhoods:
    """Collects points of a region, in steps from points to their k nearest or their columns."""

    def __init__(
        self, region: Region, core: np.ndarray, k: int, num_of_core: int, column_size: int
    ) -> None:
        self.region, self.k, self.column_size = region, k, column_size
        distance, self.of_core = region.neighbors_of(core, max(k, num_of_core))
        self.reached, self.distance, self.nearest = core, distance[:, :k], self.of_core[:, :k]
        self.columns = np.empty((0, column_size), dtype=np.int64)

    def step(self, touched: np.ndarray) -> np.ndarray:
        """Add the `touched` places, -1 for none, that are not there yet; their neighbours."""
        places = self.missing(touched)
        distance, nearest = self.region.neighbors_of(places, self.k)
        self.reached = np.concatenate([self.reached, places])
        self.distance = np.concatenate([self.distance, distance])
        self.nearest = np.concatenate([self.nearest, nearest])
        return nearest

    def missing(self, touched: np.ndarray) -> np.ndarray:
        """Those of the `touched` places that are not there yet."""
        return np.setdiff1d(touched[touched >= 0], self.reached)

    def find_columns(self) -> np.ndarray:
        """The columns of those points that are there so far and whose columns are not."""
        places = self.reached[len(self.columns) :]
        _, found = self.region.neighbors_of(places, self.column_size, dims=2)
        self.columns = np.concatenate([self.columns, found])
        return found


def gather_neighborhood(
    region: Region, core: np.ndarray, ranks: np.ndarray, config: ModelConfig
) -> Neighborhood:
    """All points on which the children of the points at places `core` depend.

    The children of each point are tied to its neighbours of the `ranks` (R,); with none, only the
    local spacing of the core is asked for. Steps from a parent to the farthest of these points: one
    for the features of the parent's neighbours, one for each attention layer, one for the
    neighbours that the input features describe, and one for the local spacing of those.
    """
    k, of_model = config.k + 1, len(ranks) > 0
    num_of_core = int(ranks.max()) + 1 if of_model else 0
    found = _Neighborhoods(region, core, k, num_of_core, config.column_size if of_model else 0)
    touched = found.of_core
    for _ in range(config.num_layers + 1 if of_model else 0):
        touched = found.step(touched)
    if found.column_size:
        for _ in range(config.column_layers):
            found.step(found.find_columns()[:, :: config.column_stride])
        # Points of columns that are reached last need only their position and that of theirs.
        found.find_columns()
        touched = found.nearest
    touched = found.step(touched)
    known = len(found.reached)
    # Of the outermost points only the positions are needed.
    outermost = found.missing(np.concatenate([touched.ravel(), found.columns.ravel()]))
    reached = np.concatenate([found.reached, outermost])

    place = np.full(len(region) + 1, -1, dtype=np.int64)
    place[reached] = np.arange(len(reached))
    index = np.full((len(reached), k), -1, dtype=np.int64)
    squared = np.full((len(reached), k), np.inf, dtype=np.float32)
    index[:, 0], squared[:, 0] = np.arange(len(reached)), 0.0
    index[:known] = place[found.nearest]
    squared[:known] = np.square(found.distance)
    positions = region.rows["position"][reached]
    # Centred in float64, so that differences of neighbours are exact in float32. At the median,
    # because single points far from all others must not move the centre away from these.
    pos = (positions - np.median(positions[: len(core)], axis=0)).astype(np.float32)
    slots = found.of_core[:, ranks]
    return Neighborhood(pos, index, squared, place[slots], reached, place[found.columns])
