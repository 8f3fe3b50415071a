"""Orders coincident points, and drops points that are in several files of a survey."""

from __future__ import annotations

import numpy as np

from pointup.io.noise import plain_name

FILE_BITS = 40
"""Bits of a row's `index` below the number of its file."""

# They tell the returns of a place apart, and no program changes them tile by tile.
_PULSE = ("gpstime", "returnnumber")


def order_by_key(rows: np.ndarray) -> np.ndarray:
    """Rows of a store sorted by key; rows of equal keys keep their order."""
    return rows[np.argsort(rows["key"], kind="stable")]


def order_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of a store sorted by key, then position, attributes and `index`.

    So the order depends neither on the files of a survey nor on the order of its points, except for
    points that are equal in everything.
    """
    rows = order_by_key(rows)
    same = rows["key"][1:] == rows["key"][:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if len(tied):
        among = rows[tied]
        x, y, z = among["position"].T
        order = np.lexsort((among["index"], _content(among), z, y, x, among["key"]))
        rows[tied] = among[order]
    return rows


def drop_repeated(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows without the points that an earlier file has, too; and which points were dropped.

    Points of two files are the same if their positions are, and, where they have these, their GPS
    times and return numbers. Other attributes, such as a tree ID, may differ from tile to tile: the
    row of the first file is kept. The second result is (D, 2) int64, ascending: the row that was
    kept, and the `index` of the same point in another file. Duplicates within the first file are
    kept, and each of them is matched with one duplicate in each other file.
    """
    file = rows["index"] >> FILE_BITS
    nothing = np.empty((0, 2), np.int64)
    if not len(file) or (file == file[0]).all():
        return rows, nothing
    same = (rows["key"][1:] == rows["key"][:-1]) & (
        rows["position"][1:] == rows["position"][:-1]
    ).all(axis=1)
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if not len(tied):
        return rows, nothing
    position = np.append(0, np.cumsum(~same))[tied]
    pulse = _content(rows[tied], _PULSE)
    order = np.lexsort((file[tied], pulse, position))
    tied, position, pulse = tied[order], position[order], pulse[order]
    file = file[tied]
    # Runs of the same point; in each run, the file numbers ascend.
    is_first = (position[1:] != position[:-1]) | (pulse[1:] != pulse[:-1])
    run_starts = np.append(True, is_first)
    file_starts = run_starts | np.append(False, file[1:] != file[:-1])
    place = np.arange(len(tied))
    run = place[run_starts][np.cumsum(run_starts) - 1]
    number_in_file = place - place[file_starts][np.cumsum(file_starts) - 1]
    is_repeated = file != file[run]
    counterpart = run + number_in_file
    is_matched = is_repeated & (file[counterpart] == file[run])
    is_kept = np.ones(len(rows), bool)
    is_kept[tied[is_repeated]] = False
    new_place = np.cumsum(is_kept) - 1
    matched, kept = tied[is_matched], tied[counterpart[is_matched]]
    repeated = np.column_stack([new_place[kept], rows["index"][matched]])
    return rows[is_kept], repeated[np.lexsort((repeated[:, 1], repeated[:, 0]))]


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
