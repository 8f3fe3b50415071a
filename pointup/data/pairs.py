"""Pair datasets on disk: writing them, opening them, and reading one (epoch, index) at a time."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch_geometric.data import Data

from pointup.data.augment import augment_pair, crop_pair
from pointup.data.checks import BadSample, find_bad_samples
from pointup.data.columns import FEATURES, POINT_COLUMNS, first_points, pack_points, standardize
from pointup.data.locality import in_spatial_order
from pointup.errors import DataError, FileError

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface

__all__ = [
    "BadSample",
    "Pair",
    "PairDataset",
    "find_bad_samples",
    "open_pairs",
    "read_pair",
    "write_pairs",
]

HELD_OUT = 0.1
BYTES_PER_BATCH = 1 << 25

logger = logging.getLogger(__name__)


@dataclass
class Pair:
    """A sparse cloud and the dense cloud that it should become, relative to a common origin.

    The points need not correspond, and their numbers are free.

    Attributes:
        name: unique in its dataset; messages name samples by it.
        source, target: (N, 3) and (M, 3) float32, relative to `origin`.
        origin: (3,) float64, what to add for the coordinates of the file the pair came from.
        target_normals: (M, 3) unit normals of the target.
        resample: (K, 3) a second, independent sampling of the true surface: every metric's floor.
        vertical: z is up, so that augmentation turns the pair about the vertical only.
        surface: file name of the true surface below `surfaces/` of the dataset.
    """

    name: str
    source: np.ndarray
    target: np.ndarray
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))
    target_normals: np.ndarray | None = None
    resample: np.ndarray | None = None
    vertical: bool = True
    surface: str = ""


def write_pairs(
    train: Iterable[Pair],
    validation: Iterable[Pair],
    directory: str | Path,
    info: dict[str, Any],
    surfaces: Mapping[str, Surface] | None = None,
) -> None:
    """Writes a pair dataset that `open_pairs` and `datasets.load_from_disk` read.

    Pairs are consumed one by one, so a generator larger than memory will do. `info` says how the
    pairs were made and becomes `pointup.json`; `surfaces` are written to `surfaces/NAME`. Without
    validation pairs there is no such split. All is written to DIRECTORY.tmp and renamed at the end.
    Raises FileError when the directory is there already, DataError for a pair of a wrong shape.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileError(f"{directory}: exists already; delete it or write to another directory")
    staging = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        splits = {}
        for split, pairs in (("train", train), ("validation", validation)):
            path = staging / f"{split}.stream"
            if _write_stream(pairs, path):
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
        (staging / "pointup.json").write_text(json.dumps(info, indent=2) + "\n")
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Two bars a split for what takes a moment would push the caller's own off the screen."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _write_stream(pairs: Iterable[Pair], path: Path) -> int:
    schema = FEATURES.arrow_schema
    num_pairs = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for group in _groups(pairs):
            stream.write_batch(pa.record_batch(_columns(group), schema=schema))
            num_pairs += len(group)
    if not num_pairs:
        path.unlink()
    return num_pairs


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    group: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        group.append(pair)
        num_bytes += 12 * sum(len(points) for points in _clouds_of(pair).values())
        if num_bytes >= BYTES_PER_BATCH:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _clouds_of(pair: Pair) -> dict[str, np.ndarray]:
    clouds = {}
    for column in POINT_COLUMNS:
        value = getattr(pair, column)
        points = np.empty((0, 3), np.float32) if value is None else np.asarray(value)
        if points.ndim != 2 or points.shape[1] != 3:
            raise DataError(f"{pair.name}: {column} has shape {points.shape}; expected (N, 3)")
        clouds[column] = points
    if pair.target_normals is not None and len(pair.target_normals) != len(pair.target):
        raise DataError(
            f"{pair.name}: {len(pair.target_normals)} normals for {len(pair.target)} target points"
        )
    return clouds


def _columns(group: Sequence[Pair]) -> list[pa.Array]:
    clouds = [_clouds_of(pair) for pair in group]
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


def open_pairs(path_or_hub_id: str | Path, split: str) -> datasets.Dataset:
    """One split of a pair dataset, memory-mapped, with pointup's columns.

    Takes a directory of `write_pairs` or `save_to_disk` (one dataset there counts as `train`), or
    whatever `datasets.load_dataset` takes: a Hub id, a directory of Parquet files. Where there
    is no `validation`, a tenth of the train samples (at least one), the same at every call, is held
    out of `train` for it, and a log message says so. Raises DataError when there is nothing to
    open, the split is unknown, or a column is missing or of a wrong type.
    """
    splits = _load(path_or_hub_id)
    if split not in splits and not (split == "validation" and "train" in splits):
        raise DataError(f"{path_or_hub_id}: no split {split!r}; there are: {', '.join(splits)}")
    if "validation" in splits or split not in ("train", "validation"):
        return standardize(splits[split], str(path_or_hub_id))
    dataset = splits["train"]
    held_out = _held_out(len(dataset))
    if not len(held_out):
        if split == "train":
            return standardize(dataset, str(path_or_hub_id))
        raise DataError(f"{path_or_hub_id}: one sample can't be split; add a validation split")
    if split == "validation":
        logger.warning(
            "%s has no validation split: %d of its %d train samples are held out for it",
            path_or_hub_id,
            len(held_out),
            len(dataset),
        )
        return standardize(dataset, str(path_or_hub_id)).select(held_out)
    kept = np.setdiff1d(np.arange(len(dataset)), held_out)
    return standardize(dataset, str(path_or_hub_id)).select(kept)


def read_pair(dataset: datasets.Dataset, row: int) -> Pair:
    """One pair of a dataset of `open_pairs`, as it was written."""
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


def _held_out(num_samples: int) -> np.ndarray:
    if num_samples < 2:
        return np.empty(0, np.int64)
    number = max(1, round(HELD_OUT * num_samples))
    return np.sort(np.random.default_rng(0).permutation(num_samples)[:number])


def _load(path_or_hub_id: str | Path) -> dict[str, datasets.Dataset]:
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
            loaded = datasets.load_dataset(str(path_or_hub_id))
    # Loading runs readers of many kinds, which raise errors of many kinds.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        place = "can't be opened" if path.exists() else "no such directory, and as a Hub id"
        raise DataError(
            f"{path_or_hub_id}: {place}: {reason}; make a dataset with `pointup prepare`"
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


class PairDataset(torch.utils.data.Dataset[Data]):
    """Samples of a pair dataset by key (epoch, index), or by index alone for epoch 0.

    Indices count the kept samples: `keep` lists the rows of `dataset` in use. A sample is a PyG
    `Data` with `pos` (N, 3), `target` (M, 3) float32, `name`, `index`, `vertical`, and
    `target_normals` and `resample` where the sample has them; its tensors may be written to. Points
    of large clouds come in the order of space, which is quicker to work on. `seconds` tells how
    long reading and augmenting took.
    With `max_tokens`, a larger pair is cropped to so many points about a random one of its source.
    What cropping and augmentation draw depends on (seed, epoch, index) alone: not on the worker,
    the process or a resume.

    Attributes:
        sizes: (n,) int64, tokens of each sample, source and target points together, after cropping.
        full_sizes: (n,) int64, the same before cropping.
        num_source: (n,) int64, source points of each sample, before cropping.
        names: (n,) names.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        seed: int = 0,
        augment: bool = False,
        keep: Sequence[int] | np.ndarray | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        self.rows = np.arange(len(dataset)) if keep is None else np.asarray(keep, np.int64)
        self.seed = seed
        self.augment = augment
        table = dataset.with_format("arrow")
        num_points = [np.asarray(table[c][:]) for c in ("num_source", "num_target")]
        self.full_sizes = np.add(*num_points, dtype=np.int64)[self.rows]
        self.num_source = num_points[0].astype(np.int64)[self.rows]
        self.max_tokens = max_tokens
        self.sizes = np.minimum(
            self.full_sizes, self.full_sizes if max_tokens is None else max_tokens
        )
        self.names = np.array(table["name"][:].to_pylist(), dtype=object)[self.rows]
        columns = [c for c in (*POINT_COLUMNS, "name", "vertical") if c in dataset.column_names]
        self._table = table.select_columns(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int] | int) -> Data:
        began = time.perf_counter()
        epoch, index = key if isinstance(key, tuple) else (0, key)
        row = self._table[int(self.rows[index])]
        clouds = {
            column: first_points(row[column])
            for column in POINT_COLUMNS
            if column in row.column_names
        }
        for column in ("target_normals", "resample"):
            if column in clouds and not len(clouds[column]):
                del clouds[column]
        vertical = (
            row["vertical"][0].as_py() is not False if "vertical" in row.column_names else True
        )
        is_read = time.perf_counter()
        if self.augment or self.max_tokens is not None:
            rng = np.random.default_rng([self.seed, epoch, index])
            if self.max_tokens is not None:
                clouds = crop_pair(clouds, self.max_tokens, rng)
            if self.augment:
                clouds = augment_pair(clouds, vertical, rng)
        clouds = in_spatial_order(clouds)
        # Arrow's memory map is read-only: writing to a view of it would kill the process.
        clouds = {
            name: points if points.flags.writeable else points.copy()
            for name, points in clouds.items()
        }
        tensors = {name: torch.from_numpy(points) for name, points in clouds.items()}
        return Data(
            pos=tensors.pop("source"),
            name=row["name"][0].as_py(),
            index=index,
            vertical=vertical,
            seconds={"reading": is_read - began, "augmenting": time.perf_counter() - is_read},
            **tensors,
        )
