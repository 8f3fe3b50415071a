"""A raster of square cells over a part of a survey: lowest points and planes of 3 x 3 cells."""

from __future__ import annotations

import numpy as np

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

    def cells(self, points: np.ndarray) -> np.ndarray:
        """The cell (Q,) of each point (Q, 3); for a point outside, the nearest cell."""
        column = np.floor(points[:, :2] / self.side).astype(np.int64) - self._first
        column = column.clip(0, self._shape - 1)
        cells: np.ndarray = column[:, 0] * self._shape[1] + column[:, 1]
        return cells

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
        combined = next(parts).copy()
        for part in parts:
            combine(combined, part, out=combined)
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
        height: np.ndarray = offset + x * at[:, 0] + y * at[:, 1]
        return height
