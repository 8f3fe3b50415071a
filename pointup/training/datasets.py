"""Opens the pair dataset of a run, excludes bad samples, and makes its sampler and loader."""

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
    """Train and validation splits of a pair dataset, without bad samples."""

    name: str
    """Directory of the dataset, or its name on the Hub."""
    train: PairDataset
    validation: PairDataset
    surfaces: tuple[Path | None, ...]
    """File of the ground truth surface of each validation sample; None if unknown."""
    vertical: tuple[bool, ...]
    """Whether z is up in each validation sample."""
    description: str
    left_out: tuple[str, ...]
    """One line per bad sample: its name and the reason."""
    files: tuple[tuple[Path, int], ...] = ()
    """Files that the samples are read from, with the size of each in bytes when it was opened."""

    @contextmanager
    def worker_faults(self) -> Iterator[None]:
        """Turn the failure of a data worker inside the `with` block into a one-line error.

        Raises DataError, naming the file, if a file was truncated during the run: the system kills
        a worker that reads beyond the end of a file, with the same signal as for a lack of shared
        memory. Raises TrainingError if a worker died or timed out for another reason.
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
                "the last checkpoint, --num-workers 0 shows the error of the worker"
            ) from error


def open_training_data(config: TrainConfig, accelerator: Accelerator) -> TrainingData:
    """Open `config.data`, or the procedural dataset, which is generated on first use.

    Every process reads all sizes and checks all samples itself, from the shared page cache, so all
    processes exclude the same samples. Raises DataError if no sample of a split can be used.
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
    """The batch sampler of this process; raises what `TokenBudgetBatchSampler` raises."""
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
    """The loader of the sampler's batches; after a change of the budget, make a new loader."""
    dataset.max_tokens = sampler.token_budget if config.crop else None
    return make_loader(dataset, sampler, config.num_workers, config.worker_timeout, device)
