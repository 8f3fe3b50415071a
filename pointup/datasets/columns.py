"""The Arrow columns of a pair dataset: their types, and their conversion from and to NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from pointup.datasets.pair import POINT_COLUMNS
from pointup.errors import DataError

POINTS = List(List(Value("float32"), length=3))
FEATURES = Features(
    {
        "name": Value("string"),
        "source": POINTS,
        "target": POINTS,
        "target_normals": POINTS,
        "resample": POINTS,
        "origin": List(Value("float64"), length=3),
        "num_source": Value("int32"),
        "num_target": Value("int32"),
        "vertical": Value("bool"),
        "surface": Value("string"),
        "core": List(Value("float64")),
    }
)


def pack_points(clouds: Sequence[np.ndarray]) -> pa.ListArray:
    """Pack clouds (N_i, 3) into an Arrow array with a list of float32 triples per cloud."""
    sizes = np.array([len(cloud) for cloud in clouds], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = np.concatenate([np.empty((0, 3), np.float32), *clouds], dtype=np.float32)
    triples = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 3)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), triples)


def unpack_points(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (N, 3) of all clouds of a column, and their bounds `ptr` (clouds + 1,).

    The coordinates are a read-only view if possible. A missing cloud counts as empty, a missing
    coordinate as NaN. Raises ValueError if a point is missing or does not have three coordinates.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    rows = column.flatten()
    if rows.null_count:
        raise ValueError("a point is missing")
    if not pa.types.is_fixed_size_list(rows.type) or rows.type.list_size != 3:
        lengths = rows.value_lengths().to_numpy(zero_copy_only=False)
        if np.any(lengths != 3):
            raise ValueError(f"a point has {int(lengths[lengths != 3][0])} coordinates")
    values = rows.flatten().to_numpy(zero_copy_only=False).reshape(-1, 3)
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return values, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def with_float_points(dataset: Dataset, label: str) -> Dataset:
    """A dataset with those of pointup's columns that it has, and points as lists of float32.

    `source` and `target` are required, as lists or arrays of three floating-point coordinates. If a
    column of points has another type than float32 lists, all are converted once to float32 relative
    to the rounded mean of the source, so that map coordinates keep their digits; `datasets` caches
    the result. Raises DataError that names the column and the expected type, also if single values
    of a column are missing.
    """
    for column in ("source", "target"):
        if column not in dataset.column_names:
            raise DataError(
                f"{label}: no column {column!r} (there are: {', '.join(dataset.column_names)}); "
                f"expected source and target, each {POINTS}"
            )
    dataset = dataset.select_columns([c for c in dataset.column_names if c in FEATURES])
    points = [column for column in POINT_COLUMNS if column in dataset.column_names]
    for column in points:
        if not _holds_triples(dataset.features.arrow_schema.field(column).type):
            raise DataError(
                f"{label}: column {column!r} is {dataset.features[column]}; expected {POINTS}"
            )
    _refuse_missing(dataset, label)
    if any(dataset.features[column] != POINTS for column in points):
        dataset = _convert(dataset, points, label)
    return dataset


def _refuse_missing(dataset: Dataset, label: str) -> None:
    """Raise DataError if values of the name, the origin or a size are missing."""
    columns = ("name", "origin", "num_source", "num_target")
    for column in (column for column in columns if column in dataset.column_names):
        missing = (
            value is None or (column == "origin" and (len(value) != 3 or None in value))
            for value in dataset.with_format(None)[column]
        )
        if num_missing := sum(missing):
            raise DataError(
                f"{label}: column {column!r} lacks values in {num_missing} of {len(dataset)} "
                "samples: fill them in, or leave the column out"
            )


def _holds_triples(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.ExtensionType):
        kind = kind.storage_type
    if not _is_list(kind) or not _is_list(kind.value_type):
        return False
    entry = kind.value_type
    if pa.types.is_fixed_size_list(entry) and entry.list_size != 3:
        return False
    return bool(pa.types.is_floating(entry.value_type))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _convert(dataset: Dataset, points: list[str], label: str) -> Dataset:
    def convert(table: pa.Table) -> pa.Table:
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        clouds = {}
        for name in points:
            try:
                values, ptr = unpack_points(columns[name])
            except ValueError as error:
                raise DataError(f"{label}: column {name!r}: {error}; expected {POINTS}") from error
            clouds[name] = [values[a:b].astype(np.float64) for a, b in itertools.pairwise(ptr)]
        centres = [rounded_mean(cloud) for cloud in clouds["source"]]
        origins = np.stack(centres)
        if "origin" in columns:
            origins = origins + np.array(columns["origin"].to_pylist(), dtype=np.float64)
        for name in points:
            if name != "target_normals":
                clouds[name] = [p - c for p, c in zip(clouds[name], centres, strict=True)]
            columns[name] = pack_points(clouds[name])
        columns["origin"] = pa.FixedSizeListArray.from_arrays(pa.array(origins.reshape(-1)), 3)
        return pa.table(columns)

    names = dict.fromkeys([*dataset.column_names, "origin"])
    features = Features(
        {n: FEATURES[n] if n in (*points, "origin") else dataset.features[n] for n in names}
    )
    try:
        converted = dataset.with_format("arrow").map(
            convert, batched=True, batch_size=16, features=features, desc="Converting to float32"
        )
    except OSError as error:
        raise DataError(f"{label}: can't store the converted points: {error}") from error
    return converted.with_format(None)


def rounded_mean(points: np.ndarray) -> np.ndarray:
    """The mean (3,) of the finite points of a cloud (N, 3), in whole units; zeros without any."""
    finite = points[np.isfinite(points).all(axis=1)]
    return np.round(finite.mean(axis=0)) if len(finite) else np.zeros(3)
