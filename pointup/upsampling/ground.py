"""Local ground below a survey: keeps new points above it, and decides which are ground points.

Measured points are sorted into square cells of a few points each. In the 3 x 3 cells around a
place, a plane is fitted to the points of class 2 if there are enough of them, else to the lowest
point of each cell. The grid of cells starts at the anchor of the cloud, so that results do not
depend on tiles.
"""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.point_store import Store

GROUND_CLASS = 2
CLASSIFICATION = "classification"

_POINTS_PER_CELL = 4
# Smallest number of points for a plane.
_LEAST_POINTS = 5
# A point is on the ground if its height above the plane is at most this many standard deviations of
# the ground points; the limit is clipped to these shares of a cell's side.
_DEVIATIONS, _MOST_HEIGHT, _LEAST_HEIGHT = 2.5, 0.2, 0.03


class Ground:
    """The ground below a rectangle of a stored cloud; low and high (2,) are in its coordinates."""

    def __init__(self, measured: Store, low: np.ndarray, high: np.ndarray) -> None:
        self.side = side = cell_side(measured)
        # A margin of two cells: one for the planes, one for rounding.
        first = np.floor(low / side).astype(np.int64) - 2
        self._first, self._shape = first, np.floor(high / side).astype(np.int64) + 3 - first
        box = first * side, (first + self._shape) * side
        points, is_ground = _points_within(measured, *box)
        cell = self._cells(points)
        lowest = _lowest_of_cells(points[:, 2], cell, int(self._shape.prod()))
        # Empty cells have infinite height, so that they are never the lowest.
        heights = np.append(points[:, 2], np.inf)[lowest]
        self.lowest = self._around(heights, np.inf, np.minimum)

        plane, _, enough = self._planes(points[lowest[lowest >= 0]])
        by_class, deviation, known = self._planes(points[is_ground])
        self._plane = np.where(known[:, None], by_class, plane)
        self._surface = np.where(known, deviation, np.nan)
        # The lowest height relative to the plane of a point's own cell, in the cells around each
        # cell.
        height = points[:, 2] - self._height(points, cell)
        deepest = _lowest_of_cells(height, cell, len(lowest))
        below = np.append(height, np.inf)[deepest]
        self._below = np.where(enough | known, self._around(below, np.inf, np.minimum), -np.inf)

    def floor(self, points: np.ndarray) -> np.ndarray:
        """Lowest allowed height (Q,) of new points at (Q, 3).

        It is the larger of two heights: the lowest return in the 3 x 3 cells around, and the plane
        plus the lowest height of a return relative to it. It is -inf without returns.
        """
        cell = self._cells(points)
        plane = self._height(points, cell) + self._below[cell]
        lowest = self.lowest[cell]
        return np.where(np.isfinite(lowest), np.fmax(lowest, plane), -np.inf)

    def is_below_returns(self, points: np.ndarray) -> np.ndarray:
        """Whether points (Q, 3) are lower than all returns in the 3 x 3 cells around them."""
        lowest = self.lowest[self._cells(points)]
        return np.isfinite(lowest) & (points[:, 2] < lowest)

    def is_on_surface(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether points (Q, 3) are on the ground, and whether it is known there from class 2."""
        cell = self._cells(points)
        deviation = self._surface[cell]
        known = ~np.isnan(deviation)
        most = (_DEVIATIONS * deviation).clip(_LEAST_HEIGHT * self.side, _MOST_HEIGHT * self.side)
        height = np.abs(points[:, 2] - self._height(points, cell))
        return known & (height <= most), known

    def _cells(self, points: np.ndarray) -> np.ndarray:
        column = np.floor(points[:, :2] / self.side).astype(np.int64) - self._first
        column = column.clip(0, self._shape - 1)
        return column[:, 0] * self._shape[1] + column[:, 1]

    def _height(self, points: np.ndarray, cell: np.ndarray) -> np.ndarray:
        """Height (Q,) of the planes of cells (Q,) at points (Q, 3)."""
        offset, x, y = self._plane[cell].T
        at = points[:, :2] - self._centre(cell)
        return offset + x * at[:, 0] + y * at[:, 1]

    def _centre(self, cell: np.ndarray) -> np.ndarray:
        number = np.stack(np.divmod(cell, self._shape[1]), axis=1)
        return (number + self._first + 0.5) * self.side

    def _around(self, values: np.ndarray, nothing: float, combine: np.ufunc) -> np.ndarray:
        """Values (C, F) or (C,) of the 3 x 3 cells around each cell, combined.

        Cells outside of the raster have the value `nothing`.
        """
        rows, columns = self._shape
        grid = values.reshape(rows, columns, -1)
        padded = np.pad(grid, ((1, 1), (1, 1), (0, 0)), constant_values=nothing)
        parts = [padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
        combined: np.ndarray = combine.reduce(np.stack(parts)).reshape(values.shape)
        return combined

    def _planes(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Least-squares planes through the points in the 3 x 3 cells around each cell.

        Returns the planes (C, 3), height at the centre of the cell and slopes along x and y; the
        standard deviation (C,) of the points; and a mask (C,) of cells with enough points.
        """
        cell = self._cells(points)
        num_cells = int(self._shape.prod())
        # In units of cells, from the corner of the raster, to avoid cancellation.
        at = points[:, :2] / self.side - self._first
        base = float(np.median(points[:, 2])) if len(points) else 0.0
        x, y, z = *at.T, points[:, 2] - base
        terms = np.stack([np.ones(len(z)), x, y, x * x, x * y, y * y, z, x * z, y * z, z * z])
        sums = np.stack([np.bincount(cell, term, minlength=num_cells) for term in terms], axis=1)
        n, sx, sy, sxx, sxy, syy, sz, sxz, syz, szz = self._around(sums, 0.0, np.add).T
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
        centre = np.stack(np.divmod(np.arange(num_cells), self._shape[1]), axis=1) + 0.5
        height = base + mz + a * (centre[:, 0] - mx) + b * (centre[:, 1] - my)
        return np.stack([height, a / self.side, b / self.side], 1), np.sqrt(variance), enough


def cell_side(store: Store) -> float:
    """Side length of a cell of about four points, at the median density of a cloud's blocks."""
    size = np.diff(store.block_ptr)
    area = np.prod((store.high - store.low)[:, :2], axis=1)
    flat = area > 0
    if not flat.any():
        return float((store.high - store.low)[:, :2].max(initial=0.0)) or 1.0
    return float(np.sqrt(_POINTS_PER_CELL * np.median(area[flat] / size[flat])))


def _points_within(
    store: Store, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 3) of the points within a rectangle, and whether (N,) they are of class 2."""
    touched = ((store.low[:, :2] < high) & (store.high[:, :2] >= low)).all(axis=1)
    positions, is_ground = [np.empty((0, 3))], [np.empty(0, dtype=bool)]
    for block in np.flatnonzero(touched).tolist():
        rows = store.read_block(block)
        inside = ((rows["position"][:, :2] >= low) & (rows["position"][:, :2] < high)).all(axis=1)
        rows = rows[inside]
        positions.append(rows["position"])
        if CLASSIFICATION in (store.dtype["attributes"].names or ()):
            is_ground.append(rows["attributes"][CLASSIFICATION] == GROUND_CLASS)
        else:
            is_ground.append(np.zeros(len(rows), dtype=bool))
    return np.concatenate(positions), np.concatenate(is_ground)


def _lowest_of_cells(height: np.ndarray, cell: np.ndarray, num_cells: int) -> np.ndarray:
    """Index (C,) of the lowest point of each cell, -1 for an empty one."""
    order = np.lexsort((height, cell))
    cells, first = np.unique(cell[order], return_index=True)
    lowest = np.full(num_cells, -1, dtype=np.int64)
    lowest[cells] = order[first]
    return lowest
