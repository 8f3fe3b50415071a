"""Finds the sample tables of a pair dataset, or makes them.

A dataset without a sample table, from the Hub, another tool or an earlier version, is read in full
once. Its table is kept in `samples/` beside the points, or in the cache if that can't be written.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from filelock import FileLock
from tqdm import tqdm

from pointup.datasets.cache import cache_root
from pointup.datasets.columns import with_float_points
from pointup.datasets.indexing import index_parts, parts_of
from pointup.datasets.opening import load_splits, source_of_split
from pointup.datasets.pair_writer import FOLDER
from pointup.datasets.sample_table import SampleTable, write_sample_table
from pointup.datasets.samples import Samples
from pointup.errors import DataError, FileError

MAX_WORKERS = 8
SECONDS_BETWEEN_LINES = 30.0

logger = logging.getLogger(__name__)


def open_together(paths_or_hub_ids: Sequence[str | Path], split: str) -> list[Samples]:
    """Open one split of datasets that are joined or trained on together, as `open_samples` does.

    A dataset without a validation split is for training only if another one has one: its split
    `validation` is empty then.
    """
    draws = not any(map(has_validation, paths_or_hub_ids))
    return [open_samples(name, split, draws_validation=draws) for name in paths_or_hub_ids]


def open_samples(
    path_or_hub_id: str | Path, split: str, *, draws_validation: bool = True
) -> Samples:
    """Open one split of a pair dataset by its sample table; accepts what `open_pairs` accepts.

    Without a stored split `validation`, the split is drawn from `train` as in `open_pairs`; it is
    empty if `draws_validation` is false. Makes the sample table if there is none for the data as
    they are now: one of all processes that call this reads the points, the others wait. Raises
    DataError if the dataset can't be opened, the split is unknown, a column is missing or of a
    wrong type, or a file of points is not as long as it was.
    """
    label, folder = str(path_or_hub_id), Path(path_or_hub_id)
    tables = {}
    if stored := _stored_splits(folder):
        for name, state in stored.items():
            paths = [folder / FOLDER / f"{name}.arrow", _cached(state.fingerprint, name)]
            load = partial(_stored_split, label, name)
            tables[name] = _table(paths, folder, state, load, f"{label}, {name}")
    else:
        for name, dataset in load_splits(label).items():
            state = _State(dataset._fingerprint, frozenset())
            paths = [_cached(state.fingerprint, name)]
            load = partial(dataset.select_columns, dataset.column_names)
            tables[name] = _table(paths, folder, state, load, f"{label}, {name}")
    if not draws_validation and "validation" not in tables and "train" in tables:
        if split == "train":
            return Samples(folder, tables["train"])
        if split == "validation":
            return Samples(folder, tables["train"], np.empty(0, np.int64))
    lengths = {name: len(table) for name, table in tables.items()}
    source, rows = source_of_split(label, split, lengths)
    return Samples(folder, tables[source], rows)


def has_validation(path_or_hub_id: str | Path) -> bool:
    """Whether a dataset has a split `validation` of its own; raises DataError as `open_samples`."""
    stored = _stored_splits(Path(path_or_hub_id)) or load_splits(str(path_or_hub_id))
    return "validation" in stored


@dataclass(frozen=True)
class _State:
    """What identifies the data of a split: a fingerprint, and the files that hold it."""

    fingerprint: str
    files: frozenset[Path]


def _stored_splits(folder: Path) -> dict[str, _State]:
    """The splits that `write_pairs` or `save_to_disk` stored in a directory; none in others."""
    try:
        if (folder / "dataset_dict.json").exists():
            description = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))
            folders = {name: folder / name for name in description["splits"]}
        elif (folder / "state.json").exists():
            folders = {"train": folder}
        else:
            return {}
        states = {}
        for name, place in folders.items():
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            files = frozenset(place / file["filename"] for file in state["_data_files"])
            states[name] = _State(str(state["_fingerprint"]), files)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder}: can't be opened: {error!r}; make a dataset with `pointup prepare`"
        ) from error
    return states


def _stored_split(label: str, split: str) -> datasets.Dataset:
    return load_splits(label)[split]


def _cached(fingerprint: str, split: str) -> Path:
    return cache_root() / FOLDER / f"{fingerprint}-{split}.arrow"


def _current_table(paths: Sequence[Path], folder: Path, state: _State) -> SampleTable | None:
    """The table of the data as they are now; None if none of the files has one.

    Raises DataError if the data are the dataset's own files, and one is cut short or missing.
    """
    for path in paths:
        if not path.exists():
            continue
        try:
            table = SampleTable(path, folder)
        except DataError as error:
            logger.debug("not used: %s", error)
            continue
        if table.fingerprint != state.fingerprint:
            continue
        changed = table.changed_file()
        if not changed:
            return table
        if {file for file, _ in table.files} == state.files:
            raise DataError(
                f"{folder}: can't be opened: {changed}; restore it, or make the dataset again with "
                "`pointup prepare`"
            )
    return None


def _table(
    paths: Sequence[Path],
    folder: Path,
    state: _State,
    load: Callable[[], datasets.Dataset],
    label: str,
) -> SampleTable:
    """The current table in one of the paths, or a new one in the first that can be written."""
    table = _current_table(paths, folder, state)
    if table is not None:
        return table
    path = paths[-1]
    if len(paths) > 1 and os.access(folder, os.W_OK):
        path = paths[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock")).acquire()
    except OSError as error:
        raise FileError(
            f"{path.parent}: can't be written ({error.strerror}); set POINTUP_CACHE to another "
            "directory"
        ) from error
    with lock:
        # Another process may have made it while this one waited.
        table = _current_table([path], folder, state)
        if table is None:
            _write_table(path, folder, state, load(), label)
            table = SampleTable(path, folder)
        return table


def _write_table(
    path: Path, folder: Path, state: _State, dataset: datasets.Dataset, label: str
) -> None:
    began = time.monotonic()
    logger.info("%s: reading all %s samples once", label, f"{len(dataset):,}")
    dataset = with_float_points(dataset, label)
    files = [Path(file["filename"]) for file in dataset.cache_files]
    parts = parts_of(files)
    if sum(part.num_rows for part in parts) != len(dataset):
        raise DataError(
            f"{label}: its samples are not all in files of its own; store it with `save_to_disk`"
        )
    relative = [
        str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file.resolve())
        for file in files
    ]
    description = {
        "fingerprint": state.fingerprint,
        "files": [[name, file.stat().st_size] for name, file in zip(relative, files, strict=True)],
    }
    tables = index_parts(parts, min(MAX_WORKERS, os.cpu_count() or 1))
    # The name is unique, because locks may not work on a network file system.
    staging = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        write_sample_table(staging, _reported(tables, len(dataset), label), description)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    logger.info("%s: read in %.1f s; the next start reads %s instead", label, seconds, path)


def _reported(tables: Iterable[pa.Table], total: int, label: str) -> Iterator[pa.Table]:
    """The same tables, with a progress bar on a terminal, and lines in the log elsewhere."""
    shown_at = time.monotonic()
    with tqdm(total=total, desc=label, unit=" samples", leave=False, disable=None, delay=2) as bar:
        done = 0
        for table in tables:
            yield table
            done += len(table)
            bar.update(len(table))
            if bar.disable and time.monotonic() - shown_at > SECONDS_BETWEEN_LINES:
                shown_at = time.monotonic()
                logger.info("%s: read %s of %s samples", label, f"{done:,}", f"{total:,}")
