"""`Store`: the points of a cloud of any size on disk, in spatial order.

The cloud is read once, in chunks. Its points are distributed to parts of space that fit in memory,
and each part is sorted. Memory use does not grow with the cloud. A survey of several files is one
cloud: the order of its points does not depend on the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from scipy.spatial import cKDTree

from pointup.disk import os_errors, scratch_errors
from pointup.errors import DataError
from pointup.geometry.grids import box_of, hashed
from pointup.io.cloud import PointCloud, check_extent, plain_name
from pointup.upsampling.store.bisection import KEY_BITS, BisectionOrder, split_boxes

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
    def rounding(self) -> float:
        """Largest distance by which the grid moves a point: half the diagonal of a cell."""
        return 3**0.5 / 2 * self.resolution

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
    return build_survey_store([chunks], directory, block_size, unique=False)


def build_survey_store(
    files: Iterable[Iterable[PointCloud]],
    directory: Path,
    block_size: int = BLOCK_SIZE,
    takes_part: Callable[[PointCloud], np.ndarray] | None = None,
    upright: bool = True,
    unique: bool = True,
) -> Store:
    """Build the store of a survey, given file by file in chunks with the same attributes.

    The directory exists and is empty. Blocks have at most `block_size` points. Points are sorted by
    key and position. Points in the same place, in one file or in several, get one row if `unique`.
    Only points that `takes_part` selects, (n,) bool for a chunk, are stored; None selects all.
    Positions are in the axes and the unit of the files, or, if not `upright`, in the cloud's own
    (`own_frame`).

    Raises DataError for fewer than two distinct points, and OSError if the directory can't be
    written.
    """
    with scratch_errors(directory):
        low, extent, dtype, num_read, num_taken = spool_points(
            files, directory / "spool", takes_part
        )
        num_points = int(num_taken.sum())

        def spooled() -> Iterator[np.ndarray]:
            for start in range(0, num_points, CHUNK_SIZE):
                yield _read_rows(directory / "spool", dtype, start, start + CHUNK_SIZE)

        frame = Frame(low, np.eye(3), 1.0)
        if not upright:
            frame, extent = own_frame(positions_of_places(spooled))
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
            ordered = order_places if unique else order_points
            blocks = _sort_parts(stream, repeated, dtype, part_ptr, block_size, ordered)
        blocks |= {"origin": frame.origin, "axes": frame.axes, "unit": np.array(frame.unit)}
        blocks |= {"num_read": num_read, "num_taken": num_taken}
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
        for start, stop in pairwise(part_ptr.tolist()):
            stream.seek(start * dtype.itemsize)
            rows = np.frombuffer(stream.read((stop - start) * dtype.itemsize), dtype)
            rows, repeated = ordered(rows)
            rows["exact"] = 0
            stream.seek(end * dtype.itemsize)
            stream.write(rows.data)
            first = split_boxes(rows["key"], lambda starts, stops: stops - starts <= block_size)
            # Boxes that bisection can't split, of nearly coincident points.
            boxes = pairwise([*first, len(rows)])
            first = np.concatenate([np.arange(*box, block_size) for box in boxes])
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


def joined(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of a store one after another: NumPy copies them field by field, 40 times as slowly."""
    together: np.ndarray = np.concatenate([part.view(np.uint8) for part in rows])
    return together.view(rows[0].dtype)


def _read_rows(path: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(path, dtype, count=stop - start, offset=start * dtype.itemsize)


def spool_points(
    files: Iterable[Iterable[PointCloud]],
    path: Path,
    takes_part: Callable[[PointCloud], np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray, np.dtype, np.ndarray, np.ndarray]:
    """Write the points of a survey's files to a file, in input order; see `build_survey_store`.

    Returns the lowest coordinates, the extent, the dtype of a row, and the numbers of points read
    and taken of each file.
    """
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    dtype = np.dtype([])
    num_read: list[int] = []
    num_taken: list[int] = []
    with path.open("wb") as stream:
        for number, chunks in enumerate(files):
            num_read.append(0)
            num_taken.append(0)
            for chunk in chunks:
                index = np.arange(num_read[-1], num_read[-1] + len(chunk))
                num_read[-1] += len(chunk)
                if takes_part is not None:
                    taking = takes_part(chunk)
                    if not taking.all():
                        chunk, index = chunk.select(taking), index[taking]
                if not len(chunk):
                    continue
                if not any(num_taken):
                    dtype = _row_dtype(chunk)
                lowest, highest = box_of(chunk.positions)
                low, high = np.minimum(low, lowest), np.maximum(high, highest)
                table = np.zeros(len(chunk), dtype)
                table["position"] = chunk.positions
                table["exact"] = exact_positions(table["position"])
                table["index"] = index + (number << FILE_BITS)
                for name in dtype["attributes"].names or ():
                    table["attributes"][name] = chunk.attributes[name]
                stream.write(table.data)
                num_taken[-1] += len(table)
    num_points, what = sum(num_taken), "point"
    if num_points < sum(num_read):
        what = f"of {sum(num_read):,} points without noise, withheld points and other classes"
    if num_points < 2:
        raise DataError(f"has {num_points} {what}; at least 2 are needed, leave it out")
    if not (high > low).any():
        raise DataError(f"all {num_points} points are in one place; leave it out")
    check_extent(low, high, f"all {num_points} points")
    return low, high - low, dtype, np.array(num_read), np.array(num_taken)


def _row_dtype(cloud: PointCloud) -> np.dtype:
    attributes = np.dtype(
        [(name, values.dtype, values.shape[1:]) for name, values in cloud.attributes.items()]
    )
    return np.dtype(
        [
            ("position", "<f8", 3),
            ("index", "<i8"),
            ("key", "<i8"),
            ("exact", "<u8"),
            ("attributes", attributes),
        ]
    )


FILE_BITS = 40
"""Bits of a row's `index` below the number of its file."""

# They tell the returns of a place apart, and no program changes them tile by tile.
_PULSE = ("gpstime", "returnnumber")


_NOTHING = np.empty((0, 2), np.int64)


def order_points(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a store, sorted by key; rows of equal keys keep their order."""
    return rows[np.argsort(rows["key"], kind="stable")], _NOTHING


def order_places(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row for each place, sorted by key, then position; and the rows of other files there.

    Points of one file are in the same place if their positions are equal in the file, and points of
    several files, if they are equal on the grid of the store. Of several, the row of the first file
    is kept, there that of the first pulse, and then the first by its attributes. So the result
    depends neither on the files of a survey nor on the order of its points. Pulses differ in GPS
    time or return number: attributes such as a tree ID may differ from tile to tile.

    The second result is (D, 2) int64, ascending: a row that was kept, and the `index` of a point in
    the same place in another file, one for each such file.
    """
    rows, _ = order_points(rows)
    same = rows["key"][1:] == rows["key"][:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if not len(tied):
        return rows, _NOTHING
    among = rows[tied]
    x, y, z = among["position"].T
    file, content, pulse = among["index"] >> FILE_BITS, _content(among), _content(among, _PULSE)
    order = (among["index"], content, pulse, among["exact"], file, z, y, x, among["key"])
    rows[tied] = among[np.lexsort(order)]
    file = rows["index"] >> FILE_BITS
    is_cell = np.ones(len(rows), bool)
    is_cell[1:] = ~same | (rows["position"][1:] != rows["position"][:-1]).any(axis=1)
    is_file = is_cell | np.append(True, file[1:] != file[:-1])
    is_point = is_file | np.append(True, rows["exact"][1:] != rows["exact"][:-1])
    if is_point.all() and is_cell.sum() == is_file.sum():
        return rows, _NOTHING
    # Points of a file that only the grid puts in one cell are several places.
    start = np.flatnonzero(is_cell)[np.cumsum(is_cell) - 1]
    is_kept = is_point & (file == file[start])
    points = np.cumsum(is_point)
    rank = points - points[np.flatnonzero(is_file)[np.cumsum(is_file) - 1]]
    number = np.cumsum(is_kept) - 1
    num_kept = np.add.reduceat(is_kept, np.flatnonzero(is_cell))[np.cumsum(is_cell) - 1]
    in_other_file = is_point & ~is_kept & (rank < num_kept)
    kept = (number[start] + rank)[in_other_file]
    repeated = np.column_stack([kept, rows["index"][in_other_file]])
    return rows[is_kept], repeated[np.lexsort(repeated.T[::-1])]


def exact_positions(points: np.ndarray) -> np.ndarray:
    """Hashes (N,) uint64 of positions (N, 3) float64 as they are, before they are rounded."""
    # Adding 0 makes -0 and 0 the same.
    return hashed((points + 0.0).T)


def positions_of_places(
    chunks: Callable[[], Iterator[np.ndarray]],
) -> Callable[[], Iterator[np.ndarray]]:
    """A function like `chunks`, for the positions (n, 3) of the rows; each place comes once.

    `chunks` returns a new iterator over the rows at each call. `exact` identifies a place.
    """
    exact = [chunk["exact"].copy() for chunk in chunks()]
    is_first = np.zeros(sum(map(len, exact)), bool)
    is_first[np.unique(np.concatenate(exact), return_index=True)[1]] = True
    of_chunks = np.split(is_first, np.cumsum([len(part) for part in exact])[:-1])

    def positions() -> Iterator[np.ndarray]:
        for chunk, kept in zip(chunks(), of_chunks, strict=True):
            if kept.any():
                yield chunk["position"][kept]

    return positions


def _content(rows: np.ndarray, only: tuple[str, ...] | None = None) -> np.ndarray:
    """Ranks (N,) int64 of rows by the bytes of their attributes; equal attributes, equal rank.

    `only` restricts them to some attributes, named without case and separators: other programs
    write GpsTime or "GPS Time".
    """
    number = np.zeros(len(rows), np.int64)
    for name in rows["attributes"].dtype.names or ():
        if only and plain_name(name).replace("_", "").replace(" ", "") not in only:
            continue
        values = np.ascontiguousarray(rows["attributes"][name]).reshape(len(rows), -1)
        values = values.view(np.dtype((np.void, values.dtype.itemsize * values.shape[1])))
        ranks = np.unique(values.ravel(), return_inverse=True)[1]
        # Renumbered, so that the product does not overflow.
        number = np.unique(number * (ranks.max() + 1) + ranks, return_inverse=True)[1]
    return number


_NUM_SEEDS, _NUM_AROUND = 8, 512
# Grid steps per extent that positions are hashed on, coarse compared to errors of coordinates.
_HASHED_STEPS = 2.0**20


def grid_resolution(chunks: Callable[[], Iterator[np.ndarray]], extent: np.ndarray) -> float:
    """Step of the grid: a power of two, thousands of times smaller than the spacing of the points.

    On this grid differences of positions are exact: equal distances compare equal, and rounding
    errors in the coordinates of a cloud far from the origin vanish.

    `chunks` returns a new iterator over the positions (n, 3) of the cloud, relative to its lowest
    corner, at each call; extent: (3,). The spacing is measured among the nearest points of a few
    seeds, which are chosen by a hash of their position. So the result depends neither on the order
    of the points nor on the files.
    """
    (seeds,) = _first(chunks(), [partial(_hashed, extent=extent)], _NUM_SEEDS)
    distances = []
    for around in _first(chunks(), [partial(_squared, seed=seed) for seed in seeds], _NUM_AROUND):
        distance = np.asarray(cKDTree(around).query(around, k=[2])[0])
        distances.append(distance[np.isfinite(distance)])
    apart = np.concatenate(distances)
    spacing = float(np.median(apart)) if len(apart) else float(extent.max())
    # Squares of distances below 1e-162 are 0.
    spacing = max(spacing, np.finfo(float).tiny)
    # Distances hold 2**26 steps exactly.
    finest = np.log2(extent.max()) - 40
    # The 1e-6 makes spacings that are powers of two up to rounding give the same result.
    return float(2.0 ** max(np.floor(np.log2(spacing) + 1e-6) - 14, np.ceil(finest)))


def _squared(points: np.ndarray, seed: np.ndarray) -> np.ndarray:
    x, y, z = (points - seed).T
    return np.asarray(x * x + y * y + z * z)


def _hashed(points: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Hashes (n,) uint64 of the positions of points."""
    return hashed(np.rint(points * (_HASHED_STEPS / extent.max())).astype(np.uint64).T)


def _first(
    chunks: Iterator[np.ndarray],
    keys: Sequence[Callable[[np.ndarray], np.ndarray]],
    number: int,
) -> list[np.ndarray]:
    """For each key function, the `number` distinct points with the smallest keys, or fewer.

    Points with equal keys are ordered by their coordinates.
    """
    found = [np.empty((0, 3)) for _ in keys]
    for points in chunks:
        for i, key in enumerate(keys):
            values = key(points)
            if len(found[i]) == number:
                may_be = values <= key(found[i][-1:])[0]
                nearby, values = points[may_be], values[may_be]
            else:
                nearby = points
            both = np.concatenate([found[i], nearby])
            found[i] = _different(both, np.append(key(found[i]), values), number)
    return found


def _different(points: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    """The first `number` distinct points by their keys (n,), ties ordered by coordinates."""
    looked_at = 2 * number
    while True:
        may_be = np.ones(len(keys), bool)
        if len(keys) > looked_at:
            may_be = keys <= np.partition(keys, looked_at)[looked_at]
        x, y, z = points[may_be].T
        ordered = points[may_be][np.lexsort((z, y, x, keys[may_be]))]
        is_new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(ordered)]
        different = ordered[is_new][:number]
        if len(different) == number or may_be.all():
            return different
        # Many points coincide.
        looked_at *= 8


# Frames: the coordinates that a cloud is upsampled in, which follow from its points alone.
#
# Thinning picks points one after another, so that a rounding error of one position changes the
# picks around it. In its own frame a cloud that was moved, scaled or turned has the same
# coordinates as before, and gets the same new points.

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

    @property
    def is_upright(self) -> bool:
        """Whether it has the axes and the unit of the file, as for surveys."""
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
