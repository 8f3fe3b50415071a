"""Benchmark of data loading: pairs read from disk (warm cache), augmented and collated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pointup.benchmark.clouds import RATIO, sheet
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort
from pointup.datasets.batch import collate, make_loader
from pointup.datasets.pair_dataset import Pair, PairDataset, open_samples, write_pairs
from pointup.datasets.sampler import TokenBudgetBatchSampler

QUICK_PAIRS = 100
PAIRS = 600
NUM_SOURCE = 4000
BUDGET = 100_000


def measure(effort: Effort) -> Iterator[Row]:
    num_pairs = QUICK_PAIRS if effort.quick else PAIRS
    source = sheet(NUM_SOURCE, 0).numpy()
    target = sheet(round(RATIO * NUM_SOURCE), 1).numpy()
    pairs = (Pair(f"sheet {number}", source, target) for number in range(num_pairs))
    with TemporaryDirectory(prefix="pointup_") as directory:
        write_pairs(pairs, [], Path(directory) / "pairs", {})
        samples = open_samples(Path(directory) / "pairs", "train")
        plain, augmented = PairDataset(samples), PairDataset(samples, augment=True)
        sampler = TokenBudgetBatchSampler(plain.sizes, BUDGET)
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
            rows = [count(load()) for _ in range(2)]
            yield {"work": name, **rows[-1]}


def count(batches: Iterable[Any]) -> Row:
    """Number of points, source and target together, and points per second."""
    start = time.perf_counter()
    num_points = sum(len(batch.pos) + len(batch.target) for batch in batches)
    return {"points": num_points, "rate": num_points / (time.perf_counter() - start)}


SECTION = Section(
    "reading",
    f"Reading pairs of {round((1 + RATIO) * NUM_SOURCE):,} points",
    (
        Column("work", "what", is_key=True, width=27),
        Column("points", "points", ","),
        Column("rate", "points/s", ",.0f", "higher"),
    ),
    measure,
)
