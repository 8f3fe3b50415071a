"""Opens the pair dataset of a run, excludes bad samples, and makes its sampler and loader."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.datasets.batch import make_loader
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.datasets.samples import usable_samples
from pointup.datasets.sizes import checksum_of_sizes
from pointup.datasets.table_store import open_samples
from pointup.errors import TrainingError
from pointup.synthetic.default_dataset import default_dataset
from pointup.training.config import TrainConfig
from pointup.training.unreadable_samples import UnreadableSamples


@dataclass(frozen=True)
class TrainingData:
    """Train and validation splits of a pair dataset, without bad samples."""

    name: str
    """Directory of the dataset, or its name on the Hub."""
    train: PairDataset
    validation: PairDataset
    description: str
    left_out: tuple[str, ...]
    """One line per bad sample: its name and the reason."""
    unreadable: UnreadableSamples
    """The samples that couldn't be read since the start."""

    @cached_property
    def checksums(self) -> dict[str, dict[str, int]]:
        """Checksums of all names, sizes and points by split, from the sample tables."""
        return {
            split: {
                "samples": len(dataset),
                "names": dataset.names.checksum(),
                "sizes": checksum_of_sizes(dataset.full_sizes),
                "contents": zlib.crc32(dataset.samples.array("checksum").tobytes()),
            }
            for split, dataset in (("train", self.train), ("validation", self.validation))
        }

    @contextmanager
    def worker_faults(self) -> Iterator[None]:
        """Turn the failure of a data worker inside the `with` block into a one-line error.

        Raises TrainingError if a worker died or timed out.
        """
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):
                raise
            raise TrainingError(
                f"{str(error).splitlines()[0].rstrip('. ')}; the same command again continues from "
                "the last checkpoint, --num-workers 0 shows the error of the worker"
            ) from error


def open_training_data(config: TrainConfig, accelerator: Accelerator) -> TrainingData:
    """Open `config.data`, or the procedural dataset, which is generated on first use.

    Reads the sample tables, and no points. Every process excludes the samples that the tables call
    bad, and those with fewer points than the model has neighbours. Raises DataError if no sample of
    a split can be used.
    """
    name = config.data
    if name is None:
        with accelerator.local_main_process_first():
            name = str(default_dataset())
    parts, left_out = [], []
    for split in ("train", "validation"):
        samples, bad = usable_samples(open_samples(name, split), config.model.k, split)
        left_out += [f"{split} sample {sample.name}: {sample.reason}" for sample in bad]
        augment = config.augment and split == "train"
        parts.append(PairDataset(samples, seed=config.seed, augment=augment))
    train, validation = parts
    where = config.data or "procedural shapes and scenes"
    description = f"{where}, {len(train):,} for training, {len(validation):,} for validation"
    return TrainingData(
        name,
        train,
        validation,
        description,
        left_out=tuple(left_out),
        unreadable=UnreadableSamples(name, len(train), config.max_unreadable),
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
