"""The token budget: the largest that fits into the measured memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import wavy_pair
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import num_tokens
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import TrainingError
from pointup.training import config as options
from pointup.training.config import TrainConfig
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.faults import token_budget as budget
from pointup.training.faults.available_memory import (
    PeakMemory,
    memory_limit,
)
from pointup.training.faults.token_budget import (
    heaviest_batches,
    knee,
    largest_that_fits,
    settle_token_budget,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PairDataset:
    """40 pairs of 45 to 720 points, of ratios 2 to 8."""
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"cloud_{i}", 15 + 5 * (i % 15), 2 + i % 7, rng) for i in range(40)]
    directory = tmp_path_factory.mktemp("data") / "pairs"
    write_pairs(pairs, pairs[:1], directory, info={})
    return PairDataset(open_samples(directory, "train"))


@pytest.fixture
def accelerator(tmp_path) -> Accelerator:
    return make_accelerator(tmp_path)


def linear(tokens: int) -> int:
    return 5000 + 90 * tokens


def with_recomputation(tokens: int) -> int:
    return 5000 + (90 * tokens if tokens < 3000 else 120_000 + 30 * tokens)


def with_overhead(tokens: int) -> int:
    return 90_000 + 90 * tokens


@pytest.mark.parametrize("memory", [linear, with_recomputation, with_overhead])
@pytest.mark.parametrize("limit", [10**5, 10**6, 10**7])
def test_the_budget_nearly_fills_the_memory_and_no_probe_exceeds_it(memory, limit):
    tried: list[int] = []

    def peak(tokens: int) -> int:
        tried.append(tokens)
        return memory(tokens)

    found = largest_that_fits(peak, 5000, smallest=100, largest=10**6, limit=limit)
    assert found and memory(found) <= limit
    assert memory(round(1.15 * found)) > limit
    assert max(map(memory, tried)) <= limit and len(tried) <= budget.MOST_PROBES


def test_a_probe_that_runs_out_of_memory_is_halved_and_the_budget_is_zero_if_none_fits():
    found = largest_that_fits(
        lambda tokens: 100 if tokens <= 3000 else None, 90, smallest=50, largest=10**5, limit=10**6
    )
    assert 2500 <= found <= 3000
    assert largest_that_fits(lambda tokens: None, 0, 50, 100, 10**6) == 0
    assert largest_that_fits(lambda tokens: 10 * tokens, 0, 50, 80, 10**6) == 80


def test_the_heaviest_batches_hold_the_largest_clouds_and_those_of_most_children(dataset):
    config = TrainConfig()
    largest, most_children = heaviest_batches(dataset, config, 1500)
    sizes = dataset.full_sizes
    assert sizes[largest[0]] == sizes.max()
    for batch in (largest, most_children):
        assert len(set(batch)) == len(batch)
        assert 1500 - sizes.min() < sizes[batch].sum() <= 1500
    ratios = sizes / dataset.num_source - 1
    assert ratios[most_children].mean() > ratios[largest].mean()
    assert len(heaviest_batches(dataset, TrainConfig(max_clouds=2), 1500)[0]) == 2


def test_the_peak_of_briefly_held_memory_is_measured():
    with PeakMemory(CPU) as nothing:
        pass
    with PeakMemory(CPU) as peak:
        held = torch.ones(50_000_000)
        held.sum()
        del held
    assert 1.8e8 < peak.bytes - nothing.bytes < 2.6e8


def test_the_limit_is_the_share_of_this_process_in_the_free_memory():
    alone, shared = memory_limit(CPU, 1), memory_limit(CPU, 1000)
    assert 0 < shared < alone


class CountedMemory:
    """Stands for PeakMemory: what the last batch took, above that of the process."""

    before, batch = 500_000_000, 0

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0

    def __enter__(self) -> CountedMemory:
        CountedMemory.batch = 0
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = self.before + self.batch


def settle(
    dataset: PairDataset, accelerator: Accelerator, output_dir: Path, **changes: Any
) -> tuple[int, list[int]]:
    """The budget found with work of 0.2 MB per token, and the sizes of the tried batches."""
    config = TrainConfig(token_budget="auto", output_dir=output_dir, **changes)
    if not (output_dir / "config.json").exists():
        (output_dir / "config.json").write_text("{}")
    tried = []

    def propagate(batch: Batch) -> Tensor:
        tried.append(num_tokens(batch))
        CountedMemory.batch = 200_000 * num_tokens(batch)
        return torch.zeros(())

    found = settle_token_budget(config, dataset, accelerator, propagate, lambda: None)
    return found, tried


@pytest.fixture
def limited(monkeypatch) -> Callable[[float], None]:
    """Set the memory limit to this many bytes above those of the process.

    Bytes are those that `propagate` counts: the resident set of a process doesn't grow where tests
    before this one have freed memory.
    """
    monkeypatch.setattr(budget, "PeakMemory", CountedMemory)

    def limit(num_bytes: float) -> None:
        share = (CountedMemory.before + num_bytes) / budget.SHARE_TO_USE
        monkeypatch.setattr(budget, "memory_limit", lambda *_: int(share))

    return limit


def test_the_budget_fits_into_the_memory_is_stored_and_not_searched_again(
    dataset, accelerator, tmp_path, limited
):
    limited(2.4e8)
    found, tried = settle(dataset, accelerator, tmp_path)
    assert 1000 <= found <= 1200 and max(tried) <= 1200
    assert json.loads((tmp_path / "config.json").read_text()) == {"found_token_budget": found}
    limited(8e7)
    assert settle(dataset, accelerator, tmp_path) == (found, [])


@pytest.mark.parametrize(
    ("speed", "largest", "expected"),
    [
        (lambda tokens: min(tokens, 160_000), 6_000_000, 160_000),  # busy from there on
        (lambda tokens: tokens / (tokens + 50_000), 6_000_000, 320_000),
        (lambda tokens: tokens, 70_000, 70_000),  # the memory ends before
        (lambda tokens: 1.0, 6_000_000, 5_000),
        (lambda tokens: 0.0 if tokens > 40_000 else tokens, 6_000_000, 40_000),  # out of memory
    ],
)
def test_the_budget_is_doubled_while_tokens_are_processed_faster(speed, largest, expected):
    assert knee(speed, 5_000, largest) == expected


def test_an_accelerator_gets_the_knee_not_all_that_fits(
    dataset, accelerator, tmp_path, monkeypatch
):
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=1, is_main_process=True)
    monkeypatch.setattr(budget, "_fits_everywhere", lambda *_: (10**6, 0))
    monkeypatch.setattr(budget, "_least", lambda number, _: number)
    busy = 2 * int(dataset.full_sizes.max())
    monkeypatch.setattr(budget.Probe, "tokens_per_second", lambda _, tokens: min(tokens, busy))
    assert settle(dataset, gpu, tmp_path)[0] == busy  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [1, 3])
def test_few_steps_of_an_epoch_are_told(
    weight, dataset, accelerator, tmp_path, limited, caplog, monkeypatch
):
    limited(2.4e8)
    monkeypatch.setattr(budget, "FEW_STEPS", weight * budget.FEW_STEPS)
    found, _ = settle(dataset, accelerator, tmp_path, data=(f"pairs={weight}",))
    steps = -(-weight * int(dataset.full_sizes.sum()) // found)
    assert f"a token budget of {found:,} leaves about {steps} steps in an epoch" in caplog.text


def test_the_speed_of_a_budget_is_that_of_its_heaviest_batch(dataset):
    tried = []

    def propagate(batch: Batch) -> Tensor:
        tried.append(num_tokens(batch))
        time.sleep(0.01 if len(tried) == 2 else 0.02)
        return torch.zeros(())

    config = TrainConfig(token_budget="auto")
    probe = budget.Probe(config, dataset, torch.device("cpu"), propagate, lambda: None)
    speed = probe.tokens_per_second(1000)
    assert tried[0] <= 1000 and tried == 3 * tried[:1]
    assert tried[0] / 0.02 < speed <= tried[0] / 0.01


def grown(
    dataset: PairDataset,
    accelerator: Accelerator,
    bytes_per_token: int = 4,
    **changes: Any,
) -> tuple[int, list[int]]:
    """The default budget, and the tried batches."""
    tried = []

    def propagate(batch: Batch) -> Tensor:
        tried.append(num_tokens(batch))
        CountedMemory.batch = bytes_per_token * num_tokens(batch)
        return torch.zeros(())

    config = TrainConfig(data=("pairs",), **changes)
    found = settle_token_budget(config, dataset, accelerator, propagate, lambda: None)
    return found, tried


def test_the_default_budget_is_raised_to_the_largest_pair(dataset, accelerator, monkeypatch):
    assert grown(dataset, accelerator) == (options.DEFAULTS.token_budget, [])
    monkeypatch.setattr(options, "DEFAULTS", options.DEFAULTS._replace(token_budget=500))
    monkeypatch.setattr(budget, "SMALLEST_PROBE", 100)
    assert dataset.full_sizes.max() == 720
    found, tried = grown(dataset, accelerator)
    assert found == 720
    # On the CPU smaller batches are tried first, then the largest.
    assert tried[0] <= 100 and 0.98 * 720 <= max(tried) <= 720
    assert dataset.max_tokens is None
    assert grown(dataset, accelerator, crop=True) == (500, [])
    assert grown(dataset, accelerator, token_budget=300) == (300, [])


def test_a_largest_pair_that_exceeds_the_memory_is_named_with_the_remedy(
    dataset, accelerator, limited, monkeypatch
):
    monkeypatch.setattr(options, "DEFAULTS", options.DEFAULTS._replace(token_budget=100))
    monkeypatch.setattr(budget, "SMALLEST_PROBE", 100)
    limited(8e7)
    with pytest.raises(TrainingError, match=r"cloud_\d+: 720 points .* --tile.* --crop") as error:
        grown(dataset, accelerator, bytes_per_token=200_000)
    assert "\n" not in str(error.value)
    dataset.max_tokens = None


def test_a_cloud_that_does_not_fit_is_named_and_cropping_makes_it_fit(
    dataset, accelerator, tmp_path, limited, monkeypatch
):
    limited(8e7)
    with pytest.raises(
        TrainingError, match=r"cloud_\d+: 720 points do not fit into the .* [MG]B that"
    ):
        settle(dataset, accelerator, tmp_path)
    monkeypatch.setattr(budget, "SMALLEST_PROBE", 100)
    found, tried = settle(dataset, accelerator, tmp_path, crop=True)
    assert 330 <= found <= 400 and max(tried) <= 400
    dataset.max_tokens = None
