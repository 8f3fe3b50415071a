"""Writes pair datasets from iterators of pairs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa

from pointup.datasets.columns import FEATURES, POINT_COLUMNS, pack_points
from pointup.datasets.pair import Pair
from pointup.errors import DataError, FileError

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface

BYTES_PER_BATCH = 1 << 25


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
    each split, by which a resumed run recognizes its data. `surfaces` are written to
    `surfaces/NAME`. Without validation pairs there is no validation split. Everything is written to
    DIRECTORY.tmp, which is renamed at the end. Raises FileError if the directory exists and is not
    empty, DataError for a pair of a wrong shape or if there are no training pairs.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileError(f"{directory}: exists already; delete it or write to another directory")
    staging = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        splits, contents = {}, {}
        for split, pairs in (("train", train), ("validation", validation)):
            path = staging / f"{split}.stream"
            if digest := _write_stream(pairs, path):
                contents[split] = digest
                splits[split] = datasets.Dataset.from_file(str(path), split=split)
        if "train" not in splits:
            raise DataError(f"{directory}: there are no training pairs to write")
        with _without_progress_bars():
            datasets.DatasetDict(splits).save_to_disk(staging)
        for split in splits:
            (staging / f"{split}.stream").unlink()
        for name, surface in (surfaces or {}).items():
            (staging / "surfaces").mkdir(exist_ok=True)
            surface.save(staging / "surfaces" / name)
        info = {**info, "contents": contents}
        (staging / "pointup.json").write_text(json.dumps(info, indent=2) + "\n")
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of `datasets`: two per split would displace the caller's own bar."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _write_stream(pairs: Iterable[Pair], path: Path) -> str:
    """Write pairs to an Arrow stream and return their digest; "" and no file without pairs."""
    schema = FEATURES.arrow_schema
    digest, num_pairs = hashlib.blake2b(digest_size=16), 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for group in _groups(pairs):
            stream.write_batch(pa.record_batch(_columns(group), schema=schema))
            num_pairs += len(group)
            for pair in group:
                _digest_pair(pair, digest)
    if not num_pairs:
        path.unlink()
        return ""
    return digest.hexdigest()


def _digest_pair(pair: Pair, digest: hashlib.blake2b) -> None:
    clouds = pair.clouds()
    texts = [pair.name, pair.surface, bool(pair.vertical), [len(clouds[c]) for c in POINT_COLUMNS]]
    digest.update(json.dumps(texts).encode())
    digest.update(np.asarray(pair.origin, np.float64).tobytes())
    for column in POINT_COLUMNS:
        digest.update(np.asarray(clouds[column], np.float32).tobytes())


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
