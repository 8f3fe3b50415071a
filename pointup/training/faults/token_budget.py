"""Sets the token budget of a run, and lowers it after several out-of-memory errors."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import collate, num_tokens
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import TrainingError
from pointup.geometry.midpoints import slots_for_ratio
from pointup.terminal import in_bytes
from pointup.training.config import TrainConfig, data_sources, write_config
from pointup.training.distributed.accelerator import now
from pointup.training.faults.available_memory import (
    PeakMemory,
    memory_limit,
    num_local_processes,
)
from pointup.training.faults.out_of_memory import attempt
from pointup.training.progress import Progress

logger = logging.getLogger("pointup")

SHARE_TO_USE = 0.85
"""Share of the available memory that batches may use; allocators, the optimizer and data workers
need the rest."""
ENOUGH = 0.9
"""Share of the usable memory at which the search for a larger budget ends."""
MOST_PROBES = 8
MOST_GROWTH = 4
SMALLEST_PROBE = 4096
SURE_TO_FIT = 0.98
"""Share of the largest cloud that must have been tried, because the search may end slightly below
its goal."""
WORTH = 1.1
"""On an accelerator the budget is doubled while it processes tokens this many times as fast."""
FEW_STEPS = 20
"""With fewer steps in an epoch, the log says so."""
EVENTS_BEFORE_LOWERING = 3
"""Out-of-memory errors on all processes after which the budget is lowered for all processes."""
LOWERED_TO = 0.8


def settle_token_budget(
    config: TrainConfig,
    dataset: PairDataset,
    accelerator: Accelerator,
    propagate: Callable[[Batch], Tensor],
    drop_gradients: Callable[[], None],
) -> int:
    """The token budget of a run, the same on every process; every process must call this.

    A given number is used as it is. By default it is that of `config.defaults`, or the size of
    the largest pair of `dataset` if that is more. "auto" is the largest budget that fits on every
    process or, on an accelerator, the `knee` of its speed; it is measured once per run and stored
    in `config.json`, from which a continued run reads it. `propagate` runs forward and backward on
    a batch, `drop_gradients` clears the gradients. Raises TrainingError if the largest cloud alone
    doesn't fit into memory.
    """
    if isinstance(config.token_budget, int):
        return config.token_budget
    probe = Probe(config, dataset, accelerator.device, propagate, drop_gradients)
    if config.token_budget is None:
        return _default_budget(probe, accelerator)
    largest = probe.largest
    path = config.output_dir / "config.json"
    # Only the main process reads it: others may not see a new file on a network file system yet.
    stored = json.loads(path.read_text()) if accelerator.is_main_process else {}
    recorded = [stored.get("found_token_budget")]
    broadcast_object_list(recorded)
    if recorded[0] is not None:
        return int(recorded[0])
    smallest = min(largest, SMALLEST_PROBE) if config.crop else largest
    slots = accelerator.num_processes * config.accumulation_steps
    weights = [source.weight for source in data_sources(config.data)] or [1.0]
    of_samples = np.repeat(weights, np.diff(dataset.samples.bounds))
    tokens_of_epoch = int(of_samples @ dataset.full_sizes)
    most = max(largest, -(-tokens_of_epoch // slots))
    found, limit = _fits_everywhere(probe, accelerator, smallest, most)
    if not found:
        raise TrainingError(
            f"{probe.largest_name}: {smallest:,} points do not fit into the {in_bytes(limit)} that "
            "a process may use here; start fewer processes, or give a smaller --token-budget and "
            "--crop"
        )
    if accelerator.device.type != "cpu":
        found = _least(knee(probe.tokens_per_second, smallest, found), accelerator)
    if accelerator.is_main_process:
        write_config(path, {**stored, "found_token_budget": found})
        steps = -(-tokens_of_epoch // (slots * found))
        if steps < FEW_STEPS:
            logger.warning(
                "a token budget of %s leaves about %d steps in an epoch: give a smaller "
                "--token-budget, or a higher --learning-rate",
                f"{found:,}",
                steps,
            )
    return found


def _default_budget(probe: Probe, accelerator: Accelerator) -> int:
    config, largest, default = probe.config, probe.largest, probe.config.defaults.token_budget
    if config.crop:
        return default
    # On a GPU, running out of memory raises an error that names the cloud; on the CPU the process
    # is killed.
    if largest > default and accelerator.device.type == "cpu":
        cropping = replace(probe, config=replace(config, crop=True))
        found, limit = _fits_everywhere(cropping, accelerator, SMALLEST_PROBE, largest)
        probe.dataset.max_tokens = None
        if found < SURE_TO_FIT * largest:
            raise TrainingError(
                f"{probe.largest_name}: {largest:,} points do not fit into the {in_bytes(limit)} "
                f"that a process may use here, about {found:,} do; prepare the data with a smaller "
                "--tile, start fewer processes, or give --crop"
            )
    return max(largest, default)


def _fits_everywhere(
    probe: Probe, accelerator: Accelerator, smallest: int, largest: int
) -> tuple[int, int]:
    """`largest_that_fits` on every process, and the bytes that this process may use."""
    limit = memory_limit(accelerator.device, num_local_processes(accelerator.num_processes))
    limit = int(SHARE_TO_USE * limit)
    # All processes read the free memory before any of them uses some of it.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        logger.info("Searching for the largest token budget that fits into %s ...", in_bytes(limit))
    with PeakMemory(accelerator.device) as before:
        pass
    found = largest_that_fits(probe.peak_bytes, before.bytes, smallest, largest, limit)
    # With 0 from one process, all processes end instead of waiting for it.
    return _least(found, accelerator), limit


def _least(number: int, accelerator: Accelerator) -> int:
    """The smallest of the numbers of all processes."""
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).min())


def knee(tokens_per_second: Callable[[int], float], smallest: int, largest: int) -> int:
    """The budget from `smallest` to `largest` beyond which twice as many tokens are processed less
    than `WORTH` times as fast: more would leave fewer steps in an epoch for nothing."""
    budget, speed = smallest, tokens_per_second(smallest)
    while budget < largest:
        larger = min(2 * budget, largest)
        faster = tokens_per_second(larger)
        if faster < WORTH * speed:
            break
        budget, speed = larger, faster
    return budget


@dataclass
class Probe:
    """Measures the peak memory of the heaviest batches that a token budget allows."""

    config: TrainConfig
    dataset: PairDataset
    device: torch.device
    propagate: Callable[[Batch], Tensor]
    drop_gradients: Callable[[], None]

    @property
    def largest(self) -> int:
        """Tokens of the largest pair."""
        return int(self.dataset.full_sizes.max())

    @property
    def largest_name(self) -> str:
        return str(self.dataset.names[int(self.dataset.full_sizes.argmax())])

    def peak_bytes(self, token_budget: int) -> int | None:
        """Peak memory in bytes over the heaviest batches; None if memory ran out."""
        self.dataset.max_tokens = token_budget if self.config.crop else None
        most = 0
        for clouds in heaviest_batches(self.dataset, self.config, token_budget):
            batch = collate([self.dataset[index] for index in clouds])
            with PeakMemory(self.device) as peak:
                losses = attempt(self.propagate, batch)
            self.drop_gradients()
            if losses is None:
                return None
            most = max(most, peak.bytes)
        logger.debug("token budget %d takes %s", token_budget, in_bytes(most))
        return most

    def tokens_per_second(self, token_budget: int) -> float:
        """Speed of the first of these batches: the best of three; 0 if memory ran out."""
        self.dataset.max_tokens = token_budget if self.config.crop else None
        clouds = heaviest_batches(self.dataset, self.config, token_budget)[0]
        batch = collate([self.dataset[index] for index in clouds])
        shortest = math.inf
        for _ in range(3):
            start = now(self.device)
            losses = attempt(self.propagate, batch)
            self.drop_gradients()
            if losses is None:
                return 0.0
            shortest = min(shortest, now(self.device) - start)
        return num_tokens(batch) / shortest


def heaviest_batches(
    dataset: PairDataset, config: TrainConfig, token_budget: int
) -> list[list[int]]:
    """Batches of indices that fill a budget: the largest clouds, and those with most children."""
    sizes = np.minimum(dataset.full_sizes, token_budget)
    num_source = dataset.num_source
    if config.ratio is not None:
        ratio = np.full(len(sizes), config.ratio)
    else:
        own = (dataset.full_sizes - num_source) / num_source.clip(min=1)
        ratio = own.clip(1.0, config.max_ratio)
    slots = slots_for_ratio(torch.from_numpy(ratio), config.model.slots_per_ratio).numpy()
    orders = (-sizes, -slots * num_source / dataset.full_sizes.clip(min=1))
    batches = [
        filled(np.argsort(order, kind="stable"), sizes, token_budget, config.max_clouds)
        for order in orders
    ]
    return batches[:1] if sorted(batches[0]) == sorted(batches[1]) else batches


def filled(
    order: np.ndarray, sizes: np.ndarray, token_budget: int, max_clouds: int | None
) -> list[int]:
    """Indices taken in this order, skipping clouds that no longer fit."""
    taken: list[int] = []
    room, smallest = token_budget, int(sizes.min())
    for index in order.tolist():
        if sizes[index] <= room:
            taken.append(index)
            room -= int(sizes[index])
        if room < smallest or len(taken) == max_clouds:
            break
    return taken


def largest_that_fits(
    peak_bytes: Callable[[int], int | None],
    bytes_before: int,
    smallest: int,
    largest: int,
    limit: int,
) -> int:
    """Most tokens, from `smallest` to `largest`, whose peak stays within `limit`; 0 if none do.

    Each probe refines the bytes per token, and so the next number to try. Numbers that are expected
    to exceed the limit are never tried: on the CPU the system would kill the process.
    """
    fits, peak, tokens, too_many = 0, bytes_before, smallest, math.inf
    for _ in range(MOST_PROBES):
        measured = peak_bytes(tokens)
        if measured is None or measured > limit:
            too_many = tokens
        else:
            # Where gradient checkpointing sets in, the peak falls before it rises again.
            recent = (measured - peak) / (tokens - fits)
            per_token = max(recent, (measured - bytes_before) / tokens, 1.0)
            fits, peak = tokens, measured
        if not fits or peak - bytes_before >= ENOUGH * (limit - bytes_before):
            break
        step = min((limit - peak) / per_token, (too_many - fits) / 2)
        tokens = min(fits + int(step), MOST_GROWTH * fits, largest)
        if tokens <= 1.02 * fits:
            break
    return fits


def lower_budget_if_needed(
    sampler: TokenBudgetBatchSampler, progress: Progress, settled: int
) -> bool:
    """Lower the budget after EVENTS_BEFORE_LOWERING out-of-memory errors; returns whether it did.

    Every process must call this after the same step; the new budget applies from the next step on.
    `progress` stores it for continued runs, together with the budget `settled` at the start.
    """
    if progress.out_of_memory < EVENTS_BEFORE_LOWERING:
        return False
    before = sampler.token_budget
    least = 1 if sampler.crop else int(sampler.sizes.max())
    sampler.change_budget(max(least, int(LOWERED_TO * before)))
    logger.warning(
        "out of memory %d times since the token budget was set: %s",
        progress.out_of_memory,
        f"lowered from {before:,} to {sampler.token_budget:,} for all processes"
        if sampler.token_budget < before
        else f"it stays at {before:,}, the size of the largest cloud; --crop allows less",
    )
    progress.out_of_memory = 0
    progress.lowered_budget, progress.budget_at_start = sampler.token_budget, settled
    return True
