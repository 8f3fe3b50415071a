"""The data of a run: opened, checked for bad samples, the same on every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.datasets.batch import make_loader
from pointup.datasets.pair_dataset import PairDataset, find_bad_samples, open_pairs, surface_path
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import DataError, TrainingError
from pointup.synthetic.default_dataset import default_dataset
from pointup.training.config import TrainConfig


@dataclass(frozen=True)
class TrainingData:
    """Train and validation parts of a pair dataset, without their bad samples."""

    name: str
    """Directory of the dataset, or its name on the Hub."""
    train: PairDataset
    validation: PairDataset
    surfaces: tuple[Path | None, ...]
    """File of the true surface of each validation sample, where it is known."""
    vertical: tuple[bool, ...]
    """Whether z is up in each validation sample."""
    description: str
    left_out: tuple[str, ...]
    """A line for each bad sample: its name and what is wrong."""
    files: tuple[tuple[Path, int], ...] = ()
    """The files that the samples are read from, and the bytes each had when it was opened."""

    @contextmanager
    def worker_faults(self) -> Iterator[None]:
        """Inside, the death of a data worker, wherever it is noticed, is told in a line.

        Raises DataError, naming it, for a file that was cut short while it is read: the system
        kills a worker that reads beyond its end, by the same signal as for lack of shared memory.
        Raises TrainingError for a worker that died, or timed out, of something else.
        """
        try:
            yield
        except RuntimeError as error:
            for path, size in self.files:
                left = path.stat().st_size if path.exists() else 0
                if left < size:
                    raise DataError(
                        f"{path}: has been cut short to {left:,} of {size:,} bytes while the run "
                        "reads it; restore it, then run the same command again"
                    ) from error
            if not str(error).startswith("DataLoader"):
                raise
            raise TrainingError(
                f"{str(error).splitlines()[0].rstrip('. ')}; the same command again continues from "
                "the last checkpoint, --num-workers 0 shows what the worker was doing"
            ) from error


def open_training_data(config: TrainConfig, accelerator: Accelerator) -> TrainingData:
    """Open `config.data`, or the procedural dataset, which is made on first use.

    Every process reads all sizes and checks all samples itself, from the shared page cache, and
    so leaves out the same ones. Raises DataError when nothing is left.
    """
    name = config.data
    if name is None:
        with accelerator.local_main_process_first():
            name = str(default_dataset())
    parts, left_out, files_of_parts = [], [], set()
    for split in ("train", "validation"):
        table = open_pairs(name, split)
        files_of_parts |= {Path(file["filename"]) for file in table.cache_files}
        bad = find_bad_samples(table, min_points=config.model.k, folder=name)
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
        name,
        train,
        validation,
        surfaces=tuple(surface_path(name, file) if file else None for file in files)
        or (None,) * len(validation),
        vertical=tuple(flag is not False for flag in upright) or (True,) * len(validation),
        description=description,
        left_out=tuple(left_out),
        files=tuple((path, path.stat().st_size) for path in files_of_parts),
    )


def training_sampler(
    config: TrainConfig, dataset: PairDataset, token_budget: int, accelerator: Accelerator
) -> TokenBudgetBatchSampler:
    """The batches of this process; see `TokenBudgetBatchSampler` for what it raises."""
    return TokenBudgetBatchSampler(
        dataset.full_sizes,
        token_budget,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        accumulation_steps=config.accumulation_steps,
        seed=config.seed,
        max_clouds=config.max_clouds,
        names=dataset.names,
        crop=config.crop,
    )


def training_loader(
    config: TrainConfig,
    dataset: PairDataset,
    sampler: TokenBudgetBatchSampler,
    device: torch.device,
) -> Iterable[Batch]:
    """The loader of the sampler's batches; a sampler whose budget has changed needs a new one."""
    dataset.max_tokens = sampler.token_budget if config.crop else None
    return make_loader(dataset, sampler, config.num_workers, config.worker_timeout, device)
