"""The data of a run: opened, checked for bad samples, the same on every process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from pointup.data.default import default_dataset
from pointup.data.pairs import PairDataset, find_bad_samples, open_pairs, surface_path
from pointup.errors import DataError
from pointup.training.config import TrainConfig


@dataclass(frozen=True)
class TrainingData:
    """Train and validation parts of a pair dataset, without their bad samples."""

    train: PairDataset
    validation: PairDataset
    surfaces: tuple[Path | None, ...]
    """File of the true surface of each validation sample, where it is known."""
    vertical: tuple[bool, ...]
    """Whether z is up in each validation sample."""
    description: str
    left_out: tuple[str, ...]
    """A line for each bad sample: its name and what is wrong."""


def open_training_data(config: TrainConfig, accelerator: Accelerator) -> TrainingData:
    """Open `config.data`, or the procedural dataset, which is made on first use.

    Every process reads all sizes and checks all samples itself, from the shared page cache, and
    so leaves out the same ones. Raises DataError when nothing is left.
    """
    name = config.data
    if name is None:
        with accelerator.local_main_process_first():
            name = str(default_dataset())
    parts, left_out = [], []
    for split in ("train", "validation"):
        table = open_pairs(name, split)
        bad = find_bad_samples(table, min_points=config.model.k)
        left_out += [f"{split} sample {sample.name}: {sample.reason}" for sample in bad]
        keep = np.setdiff1d(np.arange(len(table)), [sample.index for sample in bad])
        if not len(keep):
            raise DataError(
                f"{name}: none of the {len(table)} {split} samples can be used; "
                f"`pointup inspect {name}` lists why"
            )
        parts.append(
            PairDataset(
                table,
                seed=config.seed,
                augment=config.augment and split == "train",
                keep=keep,
            )
        )
    train, validation = parts
    files = [table["surface"][i] for i in keep] if "surface" in table.column_names else []
    upright = [table["vertical"][i] for i in keep] if "vertical" in table.column_names else []
    where = config.data or "procedural shapes and scenes"
    description = f"{where}, {len(train):,} for training, {len(validation):,} for validation"
    return TrainingData(
        train,
        validation,
        surfaces=tuple(surface_path(name, file) if file else None for file in files)
        or (None,) * len(validation),
        vertical=tuple(map(bool, upright)) or (True,) * len(validation),
        description=description,
        left_out=tuple(left_out),
    )
