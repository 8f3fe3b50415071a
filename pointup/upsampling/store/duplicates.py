"""Keeps one of the points that lie in the same place, in one file of a survey or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pointup.io.noise import plain_name

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
    key = np.zeros(len(points), np.uint64)
    # Adding 0 makes -0 and 0 the same.
    for column in (points + 0.0).T:
        key = (key ^ np.ascontiguousarray(column).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


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
