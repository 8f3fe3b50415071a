"""Opens pair datasets, and reads their samples for training by (epoch, index)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from torch_geometric.data import Data

from pointup.datasets.augmentation import augment_pair, crop_pair
from pointup.datasets.checks import BadSample, find_bad_samples
from pointup.datasets.columns import POINT_COLUMNS, first_points, standardize
from pointup.datasets.locality import in_spatial_order
from pointup.datasets.pair import Pair, surface_path
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import DataError

__all__ = [
    "BadSample",
    "Pair",
    "PairDataset",
    "find_bad_samples",
    "open_pairs",
    "read_pair",
    "surface_path",
    "write_pairs",
]

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
            "%s has no validation split: %d of its %d train samples are held out for it, at random "
            "and not by place",
            path_or_hub_id,
            len(held_out),
            len(dataset),
        )
        return standardize(dataset, str(path_or_hub_id)).select(held_out)
    kept = np.setdiff1d(np.arange(len(dataset)), held_out)
    return standardize(dataset, str(path_or_hub_id)).select(kept)


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


def _held_out(num_samples: int) -> np.ndarray:
    if num_samples < 2:
        return np.empty(0, np.int64)
    number = max(1, round(HELD_OUT_FRACTION * num_samples))
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
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        # Reading through offsets beyond the end of a damaged file would crash the process. The
        # check reads the offsets of the clouds, not the points.
        for split in splits.values():
            split.data.validate(full=True)
    # `datasets` calls many readers, which raise errors of many classes.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        place = "can't be opened" if path.exists() else "no such directory, and as a Hub id"
        raise DataError(
            f"{path_or_hub_id}: {place}: {reason}; make a dataset with `pointup prepare`"
        ) from error
    return splits


class PairDataset(torch.utils.data.Dataset[Data]):
    """The samples of a pair dataset, by key (epoch, index), or by index for epoch 0.

    `keep` lists the rows of `dataset` that are used; indices refer to this list. A sample is a PyG
    `Data` with `pos` (N, 3) and `target` (M, 3) float32, `name`, `index`, `vertical`, and
    `target_normals` and `resample` if the pair has them. Its tensors are writable. The points of
    large clouds are in spatial order, which makes neighbour searches faster. `seconds` holds the
    durations of reading and augmenting.

    With `max_tokens`, a larger pair is cropped to the `max_tokens` points around a random source
    point. The random numbers of cropping and augmentation depend only on (seed, epoch, index), not
    on the worker, the process or a resume.

    Attributes:
        sizes: (n,) int64, tokens of each sample after cropping: source and target points together.
        full_sizes: (n,) int64, tokens of each sample before cropping.
        num_source: (n,) int64, source points of each sample before cropping.
        names: (n,) names of the samples.
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
        # Arrow's memory map is read-only: writing to a view of it would crash the process.
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
