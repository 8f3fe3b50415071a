"""Points that coincide: their order, and those that stand in several files of a survey."""

from __future__ import annotations

import numpy as np

FILE_BITS = 40
"""The `index` of a row has the number of its file from this bit on."""


def order_by_key(rows: np.ndarray) -> np.ndarray:
    """Rows of a store by key, those of equal keys as they come."""
    return rows[np.argsort(rows["key"], kind="stable")]


def order_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of a store by key; of equal keys by position, attributes and then `index`.

    So the order does not depend on how a survey is cut into files, nor on the order of its points,
    unless they agree in everything.
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
    """Ordered rows without those that another file has, too; and where these were.

    The latter is (D, 2) int64, ascending: the place of a row that was kept, and the `index` of the
    same point in another file. What the first file has several times stays so, and each time stands
    for one in each of the others.
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
    content = np.full(len(rows), -1)
    content[tied] = _content(rows[tied])
    same &= content[1:] == content[:-1]
    # Runs of points that agree in everything; in each, the files ascend.
    run_starts = np.append(True, ~same)
    file_starts = run_starts | np.append(False, file[1:] != file[:-1])
    place = np.arange(len(rows))
    run = place[run_starts][np.cumsum(run_starts) - 1]
    time = place - place[file_starts][np.cumsum(file_starts) - 1]
    is_repeated = file != file[run]
    stands_for = run + time
    told = is_repeated & (file[stands_for] == file[run])
    new_place = np.cumsum(~is_repeated) - 1
    repeated = np.column_stack([new_place[stands_for[told]], rows["index"][told]])
    return rows[~is_repeated], repeated[np.lexsort((repeated[:, 1], repeated[:, 0]))]


def _content(rows: np.ndarray) -> np.ndarray:
    """Numbers (N,) int64 that order rows by the bytes of their attributes."""
    number = np.zeros(len(rows), np.int64)
    for name in rows["attributes"].dtype.names or ():
        values = np.ascontiguousarray(rows["attributes"][name]).reshape(len(rows), -1)
        values = values.view(np.dtype((np.void, values.dtype.itemsize * values.shape[1])))
        ranks = np.unique(values.ravel(), return_inverse=True)[1]
        # Renumbered, so that the product stays small.
        number = np.unique(number * (ranks.max() + 1) + ranks, return_inverse=True)[1]
    return number
