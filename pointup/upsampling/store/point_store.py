"""`Store`: the points of a cloud of any size on disk, in spatial order.

The cloud is read once, in chunks. Its points are distributed to parts of space that fit in memory,
and each part is sorted. Memory use does not grow with the cloud. A survey of several files is one
cloud: the order of its points does not depend on the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pointup.io.cloud import PointCloud, os_errors
from pointup.upsampling.store.bisection import KEY_BITS, BisectionOrder, split_boxes
from pointup.upsampling.store.duplicates import FILE_BITS, order_places, order_points
from pointup.upsampling.store.frame import Frame, frame_of_places
from pointup.upsampling.store.resolution import grid_resolution
from pointup.upsampling.store.spooling import spool_points

BLOCK_SIZE = 8192
"""Largest number of points of a block, the part of the cloud that is thinned at a time."""
CHUNK_SIZE = 250_000
"""Number of points read, or sorted in memory, at a time."""

_HISTOGRAM_BITS = 20


class Store:
    """A cloud in a directory, split into blocks: boxes in bisection order.

    Attributes:
        resolution: step of the grid that positions are rounded to, 2**-14 of their spacing or less.
        frame: the coordinates of positions. Their origin is the cloud's lowest corner, so that
            results do not depend on the origin of the coordinates in the file.
        block_ptr: (B + 1,) int64, block b has the rows block_ptr[b]:block_ptr[b + 1].
        block_keys: (B,) int64, the key of the first point of each block.
        low, high: (B, 3) float64, the bounding boxes of the points of each block.
        num_read: (F,) int64, number of points in each input file.
        num_taken: (F,) int64, how many of them are selected for upsampling, each counted.
        dtype: of a row: `position` (3,) float64; `index`, that of the point in its file, with the
            number of the file from bit `FILE_BITS` on; `key`; `exact`, 0 once sorted; `attributes`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with np.load(directory / "blocks.npz") as tables:
            self.frame = Frame(tables["origin"], tables["axes"], float(tables["unit"]))
            self.resolution = float(tables["resolution"])
            self.block_ptr, self.block_keys = tables["block_ptr"], tables["block_keys"]
            self.low, self.high = tables["low"], tables["high"]
            self.num_read, self.num_taken = tables["num_read"], tables["num_taken"]
            self._repeated_ptr = tables["repeated_ptr"]
            self._files, self._files_ptr = tables["files"], tables["files_ptr"]
        self.dtype = np.load(directory / "dtype.npy").dtype

    def __len__(self) -> int:
        return int(self.block_ptr[-1])

    @property
    def num_coincident(self) -> int:
        """How many selected points lie where another one does, the first of each place left out."""
        return int(self.num_taken.sum()) - len(self)

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

    def bounds_in_file(self) -> tuple[np.ndarray, np.ndarray]:
        """Boxes (B, 3), (B, 3) that hold the points of each block, in the coordinates of the file.

        They are larger than necessary if the frame is turned.
        """
        sides = np.stack([self.low, self.high])
        corners = [
            self.frame.to_file(np.stack([sides[i][:, 0], sides[j][:, 1], sides[k][:, 2]], axis=1))
            for i, j, k in np.ndindex(2, 2, 2)
        ]
        return np.min(corners, axis=0), np.max(corners, axis=0)

    def places_in_file(self, rows: np.ndarray, file: int) -> np.ndarray:
        """Indices (N,) int64 in a file of the points of rows (N,) of the store; -1 if absent."""
        place = np.full(len(rows), -1)
        of_row = np.searchsorted(self.block_ptr, rows, side="right") - 1
        for block in np.unique(of_row).tolist():
            here = np.flatnonzero(of_row == block)
            index = self.read_block(block)["index"][rows[here] - self.block_ptr[block]]
            repeated = self._read_repeated(block)
            repeated = repeated[repeated[:, 1] >> FILE_BITS == file]
            if len(repeated):
                found = np.searchsorted(repeated[:, 0], rows[here]).clip(max=len(repeated) - 1)
                is_repeated = repeated[found, 0] == rows[here]
                index = np.where(is_repeated, repeated[found, 1], index)
            is_there = index >> FILE_BITS == file
            place[here[is_there]] = index[is_there] & ((1 << FILE_BITS) - 1)
        return place

    def files_of(self, block: int) -> np.ndarray:
        """Numbers (F,) int64, ascending, of the files that contain points of a block."""
        return self._files[self._files_ptr[block] : self._files_ptr[block + 1]]

    def _read_repeated(self, block: int) -> np.ndarray:
        """(D, 2) int64: rows of a block that are in another file, too, and their `index` there."""
        start, stop = self._repeated_ptr[block : block + 2].tolist()
        path = self.directory / "repeated"
        if start == stop:
            return np.empty((0, 2), np.int64)
        with os_errors(path, "read"):
            pairs = np.fromfile(path, np.int64, 2 * (stop - start), offset=16 * start)
        return pairs.reshape(-1, 2)


def build_store(
    chunks: Iterable[PointCloud], directory: Path, block_size: int = BLOCK_SIZE
) -> Store:
    """Build the store of a cloud, given in chunks with the same attributes.

    As `build_survey_store`, but every point gets a row: coincident points keep their order.
    """
    return _build([chunks], directory, block_size, None, order_points, upright=True)


def build_survey_store(
    files: Iterable[Iterable[PointCloud]],
    directory: Path,
    block_size: int = BLOCK_SIZE,
    takes_part: Callable[[PointCloud], np.ndarray] | None = None,
    upright: bool = True,
) -> Store:
    """Build the store of a survey, given file by file in chunks with the same attributes.

    The directory exists and is empty. Blocks have at most `block_size` points. Points are sorted by
    key and position. Points in the same place, in one file or in several, get one row. Only points
    that `takes_part` selects, (n,) bool for a chunk, are stored; None selects all. Positions are in
    the axes and the unit of the files, or, if not `upright`, in the cloud's own (`own_frame`).

    Raises DataError for fewer than two distinct points, and FileError if the directory can't be
    written.
    """
    return _build(files, directory, block_size, takes_part, order_places, upright)


def _build(
    files: Iterable[Iterable[PointCloud]],
    directory: Path,
    block_size: int,
    takes_part: Callable[[PointCloud], np.ndarray] | None,
    ordered: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    upright: bool,
) -> Store:
    with os_errors(directory, "written"):
        low, extent, dtype, *numbers = spool_points(files, directory / "spool", takes_part)
        num_points = int(numbers[1].sum())

        def spooled() -> Iterator[np.ndarray]:
            for start in range(0, num_points, CHUNK_SIZE):
                yield _read_rows(directory / "spool", dtype, start, start + CHUNK_SIZE)

        frame = Frame.upright(low)
        if not upright:
            frame, extent = frame_of_places(spooled)
        resolution = grid_resolution(
            lambda: (frame.from_file(chunk["position"]) for chunk in spooled()), extent
        )
        # Rounding may move a point beyond the extent.
        order = BisectionOrder(extent + 2 * resolution)

        def rows() -> Iterator[np.ndarray]:
            for chunk in spooled():
                relative = frame.from_file(chunk["position"]) / resolution
                chunk["position"] = np.rint(relative) * resolution
                chunk["key"] = order.keys(chunk["position"])
                yield chunk

        keys, counts = _histogram(rows, num_points)
        ptr = np.append(0, np.cumsum(counts))
        first = split_boxes(keys, lambda starts, stops: ptr[stops] - ptr[starts] <= CHUNK_SIZE)
        part_keys, part_ptr = keys[first], np.append(ptr[first], num_points)
        with (directory / "rows").open("wb+") as stream:
            _deal_out(rows(), part_keys, part_ptr[:-1].copy(), stream)
            (directory / "spool").unlink()
            repeated = directory / "repeated"
            blocks = _sort_parts(stream, repeated, dtype, part_ptr, block_size, ordered)
        blocks |= {"origin": frame.origin, "axes": frame.axes, "unit": np.array(frame.unit)}
        blocks |= {"num_read": numbers[0], "num_taken": numbers[1]}
        np.savez(directory / "blocks.npz", resolution=resolution, **blocks)  # type: ignore[arg-type]
        np.save(directory / "dtype.npy", np.empty(0, dtype))
    return Store(directory)


def _histogram(
    rows: Callable[[], Iterator[np.ndarray]], num_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """First key and number of points of boxes that hold at most CHUNK_SIZE points each.

    A box of more points is bisected further, in another pass over `rows`. One point far away from
    the rest would leave most points in one box of the first pass.
    """
    keys, counts, shift = np.zeros(1, np.int64), np.array([num_points]), KEY_BITS
    while shift and (counts > CHUNK_SIZE).any():
        large = np.flatnonzero(counts > CHUNK_SIZE)
        bits = min(shift, max(1, _HISTOGRAM_BITS - (len(large) - 1).bit_length()))
        shift -= bits
        found = np.zeros((len(large), 2**bits), np.int64)
        for chunk in rows():
            box = np.searchsorted(keys, chunk["key"], side="right") - 1
            place = np.searchsorted(large, box).clip(max=len(large) - 1)
            is_large = large[place] == box
            within = (chunk["key"][is_large] >> shift) & (2**bits - 1)
            index = (place[is_large] << bits) + within
            found += np.bincount(index, minlength=found.size).reshape(found.shape)
        box, within = np.nonzero(found)
        finer = keys[large][box] + (within << shift)
        kept = np.delete(np.arange(len(keys)), large)
        order = np.argsort(np.append(keys[kept], finer))
        keys = np.append(keys[kept], finer)[order]
        counts = np.append(counts[kept], found[box, within])[order]
    return keys, counts


def _deal_out(
    chunks: Iterator[np.ndarray], part_keys: np.ndarray, cursors: np.ndarray, stream: BinaryIO
) -> None:
    """Write every row to its part of the file; rows of a part keep their order."""
    for chunk in chunks:
        part = np.searchsorted(part_keys, chunk["key"], side="right") - 1
        order = np.argsort(part, kind="stable")
        parts, starts = np.unique(part[order], return_index=True)
        for i, rows in zip(parts, np.split(chunk[order], starts[1:]), strict=True):
            stream.seek(int(cursors[i]) * rows.itemsize)
            stream.write(rows.data)
            cursors[i] += len(rows)


def _sort_parts(
    stream: BinaryIO,
    repeated_path: Path,
    dtype: np.dtype,
    part_ptr: np.ndarray,
    block_size: int,
    ordered: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Sort each part, and cut it into blocks."""
    keys, starts, low, high, files = [], [], [], [], []
    repeated_ptr = [np.zeros(1, np.int64)]
    end = 0
    with repeated_path.open("wb") as repeated_stream:
        for start, stop in zip(part_ptr[:-1].tolist(), part_ptr[1:].tolist(), strict=True):
            stream.seek(start * dtype.itemsize)
            rows = np.frombuffer(stream.read((stop - start) * dtype.itemsize), dtype)
            rows, repeated = ordered(rows)
            rows["exact"] = 0
            stream.seek(end * dtype.itemsize)
            stream.write(rows.data)
            first = split_boxes(rows["key"], lambda starts, stops: stops - starts <= block_size)
            # Boxes that bisection can't split, of nearly coincident points.
            first = np.concatenate(
                [
                    np.arange(begin, stop, block_size)
                    for begin, stop in zip(first, np.append(first[1:], len(rows)), strict=True)
                ]
            )
            keys.append(rows["key"][first])
            starts.append(first + end)
            low.append(np.minimum.reduceat(rows["position"], first))
            high.append(np.maximum.reduceat(rows["position"], first))
            cuts = np.searchsorted(repeated[:, 0], first[1:])
            own, others = np.split(rows["index"], first[1:]), np.split(repeated[:, 1], cuts)
            files += [
                np.unique(np.append(index, other) >> FILE_BITS)
                for index, other in zip(own, others, strict=True)
            ]
            repeated_ptr.append(repeated_ptr[-1][-1] + np.append(cuts, len(repeated)))
            repeated_stream.write((repeated + np.array([end, 0])).data)
            end += len(rows)
    stream.truncate(end * dtype.itemsize)
    return {
        "block_ptr": np.append(np.concatenate(starts), end),
        "block_keys": np.concatenate(keys),
        "low": np.concatenate(low),
        "high": np.concatenate(high),
        "repeated_ptr": np.concatenate(repeated_ptr),
        "files": np.concatenate(files),
        "files_ptr": np.append(0, np.cumsum([len(numbers) for numbers in files])),
    }


def _read_rows(path: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(path, dtype, count=stop - start, offset=start * dtype.itemsize)
