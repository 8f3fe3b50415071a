"""The sections of the benchmark: training steps, data loading, searches, upsampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from pointup.benchmark.section import Column, Effort, Row, Section
from pointup.benchmark.training_step import (
    PARTS,
    RATIO,
    OneProcessGroup,
    TrainingWork,
    sheet,
    training_batch,
)
from pointup.datasets.batch import collate, make_loader, move, num_tokens
from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.disk import temporary_directory
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import sizes_from_ptr
from pointup.geometry.thinning import farthest_point_sample
from pointup.losses import chamfer_distance
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import now
from pointup.training.faults.available_memory import PeakMemory
from pointup.upsampling import upsample
from pointup.upsampling.executor import return_memory


def added_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the peak of `work`, above those in use before it."""
    return_memory()  # Reuse of freed memory would not show in that of the process.
    with PeakMemory(device) as before:
        pass
    with PeakMemory(device) as peak:
        work()
    return max(0, peak.bytes - before.bytes)


STEP_SIZES = (500, 2000, 5000, 20_000, 50_000, 200_000)
QUICK_STEP_SIZES = STEP_SIZES[:3]
TOKENS = {"cpu": 20_000}
"""Tokens of a step of small clouds by type of device, enough to use it fully."""


def measure_steps(effort: Effort) -> Iterator[Row]:
    """Tokens per second of the parts of a step, as medians, and peak memory of a step."""
    precisions = ("fp32", "bf16", "fp16") if effort.device.type != "cpu" else ("fp32", "bf16")
    works = {name: TrainingWork(OneProcessGroup(effort.device), name) for name in precisions}
    budget = TOKENS.get(effort.device.type, 1_000_000) // (2 if effort.quick else 1)
    for size in QUICK_STEP_SIZES if effort.quick else STEP_SIZES:
        num_clouds = max(1, round(budget / ((1 + RATIO) * size)))
        batch = move(training_batch([size] * num_clouds), effort.device)
        tokens = num_tokens(batch)
        for precision, work in works.items():

            def step(work: TrainingWork = work, batch: Batch = batch) -> dict[str, float]:
                work.step(batch)
                return work.seconds

            memory = added_memory(step, effort.device)
            rounds = effort.repeat(step)
            yield {
                "precision": precision,
                "size": size,
                "clouds": num_clouds,
                "tokens": tokens,
                **{part: tokens / median(times[part] for times in rounds) for part in PARTS[:3]},
                "step": tokens / median(sum(times.values()) for times in rounds),
                "memory": memory / tokens,
            }


QUICK_PAIRS = 100
PAIRS = 600
PAIR_SOURCE = 4000
READING_BUDGET = 100_000


def measure_reading(effort: Effort) -> Iterator[Row]:
    """Pairs read from disk (warm cache), augmented and collated."""
    source = sheet(PAIR_SOURCE, 0).numpy()
    target = sheet(round(RATIO * PAIR_SOURCE), 1).numpy()
    num_pairs = QUICK_PAIRS if effort.quick else PAIRS
    pairs = (Pair(f"sheet {number}", source, target) for number in range(num_pairs))
    with temporary_directory() as directory:
        write_pairs(pairs, [], directory / "pairs", {})
        samples = open_samples(directory / "pairs", "train")
        plain, augmented = PairDataset(samples), PairDataset(samples, augment=True)
        sampler = TokenBudgetBatchSampler(plain.sizes, READING_BUDGET)
        loader = make_loader(augmented, sampler, 1, 60.0)
        loaders: dict[str, Callable[[], Iterable[Any]]] = {
            "read": lambda: (plain[index] for index in range(len(plain))),
            "read, augmented, in batches": lambda: (
                collate([augmented[key] for key in keys]) for keys in sampler
            ),
            "the same, by one worker": lambda: loader,
        }
        for name, load in loaders.items():
            # Twice: the first run warms up the disk cache and starts the worker.
            for _ in range(2):
                start = time.perf_counter()
                num_points = sum(len(batch.pos) + len(batch.target) for batch in load())
                rate = num_points / (time.perf_counter() - start)
            yield {"work": name, "points": num_points, "rate": rate}


QUICK_SEARCH_POINTS = 5000
SEARCH_POINTS = 50_000
SEARCH_CLOUDS = 8
NEIGHBORS = 16
FAR = 0.05


def ragged(
    num_points: int, device: torch.device, seed: int = 0, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`num_points` points (N, 3) in `SEARCH_CLOUDS` clouds of sizes 1 : 2 : 3 : ..., their ptr."""
    cumulative = torch.arange(SEARCH_CLOUDS + 1).cumsum(0).double()
    ptr = (cumulative / cumulative[-1] * num_points).round().long()
    sizes = sizes_from_ptr(ptr).tolist()
    clouds = [sheet(size, seed + cloud, noise) for cloud, size in enumerate(sizes)]
    return torch.cat(clouds).to(device), ptr.to(device)


def measure_searches(effort: Effort) -> Iterator[Row]:
    """Neighbours, thinning, and the Chamfer distance, forward and backward, from points near the
    target (as after training) or `FAR` away from it."""
    num_points = QUICK_SEARCH_POINTS if effort.quick else SEARCH_POINTS
    pos, ptr = ragged(num_points, effort.device)
    near, far = (
        ragged(num_points, effort.device, noise=noise)[0].requires_grad_() for noise in (0.0, FAR)
    )
    target, target_ptr = ragged(4 * num_points, effort.device, seed=100)
    num_samples = sizes_from_ptr(ptr) // 4

    def chamfer(cloud: Tensor) -> None:
        chamfer_distance(cloud, ptr, target, target_ptr).sum().backward()

    to_target = f"{num_points:,} to {len(target):,}"
    thinned = f"{num_points:,} to {int(num_samples.sum()):,}"
    searches: list[tuple[str, str, Callable[[], object]]] = [
        (f"kNN, k = {NEIGHBORS}", f"{num_points:,}", lambda: knn(pos, ptr, NEIGHBORS)),
        ("Chamfer, near", to_target, lambda: chamfer(near)),
        ("Chamfer, far", to_target, lambda: chamfer(far)),
        ("thinning", thinned, lambda: farthest_point_sample(pos, ptr, num_samples)),
    ]
    for name, size, search in searches:
        search()  # The first search on a device tests its kernels.

        def seconds_of(search: Callable[[], object] = search) -> float:
            start = now(effort.device)
            search()
            return now(effort.device) - start

        seconds = median(effort.repeat(seconds_of))
        yield {"work": name, "size": size, "seconds": seconds, "rate": num_points / seconds}


QUICK_CLOUD_SIZES = (5000, 20_000)
CLOUD_SIZES = (10_000, 100_000, 1_000_000)


def measure_upsampling(effort: Effort) -> Iterator[Row]:
    torch.manual_seed(0)
    model = Upsampler().to(effort.device)
    for num_points in QUICK_CLOUD_SIZES if effort.quick else CLOUD_SIZES:
        # Map coordinates in metres, about 20 points/m2.
        width = (num_points / 20) ** 0.5
        points = sheet(num_points, 0).double().numpy() * width + np.array([500_000.0, 4.1e6, 0.0])
        work = partial(upsample, points, RATIO, model=model, device=effort.device)
        start = now(effort.device)
        memory = added_memory(work, effort.device)
        seconds = now(effort.device) - start
        made = round((RATIO - 1) * num_points)
        yield {
            "points": num_points,
            "made": made,
            "seconds": seconds,
            "rate": made / seconds,
            "memory": memory / 1e6,
        }


ALL = (
    Section("reading", f"Reading pairs of {round((1 + RATIO) * PAIR_SOURCE):,} points", (
        Column("work", "what", is_key=True),
        Column("points", "points", ","),
        Column("rate", "points/s", ",.0f", "higher"),
    ), measure_reading),
    Section("knn", f"Searches in {SEARCH_CLOUDS} clouds of sizes 1 : 2 : ... : {SEARCH_CLOUDS}", (
        Column("work", "what", is_key=True),
        Column("size", "points in all", is_key=True),
        Column("seconds", "seconds", ".3f", "lower"),
        Column("rate", "points/s", ",.0f", "higher"),
    ), measure_searches,
        "Chamfer: forward and backward, from points on the target's surface (a unit square)\n"
        "or 0.05 off it."),
    Section("step",
        "Training steps of the default model, tokens/s (a token is a point of source or target)", (
        Column("precision", "precision", is_key=True),
        Column("size", "points", ",", is_key=True),
        Column("clouds", "clouds", ","),
        Column("tokens", "tokens", ","),
        *(Column(name, name, ",.0f", "higher") for name in (*PARTS[:3], "step")),
        Column("memory", "bytes/token", ",.0f", "lower"),
    ), measure_steps,
        "points: per source; targets have four times as many. bytes/token: peak memory."),
    Section("upsampling", f"Upsampling by {RATIO:g} with the default model", (
        Column("points", "points", ",", is_key=True),
        Column("made", "new points", ","),
        Column("seconds", "seconds", ".1f", "lower"),
        Column("rate", "new points/s", ",.0f", "higher"),
        Column("memory", "peak MB", ",.0f", "lower"),
    ), measure_upsampling),
)  # fmt: skip
