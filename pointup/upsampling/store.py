"""The points of a cloud of any size in the order of space, on disk.

The cloud is read once, in chunks. Its points are then dealt out to parts of the space that fit in
memory, and sorted there; what is held at a time does not grow with the cloud.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from scipy.spatial import cKDTree

from pointup.data.clouds import PointCloud, os_errors
from pointup.errors import DataError
from pointup.upsampling.halving import KEY_BITS, Halving, split_boxes

BLOCK_SIZE = 8192
"""Most points of a block, the part of the cloud that is thinned at a time."""
CHUNK_SIZE = 250_000
"""Points read, or sorted in memory, at a time."""

_HISTOGRAM_BITS = 20
_NUM_SAMPLED = 4096


class Store:
    """A cloud in a directory, cut into blocks: boxes made by halving, in the order of their keys.

    Attributes:
        anchor: (3,) float64, the lowest coordinates of the cloud. Positions are relative to it, so
            that a cloud gives the same results wherever it lies.
        block_ptr: (B + 1,) int64, block b has the rows block_ptr[b]:block_ptr[b + 1].
        block_keys: (B,) int64, the key of the first point of each block.
        low, high: (B, 3) float64, the tight bounds of the points of each block.
        dtype: of a row: `position` (3,) float64; `index`, its place in the cloud; `key`; and the
            `attributes`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with np.load(directory / "blocks.npz") as tables:
            self.anchor = tables["anchor"]
            self.block_ptr = tables["block_ptr"]
            self.block_keys = tables["block_keys"]
            self.low, self.high = tables["low"], tables["high"]
        self.dtype = np.load(directory / "dtype.npy").dtype

    def __len__(self) -> int:
        return int(self.block_ptr[-1])

    @property
    def num_blocks(self) -> int:
        return len(self.block_keys)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows of the store, (stop - start,) of `dtype`."""
        path = self.directory / "rows"
        with os_errors(path, "read"):
            return _read_rows(path, self.dtype, start, stop)

    def read_block(self, block: int) -> np.ndarray:
        return self.read(int(self.block_ptr[block]), int(self.block_ptr[block + 1]))


def build_store(
    chunks: Iterable[PointCloud], directory: Path, block_size: int = BLOCK_SIZE
) -> Store:
    """Sort a cloud, given in chunks with the same attributes, into an existing empty directory.

    Blocks have at most `block_size` points.
    Raises DataError for a cloud of less than two different points, and FileError when the directory
    can't be written.
    """
    with os_errors(directory, "written"):
        low, extent, resolution, dtype, num_points = _spool(chunks, directory)
        # Rounding may move a point beyond the extent.
        halving = Halving(extent + 2 * resolution)

        def rows() -> Iterator[np.ndarray]:
            for start in range(0, num_points, CHUNK_SIZE):
                chunk = _read_rows(directory / "spool", dtype, start, start + CHUNK_SIZE)
                relative = (chunk["position"] - low) / resolution
                chunk["position"] = np.rint(relative) * resolution
                chunk["index"] = np.arange(start, start + len(chunk))
                chunk["key"] = halving.keys(chunk["position"])
                yield chunk

        shift = KEY_BITS - _HISTOGRAM_BITS
        counts = np.zeros(2**_HISTOGRAM_BITS, dtype=np.int64)
        for chunk in rows():
            counts += np.bincount(chunk["key"] >> shift, minlength=len(counts))
        filled = np.flatnonzero(counts)
        ptr = np.append(0, np.cumsum(counts[filled]))
        first = split_boxes(
            filled << shift, lambda starts, stops: ptr[stops] - ptr[starts] <= CHUNK_SIZE
        )
        part_keys, part_ptr = filled[first] << shift, np.append(ptr[first], num_points)
        with (directory / "rows").open("wb+") as stream:
            _deal_out(rows(), part_keys, part_ptr[:-1].copy(), stream)
            (directory / "spool").unlink()
            blocks = _sort_parts(stream, dtype, part_ptr, block_size)
        np.savez(directory / "blocks.npz", anchor=low, **blocks)  # type: ignore[arg-type]
        np.save(directory / "dtype.npy", np.empty(0, dtype))
    return Store(directory)


def _spool(
    chunks: Iterable[PointCloud], directory: Path
) -> tuple[np.ndarray, np.ndarray, float, np.dtype, int]:
    """Write the points as they come; lowest coordinates, extent, resolution, dtype and number."""
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    sample = np.empty((0, 3))
    dtype = np.dtype([])
    num_points = 0
    with (directory / "spool").open("wb") as stream:
        for chunk in chunks:
            if num_points == 0:
                dtype = _row_dtype(chunk)
            missing = _NUM_SAMPLED - len(sample)
            sample = np.concatenate([sample, chunk.positions[:missing]])
            low = np.minimum(low, chunk.positions.min(axis=0))
            high = np.maximum(high, chunk.positions.max(axis=0))
            table = np.zeros(len(chunk), dtype)
            table["position"] = chunk.positions
            for name in dtype["attributes"].names or ():
                table["attributes"][name] = chunk.attributes[name]
            stream.write(table.data)
            num_points += len(table)
    if num_points < 2:
        raise DataError(f"has {num_points} point; there is nothing to fill in, leave it out")
    if not (high > low).any():
        raise DataError(f"all {num_points} points are in one place; leave it out")
    return low, high - low, _resolution(sample, high - low), dtype, num_points


def _row_dtype(cloud: PointCloud) -> np.dtype:
    attributes = np.dtype(
        [(name, values.dtype, values.shape[1:]) for name, values in cloud.attributes.items()]
    )
    return np.dtype(
        [("position", "<f8", 3), ("index", "<i8"), ("key", "<i8"), ("attributes", attributes)]
    )


def _resolution(sample: np.ndarray, extent: np.ndarray) -> float:
    """A power of two, thousands of times finer than the points are apart.

    On this grid differences of positions are exact: equal distances are seen to be equal, and the
    noise in coordinates of a cloud that was shifted far off is gone.
    """
    distance = np.asarray(cKDTree(sample).query(sample, k=[2])[0])
    apart = distance[(distance > 0) & np.isfinite(distance)]
    spacing = float(np.median(apart)) if len(apart) else float(extent.max())
    # Distances hold 2**26 steps exactly.
    finest = np.log2(extent.max()) - 40
    return float(2.0 ** max(np.floor(np.log2(spacing)) - 14, np.ceil(finest)))


def _deal_out(
    chunks: Iterator[np.ndarray], part_keys: np.ndarray, cursors: np.ndarray, stream: BinaryIO
) -> None:
    """Write every row to its part of the file; in a part they keep their order."""
    for chunk in chunks:
        part = np.searchsorted(part_keys, chunk["key"], side="right") - 1
        order = np.argsort(part, kind="stable")
        parts, starts = np.unique(part[order], return_index=True)
        for i, rows in zip(parts, np.split(chunk[order], starts[1:]), strict=True):
            stream.seek(int(cursors[i]) * rows.itemsize)
            stream.write(rows.data)
            cursors[i] += len(rows)


def _sort_parts(
    stream: BinaryIO, dtype: np.dtype, part_ptr: np.ndarray, block_size: int
) -> dict[str, np.ndarray]:
    """Sort each part by key, duplicates in the order of the cloud, and cut it into blocks."""
    keys, starts, low, high = [], [], [], []
    for start, stop in zip(part_ptr[:-1].tolist(), part_ptr[1:].tolist(), strict=True):
        stream.seek(start * dtype.itemsize)
        rows = np.frombuffer(stream.read((stop - start) * dtype.itemsize), dtype)
        rows = rows[np.argsort(rows["key"], kind="stable")]
        stream.seek(start * dtype.itemsize)
        stream.write(rows.data)
        first = split_boxes(rows["key"], lambda starts, stops: stops - starts <= block_size)
        # Boxes that halving can't split, of points nearly in one place.
        first = np.concatenate(
            [
                np.arange(begin, end, block_size)
                for begin, end in zip(first, np.append(first[1:], len(rows)), strict=True)
            ]
        )
        keys.append(rows["key"][first])
        starts.append(first + start)
        low.append(np.minimum.reduceat(rows["position"], first))
        high.append(np.maximum.reduceat(rows["position"], first))
    return {
        "block_ptr": np.append(np.concatenate(starts), part_ptr[-1]),
        "block_keys": np.concatenate(keys),
        "low": np.concatenate(low),
        "high": np.concatenate(high),
    }


def _read_rows(path: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(path, dtype, count=stop - start, offset=start * dtype.itemsize)
