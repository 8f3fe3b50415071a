"""Tiles: parts of a cloud that are read at a time and processed by one thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.upsampling.store.bisection import split_boxes
from pointup.upsampling.store.point_store import Store


@dataclass(frozen=True)
class Tile:
    """Blocks from `start` to `stop`; `batches` are the first blocks of its batches."""

    start: int
    stop: int
    batches: np.ndarray


def cut_into_tiles(
    store: Store, batches: np.ndarray, num_points: int, side: float | None
) -> list[Tile]:
    """Split a cloud into tiles of at most `num_points` points, or with sides of at most `side`.

    A tile is at least one batch. batches: (B,) the first blocks of the batches.
    """
    ends = np.append(batches, store.num_blocks)

    def fits(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        first, last = ends[starts], ends[stops]
        if side is None:
            return store.block_ptr[last] - store.block_ptr[first] <= num_points
        low = np.array([store.low[a:b, :2].min(0) for a, b in zip(first, last, strict=True)])
        high = np.array([store.high[a:b, :2].max(0) for a, b in zip(first, last, strict=True)])
        return (high - low <= side).all(axis=1)

    first = split_boxes(store.block_keys[batches], fits)
    return [
        Tile(int(ends[a]), int(ends[b]), batches[a:b])
        for a, b in zip(first, np.append(first[1:], len(batches)), strict=True)
    ]
