"""A batch sampler for clouds of any size: full batches, balanced steps, exact numbers of visits.

Own code, because PyTorch and Accelerate have no sampler that packs by size, and the
`DynamicBatchSampler` of PyG has neither balanced loads across processes nor a state to resume from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pointup.datasets.packing import (
    Plan,
    check_budget,
    checked_integer,
    checked_sizes,
    checksum_of_sizes,
    cropped_sizes,
    plan_epoch,
)
from pointup.errors import ConfigError


class TokenBudgetBatchSampler:
    """Yields batches: lists of (epoch, index) with at most `token_budget` tokens in total.

    `index` is an index into `sizes`. Repetition k of a sample in an epoch is (epoch, index, k) for
    k of 1 or more. An optimizer step has num_processes * accumulation_steps slots; micro-batch a of
    process p is slot a * num_processes + p. The plan of an epoch depends only on (seed, epoch,
    sizes, token_budget, max_clouds, mixture) and the number of slots, so that a step has the same
    clouds as 1x8, 2x4 or 8x1. Each sample occurs once per epoch, or as often as the weights of
    `mixture` say, and each process gets `len(self)` batches. With fewer samples than slots some
    batches are empty lists. Without `shuffle` epochs of the same samples have the same batches; a
    weight that is not a whole number gives epochs other samples.

    Iteration does not change the position, because a loader reads ahead of the training: call
    `advance` after each optimizer step. Iteration and `len` start at the position. `state_dict`
    holds a few numbers; it can be loaded with any number of processes and any budget.

    For `accelerator.prepare`, construct the sampler with num_processes=1 and accumulation_steps =
    slots: batch i then goes to process i modulo the number of processes, as above. Set epochs on
    the prepared loader, also after a resume (`loader.set_epoch(sampler.epoch)`): the loader would
    otherwise start at epoch 0.

    Args:
        sizes: (n,) tokens of each sample.
        token_budget: largest number of tokens in a batch.
        max_clouds: largest number of samples in a batch.
        names: (n,) names of the samples, for messages.
        crop: count sizes above the budget as the budget, for a dataset that crops its samples.
        mixture: the datasets that the samples are of, with their weights; one of weight 1 if None.

    Raises ConfigError if a sample exceeds the budget, ValueError for impossible arguments.
    """

    def __init__(
        self,
        sizes: Sequence[int] | np.ndarray,
        token_budget: int,
        num_processes: int = 1,
        process_index: int = 0,
        accumulation_steps: int = 1,
        seed: int = 0,
        max_clouds: int | None = None,
        names: Sequence[str] | np.ndarray | None = None,
        shuffle: bool = True,
        crop: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        self.token_budget = checked_integer("token_budget", token_budget, 1)
        self.num_processes = checked_integer("num_processes", num_processes, 1)
        self.accumulation_steps = checked_integer("accumulation_steps", accumulation_steps, 1)
        self.seed = checked_integer("seed", seed, 0)
        limit = None if max_clouds is None else checked_integer("max_clouds", max_clouds, 1)
        self.max_clouds = limit
        if not 0 <= process_index < num_processes:
            raise ValueError(f"process_index is {process_index} of {num_processes} processes")
        self.process_index = checked_integer("process_index", process_index, 0)
        self.sizes = checked_sizes(sizes)
        if names is not None and len(names) != len(self.sizes):
            raise ValueError(f"{len(names)} names for {len(self.sizes)} sizes")
        self.mixture = mixture or Mixture((len(self.sizes),), (1.0,))
        if len(self.mixture) != len(self.sizes):
            raise ValueError(f"a mixture of {len(self.mixture)} samples, {len(self.sizes)} sizes")
        if not crop:
            check_budget(self.sizes, token_budget, names)
        self.shuffle = shuffle
        self.crop = crop
        self.epoch = 0
        self._step = 0
        # Earlier parts of this epoch, which ran with other slots, budgets or limits.
        self._past: list[list[int | None]] = []
        self._num_past = 0
        self._plan: Plan | None = None

    @property
    def slots(self) -> int:
        """Number of batches of an optimizer step, over all processes."""
        return self.num_processes * self.accumulation_steps

    @property
    def sampler(self) -> TokenBudgetBatchSampler:
        """The sampler itself: Accelerate's loaders call `set_epoch` on this attribute."""
        return self

    @property
    def plan(self) -> Plan:
        """The batches of the current part of the epoch, without the parts with other settings."""
        if self._plan is None:
            self._plan = self._replay()
        return self._plan

    @property
    def num_samples(self) -> int:
        """Number of samples of the whole epoch, each as often as the epoch has it."""
        return len(self.plan.samples) + self._num_past

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole epoch, including those done."""
        return self._steps_past() + self.plan.num_steps

    @property
    def steps_done(self) -> int:
        """The position: number of optimizer steps of this epoch that are done."""
        return self._steps_past() + self._step

    @property
    def num_left(self) -> int:
        """Number of samples in the remaining optimizer steps of this epoch."""
        return len(self.plan.samples) - int(self.plan.ptr[self._step * self.slots])

    def __len__(self) -> int:
        """Number of batches that remain for this process in this epoch."""
        return (self.plan.num_steps - self._step) * self.accumulation_steps

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        plan, epoch = self.plan, self.epoch
        for step in range(self._step, plan.num_steps):
            for slot in range(self.process_index, self.slots, self.num_processes):
                yield [self._key(epoch, sample) for sample in plan.batch(step, slot)]

    def _key(self, epoch: int, sample: int) -> tuple[int, ...]:
        repetition, index = divmod(sample, len(self.sizes))
        return (epoch, index, repetition) if repetition else (epoch, index)

    def advance(self, num_steps: int = 1) -> None:
        """Advance the position by optimizer steps; ValueError beyond the end of the epoch."""
        num_steps = checked_integer("num_steps", num_steps, 0)
        if num_steps > self.plan.num_steps - self._step:
            raise ValueError(
                f"can't advance by {num_steps} from step {self.steps_done} of {self.num_steps}"
            )
        self._step += num_steps

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of another epoch; does nothing for the current epoch."""
        epoch = checked_integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._step = 0
            if self.shuffle or self._past or not self.mixture.is_plain:
                self._plan = None
            self._past = []

    def change_budget(self, token_budget: int) -> None:
        """Change the budget; the remaining samples of the epoch are planned again.

        Raises ConfigError if a sample exceeds the new budget, ValueError below 1.
        """
        token_budget = checked_integer("token_budget", token_budget, 1)
        if not self.crop:
            check_budget(self.sizes, token_budget, None)
        state = self.state_dict()
        self.token_budget = token_budget
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch as JSON values; the same on each process.

        `segments` lists [slots, token_budget, max_clouds, optimizer steps] for each part of the
        epoch that ran with its own settings.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "segments": [*self._past, *([self._segment()] if self._step else [])],
            "checksum": checksum_of_sizes(self.sizes),
            "mixture": self.mixture.as_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position and the seed of `state`.

        With the same slots, budget and limit, the epoch continues with the same batches. Otherwise
        the remaining samples are planned again. Raises ConfigError if the sizes or the weights
        differ, ValueError if the position lies beyond the end of the epoch.
        """
        if state["checksum"] != checksum_of_sizes(self.sizes):
            raise ConfigError(
                "the dataset has changed since the checkpoint (other samples or sizes): "
                "restore it, or start a new run"
            )
        weights = self.mixture.as_state()
        if state["mixture"] != weights:
            raise ConfigError(
                f"the checkpoint is of datasets with (samples, weight) {state['mixture']}, not "
                f"{weights}: give the same --data in the same order, or start a new run"
            )
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._past = [list(segment) for segment in state["segments"]]
        self._step = 0
        self._plan = None
        if self._past and self._past[-1][:3] == self._segment()[:3]:
            self._step = self._past.pop()[3] or 0
        if self._step > self.plan.num_steps:
            raise ValueError(
                f"sampler state: step {self.steps_done} of an epoch of {self.num_steps} steps"
            )

    @property
    def fill(self) -> float:
        """Mean tokens of the batches of `plan`, as a share of the token budget."""
        loads = self.plan.loads(cropped_sizes(self.sizes, self.token_budget))
        return float(loads.sum() / max(1, loads.size * self.token_budget))

    def _segment(self) -> list[int | None]:
        return [self.slots, self.token_budget, self.max_clouds, self._step]

    def _steps_past(self) -> int:
        return sum(segment[3] or 0 for segment in self._past)

    def _replay(self) -> Plan:
        """Plan the epoch, part by part."""
        samples = self.mixture.samples(self.seed, self.epoch)
        num_samples = len(samples)
        for number, segment in enumerate([*self._past, self._segment()]):
            slots, budget, max_clouds, num_steps = segment
            assert slots and budget and num_steps is not None
            key = [self.seed, self.epoch, number]
            plan = plan_epoch(
                cropped_sizes(self.sizes, budget),
                samples,
                budget,
                slots,
                max_clouds,
                np.random.default_rng(key) if self.shuffle else None,
            )
            if num_steps > plan.num_steps:
                raise ValueError(
                    f"sampler state: segment {number} ends at step {num_steps} of {plan.num_steps}"
                )
            self._num_past = num_samples - len(samples)
            samples = np.sort(plan.samples[plan.ptr[num_steps * slots] :])
        return plan


@dataclass(frozen=True)
class Mixture:
    """Several datasets as one, whose samples follow each other, each dataset with a weight.

    A weight is the number of times that an epoch has each sample of the dataset. With a weight that
    is not a whole number, an epoch has some samples once more than others, and others in the next
    epochs: after E epochs each sample was seen floor(E * weight) or ceil(E * weight) times.

    Attributes:
        lengths: number of samples of each dataset.
        weights: weight of each dataset.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.weights) or not len(self.lengths):
            raise ValueError(f"{len(self.weights)} weights for {len(self.lengths)} datasets")
        # A checkpoint has them as JSON, which has no NumPy types.
        lengths = tuple(checked_integer("a length", length, 0) for length in self.lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"weights {self.weights}: each must be greater than 0, and finite")
        if not any(n * w >= 1 for n, w in zip(self.lengths, self.weights, strict=True)):
            raise ValueError(
                f"weights {self.weights} of {self.lengths} samples: an epoch would have no sample; "
                "increase the weights"
            )

    def __len__(self) -> int:
        """Number of samples, each counted once."""
        return sum(self.lengths)

    @property
    def is_plain(self) -> bool:
        """Whether each epoch has each sample once."""
        return all(weight == 1 for weight in self.weights)

    def samples(self, seed: int, epoch: int) -> np.ndarray:
        """The samples (n,) int64 of an epoch, ascending: index + k * len(self) for repetition k.

        A function of the seed, the epoch, the lengths and the weights alone.
        """
        total = len(self)
        if self.is_plain:
            return np.arange(total)
        found, first = [], 0
        for number, (length, weight) in enumerate(zip(self.lengths, self.weights, strict=True)):
            phase = _phases(length, weight, [seed, number])
            times = np.floor(weight * (epoch + 1) + phase) - np.floor(weight * epoch + phase)
            indices = np.arange(first, first + length)
            for repetition in range(int(times.max(initial=0))):
                found.append(indices[times > repetition] + repetition * total)
            first += length
        return np.sort(np.concatenate(found))

    def as_state(self) -> list[list[float]]:
        """Length and weight of each dataset, as JSON values for a checkpoint."""
        return [list(pair) for pair in zip(self.lengths, self.weights, strict=True)]


def _phases(length: int, weight: float, seed: list[int]) -> np.ndarray:
    """Evenly spaced numbers in (0, 1), one for each sample, in random order.

    They say in which epochs a sample is seen once more. Because they are evenly spaced, all epochs
    have the same number of samples, plus or minus one.
    """
    if weight == int(weight):
        return np.zeros(length)
    return (np.random.default_rng(seed).permutation(length) + 0.5) / length
