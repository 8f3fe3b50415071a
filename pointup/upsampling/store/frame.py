"""Frames: the coordinates that a cloud is upsampled in, which follow from its points alone.

Thinning picks points one after another, so that a rounding error of one position changes the picks
around it. In its own frame a cloud that was moved, scaled or turned has the same coordinates as
before, and gets the same new points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pointup.upsampling.store.duplicates import positions_of_places

# Below these, directions are ambiguous: the difference of two variances as a share of the largest
# one, and the skewness.
_LEAST_DIFFERENCE, _LEAST_SKEWNESS = 1e-5, 1e-6
# Extent of a cloud in its own frame; below 1, so that the box of the bisection has side 1.
_EXTENT = 0.75


@dataclass(frozen=True)
class Frame:
    """A frame with the cloud's lowest corner at zero.

    Attributes:
        origin: (3,) float64, the position of zero in the coordinates of the file.
        axes: (3, 3) float64, orthogonal; its columns are the directions of the frame's axes.
        unit: length of the frame's unit in the unit of the file.
    """

    origin: np.ndarray
    axes: np.ndarray
    unit: float

    @classmethod
    def upright(cls, origin: np.ndarray) -> Frame:
        """The axes and the unit of the file: for surveys, whose third coordinate is a height."""
        return cls(origin, np.eye(3), 1.0)

    @property
    def is_upright(self) -> bool:
        return self.unit == 1.0 and np.array_equal(self.axes, np.eye(3))

    def from_file(self, positions: np.ndarray) -> np.ndarray:
        """Positions (N, 3) of the file in this frame."""
        relative = positions - self.origin
        return relative if self.is_upright else relative @ self.axes / self.unit

    def to_file(self, positions: np.ndarray) -> np.ndarray:
        """Positions (N, 3) of this frame in the coordinates of the file."""
        if self.is_upright:
            return positions + self.origin
        return (positions * self.unit) @ self.axes.T + self.origin


def frame_of_places(rows: Callable[[], Iterator[np.ndarray]]) -> tuple[Frame, np.ndarray]:
    """`own_frame` of the positions in chunks of a store's rows, where each place counts once."""
    return own_frame(positions_of_places(rows))


def own_frame(chunks: Callable[[], Iterator[np.ndarray]]) -> tuple[Frame, np.ndarray]:
    """The frame of a cloud along its principal axes, and the cloud's extent (3,) in it.

    `chunks` returns a new iterator over the positions (n, 3) of the cloud at each call. Principal
    axes are ordered by variance and point where the cloud has its longer tail. Where variances are
    equal, the axes are those of the file; where tails are equal, the direction is. The unit makes
    the longest side of the cloud 0.75 long.
    """
    sums, number = np.zeros(3), 0
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    for points in chunks():
        low, high = np.minimum(low, points.min(axis=0)), np.maximum(high, points.max(axis=0))
    size = float((high - low).max())
    for points in chunks():
        sums += ((points - low) / size).sum(axis=0)
        number += len(points)
    mean = low + size * sums / number
    second, third = np.zeros((3, 3)), np.zeros((9, 3))
    for points in chunks():
        away = (points - mean) / size
        second += away.T @ away
        third += (away[:, :, None] * away[:, None, :]).reshape(-1, 9).T @ away
    variances, axes = np.linalg.eigh(second)
    if np.diff(variances).min() < _LEAST_DIFFERENCE * variances[-1]:
        axes = np.eye(3)
    for axis in axes.T:
        skewness = float(np.einsum("i,j,k,ijk", axis, axis, axis, third.reshape(3, 3, 3)))
        # Rounding can make the variance across a plane negative.
        variance = max(float(axis @ second @ axis), 0.0)
        size_of_cubes = variance**1.5 / number**0.5
        is_clear = abs(skewness) > _LEAST_SKEWNESS * size_of_cubes
        axis *= np.sign(skewness if is_clear else axis[np.abs(axis).argmax()])
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    for points in chunks():
        turned = (points - mean) @ axes
        low, high = np.minimum(low, turned.min(axis=0)), np.maximum(high, turned.max(axis=0))
    unit = float((high - low).max()) / _EXTENT
    return Frame(mean + axes @ low, axes, unit), (high - low) / unit
