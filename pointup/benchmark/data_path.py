"""Benchmark of the data path: how long a simulated GPU waits for its batches, and for which stage.

The consumer takes a batch, sleeps for as long as a device of the given speed would train on it, and
takes the next one. A delay of each read simulates a network file system.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch_geometric.data import Batch

from pointup.benchmark.clouds import RATIO, sheet
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort
from pointup.datasets.batch import make_loader
from pointup.datasets.pair_dataset import Pair, PairDataset, Samples, open_samples, write_pairs
from pointup.datasets.sampler import TokenBudgetBatchSampler

NUM_PAIRS = 600
NUM_SOURCE = 4000
BUDGET = 100_000
SECONDS = 3.0
"""Duration of one measurement, after the first batches."""
STAGES = ("reading", "augmenting", "ordering", "packing")


@dataclass(frozen=True)
class DelayedSamples(Samples):
    """Samples whose reads take `delay` seconds longer, one read for each cloud."""

    delay: float = 0.0

    def points(self, index: int) -> dict[str, np.ndarray]:
        clouds = super().points(index)
        time.sleep(self.delay * len(clouds))
        return clouds


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    rates = (300_000,) if effort.quick else (300_000, 2_000_000)
    all_workers = (1, 2) if effort.quick else (1, 2, 4, 8, 16)
    source = sheet(NUM_SOURCE, 0).numpy()
    target = sheet(round(RATIO * NUM_SOURCE), 1).numpy()
    pairs = (Pair(f"sheet {number}", source, target) for number in range(NUM_PAIRS))
    seconds = 0.5 if effort.quick else SECONDS
    # More workers than cores is what is measured.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with TemporaryDirectory(prefix="pointup_") as directory:
        write_pairs(pairs, [], Path(directory) / "pairs", {})
        samples = open_samples(Path(directory) / "pairs", "train")
        for delay in (0.0,) if effort.quick else (0.0, 0.02):
            for rate in rates:
                for workers in all_workers:
                    row: Row = {"delay": 1000 * delay, "rate": rate, "workers": workers}
                    if refusal := bound.refusal(seconds + 3):
                        yield row | {"left_out": refusal}
                        continue
                    delayed = DelayedSamples(samples.folder, samples.table, samples.rows, delay)
                    dataset = PairDataset(delayed, augment=True)
                    sampler = TokenBudgetBatchSampler(dataset.sizes, BUDGET)
                    loader = make_loader(dataset, sampler, workers, 60.0)
                    yield row | consume(loader, rate, seconds, skipped=workers + 1)


def consume(batches: Iterable[Batch], rate: float, seconds: float, skipped: int) -> Row:
    """Consume batches at `rate` tokens/s for `seconds`, after the first `skipped` ones.

    Returns the share of the time spent waiting, the tokens/s, and the shares of the stages in the
    time that the workers spent on the batches.
    """
    waited, tokens, start = 0.0, 0, time.perf_counter()
    spent: Counter[str] = Counter()
    iterator = iter(batches)
    for number in range(10**9):
        asked = time.perf_counter()
        batch = next(iterator, None)
        now = time.perf_counter()
        if batch is None or (number > skipped and now - start > seconds):
            break
        size = len(batch.pos) + len(batch.target)
        if number == skipped:
            waited, tokens, start = 0.0, 0, now
        elif number > skipped:
            waited += now - asked
        tokens += size
        spent.update(batch.seconds)
        time.sleep(size / rate)
    took = time.perf_counter() - start
    total = sum(spent.values()) or 1.0
    shares = {stage: spent[stage] / total for stage in STAGES}
    return {"wait": waited / took, "delivered": tokens / took, **shares}


SECTION = Section(
    "data-path",
    f"Batches of {BUDGET:,} tokens for a simulated consumer",
    (
        Column("delay", "ms/read", ".0f", is_key=True, width=8),
        Column("rate", "consumes/s", ",", is_key=True, width=11),
        Column("workers", "workers", is_key=True, width=8),
        Column("wait", "waits", ".1%", "lower"),
        Column("delivered", "tokens/s", ",.0f", "higher"),
        *(Column(stage, stage, ".0%") for stage in STAGES),
    ),
    measure,
)
