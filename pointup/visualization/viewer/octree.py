"""Cuts a cloud into octree nodes whose first n points cover the node evenly, for any n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.geometry.morton import morton_codes

BITS = 21
"""Levels of the octree; three times this many bits fit into a 64-bit code."""
NODE_POINTS = 65_536


@dataclass(frozen=True, eq=False)
class Octree:
    """A cloud in drawing order.

    Attributes:
        order: (N,) index of each point in the cloud.
        ptr: (C + 1,) the row of `order` at which each node begins.
    """

    order: np.ndarray
    ptr: np.ndarray


def build_octree(points: np.ndarray, node_points: int = NODE_POINTS, seed: int = 0) -> Octree:
    """Cut finite points (N, 3) into nodes of at most `node_points`, and sort each for drawing.

    The first points of a node are one for each of its eight octants, then one for each octant of
    these, and so on; within a level the order is random. Drawing the first n points of each node
    is therefore an evenly spaced subset of any size. Points at one place form a node of any size.
    """
    if len(points) == 0:
        return Octree(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    code = _morton_codes(points)
    order = np.argsort(code, kind="stable")
    code = code[order]
    ptr = _node_starts(code, node_points)
    # In Morton order, a point is the first of its octree cell at each level below the one that it
    # shares with the point before it.
    shared = np.zeros(len(code), dtype=np.int64)
    different = code[1:] ^ code[:-1]
    # Only the highest of adjacent ones stays: float64 would round many ones up to the next bit.
    different &= ~(different >> 1)
    num_bits = np.frexp(different.astype(np.float64))[1]
    shared[1:] = BITS - (num_bits + 2) // 3
    shared[ptr[:-1]] = 0
    node = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    random = np.random.default_rng(seed).random(len(code))
    return Octree(order[np.lexsort((random, shared, node))], ptr)


def _morton_codes(points: np.ndarray) -> np.ndarray:
    low = points.min(axis=0)
    side = max(float((points - low).max()), 1e-12)
    cells = ((points - low) * ((2**BITS - 1) / side)).astype(np.int64)
    return morton_codes(cells)


def _node_starts(code: np.ndarray, node_points: int) -> np.ndarray:
    """Rows (C + 1,) of sorted codes (N,) at which nodes begin, and N at the end."""
    starts = [len(code)]
    waiting = [(0, len(code), 0, 0)]
    while waiting:
        start, stop, prefix, level = waiting.pop()
        if stop - start <= node_points or level == BITS:
            starts.append(start)
            continue
        step = 1 << (3 * (BITS - level - 1))
        edges = prefix + step * np.arange(1, 8)
        inner = start + np.searchsorted(code[start:stop], edges)
        ends = [start, *inner.tolist(), stop]
        for child in range(8):
            if ends[child] < ends[child + 1]:
                waiting.append((ends[child], ends[child + 1], prefix + child * step, level + 1))
    return np.array(sorted(starts), dtype=np.int64)
