"""A batch sampler for clouds of any size: full batches, even steps, every sample once an epoch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pointup.datasets.packing import Plan, idle_share, plan_epoch
from pointup.errors import ConfigError


@dataclass(frozen=True)
class PlanStatistics:
    """How well the batches of an epoch use the processes.

    Attributes:
        fill: tokens per batch, as a share of the budget.
        idle: share of slot time spent waiting for the largest batch of the step.
        num_empty: batches without a cloud.
    """

    fill: float
    idle: float
    num_empty: int


class TokenBudgetBatchSampler:
    """Yields lists of (epoch, index) of at most `token_budget` tokens; index counts `sizes`.

    An optimizer step has `num_processes * accumulation_steps` slots, and its micro-batch a of
    process p is slot a * num_processes + p. The plan depends on (seed, epoch, sizes, token_budget,
    max_clouds) and the number of slots alone: a step is the same clouds as 1x8, 2x4 or 8x1. Every
    sample comes once an epoch, every process gets `len(self)` batches, and where there are fewer
    samples than slots some are empty lists. Without `shuffle` all epochs are alike.

    Iterating does not move the position, since a loader reads ahead of the training: call
    `advance` after every optimizer step. Iteration and `len` start from the position.
    `state_dict` is a few numbers that resume on any number of processes, with any budget.

    For `accelerator.prepare`, build it with num_processes=1 and accumulation_steps = slots:
    batch i then goes to process i modulo their number, as above. Set epochs on the prepared
    loader, after a resume too (`loader.set_epoch(sampler.epoch)`), which would start at 0 again.

    Args:
        sizes: (n,) tokens of every sample.
        token_budget: the most tokens of a batch.
        max_clouds: the most samples of a batch.
        names: (n,) names of the samples, for messages.
        crop: sizes above the budget count as the budget, for a dataset that crops to it.

    Raises ConfigError when a sample is larger than the budget, ValueError for impossible arguments.
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
    ) -> None:
        for name, value, least in (
            ("token_budget", token_budget, 1),
            ("num_processes", num_processes, 1),
            ("accumulation_steps", accumulation_steps, 1),
            ("max_clouds", 1 if max_clouds is None else max_clouds, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if not 0 <= process_index < num_processes:
            raise ValueError(f"process_index is {process_index} of {num_processes} processes")
        self.sizes = _checked_sizes(sizes)
        if names is not None and len(names) != len(self.sizes):
            raise ValueError(f"{len(names)} names for {len(self.sizes)} sizes")
        if not crop:
            _check_budget(self.sizes, token_budget, names)
        self.token_budget = token_budget
        self.num_processes = num_processes
        self.process_index = process_index
        self.accumulation_steps = accumulation_steps
        self.seed = seed
        self.max_clouds = max_clouds
        self.shuffle = shuffle
        self.crop = crop
        self.epoch = 0
        self._step = 0
        # Parts of this epoch that were run with other slots, budgets or limits.
        self._past: list[list[int | None]] = []
        self._plan: Plan | None = None

    @property
    def slots(self) -> int:
        """Batches of one optimizer step over all processes."""
        return self.num_processes * self.accumulation_steps

    @property
    def sampler(self) -> TokenBudgetBatchSampler:
        """Itself: where Accelerate's loaders look for `set_epoch` of a wrapped batch sampler."""
        return self

    @property
    def plan(self) -> Plan:
        """The batches of the epoch, without those of parts that ran before a change of slots."""
        if self._plan is None:
            self._plan = self._replay()
        return self._plan

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole epoch, those done among them."""
        return self._steps_past() + self.plan.num_steps

    @property
    def steps_done(self) -> int:
        """The position: optimizer steps of this epoch that `advance` has counted."""
        return self._steps_past() + self._step

    @property
    def num_left(self) -> int:
        """Samples of this epoch that are in no optimizer step done."""
        return len(self.plan.samples) - int(self.plan.ptr[self._step * self.slots])

    def __len__(self) -> int:
        """Batches that this process has still to get in this epoch."""
        return (self.plan.num_steps - self._step) * self.accumulation_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        plan, epoch = self.plan, self.epoch
        for step in range(self._step, plan.num_steps):
            for slot in range(self.process_index, self.slots, self.num_processes):
                yield [(epoch, index) for index in plan.batch(step, slot)]

    def advance(self, num_steps: int = 1) -> None:
        """Counts optimizer steps as done; raises ValueError past the end of the epoch."""
        if not 0 <= num_steps <= self.plan.num_steps - self._step:
            raise ValueError(
                f"can't advance by {num_steps} from step {self.steps_done} of {self.num_steps}"
            )
        self._step += num_steps

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; the present epoch keeps its position."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; it must be at least 0")
        if epoch != self.epoch:
            self.epoch = epoch
            self._step = 0
            if self.shuffle or self._past:
                self._plan = None
            self._past = []

    def change_budget(self, token_budget: int) -> None:
        """Goes on from the position with another budget; what is left of the epoch is planned anew.

        Raises ConfigError when a sample is larger.
        """
        if not self.crop:
            _check_budget(self.sizes, token_budget, None)
        state = self.state_dict()
        self.token_budget = token_budget
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, as JSON takes it; the same on every process.

        `segments` lists [slots, token_budget, max_clouds, optimizer steps] for each part of the
        epoch that ran with other settings.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "segments": [*self._past, *([self._segment()] if self._step else [])],
            "checksum": zlib.crc32(self.sizes.tobytes()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, with its seed.

        With the same slots, budget and limit the epoch goes on batch for batch; otherwise the
        samples that are left are planned anew. Raises ConfigError when the sizes are others,
        ValueError for a state that no sampler was in.
        """
        if state["checksum"] != zlib.crc32(self.sizes.tobytes()):
            raise ConfigError(
                "the dataset has changed since the checkpoint (other samples or sizes): "
                "restore it, or start a new run"
            )
        _check_position(state)
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._past = [list(segment) for segment in state["segments"]]
        self._step = 0
        self._plan = None
        if self._past and self._past[-1][:3] == self._segment()[:3]:
            self._step = self._past.pop()[3] or 0
        if self._step > self.plan.num_steps:
            raise ValueError(f"step {self.steps_done} of an epoch of {self.num_steps}")

    def statistics(self) -> PlanStatistics:
        """Fill and idle share of `plan`."""
        loads = self.plan.loads(np.minimum(self.sizes, self.token_budget))
        return PlanStatistics(
            fill=float(loads.sum() / max(1, loads.size * self.token_budget)),
            idle=idle_share(loads),
            num_empty=int((np.diff(self.plan.ptr) == 0).sum()),
        )

    def _segment(self) -> list[int | None]:
        return [self.slots, self.token_budget, self.max_clouds, self._step]

    def _steps_past(self) -> int:
        return sum(segment[3] or 0 for segment in self._past)

    def _replay(self) -> Plan:
        samples = np.arange(len(self.sizes))
        for number, (slots, budget, max_clouds, num_steps) in enumerate(
            [*self._past, self._segment()]
        ):
            assert slots and budget and num_steps is not None
            key = [self.seed, self.epoch, number]
            plan = plan_epoch(
                np.minimum(self.sizes, budget),
                samples,
                budget,
                slots,
                max_clouds,
                np.random.default_rng(key) if self.shuffle else None,
            )
            if num_steps > plan.num_steps:
                raise ValueError(f"step {num_steps} of a part of an epoch of {plan.num_steps}")
            samples = np.sort(plan.samples[plan.ptr[num_steps * slots] :])
        return plan


def _check_position(state: dict[str, Any]) -> None:
    for name in ("seed", "epoch"):
        if type(state[name]) is not int or state[name] < 0:
            raise ValueError(f"{name} is {state[name]!r}")
    for segment in state["segments"]:
        slots, budget, max_clouds, num_steps = segment
        least = ((slots, 1), (budget, 1), (max_clouds or 1, 1), (num_steps, 0))
        if not all(type(value) is int and value >= low for value, low in least):
            raise ValueError(f"a part of the epoch is {segment}")


def _checked_sizes(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(sizes)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"sizes must be a list of whole numbers, one a sample; got {array.dtype} {array.shape}"
        )
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ValueError(f"size of sample {array.argmin()} is {array.min()}")
    return array


def _check_budget(
    sizes: np.ndarray, token_budget: int, names: Sequence[str] | np.ndarray | None
) -> None:
    too_large = int((sizes > token_budget).sum())
    if too_large:
        largest = int(sizes.argmax())
        name = f"sample {largest}" if names is None else names[largest]
        others = f" ({too_large} samples are too large)" if too_large > 1 else ""
        raise ConfigError(
            f"{name} has {sizes[largest]} points, more than the token budget of {token_budget}"
            f"{others}: raise --token-budget to at least {sizes[largest]}, or give --crop"
        )
