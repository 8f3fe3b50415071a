"""Opens pair datasets with `datasets`: every column, for commands that read all of it."""

from __future__ import annotations

import logging
from pathlib import Path

import datasets
import numpy as np

from pointup.datasets.columns import POINT_COLUMNS, first_points, standardize
from pointup.datasets.pair import Pair
from pointup.errors import DataError

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
