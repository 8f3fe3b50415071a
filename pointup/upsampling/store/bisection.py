"""Bisection order: sorts points in space, and splits them into boxes (k-d blocks) of limited size.

The bounding box of a cloud is halved across its longest side, recursively. The halves that a point
lies in are the bits of its key. A box is a run of points in the order of their keys. Boxes depend
on the cloud only, and not on tiles or processes; so do results that are computed box by box.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.disk import os_errors, scratch_errors

KEY_BITS = 62


class BisectionOrder:
    """The bisection of a box from the origin to `extent`, (3,) and not negative.

    Side lengths are rounded up to powers of two in the unit of the coordinates, so that halves are
    exact.
    """

    def __init__(self, extent: np.ndarray) -> None:
        # The side of length 2**exponent contains its extent; its upper end is open.
        exponents = [np.floor(np.log2(side)) + 1 if side > 0 else -np.inf for side in extent]
        steps: list[tuple[int, int]] = []
        exponent = int(max(exponents)) - 1 if extent.any() else 0
        while len(steps) < KEY_BITS and extent.any():
            steps += [(axis, exponent) for axis in range(3) if exponents[axis] > exponent]
            exponent -= 1
        self._steps = steps[:KEY_BITS]

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """Keys (N,) int64 of positions (N, 3): one bit for each bisection, highest bit first."""
        keys = np.zeros(len(positions), dtype=np.int64)
        if not self._steps:
            return keys
        finest = self._steps[-1][1]
        numbers = [np.floor(np.ldexp(axis, -finest)).astype(np.int64) for axis in positions.T]
        for axis, exponent in self._steps:
            keys = (keys << 1) | ((numbers[axis] >> (exponent - finest)) & 1)
        return keys << (KEY_BITS - len(self._steps))


def split_boxes(
    keys: np.ndarray, fits: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Split items into the largest boxes that fit; (B,) int64 indices of the boxes' first items.

    keys: (N,) int64, ascending. `fits` takes the first items of boxes and the ends, and returns
    which boxes need no further bisection. A box of equal keys is never split.
    """
    starts, stops = np.zeros(1, dtype=np.int64), np.array([len(keys)])
    whole = []
    for depth in range(KEY_BITS):
        is_whole = fits(starts, stops)
        whole.append(starts[is_whole])
        starts, stops = starts[~is_whole], stops[~is_whole]
        if not len(starts):
            break
        shift = KEY_BITS - depth
        middle_keys = (keys[starts] >> shift << shift) | (1 << (shift - 1))
        middles = np.searchsorted(keys, middle_keys)
        starts, stops = np.concatenate([starts, middles]), np.concatenate([middles, stops])
        starts, stops = starts[starts < stops], stops[starts < stops]
    return np.sort(np.concatenate([*whole, starts]))


@dataclass(frozen=True)
class BlockFiles:
    """Saves and loads named arrays of a block; `what` is the kind of file, such as "candidates".

    Files are pickled: of a file of NumPy's own, to parse the header of each small array takes
    longer than to read all arrays.
    """

    directory: Path

    def save(self, block: int, what: str, **arrays: np.ndarray) -> None:
        path = self._path(block, what)
        with scratch_errors(path), path.open("wb") as file:
            pickle.dump(arrays, file, protocol=5)

    def load(self, block: int, what: str) -> dict[str, np.ndarray]:
        """The arrays of a block by name."""
        path = self._path(block, what)
        with os_errors(path, "read"), path.open("rb") as file:
            return pickle.load(file)

    def exists(self, block: int, what: str) -> bool:
        return self._path(block, what).exists()

    def delete(self, block: int, what: str) -> None:
        self._path(block, what).unlink()

    def _path(self, block: int, what: str) -> Path:
        return self.directory / f"{what}_{block}.pickle"
