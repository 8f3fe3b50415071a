"""Checks the new points of a pass against the measured points, and interpolates attributes."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from pointup.errors import ConfigError
from pointup.geometry.neighbors import TreeMaker
from pointup.upsampling.attributes import NUM_NEIGHBORS, attributes_between, classify_ground
from pointup.upsampling.empty_places import NEAR, is_afloat, is_covered, neighbors_beside
from pointup.upsampling.ground import Ground
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.candidates import Reach
from pointup.upsampling.single_pass.pass_output import ROUNDING
from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region


class Measured:
    """The measured points of a pass over `store`: the points of `store` in the first pass, where
    `measured` is None. Positions are in the coordinates of `store`. `unit` is the length of their
    unit in that of the file; `max_distance` is the one of the options, in their unit, to positions
    on the grid of the store; `reach` is that of the model, in local spacings. Raises ConfigError if
    `max_distance` is finer than the grid. `make_tree` is that of `Region`."""

    def __init__(
        self,
        store: Store,
        measured: Store | None,
        options: UpsampleOptions,
        reach: float,
        make_tree: TreeMaker,
    ) -> None:
        self._make_tree = make_tree
        self._store = measured or store
        self._shift = np.zeros(3) if measured is None else store.frame.origin
        self._is_other = measured is not None
        self._reach_in_spacings = reach
        self._options = options
        self.unit = self._store.frame.unit
        self.max_distance = math.inf
        if options.max_distance is not None:
            rounding = self._store.rounding
            self.max_distance = options.max_distance / self.unit - rounding
            if self.max_distance <= 0:
                raise ConfigError(
                    f"max distance {options.max_distance:g}: positions are rounded by up to "
                    f"{rounding * self.unit:.3g}; give a larger one"
                )
        self.reach = Reach(self._store)

    def is_far(self, region: Region, points: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Whether candidates (Q, 3) are farther than `max_distance` from measured points.

        `region` is of `store`; `distance` (Q,) is that to the nearest point of `store`.
        """
        if self.max_distance == math.inf:
            return np.zeros(len(points), dtype=bool)
        if self._is_other:
            distance = self._nearest(region, points, 1)[1][:, 0]
        return distance > self.max_distance

    def is_empty(self, points: np.ndarray, distance: np.ndarray, spacing: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) lie where nothing is: below the ground, below a closed surface such
        as a roof, or afloat; all False without `above_ground`.

        distance: (Q,) to the nearest point, spacing: (Q,) the local spacing there.
        """
        if not self._options.above_ground or not len(points):
            return np.zeros(len(points), dtype=bool)
        return self._is_empty(points + self._shift, distance, spacing)

    def settle(
        self, region: Region, points: np.ndarray, instead: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Final positions of new points (Q, 3), with all that is stored of them.

        A point that is too far from measured points, or `is_empty`, is replaced by `instead`
        (Q, 3), and if that is still too far by its nearest measured point.

        Returns `position`; `distance` to the nearest measured point; `slack`, see `Reach.slack`;
        `is_below` (Q,), whether it is lower than all returns around it; and `attributes`.
        """
        ground = self._ground if self._options.above_ground and len(points) else None
        if ground:
            points = self._lifted(points)
        around, gaps, nearest = self._nearest(region, points, NUM_NEIGHBORS)
        slack = self.reach.slack(around.numbers(nearest[:, 0]), gaps[:, 0])
        points = points.copy()

        def move(moved: np.ndarray, there: np.ndarray) -> None:
            """Move some points, and look up again what is near them and no others."""
            points[moved] = there
            gaps[moved], nearest[moved] = around.neighbors(there + self._shift, NUM_NEIGHBORS)
            numbers = around.numbers(nearest[moved, 0])
            slack[moved] = self.reach.slack(numbers, gaps[moved, 0])

        rejected = (slack < 0) | (gaps[:, 0] > self.max_distance)
        if ground:
            local_spacing = (slack + gaps[:, 0]) / self._reach_in_spacings
            there = points + self._shift
            rejected |= self._is_empty(there, gaps[:, 0], local_spacing)
        if rejected.any():
            there = instead[rejected]
            move(np.flatnonzero(rejected), self._lifted(there) if ground else there)
        # Lifting may have moved them away.
        too_far = (slack < -ROUNDING * gaps[:, 0]) | (gaps[:, 0] > self.max_distance)
        if too_far.any():
            # Where a denser place begins, a point of a later pass may be too far from its points.
            there = around.rows["position"][nearest[too_far, 0]] - self._shift
            move(np.flatnonzero(too_far), there)
        attributes = attributes_between(around.rows["attributes"], gaps, nearest)
        is_below = np.zeros(len(points), dtype=bool)
        if ground:
            there = points + self._shift
            is_below = ground.is_below_returns(there)
            classify_ground(attributes, around.rows, nearest, ground, there)
        return {
            "position": points,
            "distance": gaps[:, 0].astype(np.float32),
            "slack": slack.astype(np.float32),
            "is_below": is_below,
            "attributes": attributes,
        }

    def is_kept(self, points: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3), settled at a `distance` (Q,) from measured ones, are written.

        All are where numbers are exact. Otherwise only one in each place, and none in the place of
        a measured point that the output keeps.
        """
        if self._options.has_exact_numbers:
            return np.ones(len(points), dtype=bool)
        kept = np.zeros(len(points), dtype=bool)
        kept[np.unique(points, axis=0, return_index=True)[1]] = True
        if self._options.originals:
            kept &= distance > self._store.resolution / 2
        return kept

    @cached_property
    def _ground(self) -> Ground:
        """The ground in the coordinates of the measured store."""
        return Ground(self._store)

    def _lifted(self, points: np.ndarray) -> np.ndarray:
        """`Ground.lifted` of points (Q, 3); the others keep every bit."""
        there = points + self._shift
        lifted = self._ground.lifted(there)
        return np.where(lifted > there, lifted - self._shift, points)

    def _is_empty(
        self, points: np.ndarray, distance: np.ndarray, spacing: np.ndarray
    ) -> np.ndarray:
        """`is_empty` of points (Q, 3) in the coordinates of the measured store, Q > 0."""
        is_empty: np.ndarray = points[:, 2] < self._ground.floor(points)
        far = np.flatnonzero(~is_empty & (distance > NEAR * spacing))
        if len(far):
            points, distance, spacing = points[far], distance[far], spacing[far]
            region = Region.around(self._store, points, self._make_tree)
            beside = neighbors_beside(region, points)
            is_empty[far] = is_covered(region, points, beside)
            is_empty[far] |= is_afloat(region, points, beside, distance, spacing)
        return is_empty

    def _nearest(
        self, region: Region, points: np.ndarray, k: int
    ) -> tuple[Region, np.ndarray, np.ndarray]:
        """The k nearest measured points: distances (Q, k) and places (Q, k) in a region of them."""
        if self._is_other and len(points):
            points = points + self._shift
            region = Region.around(self._store, points, self._make_tree)
        return region, *region.neighbors(points, k)
