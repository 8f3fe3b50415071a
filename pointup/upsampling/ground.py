"""Local ground below a survey: keeps new points above it, and decides which are ground points.

Measured points are sorted into square cells of a few points each, and into coarser cells of two
and four times the side. In the 3 x 3 cells around a place, a plane is fitted to the points of
class 2 if there are enough of them, else to the lowest point of each cell. Where no return around a
place is near the plane of the coarser cells, as below a dense crown or on a roof, no return came
from the ground there: the coarser cells describe it. Cells start at the anchor of the cloud, so
that results do not depend on tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pointup.io.noise import CLASSIFICATION, plain_name
from pointup.upsampling.ground_level import Level
from pointup.upsampling.ground_raster import Raster
from pointup.upsampling.store.point_store import Store

GROUND_CLASS = 2

_POINTS_PER_CELL = 4
# Number of blocks up to which their density is not that of their boxes.
_FEW_BLOCKS = 8
# Sides of the coarse cells, in cells, from coarse to fine.
_COARSE = (4, 2)
# Cells of a rectangle, above which it is divided into squares, one in memory at a time: about
# 60 MB.
_MOST_CELLS = 2**18
# Side of such a square, in cells.
_SQUARE = 256
# Cells of the largest size around a place on which its ground depends.
_MARGIN = 7
# A point is on the ground if its height above the plane is at most this many standard deviations of
# the ground points; the limit is clipped to these shares of a cell's side.
_DEVIATIONS, _MOST_HEIGHT, _LEAST_HEIGHT = 2.5, 0.2, 0.03


class Ground:
    """The ground below a rectangle of a stored cloud; low and high (2,) are in its coordinates.

    A few points far from a dense cloud, or wrong measurements above all of it, span a rectangle of
    millions of cells. It is divided into squares, and only those with points in them are computed,
    each time that they are asked for.
    """

    def __init__(self, measured: Store, low: np.ndarray, high: np.ndarray) -> None:
        self.side = cell_side(measured)
        self._measured = measured
        num_cells = np.prod((high - low) / self.side + 2 * _COARSE[0] * _MARGIN)
        self._whole = (
            _Rectangle(measured, self.side, low, high) if num_cells <= _MOST_CELLS else None
        )

    def floor(self, points: np.ndarray) -> np.ndarray:
        """Lowest allowed height (Q,) of new points at (Q, 3).

        It is the larger of two heights: the lowest return in the 3 x 3 cells around, and the plane
        plus the lowest height of a return relative to it. The cells are the smallest in which
        enough returns came from the ground for a plane, or those of the coarsest raster where there
        are none. It is -inf without returns.
        """
        floor = np.empty(len(points))
        for rows, rectangle in self._rectangles(points):
            floor[rows] = rectangle.floor(points[rows])
        return floor

    def is_below_returns(self, points: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) are lower than all returns in the 3 x 3 cells around them."""
        is_below = np.empty(len(points), dtype=bool)
        for rows, rectangle in self._rectangles(points):
            is_below[rows] = rectangle.is_below_returns(points[rows])
        return is_below

    def is_on_surface(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether points (Q, 3) are on the ground, and whether it is known there from class 2."""
        is_on, known = np.empty((2, len(points)), dtype=bool)
        for rows, rectangle in self._rectangles(points):
            is_on[rows], known[rows] = rectangle.is_on_surface(points[rows])
        return is_on, known

    def _rectangles(self, points: np.ndarray) -> Iterator[tuple[np.ndarray, _Rectangle]]:
        """Rectangles that contain points (Q, 3), each with the rows of its points."""
        if self._whole:
            yield np.arange(len(points)), self._whole
            return
        square = np.floor(points[:, :2] / (_SQUARE * self.side)).astype(np.int64)
        _, number, size = np.unique(square, axis=0, return_inverse=True, return_counts=True)
        for rows in np.split(np.argsort(number.ravel(), kind="stable"), size.cumsum()[:-1]):
            xy = points[rows, :2]
            yield rows, _Rectangle(self._measured, self.side, xy.min(axis=0), xy.max(axis=0))


class _Rectangle:
    """`Ground` below one rectangle, whose cells are all in memory."""

    def __init__(self, measured: Store, side: float, low: np.ndarray, high: np.ndarray) -> None:
        largest, self._side = _COARSE[0], side
        first = np.floor(low / (largest * side)).astype(np.int64) - _MARGIN
        shape = np.floor(high / (largest * side)).astype(np.int64) + 1 + _MARGIN - first
        points, is_ground = _points_within(
            measured, first * largest * side, (first + shape) * largest * side
        )
        finest = Raster(side, largest * first, largest * shape)
        lowest = finest.lowest(points[:, 2], finest.cells(points))
        low_returns = lowest[lowest >= 0]
        self._levels: list[Level] = []
        for factor in (*_COARSE, 1):
            scale = largest // factor
            raster = Raster(factor * side, scale * first, scale * shape)
            coarser = self._levels[0] if self._levels else None
            level = Level(raster, points, is_ground, low_returns, coarser)
            self._levels.insert(0, level)

    def floor(self, points: np.ndarray) -> np.ndarray:
        floor, known = self._levels[0].floor(points)
        for level in self._levels[1:]:
            rows = np.flatnonzero(~known)
            floor[rows], known[rows] = level.floor(points[rows])
        return floor

    def is_below_returns(self, points: np.ndarray) -> np.ndarray:
        finest = self._levels[0]
        lowest = finest.lowest[finest.raster.cells(points)]
        return np.isfinite(lowest) & (points[:, 2] < lowest)

    def is_on_surface(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        finest = self._levels[0]
        cell = finest.raster.cells(points)
        deviation = finest.deviation[cell]
        known = ~np.isnan(deviation)
        most = (_DEVIATIONS * deviation).clip(_LEAST_HEIGHT * self._side, _MOST_HEIGHT * self._side)
        height = np.abs(points[:, 2] - finest.raster.height_of(finest.planes, points, cell))
        return known & (height <= most), known


def class_attribute(attributes: np.dtype) -> str | None:
    """The name of the attribute with the classes of points, ignoring case; None without one.

    A column with several values for each point is none.
    """
    for name in attributes.names or ():
        if plain_name(name) == CLASSIFICATION and not attributes[name].shape:
            return name
    return None


def cell_side(store: Store) -> float:
    """Side length of a cell of about four points, at the median density of a cloud's blocks."""
    size = np.diff(store.block_ptr)
    area = np.prod((store.high - store.low)[:, :2], axis=1)
    if len(size) <= _FEW_BLOCKS:
        # The box of a block may be mostly empty, as with a stray point or two plots in one file.
        xy = [store.read_block(block)["position"][:, :2] for block in range(len(size))]
        area = np.array([min(a, occupied_area(b)) for a, b in zip(area, xy, strict=True)])
    flat = area > 0
    if not flat.any():
        return float((store.high - store.low)[:, :2].max(initial=0.0)) or 1.0
    return float(np.sqrt(_POINTS_PER_CELL * np.median(area[flat] / size[flat])))


def occupied_area(xy: np.ndarray) -> float:
    """Area that points (N, 2) occupy: of their bounding box, or of the cells of about four points
    with a point in them, if these are less than half of it."""
    area, number = float(np.prod(np.ptp(xy, axis=0))), len(xy)
    while area > 0.0:
        side = np.sqrt(_POINTS_PER_CELL * area / number)
        x, y = np.floor((xy - xy.min(axis=0)) / side).astype(np.int64).T
        occupied = len(np.unique(x * (y.max() + 1) + y)) * side**2
        if occupied > area / 2:
            break
        # Points in the same place occupy one: without them each point gets a cell in the end.
        area, number = occupied, len(np.unique(xy, axis=0))
    return area


def _points_within(
    store: Store, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 3) of the points within a rectangle, and whether (N,) they are of class 2."""
    touched = ((store.low[:, :2] < high) & (store.high[:, :2] >= low)).all(axis=1)
    positions, is_ground = [np.empty((0, 3))], [np.empty(0, dtype=bool)]
    name = class_attribute(store.dtype["attributes"])
    for block in np.flatnonzero(touched).tolist():
        rows = store.read_block(block)
        inside = ((rows["position"][:, :2] >= low) & (rows["position"][:, :2] < high)).all(axis=1)
        rows = rows[inside]
        positions.append(rows["position"])
        if name is None:
            is_ground.append(np.zeros(len(rows), dtype=bool))
        else:
            is_ground.append(rows["attributes"][name] == GROUND_CLASS)
    return np.concatenate(positions), np.concatenate(is_ground)
