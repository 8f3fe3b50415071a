"""Opens pair datasets by their sample tables.

A dataset without a sample table, from the Hub or another tool, is read in full once. Its table is
kept in `samples/` beside the points, or in the cache if that can't be written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import datasets
import numpy as np

from pointup.datasets.checks import index_parts, parts_of
from pointup.datasets.columns import with_float_points
from pointup.datasets.pair_writer import FOLDER
from pointup.datasets.samples import Samples, SampleTable, write_sample_table
from pointup.disk import acquire_lock, check_dataset_exists, written_whole
from pointup.errors import DataError, FileError
from pointup.io.cloud import warn_once
from pointup.processes import num_cores
from pointup.progress import tracked
from pointup.terminal import first_line

HELD_OUT_FRACTION = 0.1
MAX_WORKERS = 8

logger = logging.getLogger(__name__)


def source_of_split(
    label: str, split: str, tables: dict[str, SampleTable], draws_validation: bool = True
) -> tuple[str, np.ndarray | None]:
    """The stored split that holds `split`, and the rows of it that do; None for all.

    `tables` has the sample table of each stored split. Without `draws_validation`, no rows of
    `train` are held out for a missing split `validation`. Samples that can't be used are held out
    last. Raises DataError for an unknown split.
    """
    lengths = {name: len(table) for name, table in tables.items()}
    if split not in lengths and not (split == "validation" and "train" in lengths):
        raise DataError(f"{label}: no split {split!r}; there are: {', '.join(lengths)}")
    if "validation" in lengths or split not in ("train", "validation"):
        return split, None
    number = lengths["train"]
    num_held_out = max(1, round(HELD_OUT_FRACTION * number)) if draws_validation else 0
    if split == "train" and (number < 2 or not num_held_out):
        return split, None
    if number < 2 and num_held_out:
        raise DataError(
            f"{label}: one sample can't be split into training and validation; add a validation "
            "split, or train on it together with a dataset that has one"
        )
    order = np.random.default_rng(0).permutation(number)
    is_bad = np.isin(order, tables["train"].unusable())
    held_out = np.sort(order[is_bad.argsort(kind="stable")][:num_held_out])
    if split == "train":
        return split, np.setdiff1d(np.arange(number), held_out)
    if num_held_out:
        warn_once(
            f"{label} has no validation split: {num_held_out} of its {number} train samples are "
            "held out for it, at random and not by place"
        )
    return "train", held_out


def load_splits(path_or_hub_id: str | Path) -> dict[str, datasets.Dataset]:
    """The stored splits of a dataset, with the columns that it has. Raises DataError."""
    path = Path(path_or_hub_id)
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    if not saved and path.exists() and not (path.is_dir() and any(path.iterdir())):
        kind = "an empty directory" if path.is_dir() else "a file"
        raise DataError(f"{path}: is {kind}; expected a dataset of `pointup prepare`")
    check_dataset_exists(path_or_hub_id)
    if saved:
        _saved_splits(path)
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            # A resolved path has a last part, which `datasets` needs, other than "." and "..".
            place = path.resolve() if path.exists() else path_or_hub_id
            if path.exists():
                named = datasets.load_dataset_builder(str(place)).config.data_files or {}
                for file in chain.from_iterable(named.values()):
                    _inside(path.resolve(), file)
            loaded = datasets.load_dataset(str(place))
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        # Reading through offsets beyond the end of a damaged file would crash the process. The
        # check reads the offsets of the clouds, not the points.
        for split in splits.values():
            split.data.validate(full=True)
    except DataError:
        raise
    # `datasets` calls many readers, which raise errors of many classes.
    except Exception as error:
        has_tables = any(file.suffix in (".arrow", ".parquet") for file in path.rglob("*"))
        if path.is_dir() and not (saved or has_tables):
            raise DataError(
                f"{path}: can't be opened: it holds no dataset of `pointup prepare`, and no Arrow "
                "or Parquet files; make one, or name a file of points"
            ) from error
        reason = first_line(error)[:200]
        place = "can't be opened" if path.exists() else "no such directory, and as a Hub id"
        raise DataError(
            f"{path_or_hub_id}: {place}: {reason}; make a dataset with `pointup prepare`"
        ) from error
    return splits


def cache_root() -> Path:
    """$POINTUP_CACHE, else $XDG_CACHE_HOME/pointup, else ~/.cache/pointup."""
    for variable, folder in (("POINTUP_CACHE", ""), ("XDG_CACHE_HOME", "pointup")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / folder
    return Path.home() / ".cache" / "pointup"


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
    """Open one split of a pair dataset by its sample table.

    Accepts a directory written by `write_pairs` or `save_to_disk` (a single dataset counts as
    `train`), and everything that `datasets.load_dataset` accepts, such as a Hub id or a directory
    of Parquet files. Without a split `validation`, a tenth of the train samples (at least one), the
    same in every call, is held out of `train`; opening `validation` then logs a warning. If
    `draws_validation` is false, the split is empty instead.

    Makes the sample table if there is none for the data as they are now: one of all processes that
    call this reads the points, the others wait. Raises DataError if the dataset can't be opened,
    the split is unknown, a column is missing or of a wrong type, or a file of points is not as long
    as it was.
    """
    label = str(path_or_hub_id)
    tables = {each.name: _table(each, label) for each in _stored_splits(path_or_hub_id)}
    source, rows = source_of_split(label, split, tables, draws_validation)
    return Samples(tables[source], rows)


def has_validation(path_or_hub_id: str | Path) -> bool:
    """Whether a dataset has a split `validation` of its own; raises DataError as `open_samples`."""
    return any(split.name == "validation" for split in _stored_splits(path_or_hub_id))


@dataclass(frozen=True)
class _StoredSplit:
    """A split of the dataset `folder`, with a fingerprint of its data.

    `files` hold the data; for a dataset of another form there are none, and `dataset` is given.
    """

    name: str
    folder: Path
    fingerprint: str
    files: frozenset[Path] = frozenset()
    dataset: datasets.Dataset | None = None


def _stored_splits(path_or_hub_id: str | Path) -> list[_StoredSplit]:
    """The splits that `write_pairs` or `save_to_disk` stored, else those that `datasets` finds."""
    folder = Path(path_or_hub_id)
    return _saved_splits(folder) or [
        _StoredSplit(name, folder, dataset._fingerprint, dataset=dataset)
        for name, dataset in load_splits(path_or_hub_id).items()
    ]


def _saved_splits(folder: Path) -> list[_StoredSplit]:
    """The splits that `save_to_disk` stored; none in other folders. Raises DataError."""
    try:
        if (folder / "dataset_dict.json").exists():
            description = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))
            folders = {str(name): _inside(folder, name) for name in description["splits"]}
        else:
            folders = {"train": folder} if (folder / "state.json").exists() else {}
        splits = []
        for name, place in folders.items():
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            files = frozenset(_inside(place, file["filename"]) for file in state["_data_files"])
            if not files:  # `datasets` stores such a split, but can't open it.
                raise DataError(f"{folder}: its split {name!r} is empty; store it without that one")
            splits.append(_StoredSplit(name, folder, str(state["_fingerprint"]), files))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder}: can't be opened: {error!r}; make a dataset with `pointup prepare`"
        ) from error
    return splits


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that a dataset names. Raises DataError for one out of its folder."""
    path = folder / name
    if not _is_inside(folder, path):
        raise DataError(f"{folder}: names the file {name!r}, which is not in it; delete the name")
    return path


def _is_inside(folder: Path, path: Path) -> bool:
    """Whether a path below `folder`, as it is written, stays in it. Its links are not followed."""
    return path.is_relative_to(folder) and ".." not in path.relative_to(folder).parts


def _table(split: _StoredSplit, label: str) -> SampleTable:
    """The table of a split as it is now. It is read from the folder of the dataset or the cache, or
    made and kept in the first of them that can be written."""
    beside = split.folder / FOLDER / f"{split.name}.arrow"
    cached = cache_root() / FOLDER / f"{split.fingerprint}-{split.name}.arrow"
    # A file that a link in the dataset leads to is not the dataset's own.
    links = (beside.parent, beside, beside.with_suffix(".lock"))
    is_own = bool(split.files) and not any(path.is_symlink() for path in links)
    for path in (beside, cached) if is_own else (cached,):
        if table := _current_table(path, split):
            return table
    path = beside if is_own and os.access(split.folder, os.W_OK) else cached
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
        if table := _current_table(path, split):
            return table
        _write_table(path, split, f"{label}, {split.name}")
        return SampleTable(path, split.folder)


def _current_table(path: Path, split: _StoredSplit) -> SampleTable | None:
    """The table in a file; None if the file is missing, or has no table of the data as they are."""
    if not path.exists():
        return None
    try:
        table = SampleTable(path, split.folder)
    except DataError as error:
        logger.debug("not used: %s", error)
        return None
    if table.fingerprint != split.fingerprint:
        return None
    if split.files and not all(_is_inside(split.folder, file) for file, _ in table.files):
        return None
    changed = table.changed_file()
    if changed and {file for file, _ in table.files} == split.files:
        raise DataError(
            f"{split.folder}: can't be opened: {changed}; restore it, or make the dataset again "
            "with `pointup prepare`"
        )
    return None if changed else table


def _write_table(path: Path, split: _StoredSplit, label: str) -> None:
    began = time.monotonic()
    dataset = load_splits(split.folder)[split.name] if split.dataset is None else split.dataset
    logger.info("%s: reading all %s samples once", label, f"{len(dataset):,}")
    dataset = with_float_points(dataset, label)
    files = [Path(file["filename"]).resolve() for file in dataset.cache_files]
    parts = parts_of(files)
    if sum(part.num_rows for part in parts) != len(dataset):
        raise DataError(
            f"{label}: its samples are not all in files of its own; store it with `save_to_disk`"
        )
    folder = split.folder.resolve()
    relative = [
        str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)
        for file in files
    ]
    description = {
        "fingerprint": split.fingerprint,
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
