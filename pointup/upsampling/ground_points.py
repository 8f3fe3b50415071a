"""New points on the ground below crowns, where a survey has returns above and none on the ground.

The ground is interpolated between the ground returns around a place: by radial basis functions
(SciPy), linear in the distance, on the nearest returns. How far from a return this holds follows
from the survey itself: heights that are interpolated at ground returns, without all others up to a
distance, are compared with the measured ones. No point is made below a closed surface such as a
roof, where there are no returns above such as on water, or where the ground is not smooth, such as
at a cliff. The points depend on the cloud only, not on tiles or processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.spatial import cKDTree

from pointup.geometry.grids import box_of, in_box, spread
from pointup.io.cloud import NUMBER_OF_RETURNS
from pointup.upsampling.attributes import NUM_NEIGHBORS, attributes_between
from pointup.upsampling.empty_places import NUM_ABOVE, is_covered, neighbors_beside
from pointup.upsampling.ground import Ground, class_attribute, is_of_ground
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.pass_output import PassOutput
from pointup.upsampling.single_pass.selection import shuffled
from pointup.upsampling.store.bisection import BlockFiles
from pointup.upsampling.store.point_store import Store, joined
from pointup.upsampling.store.region import Region

LARGEST_SHARE = 0.05
"""Largest share of the new points that is made on the ground. With a quarter, at a ratio of 2 other
places would lose more than the ground gains."""

# Number of ground returns that a height is interpolated from, and smoothing in spacings of the made
# points. Of those tried on nine surveys with holes of 2, 5 and 10 m, these had the lowest errors.
_NUM_AROUND, _SMOOTHING = 64, 0.3
# Heights that are interpolated from so few returns differ from those from many where the ground is
# not smooth.
_NUM_NEAREST = 8
# Largest root mean square error of the heights, and largest difference of these two, as a share of
# the spacing of the made points.
_LARGEST_ERROR = 0.5
# Distances at which that error is measured, in spacings of the made points, and the number of
# places. Up to the largest one that it is small at, points are made.
_DISTANCES, _NUM_PLACES = (1.0, 2.0, 4.0, 8.0, 16.0), 48
# Ground returns that the density of the ground where it is seen is measured with; number of blocks.
_NUM_IN_CIRCLE, _NUM_BLOCKS = 8, 24
# Blocks that `may_have_ground` looks at.
_NUM_FIRST = 6
# Least share of the points above a place that are of a pulse with several returns. It is lower on
# nine tenths of all roofs, and higher in three quarters of crowns.
_LEAST_SEVERAL = 0.25
# Least distance of a made point to the nearest measured one, in spacings of the made points.
_LEAST_GAP = 0.5
# `farthest_mean` of `is_covered`: there is no wall to keep. Below a roof the mean of points spread
# at random is farther off than by 0.25 in a fifth of all places, by this in a few of a thousand.
_ROOF_MEAN = 0.5
# Building, water, bridge deck; bridges and other structures of Dutch surveys.
_HIDE_GROUND = (6, 9, 17, 26)


class GroundReturns:
    """The ground returns of a survey: of class 2 or, where it has none, those that `Ground` finds.

    Call `save` for every block; results are block files for all processes.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        directory = store.directory / "ground"
        directory.mkdir(exist_ok=True)
        self.files = BlockFiles(directory)
        self.samples = spread(store.num_blocks, _NUM_BLOCKS).tolist()
        samples = np.concatenate([store.read_block(block) for block in self.samples])
        self.by_class = bool(is_of_ground(samples).any())
        attributes = samples["attributes"]
        is_known = NUMBER_OF_RETURNS in (attributes.dtype.names or ())
        self._has_several = is_known and bool((attributes[NUMBER_OF_RETURNS] > 1).any())
        self._ground = Ground(store)

    def save(self, block: int) -> None:
        """Find the ground returns of a block, and save them."""
        rows, number = self.find(block)
        self.files.save(block, "returns", rows=rows, number=number)

    def find(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows (G,) of the ground returns of a block, and their numbers (G,) in the store."""
        rows = self.store.read_block(block)
        number = np.arange(*self.store.block_ptr[block : block + 2])
        if self.by_class:
            found = is_of_ground(rows)
        else:
            found = self._ground.are_returns(rows["position"], number)
        return rows[found], number[found]

    def within(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (G,) of the ground returns within a rectangle, and their numbers (G,)."""
        store = self.store
        touched = ((store.low[:, :2] <= high) & (store.high[:, :2] >= low)).all(axis=1)
        parts, numbers = [np.empty(0, store.dtype)], [np.empty(0, dtype=np.int64)]
        for block in np.flatnonzero(touched).tolist():
            saved = self.files.load(block, "returns")
            inside = in_box(saved["rows"]["position"], low, high)
            parts.append(saved["rows"].compress(inside))
            numbers.append(saved["number"][inside])
        return joined(parts), np.concatenate(numbers)

    def lets_pulses_through(self, above: np.ndarray) -> np.ndarray:
        """Whether the measured points above a place, with attributes (Q, K), may be of a crown: not
        of a class that hides the ground, and enough of pulses with several returns, if known."""
        may_be = np.ones(len(above), dtype=bool)
        name = class_attribute(above.dtype)
        if name is not None:
            may_be &= ~np.isin(above[name], _HIDE_GROUND).any(axis=1)
        if self._has_several:
            may_be &= (above[NUMBER_OF_RETURNS] > 1).mean(axis=1) >= _LEAST_SEVERAL
        return may_be


@dataclass(frozen=True)
class GroundSurface:
    """How the ground of a survey is continued between its ground returns.

    Attributes:
        density: of the points to make, per unit of area.
        trusted: largest horizontal distance of a made point to the nearest ground return.
        errors: horizontal distances to the nearest ground return, ascending, and the height error
            at each that nine in ten places stay within.
    """

    density: float
    trusted: float
    errors: tuple[Sequence[float], Sequence[float]]

    @property
    def spacing(self) -> float:
        return self.density**-0.5


def ground_surface(returns: GroundReturns, density: float | None = None) -> GroundSurface | None:
    """The surface of a survey, by blocks spread over it; None if it has too few ground returns, or
    if its heights can't be interpolated well enough.

    The density is at most `density`, and at most that of the ground returns where there are any:
    the median over them.
    """
    saved = (returns.files.load(block, "returns") for block in returns.samples)
    parts = [of_block["rows"]["position"] for of_block in saved]
    seen = _density(parts)
    if not seen:
        return None
    spacing = min(density or seen, seen) ** -0.5
    # By block, so that the returns around the places of each are read once.
    ends = np.cumsum([len(part) for part in parts])
    chosen = spread(ends[-1], _NUM_PLACES)
    places = np.split(np.concatenate(parts)[chosen], np.searchsorted(chosen, ends[:-1]))
    trusted, within = 0.0, list[float]()
    for distance in spacing * np.array(_DISTANCES):
        reach, errors = 4 * distance, []
        for xyz in filter(len, places):
            low, high = box_of(xyz[:, :2])
            around = _merged(returns.within(low - reach, high + reach)[0]["position"])
            for place in xyz:
                is_near = (np.abs(around[:, :2] - place[:2]) <= reach).all(axis=1)
                errors.append(_error(around[is_near], place, distance, spacing))
        if not _are_small(errors, spacing):
            break
        trusted = float(distance)
        within.append(float(np.nanquantile(np.abs(errors), 0.9)))
    distances = (spacing * np.array(_DISTANCES)).tolist()[: len(within)]
    return GroundSurface(spacing**-2, trusted, (distances, within)) if trusted else None


def may_have_ground(returns: GroundReturns) -> bool:
    """Whether a survey without classes may have a `ground_surface`, by a few of its blocks.

    Below most plants that are scanned from the ground, and in rooms, it has none. To find the
    ground returns of all blocks takes long.
    """
    errors = []
    for block in spread(returns.store.num_blocks, _NUM_FIRST).tolist():
        around = returns.find(block)[0]["position"]
        seen = _density([around])
        if seen:
            places = around[spread(len(around), _NUM_PLACES // _NUM_FIRST)]
            spacing, around = seen**-0.5, _merged(around)
            errors += [_error(around, place, spacing, spacing) / spacing for place in places]
    return bool(errors) and _are_small(errors, 1.0)


def _density(parts: list[np.ndarray]) -> float:
    """Median density on the ground around the points of clouds (G, 3); 0.0 with too few."""
    rank = [_NUM_IN_CIRCLE + 1]
    radius = [
        np.asarray(cKDTree(part[:, :2]).query(part[:, :2], k=rank)[0])[:, 0]
        for part in parts
        if len(part) > _NUM_IN_CIRCLE
    ]
    middle = float(np.median(np.concatenate(radius))) if radius else 0.0
    return (_NUM_IN_CIRCLE - 0.5) / (np.pi * middle**2) if middle else 0.0


def _are_small(errors: list[float], spacing: float) -> bool:
    """Whether errors are small; not if most are NaN, as where most of the ground lies beyond."""
    known = np.array(errors)[np.isfinite(errors)]
    if len(known) < len(errors) / 2:
        return False
    return bool(np.sqrt(np.square(known).mean()) <= _LARGEST_ERROR * spacing)


def _error(around: np.ndarray, place: np.ndarray, distance: float, spacing: float) -> float:
    """Error of the height that is interpolated at a ground return (3,) from those `around` (G, 3)
    it, without those within a distance; NaN with too few. As `interpolated`, without its set-up,
    which takes five times as long as one height."""
    gap = np.hypot(*(around[:, :2] - place[:2]).T)
    left = np.flatnonzero(gap > distance)
    if len(left) < _NUM_NEAREST:
        return np.nan
    left = left[np.argsort(gap[left])[:_NUM_AROUND]]
    x, y, height = around[left].T
    system = np.ones((len(left) + 1,) * 2)
    system[:-1, :-1] = -np.hypot(x[:, None] - x, y[:, None] - y) / spacing
    np.fill_diagonal(system, _SMOOTHING)
    system[-1, -1] = 0.0
    weights = np.linalg.solve(system, np.append(height, 0.0))
    return float(weights[-1] - gap[left] / spacing @ weights[:-1] - place[2])


def _merged(returns: np.ndarray) -> np.ndarray:
    """Returns (G, 3) from left to right; those in one place as one, with their mean height."""
    x, y, z = returns[np.lexsort(returns[:, :2].T)].T
    first = np.flatnonzero(np.append(True, (np.diff(x) != 0) | (np.diff(y) != 0)))
    height = np.add.reduceat(z, first) / np.diff(np.append(first, len(z)))
    return np.stack([x[first], y[first], height], axis=1)


def interpolated(
    returns: np.ndarray, places: np.ndarray, spacing: float, nums_around: tuple[int, ...]
) -> list[np.ndarray]:
    """Heights (Q,) of the ground at places (Q, 2), from the nearest of the returns (G, 3), for each
    of some numbers of these."""
    if not len(places):
        return [np.empty(0)] * len(nums_around)
    merged = _merged(returns)
    at, height = merged[:, :2] / spacing, merged[:, 2]
    return [
        RBFInterpolator(at, height, min(number, len(at)), _SMOOTHING, "linear")(places / spacing)
        for number in nums_around
    ]


class GroundPoints:
    """The new points on the ground of a survey. Call `make` for every block."""

    def __init__(
        self, returns: GroundReturns, surface: GroundSurface, options: UpsampleOptions
    ) -> None:
        self._returns, self._surface, self._options = returns, surface, options
        self._store = returns.store
        self.output = PassOutput(self._store, returns.files, None, True, saved=("points",))

    def make(self, block: int) -> None:
        """Make the points whose nearest ground return is in a block: at most one in each cell of a
        grid over the survey, where the nearest is farther away than the side of a cell."""
        store, surface = self._store, self._surface
        low, high = store.low[block, :2], store.high[block, :2]
        margin = surface.trusted
        returns, number = self._returns.within(low - 1.5 * margin, high + 1.5 * margin)
        start, stop = store.block_ptr[block : block + 2]
        is_own = (number >= start) & (number < stop)
        tree = cKDTree(returns["position"][:, :2])
        own = returns["position"][is_own, :2]
        places = _places(own, margin, surface.spacing, self._options.seed)
        gap, nearest = (np.asarray(found) for found in tree.query(places))
        is_free = (gap > surface.spacing) & (gap <= margin) & is_own[nearest]
        if (most := self._options.max_uncertainty) is not None:
            is_free &= np.interp(gap, *surface.errors) <= most
        places = places[is_free]
        points, distance, above = self._below_crowns(returns["position"], places)
        ranks = np.arange(1, NUM_NEIGHBORS + 1)
        gap, nearest = (np.asarray(found) for found in tree.query(points[:, :2], k=ranks))
        parent, uncertainty = number[nearest[:, 0]], np.interp(gap[:, 0], *surface.errors)
        nearest = np.where(nearest == len(returns), -1, nearest)
        attributes = attributes_between(returns["attributes"], gap, nearest)
        self._returns.files.save(
            block,
            "points",
            position=points,
            parent=parent,
            row=parent - start,
            above=above,
            distance=distance.astype(np.float32),
            uncertainty=uncertainty.astype(np.float32),
            is_below=np.zeros(len(points), dtype=bool),
            attributes=attributes,
        )

    def num_below(self) -> np.ndarray:
        """Number (N,) of made points below each measured one, in equal shares of those above."""
        blocks = range(self._store.num_blocks)
        above = np.concatenate([self.output.values(block, "above").ravel() for block in blocks])
        return np.bincount(above, minlength=len(self._store)) / NUM_ABOVE

    def _below_crowns(
        self, returns: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points (M, 3) on the ground at those of the places (Q, 2) that lie below crowns, between
        ground returns (G, 3); their distances (M,) to the nearest measured point; and the numbers
        (M, `NUM_ABOVE`) of the measured points above them."""
        spacing = self._surface.spacing
        points = np.pad(places, ((0, 0), (0, 1)))
        if not len(points) or len(self._store) < NUM_ABOVE:
            return points[:0], np.empty(0), np.empty((0, NUM_ABOVE), dtype=np.int64)
        region = Region.around(self._store, points)
        beside, above = neighbors_beside(region, points)
        rows = np.flatnonzero(
            (beside[:, 0] <= spacing)
            & self._returns.lets_pulses_through(region.rows["attributes"][above])
        )
        nums_around = _NUM_AROUND, _NUM_NEAREST
        heights, others = interpolated(returns, places[rows], spacing, nums_around)
        tolerance = _LARGEST_ERROR * spacing
        # A return below the surface proves it wrong. Without classes, one close to it is of the
        # ground itself.
        least = -tolerance if self._returns.by_class else spacing
        height_above = region.rows["position"][:, 2][above[rows]]
        is_right = (np.abs(heights - others) <= tolerance) & (
            height_above.min(axis=1) > heights + least
        )
        # Elsewhere nothing hides the ground, as on water and beside a survey.
        hidden = heights
        if not self._returns.by_class:
            # The middle of a roof may count as ground. Its eaves are not above that.
            ranks = np.arange(1, min(_NUM_NEAREST, len(returns)) + 1)
            hidden = returns[cKDTree(returns[:, :2]).query(places[rows], k=ranks)[1], 2].max(axis=1)
        is_right &= height_above.max(axis=1) > hidden + spacing
        points, rows = np.column_stack([places[rows], heights])[is_right], rows[is_right]
        distance = region.neighbors(points, 1)[0][:, 0]
        kept = distance > _LEAST_GAP * spacing
        # Other blocks may be loaded by now: rows of the region stay where they are.
        kept &= ~is_covered(region, points, (beside[rows], above[rows]), _ROOF_MEAN)
        if self._options.max_distance is not None:
            # The ground is upright, so that its unit is that of the options.
            kept &= distance <= self._options.max_distance - self._store.rounding
        return points[kept], distance[kept], region.numbers(above[rows])[kept]


def _places(xy: np.ndarray, reach: float, side: float, seed: int) -> np.ndarray:
    """One place (Q, 2) in each cell of a grid, in all cells that lie within reach of points (G, 2).

    Between points far from each other, such as a wrong measurement and a survey, there are none.
    """
    # Squares of cells, at least as wide as the reach.
    width = math.ceil(reach / side)
    square = np.unique(np.floor(xy / side).astype(np.int64) // width, axis=0)
    beside, of_square = (np.indices((size, size)).reshape(2, -1).T for size in (3, width))
    square = np.unique((square[:, None] + beside - 1).reshape(-1, 2), axis=0)
    cell = (width * square[:, None] + of_square).reshape(-1, 2)
    cell = cell[np.lexsort((cell[:, 1], cell[:, 0]))]
    number = (cell[:, 0] << 16) ^ cell[:, 1]
    axes = [shuffled(seed, number, np.full(len(cell), axis)).view(np.uint64) for axis in (0, 1)]
    # In the middle half of the cell, so that places are apart.
    within = np.stack(axes, axis=1) / 2.0**64
    return (cell + 0.25 + 0.5 * within) * side
