"""Writes pair datasets from iterators of pairs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa

from pointup.datasets.columns import FEATURES, POINT_COLUMNS, pack_points, rounded_mean
from pointup.datasets.indexing import index_parts, parts_of
from pointup.datasets.pair import Pair
from pointup.datasets.sample_table import write_sample_table
from pointup.errors import DataError, FileError

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface

BYTES_PER_BATCH = 1 << 25
BYTES_PER_FILE = 1 << 29
FOLDER = "samples"
"""Folder of the sample tables in a dataset."""
MAX_ROUNDING = 1e-3
"""Largest part of the point spacing by which the conversion to float32 may move a point."""


def write_pairs(
    train: Iterable[Pair],
    validation: Iterable[Pair],
    directory: str | Path,
    info: dict[str, Any],
    surfaces: Mapping[str, Surface] | None = None,
) -> None:
    """Write a pair dataset that `open_pairs` and `datasets.load_from_disk` can read.

    Pairs are consumed one by one, so that the dataset may be larger than memory. `info` describes
    how the pairs were made. It is written to `pointup.json`, together with `contents`, a digest of
    each split, by which a resumed run recognizes its data. What training must know of each sample
    is written to `samples/SPLIT.arrow` (`pointup.datasets.sample_table`). `surfaces` are written to
    `surfaces/NAME`; their vertices are relative to the origin of the pair, as its points. Without
    validation pairs there is no validation split. Everything is written to DIRECTORY.tmp, which is
    renamed at the end.

    Points are stored as float32. Where that would move float64 points by more than a thousandth of
    their spacing, such as map coordinates, the points of the pair are stored relative to the
    rounded mean of its source, which is added to its origin.

    Raises FileError if the directory exists and is not empty. Raises DataError for a pair of a
    wrong shape, for a pair with a surface whose points float32 would move, for values of `info`
    that are not JSON, and if there are no training pairs.
    """
    directory = Path(directory)
    _check_info(info)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileError(f"{directory}: exists already; delete it or write to another directory")
    staging = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        contents = {}
        for split, pairs in (("train", train), ("validation", validation)):
            if digest := _write_split(pairs, staging, split):
                contents[split] = digest
        if "train" not in contents:
            raise DataError(f"{directory}: there are no training pairs to write")
        for name, surface in (surfaces or {}).items():
            (staging / "surfaces").mkdir(exist_ok=True)
            surface.save(staging / "surfaces" / name)
        write_description(staging, contents, info)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_info(info: dict[str, Any]) -> None:
    """Raise DataError for values that JSON does not have, before any pair is made."""
    for key, value in info.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"info: the value of {key!r} can't be written as JSON ({error}): convert it with "
                "str(), int(), float() or .tolist()"
            ) from error


def write_description(directory: Path, contents: dict[str, str], info: dict[str, Any]) -> None:
    """Write pointup.json, and the names of the splits for `datasets`."""
    info = {**info, "contents": contents}
    (directory / "pointup.json").write_text(json.dumps(info, indent=2) + "\n")
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(contents)}))


def _write_split(pairs: Iterable[Pair], directory: Path, split: str) -> str:
    """Write the pairs of a split and return their digest; "" and no folder without pairs."""
    digest = hashlib.blake2b(digest_size=16)
    (directory / split).mkdir()
    files = write_files(pairs, directory / split, digest)
    if not files:
        (directory / split).rmdir()
        return ""
    store_split(directory, split, files, digest.hexdigest())
    return digest.hexdigest()


def write_files(
    pairs: Iterable[Pair], folder: Path, digest: hashlib.blake2b, prefix: str = "data-"
) -> list[Path]:
    """Write pairs to Arrow stream files of about `BYTES_PER_FILE`, and add them to the digest.

    The names of the files begin with `prefix`. `write_pairs` says how points are stored.
    """
    schema = FEATURES.arrow_schema
    files: list[Path] = []
    groups = _groups(map(_with_float32_digits, pairs))
    group = next(groups, None)
    while group is not None:
        files.append(folder / f"{prefix}{len(files):05}.arrow")
        with pa.OSFile(str(files[-1]), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            while group is not None and file.tell() < BYTES_PER_FILE:
                stream.write_batch(pa.record_batch(_columns(group), schema=schema))
                for pair in group:
                    _digest_pair(pair, digest)
                group = next(groups, None)
    return files


def store_split(directory: Path, split: str, files: Sequence[Path], digest: str) -> None:
    """Make and write the sample table of the files of a split; see `store_rows`."""
    store_rows(directory, split, files, digest, index_parts(parts_of(files), num_workers=1))


def store_rows(
    directory: Path, split: str, files: Sequence[Path], digest: str, rows: Iterable[pa.Table]
) -> None:
    """Write the sample table of the files of a split, and their description for `datasets`.

    The description is that of `save_to_disk`. It is written here, because `save_to_disk` would copy
    all points once more.
    """
    folder = directory / split
    state: dict[str, Any] = {
        "_data_files": [{"filename": str(file.relative_to(folder))} for file in files],
        "_fingerprint": digest,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    datasets.DatasetInfo(features=FEATURES).write_to_directory(str(folder))
    description = {
        "fingerprint": digest,
        "files": [[str(file.relative_to(directory)), file.stat().st_size] for file in files],
    }
    (directory / FOLDER).mkdir(exist_ok=True)
    write_sample_table(directory / FOLDER / f"{split}.arrow", rows, description)


def _digest_pair(pair: Pair, digest: hashlib.blake2b) -> None:
    clouds = pair.clouds()
    texts = [pair.name, pair.surface, bool(pair.vertical), [len(clouds[c]) for c in POINT_COLUMNS]]
    digest.update(json.dumps(texts).encode())
    digest.update(np.asarray(pair.origin, np.float64).tobytes())
    for column in POINT_COLUMNS:
        digest.update(np.asarray(clouds[column], np.float32).tobytes())


def _with_float32_digits(pair: Pair) -> Pair:
    """The pair, or the same pair relative to the mean of its source if float32 moved its points.

    Raises DataError if the pair has a surface, which can be that of other pairs too.
    """
    clouds = pair.clouds()
    places = {name: clouds[name] for name in POINT_COLUMNS if name != "target_normals"}
    moved = max(map(_rounding, places.values()))
    if moved == 0 or moved <= MAX_ROUNDING * _spacing(clouds["target"]):
        return pair
    centre = rounded_mean(np.asarray(clouds["source"], np.float64))
    if pair.surface and centre.any():
        raise DataError(
            f"{pair.name}: as float32, its points would move by up to {moved:.2g}: subtract "
            f"{centre.tolist()} from its points and its surface, and add it to its origin"
        )
    centred: dict[str, Any] = {
        name: points - centre for name, points in places.items() if len(points)
    }
    return replace(pair, origin=np.asarray(pair.origin, np.float64) + centre, **centred)


def _rounding(points: np.ndarray) -> float:
    """The largest distance on an axis by which float32 moves a finite point of a cloud (N, 3)."""
    if points.dtype == np.float32:
        return 0.0
    points = _finite(points)
    with np.errstate(over="ignore"):
        return float(np.abs(points - points.astype(np.float32)).max(initial=0.0))


def _spacing(points: np.ndarray) -> float:
    """About the point spacing of a cloud (N, 3) on a surface; 0 without points."""
    points = _finite(points)
    return float(np.ptp(points, axis=0).max() / np.sqrt(len(points))) if len(points) else 0.0


def _finite(points: np.ndarray) -> np.ndarray:
    points = np.asarray(points, np.float64)
    return points[np.isfinite(points).all(axis=1)]


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    group: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        group.append(pair)
        num_bytes += 12 * sum(len(points) for points in pair.clouds().values())
        if num_bytes >= BYTES_PER_BATCH:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _columns(group: Sequence[Pair]) -> list[pa.Array]:
    clouds = [pair.clouds() for pair in group]
    columns: dict[str, pa.Array] = {
        column: pack_points([c[column] for c in clouds]) for column in POINT_COLUMNS
    }
    origins = np.stack([np.asarray(pair.origin, np.float64).reshape(3) for pair in group])
    columns |= {
        "name": pa.array([pair.name for pair in group], pa.string()),
        "origin": pa.FixedSizeListArray.from_arrays(pa.array(origins.reshape(-1)), 3),
        "num_source": pa.array([len(pair.source) for pair in group], pa.int32()),
        "num_target": pa.array([len(pair.target) for pair in group], pa.int32()),
        "vertical": pa.array([bool(pair.vertical) for pair in group], pa.bool_()),
        "surface": pa.array([pair.surface for pair in group], pa.string()),
    }
    return [columns[name] for name in FEATURES]
