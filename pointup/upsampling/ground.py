"""Local ground below a survey: keeps new points above it, and decides which are ground points.

Measured points are sorted into square cells of a few points each, and into coarser cells of two
and four times the side. In the 3 x 3 cells around a place, a plane is fitted to the points of
class 2 if there are enough of them, else to the lowest point of each cell. Where no return around a
place is near the plane of the coarser cells, as below a dense crown or on a roof, no return came
from the ground there: the coarser cells describe it. Cells start at the anchor of the cloud, so
that results do not depend on tiles.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import Delaunay, QhullError

from pointup.disk import os_errors, scratch_errors, written_whole
from pointup.geometry.grids import box_of, in_box
from pointup.io.cloud import CLASSIFICATION, plain_name
from pointup.upsampling.store.point_store import Store

GROUND_CLASS = 2

_POINTS_PER_CELL = 4
# Number of blocks up to which their density is not that of their boxes.
_FEW_BLOCKS = 8
# Sides of the coarse cells, in cells, from coarse to fine.
_COARSE = (4, 2)
# Side of a square, in cells, and number of squares in memory for each thread: 20 MB each. A block
# at a corner needs four. Half of the work on a square is for its margin; while one thread computes
# a larger square, others would wait longer.
_SQUARE, _SQUARES_OF_THREAD = 128, 4
# Cells of the largest size around a place on which its ground depends, and those of which the
# returns are corners of triangles.
_MARGIN, _TRIANGLES_MARGIN = 7, 5
# A point is on the ground if its height above the plane is at most this many standard deviations of
# the ground points; the limit is clipped to these shares of a cell's side.
_DEVIATIONS, _MOST_HEIGHT, _LEAST_HEIGHT = 2.5, 0.2, 0.03
# In sides of a cell: height above its plane up to which the lowest return of a cell is a corner of
# the triangles that points are lifted onto, and largest lift.
_MOST_ABOVE, _MOST_LIFT = 0.3, 0.4


class Ground:
    """The ground below a stored cloud, in its coordinates.

    The survey is divided into squares. Only those with points that are asked for are computed, once
    for all phases and processes: they are saved beside the store, and the last few are kept in
    memory. Wrong measurements far away would span a single raster of millions of cells.
    """

    def __init__(self, measured: Store) -> None:
        self.side = cell_side(measured)
        self._directory = measured.directory / "squares"
        self._directory.mkdir(exist_ok=True)
        self._measured = measured
        self._low, self._high = measured.low[:, :2].min(axis=0), measured.high[:, :2].max(axis=0)
        # The last is the one that was used last.
        self._kept = dict[tuple[int, int], _Rectangle]()
        self._threads = WeakSet[threading.Thread]()
        self._lock = threading.Lock()

    def floor(self, points: np.ndarray) -> np.ndarray:
        """Lowest allowed height (Q,) of new points at (Q, 3).

        It is the largest of the lowest return in the 3 x 3 cells around, the plane plus the lowest
        height of a return relative to it, and the triangles between the lowest points of class 2
        of cells, less twice the depth of the deepest point of this class in the 3 x 3 cells below
        them, or less that of the deepest point of the cell. The cells are the smallest
        in which enough returns came from the ground for a plane, or those of the coarsest raster
        where there are none. It is -inf without returns.
        """
        return self._found(_Rectangle.floor, points, float)

    def lifted(self, points: np.ndarray) -> np.ndarray:
        """Points (Q, 3), those a little below triangles between ground returns lifted onto these.

        The returns are the lowest of cells, if near the plane there, and those a little below
        triangles between these. A point farther below, or near a return that is, stays where it is:
        it may be right, and the returns those of plants.
        """
        return np.column_stack([points[:, :2], self._found(_Rectangle.lifted, points, float)])

    def are_returns(self, points: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) with these `numbers` (Q,) in the store are ground returns."""
        found = np.empty(len(points), dtype=bool)
        for rows, rectangle in self._rectangles(points):
            found[rows] = np.isin(numbers[rows], rectangle.returns)
        return found

    def is_below_returns(self, points: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) are lower than all returns in the 3 x 3 cells around them."""
        return self._found(_Rectangle.is_below_returns, points, bool)

    def is_on_surface(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether points (Q, 3) are on the ground, and whether it is known there from class 2."""
        is_on, known = np.empty((2, len(points)), dtype=bool)
        for rows, rectangle in self._rectangles(points):
            is_on[rows], known[rows] = rectangle.is_on_surface(points[rows])
        return is_on, known

    def _found(
        self, find: Callable[[_Rectangle, np.ndarray], np.ndarray], points: np.ndarray, dtype: type
    ) -> np.ndarray:
        """What a method of the rectangles finds for each of the points (Q, 3)."""
        found: np.ndarray = np.empty(len(points), dtype)
        for rows, rectangle in self._rectangles(points):
            found[rows] = find(rectangle, points[rows])
        return found

    def _rectangles(self, points: np.ndarray) -> Iterator[tuple[np.ndarray, _Rectangle]]:
        """Rectangles that contain points (Q, 3), each with the rows of its points."""
        x, y = (
            np.floor(values.clip(low, high) / (_SQUARE * self.side)).astype(np.int64)
            for values, low, high in zip(points.T, self._low, self._high, strict=False)
        )
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
        first = np.flatnonzero(np.append(True, (np.diff(x) != 0) | (np.diff(y) != 0))[: len(x)])
        for rows, of_square in zip(np.split(order, first[1:]), first.tolist(), strict=False):
            yield rows, self._rectangle(int(x[of_square]), int(y[of_square]))

    def _rectangle(self, x: int, y: int) -> _Rectangle:
        """The rectangle that the survey covers of a square."""
        with self._lock:
            rectangle = self._kept.pop((x, y), None)
            if rectangle is None:
                low = _SQUARE * self.side * np.array([x, y])
                high = np.minimum(low + _SQUARE * self.side, self._high)
                low = np.maximum(low, self._low)
                saved = self._directory / f"{x}_{y}"
                rectangle = _Rectangle(self._measured, self.side, low, high, saved)
            self._kept[x, y] = rectangle
            self._threads.add(threading.current_thread())
            while len(self._kept) > _SQUARES_OF_THREAD * len(self._threads):
                del self._kept[next(iter(self._kept))]
        return rectangle


Part = TypeVar("Part")


class _Once(Generic[Part]):
    """A part of a rectangle that is computed when it is asked for first; other threads wait."""

    def __init__(self, compute: Callable[[_Rectangle], Part]) -> None:
        self._compute = compute

    def __get__(self, rectangle: _Rectangle, owner: type) -> Part:
        with rectangle.lock:
            if self not in rectangle.parts:
                rectangle.parts[self] = self._compute(rectangle)
            part: Part = rectangle.parts[self]
        return part


def _saved(compute: Callable[[_Rectangle], Part]) -> Callable[[_Rectangle], Part]:
    """`compute`, but for a part that is on the disk, which is read in a hundredth of the time."""

    def read_or_compute(rectangle: _Rectangle) -> Part:
        path = rectangle.saved.with_name(f"{rectangle.saved.name}{compute.__name__}.pickle")
        if path.exists():
            with os_errors(path, "read"):
                read: Part = pickle.loads(path.read_bytes())
            return read
        part = compute(rectangle)
        with scratch_errors(path), written_whole(path) as new:
            new.write_bytes(pickle.dumps(part, protocol=5))
        return part

    return read_or_compute


class _Rectangle:
    """`Ground` below one rectangle, whose cells are all in memory. Names of files with its parts
    start with that of `saved`."""

    def __init__(
        self, measured: Store, side: float, low: np.ndarray, high: np.ndarray, saved: Path
    ) -> None:
        self._measured, self._side, self._low, self._high = measured, side, low, high
        self.saved, self.lock, self.parts = saved, threading.RLock(), dict[object, Any]()

    @_Once
    def _raster(self) -> Raster:
        """The cells of the rectangle, with those around it on which its ground depends."""
        largest = _COARSE[0]
        first = np.floor(self._low / (largest * self._side)).astype(np.int64) - _MARGIN
        shape = np.floor(self._high / (largest * self._side)).astype(np.int64) + 1 + _MARGIN - first
        return Raster(self._side, largest * first, largest * shape)

    @_Once
    def _points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Positions, numbers, whether they are of class 2, and cells of the points there."""
        found = _points_within(self._measured, *self._raster.corners())
        return *found, self._raster.cells(found[0])

    @_Once
    def _is_near(self) -> np.ndarray:
        """Whether the points (N,) are so near that the triangles depend on them."""
        margin = _TRIANGLES_MARGIN * _COARSE[0] * self._side
        return in_box(self._points[0], self._low - margin, self._high + margin)

    @_Once
    @_saved
    def _levels(self) -> list[Level]:
        """From the finest to the coarsest."""
        points, _, is_ground, cell = self._points
        lowest = self._raster.lowest(points[:, 2], cell)
        low_returns = lowest[lowest >= 0]
        levels: list[Level] = []
        for factor in (*_COARSE, 1):
            raster = self._raster.coarser(factor)
            coarser = levels[0] if levels else None
            levels.insert(0, Level(raster, points, is_ground, low_returns, coarser))
        return levels

    @_Once
    @_saved
    def _by_class(self) -> tuple[Triangles, np.ndarray]:
        """Triangles between points of class 2, and the depths (C,) below them that are allowed."""
        points, _, is_ground, cell = (values[self._is_near] for values in self._points)
        finest, ground = self._raster, points[is_ground]
        lowest = finest.lowest(ground[:, 2], cell[is_ground])
        # Lowest returns of cells can't replace class 2 in the floor: some are of plants.
        triangles = Triangles(finest, ground[lowest[lowest >= 0]])
        depth = triangles.depth(points)
        below, noise = np.zeros((2, len(finest)))
        np.maximum.at(below, cell, depth)
        np.maximum.at(noise, cell[is_ground], depth[is_ground])
        return triangles, np.maximum(below, _NOISE * finest.around(noise, 0.0, np.maximum))

    @_Once
    @_saved
    def _by_lowest(self) -> tuple[Triangles, np.ndarray]:
        """Triangles between ground returns, and whether returns lie far below them (C,)."""
        points, _, _, cell = self._points
        finest, level = self._raster, self._levels[0]
        is_near, depth = self._is_near, np.zeros(len(points))
        low = level.from_ground[is_near[level.from_ground]]
        height = points[low, 2] - finest.height_of(level.planes, points[low], cell[low])
        low = low[height <= _MOST_ABOVE * self._side]
        depth[is_near] = Triangles(finest, points[low]).depth(points[is_near])
        is_corner = (depth > 0) & (depth <= _MOST_LIFT * self._side)
        is_corner[low] = True
        triangles = Triangles(finest, points[is_corner])
        # Where returns lie far below them, the triangles are not the ground.
        depth[is_near] = triangles.depth(points[is_near])
        far_below = np.zeros(len(finest))
        far_below[cell[depth > _MOST_LIFT * self._side]] = 1.0
        return triangles, finest.around(far_below, 0.0, np.maximum) > 0

    @_Once
    @_saved
    def returns(self) -> np.ndarray:
        """Row numbers (G,) in the store of the ground returns: the lowest of cells."""
        number = self._points[1]
        return number[self._levels[0].from_ground]

    def floor(self, points: np.ndarray) -> np.ndarray:
        floor, known = self._levels[0].floor(points)
        for level in self._levels[1:]:
            rows = np.flatnonzero(~known)
            floor[rows], known[rows] = level.floor(points[rows])
        triangles, most_depth = self._by_class
        return np.fmax(floor, triangles.heights(points) - most_depth[self._raster.cells(points)])

    def lifted(self, points: np.ndarray) -> np.ndarray:
        triangles, is_far_below = self._by_lowest
        height, depth = points[:, 2], triangles.depth(points)
        stays = is_far_below[self._raster.cells(points)]
        return height + np.where(stays | (depth > _MOST_LIFT * self._side), 0.0, depth)

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
        x, y = np.floor((xy - box_of(xy)[0]) / side).astype(np.int64).T
        occupied = len(np.unique(x * (y.max() + 1) + y)) * side**2
        if occupied > area / 2:
            break
        # Points in the same place occupy one: without them each point gets a cell in the end.
        area, number = occupied, len(np.unique(xy, axis=0))
    return area


def _points_within(
    store: Store, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions (N, 3) of the points within a rectangle, their numbers (N,) in the store, and
    whether (N,) they are of class 2."""
    touched = ((store.low[:, :2] < high) & (store.high[:, :2] >= low)).all(axis=1)
    positions, numbers = [np.empty((0, 3))], [np.empty(0, dtype=np.int64)]
    is_ground = [np.empty(0, dtype=bool)]
    for block in np.flatnonzero(touched).tolist():
        rows = store.read_block(block)
        # The upper border belongs to the next rectangle.
        inside = in_box(rows["position"], low, np.nextafter(high, -np.inf))
        positions.append(rows["position"][inside])
        numbers.append(store.block_ptr[block] + np.flatnonzero(inside))
        is_ground.append(is_of_ground(rows)[inside])
    return np.concatenate(positions), np.concatenate(numbers), np.concatenate(is_ground)


def is_of_ground(rows: np.ndarray) -> np.ndarray:
    """Whether rows (N,) of a store are of class 2."""
    name = class_attribute(rows["attributes"].dtype)
    if name is None:
        return np.zeros(len(rows), dtype=bool)
    return rows["attributes"][name] == GROUND_CLASS


# The lowest return of a cell comes from the ground if it is within this many sides of the next
# coarser cells of their plane.
_TOLERANCE = 0.5
# Fits of the planes of the coarsest cells; lowest returns far above one are left out of the next.
_FITS = 3


class Level:
    """Planes and lowest returns in the 3 x 3 cells around each cell of a raster.

    `low_returns` (L,) are the lowest points of small cells. `coarser` decides which of them came
    from the ground; None: all of them, but for the very lowest of a cell with many.

    Attributes:
        planes: (C, 3), see `Raster.planes`.
        deviation: (C,) standard deviation of the points of class 2 there, NaN with too few.
        lowest: (C,) height of the lowest return, inf without one.
        from_ground: (G,) the low returns that came from the ground.
        below: (C,) lowest height of a return relative to the plane of its cell, -inf without plane.
        has_plane: (C,) whether enough returns came from the ground.
    """

    def __init__(
        self,
        raster: Raster,
        points: np.ndarray,
        is_ground: np.ndarray,
        low_returns: np.ndarray,
        coarser: Level | None,
    ) -> None:
        self.raster, self._coarser = raster, coarser
        lowest = raster.lowest(
            points[low_returns, 2], raster.cells(points[low_returns]), robust=coarser is None
        )
        from_ground = low_returns[lowest[lowest >= 0]]
        if coarser is not None:
            near = coarser.is_near(points[from_ground]) | is_ground[from_ground]
            from_ground = from_ground[near]
        self.from_ground = from_ground
        num_fits = _FITS if coarser is None else 1
        planes, enough = self._fit(points, from_ground, num_fits)
        by_class, deviation, known = raster.planes(points[is_ground])
        self.planes = np.where(known[:, None], by_class, planes)
        self.deviation = np.where(known, deviation, np.nan)
        self.has_plane = enough | known
        cell = raster.cells(points)
        self.lowest = raster.minimum(points[:, 2], cell)
        height = points[:, 2] - raster.height_of(self.planes, points, cell)
        self.below = np.where(self.has_plane, raster.minimum(height, cell), -np.inf)

    def _fit(
        self, points: np.ndarray, from_ground: np.ndarray, num_fits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Planes through the lowest returns `from_ground`, and the mask of `Raster.planes`.

        Returns that lie far above a fit are left out of the next one.
        """
        for _ in range(num_fits):
            lowest = points[from_ground]
            planes, _, enough = self.raster.planes(lowest)
            cell = self.raster.cells(lowest)
            above = lowest[:, 2] - self.raster.height_of(planes, lowest, cell)
            is_ground = (above <= _TOLERANCE * self.raster.side) | ~enough[cell]
            if is_ground.all():
                break
            from_ground = from_ground[is_ground]
        return planes, enough

    def is_near(self, points: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) are near the plane of their cell, or of the coarser one if it has
        none. Without any plane they are."""
        cell = self.raster.cells(points)
        height = np.abs(points[:, 2] - self.raster.height_of(self.planes, points, cell))
        otherwise = True if self._coarser is None else self._coarser.is_near(points)
        return np.where(self.has_plane[cell], height <= _TOLERANCE * self.raster.side, otherwise)

    def floor(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lowest allowed height (Q,) of points (Q, 3), and whether it follows the ground there."""
        cell = self.raster.cells(points)
        plane = self.raster.height_of(self.planes, points, cell) + self.below[cell]
        lowest = self.lowest[cell]
        floor = np.where(np.isfinite(lowest), np.fmax(lowest, plane), -np.inf)
        return floor, self.has_plane[cell]


class Triangles:
    """The ground as triangles between corners (T, 3), some of the returns in the cells of a raster.

    Planes through many cells don't follow the terrain of a sparse survey, and new points would lie
    below it.
    """

    def __init__(self, raster: Raster, corners: np.ndarray) -> None:
        self._raster = raster
        highest = np.full(len(raster), -np.inf)
        np.maximum.at(highest, raster.cells(corners), corners[:, 2])
        self._highest = raster.around(highest, -np.inf, np.maximum)
        self._surface: LinearNDInterpolator | None = None
        # Returns on one line span no triangle.
        with suppress(QhullError):
            if len(corners) > 2:
                triangles = _Triangulation(corners[:, :2])
                self._surface = LinearNDInterpolator(triangles, corners[:, 2])

    def heights(self, points: np.ndarray) -> np.ndarray:
        """Heights (Q,) of the triangles at points (Q, 3). NaN beyond them, and where a point is
        above all corners in the 3 x 3 cells around."""
        heights = np.full(len(points), np.nan)
        cell = self._raster.cells(points)
        low = np.flatnonzero(points[:, 2] < self._highest[cell])
        if self._surface is not None and len(low):
            # The search for the triangle of a point begins at that of the last one.
            low = low[np.argsort(cell[low], kind="stable")]
            heights[low] = self._surface(points[low, :2])
        return heights

    def depth(self, points: np.ndarray) -> np.ndarray:
        """Depths (Q,) of points (Q, 3) below the triangles; 0 above and beyond them."""
        return np.fmax(self.heights(points) - points[:, 2], 0.0)


class _Triangulation(Delaunay):
    """Delaunay triangles, with their barycentric coordinates in closed form.

    SciPy solves a system of equations for each triangle: as long as the triangulation takes, and
    three times as long in two threads. They are not pickled.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "transform"}

    @functools.cached_property
    def transform(self) -> np.ndarray:
        """See `Delaunay`: for each triangle the inverse (2, 2) of its edges, and its last corner.

        NaN for a triangle that is nearly a line.
        """
        last = self.points[self.simplices[:, 2]]
        (ax, ay), (bx, by) = np.moveaxis(self.points[self.simplices[:, :2]] - last[:, None], 0, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.array([[by, -bx], [-ay, ax]]) / (ax * by - bx * ay)
            size = np.maximum(np.abs(ax) + np.abs(ay), np.abs(bx) + np.abs(by))
            condition = size * np.abs(inverse).sum(axis=0).max(axis=0)
        # SciPy reads it as adjacent in memory.
        transform = np.empty((len(last), 3, 2))
        transform[:, :2], transform[:, 2] = np.moveaxis(inverse, 2, 0), last
        transform[~(condition < _LARGEST_CONDITION)] = np.nan
        return transform


# SciPy's limit for triangles.
_LARGEST_CONDITION = 1e-3 / np.finfo(np.float64).eps

# Depths of ground points below the triangles that new points may have. With less, the Chamfer
# distance of flat surveys grows by 0.7 %.
_NOISE = 2.0

# Smallest number of points for a plane.
_LEAST_POINTS = 5
# With so many points, a cell still has several on the ground without the lowest.
_MANY = 12


class Raster:
    """Square cells with sides of `side`, `shape` (2,) of them from the cell `first` (2,) on.

    The corner of the cell (0, 0) is the origin of the coordinates, so that cells do not depend on
    the part of the survey. Values of cells are (C,) or (C, F), row after row.
    """

    def __init__(self, side: float, first: np.ndarray, shape: np.ndarray) -> None:
        self.side, self._first, self._shape = side, first, shape

    def __len__(self) -> int:
        return int(self._shape.prod())

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and the upper corner (2,)."""
        return self._first * self.side, (self._first + self._shape) * self.side

    def coarser(self, factor: int) -> Raster:
        """The raster of cells that are `factor` times as large."""
        return Raster(factor * self.side, self._first // factor, self._shape // factor)

    def cells(self, points: np.ndarray) -> np.ndarray:
        """The cell (Q,) of each point (Q, 3); for a point outside, the nearest cell."""
        x, y = (
            (np.floor(values / self.side).astype(np.int64) - first).clip(0, number - 1)
            for values, first, number in zip(points.T, self._first, self._shape, strict=False)
        )
        return x * self._shape[1] + y

    def lowest(self, height: np.ndarray, cell: np.ndarray, robust: bool = False) -> np.ndarray:
        """Index (C,) of the lowest point of each cell, -1 for an empty one.

        With `robust` it is the second lowest of a cell with many points, because the lowest may be
        a wrong measurement. Shapes: `height` and `cell` (N,) of all points.
        """
        order = np.lexsort((height, cell))
        cells, place, number = np.unique(cell[order], return_index=True, return_counts=True)
        if robust:
            place += number >= _MANY
        lowest = np.full(len(self), -1, dtype=np.int64)
        lowest[cells] = order[place]
        return lowest

    def minimum(self, values: np.ndarray, cell: np.ndarray) -> np.ndarray:
        """Smallest of the values (N,) in the 3 x 3 cells around each cell (C,); inf without any.

        `cell`: (N,) the cell of each value.
        """
        smallest = np.full(len(self), np.inf)
        np.minimum.at(smallest, cell, values)
        return self.around(smallest, np.inf, np.minimum)

    def around(self, values: np.ndarray, nothing: float, combine: np.ufunc) -> np.ndarray:
        """Values (C, F) or (C,) of the 3 x 3 cells around each cell, combined.

        Cells outside of the raster have the value `nothing`.
        """
        rows, columns = self._shape
        grid = values.reshape(rows, columns, -1)
        padded = np.pad(grid, ((1, 1), (1, 1), (0, 0)), constant_values=nothing)
        parts = (padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3))
        combined: np.ndarray = functools.reduce(combine, parts)
        return combined.reshape(values.shape)

    def planes(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Least-squares planes through the points (N, 3) in the 3 x 3 cells around each cell.

        Returns the planes (C, 3), height at the centre of the cell and slopes along x and y; the
        standard deviation (C,) of the points; and a mask (C,) of cells with enough points.
        """
        cell = self.cells(points)
        # In units of cells, from the corner of the raster, to avoid cancellation.
        at = points[:, :2] / self.side - self._first
        base = float(np.median(points[:, 2])) if len(points) else 0.0
        x, y = at.T
        z = points[:, 2] - base
        terms = np.stack([np.ones(len(z)), x, y, x * x, x * y, y * y, z, x * z, y * z, z * z])
        sums = np.stack([np.bincount(cell, term, minlength=len(self)) for term in terms], axis=1)
        n, sx, sy, sxx, sxy, syy, sz, sxz, syz, szz = self.around(sums, 0.0, np.add).T
        count = np.maximum(n, 1)
        mx, my, mz = sx / count, sy / count, sz / count
        cxx, cxy, cyy = sxx / count - mx * mx, sxy / count - mx * my, syy / count - my * my
        cxz, cyz, czz = sxz / count - mx * mz, syz / count - my * mz, szz / count - mz * mz
        determinant = cxx * cyy - cxy * cxy
        # Points on a line do not determine the slope across it.
        enough = (n >= _LEAST_POINTS) & (determinant > 0.01)
        safe = np.where(enough, determinant, 1.0)
        a, b = (cxz * cyy - cyz * cxy) / safe, (cyz * cxx - cxz * cxy) / safe
        variance = (czz - a * cxz - b * cyz).clip(min=0) * count / np.maximum(count - 3, 1)
        centre = np.stack(np.divmod(np.arange(len(self)), self._shape[1]), axis=1) + 0.5
        height = base + mz + a * (centre[:, 0] - mx) + b * (centre[:, 1] - my)
        return np.stack([height, a / self.side, b / self.side], 1), np.sqrt(variance), enough

    def height_of(self, planes: np.ndarray, points: np.ndarray, cell: np.ndarray) -> np.ndarray:
        """Height (Q,) of the `planes` (C, 3) of cells (Q,) at points (Q, 3)."""
        offset, x, y = planes[cell].T
        centre = (np.stack(np.divmod(cell, self._shape[1]), axis=1) + self._first + 0.5) * self.side
        at = points[:, :2] - centre
        return offset + x * at[:, 0] + y * at[:, 1]
