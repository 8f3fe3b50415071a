"""Opens the pair datasets of a run, excludes bad samples, and makes its sampler and loader."""

from __future__ import annotations

import logging
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import make_loader
from pointup.datasets.checks import notes_on_pairs
from pointup.datasets.held_out import none_left_of, rows_held_out_elsewhere
from pointup.datasets.opening import open_together
from pointup.datasets.packing import checksum_of_sizes
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.sampler import Mixture, TokenBudgetBatchSampler
from pointup.datasets.samples import PLACE, JoinedSamples, Samples, usable_samples
from pointup.errors import ConfigError, DataError, TrainingError
from pointup.training.config import DataSource, TrainConfig, data_sources
from pointup.training.faults.consistency import check_consistency
from pointup.training.faults.token_budget import lower_budget_if_needed
from pointup.training.progress import Progress


@dataclass(frozen=True)
class TrainingData:
    """Train and validation splits of the datasets of a run, without bad samples."""

    sources: tuple[DataSource, ...]
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
                "names": dataset.samples.names_checksum(),
                "sizes": checksum_of_sizes(dataset.full_sizes),
                "contents": zlib.crc32(dataset.samples.array("checksum").tobytes()),
            }
            for split, dataset in (("train", self.train), ("validation", self.validation))
        }

    def check_same(self, before: dict[str, dict[str, int]]) -> None:
        """Raise ConfigError, naming what differs, unless `before`, of a checkpoint, are the same
        `checksums`."""
        differing = [
            f"the {name} of the {split} pairs"
            for split, values in self.checksums.items()
            for name, value in values.items()
            if before[split][name] != value
        ]
        if differing:
            raise ConfigError(
                f"the dataset has changed since the checkpoint ({', '.join(differing)}): restore "
                "it, give --data in the same order, or start a new run in another --output-dir"
            )

    def notes(self) -> list[str]:
        """`notes_on_pairs` of the training pairs of each dataset; reads some of them."""
        samples = self.train.samples
        parts = samples.parts if isinstance(samples, JoinedSamples) else (samples,)
        return [
            f"{source.label}: {text}"
            for source, part in zip(self.sources, parts, strict=True)
            for text in notes_on_pairs(part)
        ]

    @property
    def has_normals(self) -> bool:
        """Whether the first training pair of any dataset has target normals."""
        samples = self.train.samples
        parts = samples.parts if isinstance(samples, JoinedSamples) else (samples,)
        return any(part.value("place", 0)[PLACE.index("target_normals")] >= 0 for part in parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name of each dataset for metrics; none if there is one dataset only."""
        return tuple(s.label for s in self.sources) if len(self.sources) > 1 else ()

    @property
    def mixture(self) -> Mixture:
        """Numbers of training samples and weights of the datasets."""
        lengths = tuple(np.diff(self.bounds["train"]).tolist())
        return Mixture(lengths, tuple(source.weight for source in self.sources))

    def source_of(self, batch: Batch) -> Tensor:
        """The number (B,) int64 of the dataset of each cloud of a training batch on the host."""
        bounds = torch.tensor(self.bounds["train"][1:])
        return torch.bucketize(batch.index, bounds, right=True)

    @property
    def bounds(self) -> dict[str, tuple[int, ...]]:
        """By split: dataset d has the samples bounds[d] to bounds[d + 1]."""
        return {
            split: part.samples.bounds
            for split, part in (("train", self.train), ("validation", self.validation))
        }

    def sampler(
        self, config: TrainConfig, token_budget: int, accelerator: Accelerator
    ) -> TokenBudgetBatchSampler:
        """The batch sampler of this process; raises what `TokenBudgetBatchSampler` raises."""
        return TokenBudgetBatchSampler(
            self.train.full_sizes,
            token_budget,
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
            accumulation_steps=config.accumulation_steps,
            seed=config.seed,
            max_clouds=config.max_clouds,
            names=self.train.names,
            crop=config.crop,
            mixture=self.mixture,
        )

    def facts_of_epoch(self, sampler: TokenBudgetBatchSampler) -> dict[str, Any]:
        """Facts that all processes must have in common before the first step of an epoch."""
        plan = sampler.plan
        return {
            "dataset": self.checksums,
            "weights": self.mixture.weights,
            "steps": {"epoch": sampler.epoch, "of": sampler.num_steps, "done": sampler.steps_done},
            "plan": zlib.crc32(plan.ptr.tobytes(), zlib.crc32(plan.samples.tobytes())),
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
    """Open the datasets of `config.data`, or the procedural one, which is generated on first use.

    Reads the sample tables, and no points. Every process excludes the samples that the tables call
    bad, and those with fewer points than the model has neighbours. Raises DataError if no sample of
    a split can be used.
    """
    names = list(config.data)
    if not names:
        # Imported here: training on other data needs none of it.
        from pointup.synthetic.default_dataset import default_dataset

        with accelerator.local_main_process_first():
            names = [str(default_dataset())]
    sources = tuple(data_sources(names))
    train, bad = open_split(sources, "train", config.model.k)
    validation, others = open_split(sources, "validation", config.model.k)
    train, known = without_held_out_elsewhere(train, validation)
    where = ", ".join(config.data) or "procedural shapes and scenes"
    return TrainingData(
        sources,
        PairDataset(train, seed=config.seed, augment=config.augment, noise=config.noise_spacings),
        PairDataset(validation, seed=config.seed, noise=config.noise_spacings),
        f"{where}, {len(train):,} for training, {len(validation):,} for validation",
        left_out=tuple(bad + known + others),
        unreadable=UnreadableSamples(
            [source.name for source in sources], train.bounds, config.max_unreadable
        ),
    )


def open_split(
    sources: Sequence[DataSource], split: str, min_points: int
) -> tuple[Samples | JoinedSamples, list[str]]:
    """The usable samples of a split of all datasets, and a line for each of the others.

    Which datasets have validation samples is up to `open_together`. Raises its errors and those of
    `usable_samples`.
    """
    parts, left_out = [], []
    opened = open_together([source.name for source in sources], split)
    for source, all_samples in zip(sources, opened, strict=True):
        samples, bad = usable_samples(all_samples, min_points, split)
        parts.append(samples)
        label = f"{source.label}/" if len(sources) > 1 else ""
        left_out += [f"{split} sample {label}{sample.name}: {sample.reason}" for sample in bad]
    if len(parts) == 1:
        return parts[0], left_out
    return JoinedSamples(tuple(source.label for source in sources), tuple(parts)), left_out


def without_held_out_elsewhere(
    train: Samples | JoinedSamples, validation: Samples | JoinedSamples
) -> tuple[Samples | JoinedSamples, list[str]]:
    """The training samples that show nothing that another dataset holds out; a line for each other.

    `pointup prepare join` leaves the same samples out. Reads the points of survey samples near
    validation samples. Raises DataError if a dataset keeps none.
    """
    if not isinstance(train, JoinedSamples) or not isinstance(validation, JoinedSamples):
        return train, []
    parts, left_out = [], []
    for number, (part, label) in enumerate(zip(train.parts, train.labels, strict=True)):
        kept = np.ones(len(part), bool)
        for other, held_out in enumerate(validation.parts):
            if other != number:
                for how, rows in rows_held_out_elsewhere(part, held_out).items():
                    kept[rows] = False
                    reason = f"{how} validation samples of {validation.labels[other]}"
                    left_out += [
                        f"train sample {label}/{part.names[r]}: {reason}" for r in rows.tolist()
                    ]
        if not kept.any():
            raise none_left_of(part.folder)
        parts.append(part if kept.all() else part.select(np.flatnonzero(kept)))
    return JoinedSamples(train.labels, tuple(parts)), left_out


class TrainingBatches:
    """The micro-batches of this process, epoch after epoch, in the order of the sampler.

    `begin_epoch_if_due` comes before the batches of each step. `Accelerator.prepare` would not
    change the loader, because the sampler gives each process its own batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        sampler: TokenBudgetBatchSampler,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.data, self.sampler = config, data, sampler
        self.accelerator = accelerator
        self.loader: Iterable[Batch] | None = None
        self.batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        assert self.batches is not None
        return next(self.batches)

    def begin_epoch_if_due(self) -> None:
        """Begin the next epoch after the last step of one, or what is left of one after a start or
        with another token budget.

        Raises TrainingError, on every process, unless all have the same data and plan.
        """
        if not len(self.sampler):
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.batches = None
        if self.batches is None:
            check_consistency(self.accelerator, self.data.facts_of_epoch(self.sampler))
            if self.loader is None:
                config, dataset, sampler = self.config, self.data.train, self.sampler
                dataset.max_tokens = sampler.token_budget if config.crop else None
                num_workers, device = config.num_workers, self.accelerator.device
                self.loader = make_loader(
                    dataset, sampler, num_workers, config.worker_timeout, device
                )
            self.batches = iter(self.loader)

    def lower_budget_if_needed(self, progress: Progress, settled: int) -> None:
        """Lower the token budget, which was `settled` at the start, from the next step on, if
        memory ran out several times."""
        if lower_budget_if_needed(self.sampler, progress, settled):
            self.loader = self.batches = None


logger = logging.getLogger("pointup")

Fault = tuple[int, str, str]
"""Index, name and reason of a sample that can't be read."""


class UnreadableSamples:
    """The samples of a training set that couldn't be read, on any process, since the start.

    They are left out of their step: they have weight zero, and the gradient of the step is divided
    by the number of the other clouds. `datasets` are their names; dataset d has the samples
    bounds[d] to bounds[d + 1]. The run ends when more than `max_share` of the samples, rounded up,
    couldn't be read.
    """

    def __init__(self, datasets: Sequence[str], bounds: Sequence[int], max_share: float) -> None:
        self.datasets, self.bounds, self.num_samples = datasets, bounds, bounds[-1]
        self.max_share, self.most = max_share, math.ceil(max_share * self.num_samples)
        self.indices: set[int] = set()

    def report(self, step: int, number: int, faults: Sequence[Fault]) -> None:
        """Log the samples that were left out of a step; every process must call this.

        `number` is their number on all processes, `faults` are those of this process. Raises
        DataError, on every process, if there are too many.
        """
        if not number:
            return
        everywhere: list[Fault] = sorted(gather_object(list(faults)))
        for _, name, reason in everywhere:
            logger.warning("step %d: left out %s: %s", step, name, reason)
        self.indices.update(index for index, _, _ in everywhere)
        if len(self.indices) > self.most:
            index, name, reason = everywhere[-1]
            dataset = self.datasets[bisect_right(self.bounds, index) - 1]
            raise DataError(
                f"{len(self.indices)} of {self.num_samples:,} training samples can't be read, more "
                f"than --max-unreadable {self.max_share:g} allows; {name}: {reason}; restore the "
                f"files, then run the same command again; `pointup inspect --deep {dataset}` "
                "lists all"
            )
