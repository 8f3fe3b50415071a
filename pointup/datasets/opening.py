"""Opens pair datasets: every column, or the sample tables alone, made where there are none."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np

from pointup.datasets.columns import POINT_COLUMNS, first_points, standardize, with_float_points
from pointup.datasets.indexing import index_parts, parts_of
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import FOLDER
from pointup.datasets.samples import Samples, SampleTable, write_sample_table
from pointup.disk import acquire_lock, written_whole
from pointup.errors import DataError, FileError
from pointup.processes import num_cores
from pointup.progress import tracked

HELD_OUT_FRACTION = 0.1

logger = logging.getLogger(__name__)


def open_pairs(path_or_hub_id: str | Path, split: str) -> datasets.Dataset:
    """Open one split of a pair dataset, memory-mapped, with pointup's columns.

    Accepts a directory written by `write_pairs` or `save_to_disk` (a single dataset counts as
    `train`), and everything that `datasets.load_dataset` accepts, such as a Hub id or a directory
    of Parquet files. Without a split `validation`, a tenth of the train samples (at least one), the
    same in every call, is held out of `train`; opening `validation` then logs a warning. Raises
    DataError if the dataset can't be opened, the split is unknown, or a column is missing or of a
    wrong type.
    """
    splits = load_splits(path_or_hub_id)
    source, held_out = source_of_split(
        str(path_or_hub_id), split, {n: len(s) for n, s in splits.items()}
    )
    dataset = standardize(splits[source], str(path_or_hub_id))
    return dataset if held_out is None else dataset.select(held_out)


def source_of_split(
    label: str, split: str, lengths: dict[str, int]
) -> tuple[str, np.ndarray | None]:
    """The stored split that holds `split`, and the rows of it that do; None for all.

    `lengths` has the number of samples of each stored split. Raises DataError for an unknown split.
    """
    if split not in lengths and not (split == "validation" and "train" in lengths):
        raise DataError(f"{label}: no split {split!r}; there are: {', '.join(lengths)}")
    if "validation" in lengths or split not in ("train", "validation"):
        return split, None
    number = lengths["train"]
    held_out = held_out_rows(number)
    if not len(held_out):
        if split == "train":
            return split, None
        raise DataError(
            f"{label}: one sample can't be split into training and validation; add a validation "
            "split, or train on it together with a dataset that has one"
        )
    if split == "train":
        return split, np.setdiff1d(np.arange(number), held_out)
    logger.warning(
        "%s has no validation split: %d of its %d train samples are held out for it, at random "
        "and not by place",
        label,
        len(held_out),
        number,
    )
    return "train", held_out


def read_pair(dataset: datasets.Dataset, row: int) -> Pair:
    """Read one pair of a dataset of `open_pairs`, as it was written."""
    table = dataset.with_format("arrow")[row]
    clouds = {column: first_points(table[column]) for column in POINT_COLUMNS}
    origin, vertical, surface = (
        table[column][0].as_py() for column in ("origin", "vertical", "surface")
    )
    return Pair(
        name=table["name"][0].as_py(),
        source=clouds["source"],
        target=clouds["target"],
        origin=np.array(origin),
        target_normals=clouds["target_normals"] if len(clouds["target_normals"]) else None,
        resample=clouds["resample"] if len(clouds["resample"]) else None,
        vertical=vertical is not False,
        surface=surface or "",
    )


def held_out_rows(num_samples: int) -> np.ndarray:
    if num_samples < 2:
        return np.empty(0, np.int64)
    number = max(1, round(HELD_OUT_FRACTION * num_samples))
    return np.sort(np.random.default_rng(0).permutation(num_samples)[:number])


def load_splits(path_or_hub_id: str | Path) -> dict[str, datasets.Dataset]:
    """The stored splits of a dataset, with the columns that it has. Raises DataError."""
    path = Path(path_or_hub_id)
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    if not saved and path.exists() and not (path.is_dir() and any(path.iterdir())):
        kind = "an empty directory" if path.is_dir() else "a file"
        raise DataError(f"{path}: is {kind}; expected a dataset of `pointup prepare`")
    if not path.exists() and (path.is_absolute() or len(path.parts) != 2):
        raise DataError(f"{path}: no such directory; make a dataset with `pointup prepare`")
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            # A resolved path has a last part, which `datasets` needs, other than "." and "..".
            place = path.resolve() if path.exists() else path_or_hub_id
            loaded = datasets.load_dataset(str(place))
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        # Reading through offsets beyond the end of a damaged file would crash the process. The
        # check reads the offsets of the clouds, not the points.
        for split in splits.values():
            split.data.validate(full=True)
    # `datasets` calls many readers, which raise errors of many classes.
    except Exception as error:
        if path.is_dir() and not (saved or _has_tables(path)):
            raise DataError(
                f"{path}: can't be opened: it holds no dataset of `pointup prepare`, and no Arrow "
                "or Parquet files"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        place = "can't be opened" if path.exists() else "no such directory, and as a Hub id"
        raise DataError(
            f"{path_or_hub_id}: {place}: {reason}; make a dataset with `pointup prepare`"
        ) from error
    return splits


def _has_tables(directory: Path) -> bool:
    return any(path.suffix in (".arrow", ".parquet") for path in directory.rglob("*"))


def cache_root() -> Path:
    """$POINTUP_CACHE, else $XDG_CACHE_HOME/pointup, else ~/.cache/pointup."""
    for variable, folder in (("POINTUP_CACHE", ""), ("XDG_CACHE_HOME", "pointup")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / folder
    return Path.home() / ".cache" / "pointup"


# Finds the sample tables of a pair dataset, or makes them.
#
# A dataset without a sample table, from the Hub, another tool or an earlier version, is read in
# full once. Its table is kept in `samples/` beside the points, or in the cache if that can't be
# written.

MAX_WORKERS = 8


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
        lock = acquire_lock(path.with_suffix(".lock"))
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
    tables = tracked(
        index_parts(parts, min(MAX_WORKERS, num_cores())),
        len(dataset),
        label,
        "samples",
        size=len,
        delay=2.0,
        write=logger.info,
    )
    with written_whole(path) as staging:
        write_sample_table(staging, tables, description)
    seconds = time.monotonic() - began
    logger.info("%s: read in %.1f s; the next start reads %s instead", label, seconds, path)
