"""Benchmark of the sampler: time to plan an epoch, and how evenly its batches load processes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort
from pointup.datasets.sampler import TokenBudgetBatchSampler

BUDGET = 100_000
PROCESSES = 8
SMALLEST = 100


def random_sizes(kind: str, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes (n,) of clouds: lognormal, with a Pareto tail, or nine small clouds per large one.

    Those are "bimodal", or "two sizes": 2,000 to 2,500 and 40,000 to 40,500.
    """
    if kind == "lognormal":
        sizes = np.exp(rng.normal(8.0, 1.0, num_samples))
    elif kind == "Pareto":
        sizes = 500.0 * (1.0 + rng.pareto(1.2, num_samples))
    elif kind == "two sizes":
        small, large = rng.integers([[2000], [40_000]], [[2501], [40_501]], (2, num_samples))
        sizes = np.where(rng.random(num_samples) < 0.9, small, large)
    else:
        small, large = rng.normal([[2000.0], [40_000.0]], [[300.0], [5000.0]], (2, num_samples))
        sizes = np.where(rng.random(num_samples) < 0.9, small, large)
    return np.clip(sizes, SMALLEST, BUDGET).astype(np.int64)


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    slowest = 0.0
    for num_samples in (1_000_000,) if effort.quick else (1_000_000, 10_000_000):
        for kind in ("lognormal", "Pareto", "bimodal"):
            row: Row = {"sizes": kind, "samples": num_samples}
            expected = slowest * num_samples / 1_000_000
            if refusal := bound.refusal(expected):
                yield row | {"left_out": refusal}
                continue
            sizes = random_sizes(kind, num_samples, np.random.default_rng(0))
            start = time.perf_counter()
            plan = TokenBudgetBatchSampler(sizes, BUDGET, num_processes=PROCESSES).statistics()
            seconds = time.perf_counter() - start
            slowest = max(slowest, seconds * 1_000_000 / num_samples)
            yield row | {"seconds": seconds, "fill": plan.fill, "idle": plan.idle}


SECTION = Section(
    "sampler",
    f"Planning an epoch, batches of {BUDGET:,} tokens for {PROCESSES} processes",
    (
        Column("sizes", "sizes", is_key=True, width=9),
        Column("samples", "samples", ",", is_key=True, width=10),
        Column("seconds", "seconds", ".2f", "lower"),
        Column("fill", "full", ".2%", "higher"),
        Column("idle", "idle", ".4%", "lower"),
    ),
    measure,
)
